"""Bars and lines as SVG. Lengths are attributes, since the page's policy forbids inline style."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvwatch.export.statuspage.markup import Markup, tag


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a bar.

    Attributes:
        kind: CSS class that colours it.
        begin, end: on the bar's scale.
        title: what it is, for the pointer.
    """

    kind: str
    begin: float
    end: float
    title: str | None = None


_LEAST = 0.005
"""Share of the width that the smallest span is drawn with, so that it can be seen."""
_BEYOND = 4
"""Pixels by which a mark stands out above and below its bar."""


def bar(
    scale: float, spans: Iterable[Span], *, height: int, label: str | None = None, mark: float | None = None
) -> Markup:
    """Spans on one line.

    Args:
        scale: what the whole width stands for.
        label: text alternative; without one the same facts stand beside the bar, and readers skip it.
        mark: where a line stands across the bar.
    """
    spoken = {"role": "img", "aria_label": label} if label else {"aria_hidden": "true"}
    top = 0 if mark is None else _BEYOND
    place = {"y": top, "height": height - 2 * top}
    return tag(
        "svg",
        tag("rect", class_="track", width="100%", rx=3, **place),
        [_rect(span, scale, place) for span in spans if span.end > span.begin],
        None if mark is None else _mark(mark, scale),
        class_="bar",
        width="100%",
        height=height,
        **spoken,
    )


def _rect(span: Span, scale: float, place: Mapping[str, object]) -> Markup:
    share = max(_LEAST, (span.end - span.begin) / scale)
    begin = min(span.begin / scale, 1 - share)
    title = tag("title", span.title) if span.title else None
    shape = tag("rect", class_=f"span {span.kind}", x=_percent(begin), width=_percent(share), **place)
    return tag("g", title, shape)


def _mark(at: float, scale: float) -> list[Markup]:
    place = _percent(at / scale)
    return [tag("line", class_=kind, x1=place, x2=place, y1="0", y2="100%") for kind in ("halo", "mark")]


def _percent(share: float) -> str:
    return f"{100 * share:.3f}%"


_WIDTH, _HEIGHT = 320.0, 72.0


def sparkline(
    points: Sequence[tuple[float, float]], *, label: str, ahead: tuple[float, float] | None = None
) -> Markup:
    """A course over time with its zero line.

    Args:
        points: (time, value), oldest first, two or more.
        ahead: the point that a dashed line leads to.
    """
    seen = [*points, ahead] if ahead else list(points)
    times, values = [time for time, _ in seen], [value for _, value in seen]
    low, high = min(0.0, *values), max(0.0, *values)
    begin, end = times[0], max(times)

    def place(time: float, value: float) -> str:
        x = _WIDTH * (time - begin) / ((end - begin) or 1)
        y = 2 + (_HEIGHT - 4) * (high - value) / ((high - low) or 1)
        return f"{x:.1f},{y:.1f}"

    course = " ".join(place(*point) for point in points)
    zero = [place(begin, 0.0), place(end, 0.0)]
    area = f"{zero[0]} {course} {place(points[-1][0], 0.0)}"
    coming = f"{place(*points[-1])} {place(*ahead)}" if ahead else None
    return tag(
        "svg",
        tag("polyline", class_="area", points=area),
        tag("polyline", class_="zero", points=" ".join(zero)),
        tag("polyline", class_="course", points=course),
        tag("polyline", class_="coming", points=coming) if coming else None,
        class_="spark",
        viewBox=f"0 0 {_WIDTH:g} {_HEIGHT:g}",
        preserveAspectRatio="none",
        role="img",
        aria_label=label,
    )
