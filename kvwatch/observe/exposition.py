"""Strict reader of the Prometheus text format 0.0.4 for the few families that a caller needs.

A vLLM page has 600 to 800 lines of which kvwatch needs some 50, so lines are picked by sample name before
anything is parsed. What is picked is parsed strictly: a line that does not follow the
format raises :class:`MalformedPage`, it is never skipped and never repaired. Lines of other families are not
looked at.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

MAX_LINE_BYTES = 64 * 1024
MAX_SERIES = 5_000

# Possessive quantifiers: a line that is wrong near its end must not be tried in a million ways.
_NAME = r"[a-zA-Z_][a-zA-Z0-9_]*+"
_TEXT = r'(?:[^"\\]|\\[\\"n])*+'
_PAIR = re.compile(rf'[ \t]*+({_NAME})[ \t]*+=[ \t]*+"({_TEXT})"')
_PAIRS = rf'(?:[ \t]*+{_NAME}[ \t]*+=[ \t]*+"{_TEXT}"[ \t]*+(?:,|(?=\}})))*+[ \t]*+'
_NUMBER = r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[+-]?(?i:inf|infinity)|(?i:nan)"
_SAMPLE = re.compile(
    rf"[ \t]*+(?:\{{({_PAIRS})\}})?[ \t]*+({_NUMBER})(?:[ \t]+[+-]?[0-9]+)?[ \t]*\r?", re.ASCII
)
_ESCAPE = re.compile(r'\\([\\"n])')
_Identity = frozenset[tuple[str, str]]
_USUAL_LABELS = 2048
"""Characters of labels that are remembered; longer ones are read anew each time."""
_UNESCAPED = {"\\": "\\", '"': '"', "n": "\n"}


class MalformedPage(ValueError):
    """The page, or a line of it that matters, does not follow the exposition format.

    Attributes:
        reason: short name fit for a label.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample line: full sample name (with ``_bucket``, ``_total`` …), labels unescaped, value."""

    name: str
    labels: Mapping[str, str]
    value: float


class FamilyFilter:
    """Reads the samples of a fixed set of sample names out of pages."""

    def __init__(self, names: Collection[str]) -> None:
        self._wanted = _wanted_lines(names)

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
        seen: set[tuple[str, _Identity]] = set()
        for name, rest in self._lines(page):
            sample, identity = _parse(name, rest)
            series = name, identity
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
            yield line[1].decode(), line[2]


def _wanted_lines(names: Collection[str]) -> re.Pattern[bytes]:
    """Matches the lines of these samples, from the newline before: one pass that skips the others cheaply."""
    by_namespace: dict[str, list[str]] = {}
    for name in names:
        namespace, colon, own = name.rpartition(":")
        by_namespace.setdefault(namespace + colon, []).append(re.escape(own))
    choices = (f"{re.escape(namespace)}(?:{'|'.join(own)})" for namespace, own in by_namespace.items())
    return re.compile(rf"\n[ \t]*+({'|'.join(choices)})(?=[{{\s])([^\n]*+)".encode())


def _parse(name: str, rest: bytes) -> tuple[Sample, _Identity]:
    if len(rest) > MAX_LINE_BYTES:
        raise MalformedPage("line_too_long", f"a line of {name} has {len(rest)} bytes")
    try:
        text = rest.decode()
    except UnicodeDecodeError as error:
        raise MalformedPage("not_utf8", f"a line of {name} is not UTF-8") from error
    sample = _SAMPLE.fullmatch(text)
    if sample is None:
        raise MalformedPage("bad_sample", f"{name}: not a sample: {text[:80]!r}")
    inside = sample[1] or ""
    try:
        labels, identity = _usual_labels(inside) if len(inside) <= _USUAL_LABELS else _labels(inside)
    except ValueError:
        raise MalformedPage("bad_sample", f"{name}: a label is given twice: {text[:80]!r}") from None
    return Sample(name, labels, float(sample[2])), identity


def _labels(inside: str) -> tuple[Mapping[str, str], _Identity]:
    """The labels between the braces of a well-formed line, and what tells them from others.

    Raises:
        ValueError: one is given twice.
    """
    pairs = _PAIR.findall(inside)
    if "\\" in inside:
        pairs = [(label, _ESCAPE.sub(_unescape, value)) for label, value in pairs]
    labels = dict(pairs)
    if len(labels) < len(pairs):
        raise ValueError
    return MappingProxyType(labels), frozenset(pairs)


@lru_cache(maxsize=1024)
def _usual_labels(inside: str) -> tuple[Mapping[str, str], _Identity]:
    """The same; from look to look a server's labels stay as they are, and only the values change."""
    return _labels(inside)


def _unescape(escape: re.Match[str]) -> str:
    return _UNESCAPED[escape[1]]
