"""The language in which the wordings of vLLM's log are written down.

Patterns are matched against text with all white space removed, so a message is found however a terminal or a
log shipper wrapped it. They are written with their spaces for the reader's sake. ``<name>`` stands for a
number and ``<name:regex>`` for any other text; the name is the key under which the value is reported.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

Number = int | float
Value = Number | str | bool | list[str] | dict[str, float | None]
Numbers = dict[str, Value]

NUMBER = r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?"
_PLACEHOLDER = re.compile(r"<(\w+)(?::([^>]*))?>")
_WHITE = re.compile(r"\s+")


def squeeze(text: str) -> str:
    """Text without any white space."""
    return "".join(text.split())


def number(text: str) -> Number:
    """A printed number: ``1,048,576`` and ``2048`` are whole, ``2048.0`` is not."""
    plain = text.replace(",", "")
    return float(plain) if "." in plain or "e" in plain else int(plain)


def squeezed_pattern(spaced: str) -> re.Pattern[str]:
    """The regular expression of a pattern with its spaces and placeholders."""
    named = _PLACEHOLDER.sub(lambda hole: f"(?P<{hole[1]}>{hole[2] or NUMBER})", spaced)
    return re.compile(_WHITE.sub("", named))


def named_groups(match: re.Match[str]) -> Numbers:
    """The placeholders of a match that took part in it, numbers as numbers."""
    return {name: _value(text) for name, text in match.groupdict().items() if text is not None}


def _value(text: str) -> Value:
    return number(text) if re.fullmatch(NUMBER, text) else text


@dataclass(frozen=True, slots=True)
class Message:
    """One wording.

    Attributes:
        kind: name, or a function of the match that names it.
        anchors: squeezed fragments; a text that holds none of them cannot match. More than one where the
            message is long enough to be wrapped, so that one survives whole.
        parse: the numbers of a match.
    """

    kind: str | Callable[[re.Match[str]], str]
    pattern: re.Pattern[str]
    anchors: tuple[str, ...]
    parse: Callable[[re.Match[str]], Numbers]

    def name(self, match: re.Match[str]) -> str:
        """The kind of a match."""
        return self.kind if isinstance(self.kind, str) else self.kind(match)


def message(
    kind: str | Callable[[re.Match[str]], str],
    pattern: str,
    *anchors: str,
    parse: Callable[[re.Match[str]], Numbers] = named_groups,
) -> Message:
    """One row of a table of wordings; pattern and anchors are written with their spaces."""
    return Message(kind, squeezed_pattern(pattern), tuple(squeeze(anchor) for anchor in anchors), parse)
