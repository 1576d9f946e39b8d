"""Which form of a resource a client wants: ``Accept`` and ``Accept-Encoding`` with q-values (RFC 9110)."""

from __future__ import annotations

from collections.abc import Iterator

_OPENMETRICS = ("application", "openmetrics-text")
_OPENMETRICS_VERSIONS = ("1.0.0", "0.0.1", "")
_TEXT = ("text", "plain")
_TEXT_VERSIONS = ("0.0.4", "")
_MAX_RANGES = 64


def wants_openmetrics(accept: str) -> bool:
    """Whether OpenMetrics is preferred; the text format wins a draw and an empty header."""
    openmetrics = _quality(accept, _OPENMETRICS, _OPENMETRICS_VERSIONS)
    text = _quality(accept, _TEXT, _TEXT_VERSIONS)
    return openmetrics > text and openmetrics[0] > 0


def accepts_gzip(accept_encoding: str) -> bool:
    """Whether a gzip body may be sent."""
    qualities = {coding: quality for coding, _, quality in _ranges(accept_encoding)}
    return max(qualities.get("gzip", qualities.get("*", 0.0)), qualities.get("x-gzip", 0.0)) > 0


def _quality(accept: str, media_type: tuple[str, str], versions: tuple[str, ...]) -> tuple[float, int]:
    """Quality of the most specific range that matches, and how specific that is."""
    kind, subtype = media_type
    specificity = {f"{kind}/{subtype}": 2, f"{kind}/*": 1, "*/*": 0}
    matches = [
        (specificity[name], quality)
        for name, version, quality in _ranges(accept)
        if name in specificity and version in versions
    ]
    best, quality = max(matches, default=(-1, 0.0))
    return quality, best


def _ranges(header: str) -> Iterator[tuple[str, str, float]]:
    """Name, version parameter and quality of each element; one that makes no sense counts as refused."""
    for element in header.lower().split(",")[:_MAX_RANGES]:
        name, *parameters = (part.strip() for part in element.split(";"))
        values = dict(parameter.partition("=")[::2] for parameter in parameters)
        try:
            quality = float(values.get("q", "1"))
        except ValueError:
            quality = 0.0
        yield name, values.get("version", "").strip('"'), quality if 0 <= quality <= 1 else 0.0
