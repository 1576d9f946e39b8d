from __future__ import annotations

import pytest

from kvwatch.export.negotiation import accepts_gzip, wants_openmetrics

PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    "application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,"
    "text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)


@pytest.mark.parametrize(
    ("accept", "openmetrics"),
    [
        ("", False),
        ("*/*", False),
        ("text/plain", False),
        ("text/html,application/xhtml+xml,*/*;q=0.8", False),
        ("application/openmetrics-text", True),
        ("application/openmetrics-text; version=1.0.0", True),
        ("application/openmetrics-text;version=0.0.1,text/plain;version=0.0.4;q=0.5,*/*;q=0.1", True),
        (
            PROMETHEUS_3,
            True,
        ),
        ("text/plain;version=0.0.4;q=0.9,application/openmetrics-text;version=1.0.0;q=0.4", False),
        ("application/openmetrics-text;q=0.5,text/plain;q=0.5", False),
        ("application/openmetrics-text,*/*", True),
        ("application/openmetrics-text;version=2.0.0", False),
        ("application/openmetrics-text;version=2.0.0,text/plain;q=0.1", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=0,*/*", False),
        ("application/*", True),
        ("application/openmetrics-text;q=0.2,application/*;q=0.9,text/plain;q=0.5", False),
        ("Application/OpenMetrics-Text; Version=1.0.0", True),
        ("application/openmetrics-text;q=high", False),
        ("application/openmetrics-text;q=7", False),
        ("application/openmetrics-text;q=nan", False),
        (";;;,,,=;q=,", False),
    ],
)
def test_wants_openmetrics(accept: str, openmetrics: bool) -> None:
    assert wants_openmetrics(accept) is openmetrics


@pytest.mark.parametrize(
    ("header", "gzip"),
    [
        ("", False),
        ("gzip", True),
        ("GZIP", True),
        ("deflate, gzip;q=0.5, br", True),
        ("gzip;q=0", False),
        ("gzip;q=0, *", False),
        ("*", True),
        ("*;q=0", False),
        ("x-gzip", True),
        ("identity", False),
        ("gzipped", False),
    ],
)
def test_accepts_gzip(header: str, gzip: bool) -> None:
    assert accepts_gzip(header) is gzip
