"""Values of the document as people read them. What is null is called unknown, never 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from kvwatch.export.statuspage.markup import Markup, tag
from kvwatch.units import bytes_text, duration_text

Record = Mapping[str, Any]
"""One object of the document."""

DAY = 86400.0
UNKNOWN = tag("span", "unknown", class_="unknown")


def figure(record: Record, field: str, text: Callable[[Any], str] = bytes_text) -> Markup:
    """One number of a record in words, with the exact number beside it for machines."""
    value = record[field]
    return UNKNOWN if value is None else tag("data", text(value), value=value, data_field=field)


def count_text(number: float) -> str:
    """A whole number with its thousands apart."""
    return f"{number:,.0f}"


def length_text(tokens: int) -> str:
    """A length that would start; none would where it is 0."""
    return count_text(tokens) if tokens else "none"


def share_text(share: float) -> str:
    """A share of one as a percentage."""
    return f"{share:.0%}"


def signed_text(number: int) -> str:
    """Bytes with their sign, as a margin has them."""
    return f"+{bytes_text(number)}" if number > 0 else bytes_text(number).replace("-", "\N{MINUS SIGN}")


def plural(number: int, noun: str) -> str:
    """A number and what it counts."""
    return f"{count_text(number)} {noun}" if number == 1 else f"{count_text(number)} {noun}s"


def moment(time: float) -> Markup:
    """A Unix time, in UTC."""
    when = datetime.fromtimestamp(time, UTC)
    return tag("time", f"{when:%Y-%m-%d %H:%M:%S} UTC", datetime=when.isoformat(timespec="seconds"))


def ahead(time: float, now: float) -> list[str | Markup]:
    """How far ahead a moment is, and when it is."""
    when = datetime.fromtimestamp(time, UTC)
    day = "" if time - now < DAY else f"{when:%a %d %b}, "
    short = tag("time", f"{day}{when:%H:%M} UTC", datetime=when.isoformat(timespec="seconds"))
    return ["in ", duration_text(time - now), " (", short, ")"]


def flag_text(changes: Mapping[str, object]) -> str:
    """Settings as they are typed on vLLM's command line."""
    words = []
    for name, value in changes.items():
        words.append(f"--{'' if value is not False else 'no-'}{name.replace('_', '-')}")
        if not isinstance(value, bool):
            words.append(str(value))
    return " ".join(words)
