"""Writes samples in the Prometheus text format 0.0.4 and in OpenMetrics 1.0.0.

A sample's line is the same in both, byte for byte what the Python client library writes. It is made once,
since making the pages is a good part of what a cycle costs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache

from kvwatch.export.catalogue import Family

_LEAST_WITH_EXPONENT = 1_000_000.0
"""From here on the Go and Python clients write a number with an exponent."""
_MAX_CACHED_SERIES = 1024
"""So many series of a family are remembered as text."""


class FamilyWriter:
    """Makes the lines of one family."""

    def __init__(self, family: Family) -> None:
        self._labels = tuple(sorted(family.labels))
        self._names = frozenset(family.labels)
        pairs = ",".join(f'{label}="%s"' for label in self._labels)
        self._series = f"{family.name}{{{pairs}}} " if pairs else f"{family.name} "
        # From look to look labels stay as they are, and only the values change.
        self._series_text = lru_cache(maxsize=_MAX_CACHED_SERIES)(self._escaped_series)
        self.text_head = _head(family.name, family.kind, _escaped_help(family.help))
        openmetrics_name = family.name.removesuffix("_total") if family.kind == "counter" else family.name
        self.openmetrics_head = _head(openmetrics_name, family.kind, _escaped(family.help))

    def line(self, value: float, labels: Mapping[str, str]) -> str:
        """One sample.

        Raises:
            KeyError: these are not the family's labels.
        """
        if labels.keys() != self._names:
            raise KeyError(f"labels {sorted(labels)} instead of {list(self._labels)}")
        texts = tuple([labels[name] for name in self._labels])
        return f"{self._series_text(texts)}{number(value)}\n"

    def _escaped_series(self, texts: tuple[str, ...]) -> str:
        return self._series % tuple(map(_escaped, texts))


def number(value: float) -> str:
    """A value as the client libraries write it: 1.0, 8.5e+10, +Inf, NaN."""
    value = float(value)
    if -math.inf < value < _LEAST_WITH_EXPONENT:
        return repr(value)
    return _large_number(value)


@lru_cache(maxsize=1024)
def _large_number(value: float) -> str:
    """Most of a page's numbers are bytes, and most of those stay as they are from look to look."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    text = repr(value)
    before, point, after = text.partition(".")
    if not point or "e" in after:
        return text
    mantissa = f"{before[0]}.{before[1:]}{after}".rstrip("0").removesuffix(".")
    return f"{mantissa}e+{len(before) - 1:02}"


def written(parts: Iterable[tuple[str, list[str]]]) -> bytes:
    """Families one after the other, each a head and its lines."""
    return "".join(text for head, lines in parts for text in (head, *lines)).encode()


def _escaped(text: str) -> str:
    return _escaped_help(text).replace('"', r"\"")


def _escaped_help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _head(name: str, kind: str, text: str) -> str:
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n"
