"""Where a server's margins are heading."""

from __future__ import annotations

from collections.abc import Iterator

from kvwatch.export.statuspage.markup import Content, Markup, tag
from kvwatch.export.statuspage.shapes import sparkline
from kvwatch.export.statuspage.words import Record, ahead, signed_text
from kvwatch.units import bytes_text, duration_text

MAX_AHEAD = 2.0
"""The picture reaches at most so many times as far into the future as into the past."""


def trend_part(server: Record, now: float) -> Markup:
    """The course of the tightest margin in a picture and in words."""
    trend = server["trend"]
    points = [(point["time"], float(point["margin_bytes"])) for point in trend["margins"]]
    return tag(
        "div",
        tag("h4", "Margin over time"),
        _picture(points, trend) if len(points) > 1 else None,
        tag("ul", [tag("li", line) for line in _lines(points, server, now)]),
        class_="trend",
    )


def outlook_lines(server: Record, now: float) -> Iterator[Content]:
    """What is foretold with a time; of a restart that fails already nothing is."""
    trend = server["trend"]
    at, slope = trend["infeasible_at"], trend["margin_slope_bytes_per_second"]
    if at is not None and at > now and server["restart"]["feasible"] is not False:
        hourly = bytes_text(round(-slope * 3600))
        yield ["A restart becomes impossible ", ahead(at, now), f" if it goes on: {hourly} less per hour."]
    for engine, full_at in trend["kv_cache_full_at"].items():
        if full_at > now:
            yield [f"The KV cache of engine {engine} is full ", ahead(full_at, now), "."]


def _lines(points: list[tuple[float, float]], server: Record, now: float) -> Iterator[Content]:
    trend = server["trend"]
    yield from outlook_lines(server, now)
    if trend["infeasible_at"] is None:
        yield "No steady fall." if len(points) > 1 else "Too few looks yet to tell a trend."
    if len(points) > 1:
        lowest = signed_text(round(min(margin for _, margin in points)))
        span = duration_text(points[-1][0] - points[0][0])
        yield f"Lowest in the last {span}: {lowest}, on GPU {trend['gpu']}."


def _picture(points: list[tuple[float, float]], trend: Record) -> Markup:
    begin, end = points[0][0], points[-1][0]
    zero_at = trend["infeasible_at"]
    above = points[-1][1] > 0
    shown = above and zero_at is not None and end < zero_at <= end + MAX_AHEAD * (end - begin)
    first, last = (signed_text(round(point[1])) for point in (points[0], points[-1]))
    label = f"Tightest margin on GPU {trend['gpu']}, {duration_text(end - begin)}: from {first} to {last}"
    return sparkline(points, label=label, ahead=(zero_at, 0.0) if shown else None)
