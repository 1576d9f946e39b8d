"""HTML in which every text is escaped unless it is markup already."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator
from html import escape
from typing import TypeAlias


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Content: TypeAlias = "str | Iterable[Content] | None"
"""What stands in an element: text, markup, nothing, or several of these."""

_VOID = frozenset({"meta", "link"})
_SHAPES = frozenset({"rect", "line", "polyline"})
"""SVG's elements without content, which HTML closes only where told."""
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
"""Characters that HTML does not allow, or UTF-8 does not have: a process may have any name."""


def tag(name: str, /, *content: Content, **attributes: object) -> Markup:
    """One element.

    Args:
        attributes: an underscore stands for a hyphen, one at the end is dropped (``class_``); True gives the
            bare name; None and False leave the attribute out.
    """
    opening = f"<{name}{_attributes(attributes)}"
    if name in _SHAPES:
        return Markup(f"{opening}/>")
    return Markup(f"{opening}>" if name in _VOID else f"{opening}>{join(*content)}</{name}>")


def table(
    caption: str,
    headings: Iterable[str],
    rows: Iterable[Markup],
    *,
    kind: str | None = None,
    numbers: Container[str] = (),
) -> Markup:
    """A table with a caption for readers of the screen.

    Args:
        kind: its CSS class.
        numbers: headings of columns that are flush right.
    """
    heads = [
        tag("th", heading, scope="col", class_="number" if heading in numbers else None)
        for heading in headings
    ]
    spoken = tag("caption", caption, class_="spoken")
    return tag("table", spoken, tag("thead", tag("tr", heads)), tag("tbody", rows), class_=kind)


def join(*content: Content) -> Markup:
    """Contents one after the other, without an element around them."""
    return Markup("".join(_texts(content)))


def _texts(content: Content) -> Iterator[str]:
    if content is None:
        return
    if isinstance(content, Markup):
        yield content
    elif isinstance(content, str):
        yield escape(_CONTROL.sub("\ufffd", content))
    else:
        for part in content:
            yield from _texts(part)


def _attributes(attributes: dict[str, object]) -> str:
    return "".join(
        f" {name.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{_quoted(value)}"')
        for name, value in attributes.items()
        if value is not None and value is not False
    )


def _quoted(value: object) -> str:
    return escape(_CONTROL.sub("\ufffd", str(value)))
