"""Verdicts in words, the same everywhere on the page."""

from __future__ import annotations

from collections.abc import Iterable

from kvwatch.export.statuspage.markup import Markup, tag
from kvwatch.export.statuspage.words import Record
from kvwatch.export.text import CHECK_TEXT
from kvwatch.units import bytes_text

_PILLS = {True: ("ok", "Would start"), False: ("fail", "Would not start"), None: ("unsure", "Unknown")}


def pill(verdict: Record, up: bool = True) -> Markup:
    """The verdict as a label; a server that does not answer is called down."""
    kind, text = _PILLS[verdict["feasible"]]
    if not up and verdict["feasible"] is None:
        text = "No answer"
    return tag("span", tag("span", class_="glyph"), text, class_=f"pill {kind}")


def check_words(check: Record) -> str:
    """A check and where it was made."""
    where = f", GPU {check['gpu']}" if check["gpu"] is not None else ""
    return f"{CHECK_TEXT.get(check['check'], check['check'])}{where}"


def tightest_check(checks: Iterable[Record]) -> Record | None:
    """The check with the smallest margin; None where no margin is known."""
    known = [check for check in checks if check["margin_bytes"] is not None]
    return min(known, key=lambda check: int(check["margin_bytes"]), default=None)


def reason_words(verdict: Record) -> str | None:
    """Why a verdict is no or unknown, in one sentence; None where it is yes."""
    if (unknown := verdict["unknown"]) is not None:
        return f"Unknown ({unknown['reason']}): {unknown['detail']}"
    blocking = verdict["blocking"]
    if blocking is None:
        return None
    margin = blocking["margin_bytes"]
    missing = f": {bytes_text(-margin)} missing" if margin is not None else ""
    words = check_words(blocking)
    return f"{words[0].upper()}{words[1:]}{missing}"
