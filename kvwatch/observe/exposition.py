"""Strict reader of the Prometheus text format 0.0.4 for the few families that a caller needs.

A vLLM page has 600 to 800 lines of which kvwatch needs some 50, so lines are picked by sample name before
anything is parsed. What is picked is parsed strictly: a line that does not follow the
format raises :class:`MalformedPage`, it is never skipped and never repaired. Lines of other families are not
looked at.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

MAX_LINE_BYTES = 64 * 1024
MAX_SERIES = 5_000

# Possessive quantifiers: a line that is wrong near its end must not be tried in a million ways.
_NAME = r"[a-zA-Z_][a-zA-Z0-9_]*+"
_TEXT = r'(?:[^"\\]|\\[\\"n])*+'
_PAIR = re.compile(rf'[ \t]*+({_NAME})[ \t]*+=[ \t]*+"({_TEXT})"')
_PAIRS = rf'(?:[ \t]*+{_NAME}[ \t]*+=[ \t]*+"{_TEXT}"[ \t]*+(?:,|(?=\}})))*+[ \t]*+'
_NUMBER = r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[+-]?(?i:inf|infinity)|(?i:nan)"
_BRACES = re.compile(rf"[ \t]*+\{{({_PAIRS})\}}")
_VALUE = re.compile(rf"[ \t]*+({_NUMBER})(?:[ \t]+[+-]?[0-9]+)?[ \t]*\r?".encode())
_ESCAPE = re.compile(r'\\([\\"n])')
_MAX_CACHED_BYTES = 2048
_MAX_CACHED_LABELS = 64
"""Larger sets of labels are read anew each time, so that no page fills the memory."""
_UNESCAPED = {"\\": "\\", '"': '"', "n": "\n"}

Pairs = frozenset[tuple[str, str]]
"""Labels and their values."""
_NO_LABELS: tuple[Mapping[str, str], Pairs] = MappingProxyType({}), frozenset()


class MalformedPage(ValueError):
    """The page, or a line of it that matters, does not follow the exposition format.

    Attributes:
        reason: short name fit for a label.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Sample(NamedTuple):
    """One sample line.

    Attributes:
        name: in full, with ``_bucket``, ``_total`` …
        labels: unescaped.
        pairs: the labels, as what tells this sample from others of its name.
    """

    name: str
    labels: Mapping[str, str]
    value: float
    pairs: Pairs


class FamilyFilter:
    """Reads the samples of a fixed set of sample names out of pages."""

    def __init__(self, names: Collection[str]) -> None:
        self._wanted = _wanted_lines(names)
        self._names = {name.encode(): name for name in names}

    def samples(self, page: bytes) -> dict[str, list[Sample]]:
        """The samples by name, in page order; names without a sample are left out.

        Raises:
            MalformedPage: with reason ``empty_page``, ``truncated``, ``line_too_long``, ``bad_sample``,
                ``not_utf8``, ``duplicate_series`` or ``too_many_series``.
        """
        if not page.strip():
            raise MalformedPage("empty_page", "the page is empty")
        if not page.endswith(b"\n"):
            raise MalformedPage("truncated", "the page does not end with a newline")
        found: dict[str, list[Sample]] = {}
        seen: set[tuple[str, Pairs]] = set()
        for name, rest in self._lines(page):
            sample = _parse(name, rest)
            series = name, sample.pairs
            if series in seen:
                raise MalformedPage("duplicate_series", f"{name} has the same labels twice")
            seen.add(series)
            rows = found.setdefault(name, [])
            rows.append(sample)
            if len(rows) > MAX_SERIES:
                raise MalformedPage("too_many_series", f"{name} has more than {MAX_SERIES} series")
        return found

    def _lines(self, page: bytes) -> Iterator[tuple[str, bytes]]:
        """Sample name and the rest of the line, for the lines whose name is wanted."""
        for line in self._wanted.finditer(b"\n" + page):
            name, rest = line.groups()
            yield self._names[name], rest


def _wanted_lines(names: Collection[str]) -> re.Pattern[bytes]:
    """Matches the lines of these samples, from the newline before: one pass that skips the others cheaply."""
    by_namespace: dict[str, list[str]] = {}
    for name in names:
        namespace, colon, own = name.rpartition(":")
        by_namespace.setdefault(namespace + colon, []).append(re.escape(own))
    choices = (f"{re.escape(namespace)}(?:{'|'.join(own)})" for namespace, own in by_namespace.items())
    return re.compile(rf"\n[ \t]*+({'|'.join(choices)})(?=[{{\s])([^\n]*+)".encode())


def _parse(name: str, rest: bytes) -> Sample:
    if len(rest) > MAX_LINE_BYTES:
        raise MalformedPage("line_too_long", f"a line of {name} has {len(rest)} bytes")
    # No value has a brace, so the last one of a line ends its labels.
    inside, brace, number = rest.rpartition(b"}")
    value = _VALUE.fullmatch(number)
    small = len(inside) <= _MAX_CACHED_BYTES and inside.count(b"=") <= _MAX_CACHED_LABELS
    try:
        labels, pairs = (_cached_labels if small else _labels)(inside + brace)
        if value is None:
            raise _BadLine("not a sample")
    except (UnicodeDecodeError, _BadLine) as error:
        raise _malformed(name, rest, str(error)) from None
    return Sample(name, labels, float(value[1]), pairs)


def _malformed(name: str, rest: bytes, what: str) -> MalformedPage:
    try:
        return MalformedPage("bad_sample", f"{name}: {what}: {rest.decode()[:80]!r}")
    except UnicodeDecodeError:
        return MalformedPage("not_utf8", f"a line of {name} is not UTF-8")


class _BadLine(Exception):
    """The message says what is wrong with it."""


def _labels(braces: bytes) -> tuple[Mapping[str, str], Pairs]:
    """The labels of a line, braces included; none where there are none.

    Raises:
        UnicodeDecodeError: as it says.
        _BadLine: they are not well formed, or one is given twice.
    """
    if not braces:
        return _NO_LABELS
    well_formed = _BRACES.fullmatch(braces.decode())
    if well_formed is None:
        raise _BadLine("not a sample")
    pairs = _PAIR.findall(well_formed[1])
    if b"\\" in braces:
        pairs = [(label, _ESCAPE.sub(_unescape, value)) for label, value in pairs]
    labels = dict(pairs)
    if len(labels) < len(pairs):
        raise _BadLine("a label is given twice")
    return MappingProxyType(labels), frozenset(pairs)


@lru_cache(maxsize=1024)
def _cached_labels(braces: bytes) -> tuple[Mapping[str, str], Pairs]:
    """The same; from look to look a server's labels stay as they are, and only the values change."""
    return _labels(braces)


def _unescape(escape: re.Match[str]) -> str:
    return _UNESCAPED[escape[1]]
