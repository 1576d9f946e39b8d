"""Byte for byte what prometheus_client itself writes."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from kvwatch.export.exposition import openmetrics_format, text_format

NAMES = st.from_regex(r"[a-z][a-z_]{0,8}[a-z]", fullmatch=True)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
VALUES = st.one_of(st.floats(), st.integers(-(10**15), 10**15))


@st.composite
def families(draw: st.DrawFn) -> list[Metric]:
    found: list[Metric] = []
    for name in draw(st.lists(NAMES, unique=True, max_size=4)):
        labels = draw(st.lists(NAMES, unique=True, max_size=3))
        build = draw(st.sampled_from((CounterMetricFamily, GaugeMetricFamily)))
        family = build(f"kvwatch_{name}_x", draw(TEXTS), labels=labels)
        for _ in range(draw(st.integers(1, 3))):
            family.add_metric([draw(TEXTS) for _ in labels], draw(VALUES))
        found.append(family)
    return found


class Registry:
    def __init__(self, found: list[Metric]) -> None:
        self._found = found

    def collect(self) -> Iterator[Metric]:
        return iter(self._found)


@given(families())
def test_the_bytes_are_the_librarys(found: list[Metric]) -> None:
    assert text_format(found) == generate_latest(Registry(found))
    expected: bytes = generate_openmetrics(Registry(found))  # type: ignore[no-untyped-call]
    assert openmetrics_format(found) == expected
