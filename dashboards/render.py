"""Draws the dashboards from a Prometheus's answers, for the documentation and for the eye.

    python -m dashboards.record DIRECTORY
    prometheus --storage.tsdb.path=DIRECTORY …
    python -m dashboards.render --prometheus http://127.0.0.1:9090 --out docs/images

It is not Grafana: it knows the panels, units and colours that dashboards/grafana.py writes.
"""

from __future__ import annotations

import argparse
import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl
import requests
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from matplotlib.ticker import MultipleLocator

from dashboards.build import BOARDS
from kvwatch.units import bytes_text, duration_text

COLUMN_INCHES = 0.62
ROW_INCHES = 0.36
LONGEST_CELL = 36
ONE_NODE = ("kvwatch-node", "kvwatch-server")
BACKGROUND, CARD, TEXT, FAINT = "#111217", "#181b1f", "#ccccdc", "#8e8e9a"
COLORS = {
    "text": TEXT,
    "green": "#73bf69",
    "yellow": "#fade2a",
    "red": "#f2495c",
    "orange": "#ff9830",
    "blue": "#5794f2",
    "purple": "#b877d9",
    "semi-dark-yellow": "#e0b400",
    "dark-red": "#c4162a",
}
PALETTE = ("#73bf69", "#f2cc0c", "#8ab8ff", "#ff780a", "#f2495c", "#5794f2", "#b877d9", "#705da0")
VARIABLES = {"$job": ".+", "$server": ".+", "$__rate_interval": "10m"}

Series = tuple[Mapping[str, str], list[tuple[float, float]]]


def _short(number: float) -> str:
    for factor, unit in ((1e9, " Bil"), (1e6, " Mil"), (1e3, " K")):
        if abs(number) >= factor:
            return f"{number / factor:.3g}{unit}"
    return f"{number:.3g}"


def _bytes(number: float) -> str:
    return bytes_text(round(number)) if abs(number) < 1024**4 else f"{number / 1024**4:.2f} TiB"


UNITS: Mapping[str, Callable[[float], str]] = {
    "bytes": _bytes,
    "binBps": lambda number: f"{_bytes(number)}/s",
    "short": _short,
    "none": lambda number: f"{number:.0f}",
    "percentunit": lambda number: f"{number * 100:.3g}%",
    "s": lambda number: f"{number * 1000:.0f} ms" if abs(number) < 1 else f"{number:.3g} s",
    "dtdurations": lambda number: duration_text(number) if number >= 0 else f"-{duration_text(-number)}",
    "cps": lambda number: f"{number:.3g} c/s",
}


@dataclass(frozen=True, slots=True)
class Source:
    """A Prometheus and the time range that is drawn."""

    url: str
    start: float
    end: float
    node: str = ".+"

    def over_time(self, expression: str) -> list[Series]:
        """A range query with one point a minute or so."""
        step = max(30.0, (self.end - self.start) / 240)
        params: dict[str, str | float] = {
            "query": filled(expression, self.node),
            "start": self.start,
            "end": self.end,
            "step": step,
        }
        answer = self._ask("query_range", params)
        return [(series["metric"], [(float(t), float(v)) for t, v in series["values"]]) for series in answer]

    def now(self, expression: str) -> list[tuple[Mapping[str, str], float]]:
        """An instant query at the end of the range."""
        params: dict[str, str | float] = {"query": filled(expression, self.node), "time": self.end}
        return [(series["metric"], float(series["value"][1])) for series in self._ask("query", params)]

    def _ask(self, path: str, params: Mapping[str, str | float]) -> list[dict[str, Any]]:
        response = requests.get(f"{self.url}/api/v1/{path}", params=params, timeout=30)
        response.raise_for_status()
        result: list[dict[str, Any]] = response.json()["data"]["result"]
        return result


def filled(expression: str, node: str) -> str:
    """The expression with this pattern for the node and every other variable at "all"."""
    for variable, value in {**VARIABLES, "$node": node}.items():
        expression = expression.replace(variable, value)
    return expression


def legend(template: str, labels: Mapping[str, str]) -> str:
    """Grafana's legend template, filled."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), template)


def at_or_below(steps: list[dict[str, Any]], number: float) -> str:
    """Colour of the last threshold that the number reaches."""
    color = "text"
    for step in steps:
        if step["value"] is None or number >= step["value"]:
            color = step["color"]
    return COLORS[color]


def mapped(mappings: list[dict[str, Any]], number: float) -> tuple[str, str] | None:
    """Text and colour that stand for a number, where a value mapping has it."""
    for mapping in mappings:
        found = mapping["options"].get(f"{number:.0f}")
        if found:
            return found["text"], COLORS[found["color"]]
    return None


def draw(board: Mapping[str, Any], source: Source) -> Figure:
    """One dashboard."""
    panels = board["panels"]
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    width, height = 24 * COLUMN_INCHES, rows * ROW_INCHES + 0.5
    figure = Figure(figsize=(width, height), facecolor=BACKGROUND)
    figure.text(0.008, 1 - 0.33 / height, board["title"], color=TEXT, fontsize=15, va="center")
    for panel in panels:
        grid = panel["gridPos"]
        left, right = grid["x"] / 24, (grid["x"] + grid["w"]) / 24
        top = 1 - (grid["y"] * ROW_INCHES + 0.5) / height
        bottom = 1 - ((grid["y"] + grid["h"]) * ROW_INCHES + 0.5) / height
        gap_x, gap_y = 0.05 / width, 0.05 / height
        box = (left + gap_x, bottom + gap_y, right - left - 2 * gap_x, top - bottom - 2 * gap_y)
        frame = FancyBboxPatch(
            (box[0], box[1]),
            box[2],
            box[3],
            boxstyle="square,pad=0",
            zorder=-1,
            color=CARD,
            transform=figure.transFigure,
        )
        figure.add_artist(frame)
        title_y = top - gap_y - 0.16 / height
        figure.text(box[0] + 0.1 / width, title_y, panel["title"], color=TEXT, fontsize=10, va="center")
        margins = MARGINS[panel["type"]]
        inner = (
            box[0] + margins[0] / width,
            box[1] + margins[1] / height,
            box[2] - (margins[0] + margins[2]) / width,
            box[3] - (margins[1] + margins[3]) / height,
        )
        axes = figure.add_axes(inner, facecolor="none")
        PAINTERS[panel["type"]](axes, panel, source)
    return figure


MARGINS = {
    "timeseries": (0.85, 0.55, 0.15, 0.35),
    "state-timeline": (2.4, 0.55, 0.15, 0.35),
    "stat": (0.1, 0.1, 0.1, 0.3),
    "table": (0.12, 0.08, 0.12, 0.34),
}
"""Inches left, below, right and above what is drawn in a panel."""


def _over_time_axes(axes: Axes, source: Source) -> None:
    axes.set_xlim(source.start, source.end)
    hour = 3600
    axes.set_xticks([second for second in range(int(source.start), int(source.end)) if second % hour == 0])
    axes.xaxis.set_major_formatter(lambda seconds, _: datetime.fromtimestamp(seconds, UTC).strftime("%H:%M"))
    axes.tick_params(colors=FAINT, labelsize=8, length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _named_series(panel: Mapping[str, Any], source: Source) -> list[tuple[str, list[tuple[float, float]]]]:
    return [
        (legend(target["legendFormat"], labels), points)
        for target in panel["targets"]
        for labels, points in source.over_time(target["expr"])
    ]


def _paint_time_series(axes: Axes, panel: Mapping[str, Any], source: Source) -> None:
    _over_time_axes(axes, source)
    axes.grid(visible=True, color="#2c2f36", linewidth=0.6)
    axes.set_axisbelow(True)
    field = panel["fieldConfig"]
    fixed = {
        override["matcher"]["options"]: COLORS[override["properties"][0]["value"]["fixedColor"]]
        for override in field["overrides"]
    }
    series = _named_series(panel, source)
    colors = [fixed.get(name, PALETTE[number % len(PALETTE)]) for number, (name, _) in enumerate(series)]
    if field["defaults"]["custom"]["stacking"]["mode"] == "normal":
        _stack(axes, series, colors)
    else:
        for (name, points), color in zip(series, colors, strict=True):
            times, values = _with_gaps(points)
            axes.plot(times, values, color=color, linewidth=1.2, label=name)
    unit = UNITS[field["defaults"]["unit"]]
    axes.yaxis.set_major_formatter(lambda number, _: unit(number))
    if field["defaults"]["unit"] == "bytes":
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(MultipleLocator(2.0 ** math.ceil(math.log2((high - low) / 7))))
    names = [name for name, _ in series]
    if names:
        inches = panel["gridPos"]["w"] * COLUMN_INCHES
        columns = max(1, int(inches / (0.075 * max(map(len, names)) + 0.35)))
        further_rows = max(0, math.ceil(len(names) / columns) - 2)
        place = axes.get_position()
        lift = further_rows * 0.14 * place.height / (panel["gridPos"]["h"] * ROW_INCHES - 0.9)
        axes.set_position((place.x0, place.y0 + lift, place.width, place.height - lift))
        axes.legend(
            loc="upper left",
            bbox_to_anchor=(-0.75 / inches, -0.09),
            ncols=columns,
            frameon=False,
            fontsize=7.5,
            labelcolor=TEXT,
            handlelength=1,
            columnspacing=1.2,
            labelspacing=0.2,
            borderpad=0,
        )


def _stack(axes: Axes, series: list[tuple[str, list[tuple[float, float]]]], colors: list[str]) -> None:
    times = sorted({time for _, points in series for time, _ in points})
    heights = [[dict(points).get(time, 0.0) for time in times] for _, points in series]
    axes.stackplot(
        times,
        heights,
        labels=[name for name, _ in series],
        colors=colors,
        alpha=0.65,
        linewidth=0,
    )


def _with_gaps(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Times and values, with a hole wherever a sample is missing."""
    steps = [b - a for (a, _), (b, _) in pairwise(points)]
    usual = min(steps, default=0.0)
    times: list[float] = []
    values: list[float] = []
    for number, (moment, value) in enumerate(points):
        if number and steps[number - 1] > 1.5 * usual:
            times.append(moment)
            values.append(float("nan"))
        times.append(moment)
        values.append(value)
    return times, values


def _paint_state_timeline(axes: Axes, panel: Mapping[str, Any], source: Source) -> None:
    _over_time_axes(axes, source)
    mappings = panel["fieldConfig"]["defaults"]["mappings"]
    series = [
        (legend(target["legendFormat"], labels), points)
        for target in panel["targets"]
        for labels, points in source.over_time(target["expr"])
    ]
    for row, (_, points) in enumerate(series):
        for (begin, value), (end, _) in pairwise(points):
            shown = mapped(mappings, value)
            color = shown[1] if shown else FAINT
            axes.barh(row, end - begin, left=begin, height=0.8, color=color, alpha=0.85)
    axes.set_yticks(range(len(series)), [name for name, _ in series])
    axes.set_ylim(len(series) - 0.5, -0.5)


def _paint_stat(axes: Axes, panel: Mapping[str, Any], source: Source) -> None:
    axes.axis("off")
    defaults = panel["fieldConfig"]["defaults"]
    found = source.now(panel["targets"][0]["expr"])
    text, color = defaults["noValue"], FAINT
    if found:
        number = found[0][1]
        text, color = mapped(defaults["mappings"], number) or (
            UNITS[defaults["unit"]](number),
            at_or_below(defaults["thresholds"]["steps"], number),
        )
    axes.text(0.5, 0.45, text, color=color, fontsize=24, ha="center", va="center")


def _merged(panel: Mapping[str, Any], source: Source) -> tuple[list[str], list[list[float | str | None]]]:
    """Headings and rows as Grafana's merge and organize transformations leave them."""
    organize = panel["transformations"][1]["options"]["renameByName"]
    labels = [name for name in organize if not name.startswith("Value")]
    width = len(panel["targets"])
    rows: dict[tuple[str, ...], list[float | None]] = {}
    for column, target in enumerate(panel["targets"]):
        for found, value in source.now(target["expr"]):
            key = tuple(found.get(label, "") for label in labels)
            rows.setdefault(key, [None] * width)[column] = value
    headings = list(organize.values())
    order = panel["options"]["sortBy"][0]
    place = headings.index(order["displayName"])
    table: list[list[float | str | None]] = [[*key, *values] for key, values in rows.items()]
    known: list[Any] = [row for row in table if row[place] is not None]
    known.sort(key=lambda row: row[place], reverse=order["desc"])
    return headings, known + [row for row in table if row[place] is None]


def _paint_table(axes: Axes, panel: Mapping[str, Any], source: Source) -> None:
    axes.axis("off")
    axes.set_xlim(0, 1)
    box = axes.get_window_extent()
    inches = box.height / axes.get_figure().dpi  # type: ignore[union-attr]
    axes.set_ylim(inches, 0)
    headings, rows = _merged(panel, source)
    if not rows:
        axes.text(0.5, inches / 2, "no data", color=FAINT, fontsize=14, ha="center", va="center")
        return
    shown = rows[: int((inches - 0.25) / 0.27)]
    cells = [
        [_cell(panel, heading, cell) for heading, cell in zip(headings, row, strict=True)] for row in shown
    ]
    widths = [
        max(len(heading), *(len(row[column][0]) for row in cells)) + 3
        for column, heading in enumerate(headings)
    ]
    lefts = [sum(widths[:column]) / sum(widths) for column in range(len(widths))]
    for left, heading in zip(lefts, headings, strict=True):
        axes.text(left, 0.12, heading, color="#6e9fff", fontsize=8.5, va="center", weight="bold")
    axes.axhline(0.24, color="#2c2f36", linewidth=0.8)
    for number, row in enumerate(cells):
        for left, (text, color) in zip(lefts, row, strict=True):
            axes.text(left, 0.38 + number * 0.27, text, color=color, fontsize=8.5, va="center")


def _cell(panel: Mapping[str, Any], heading: str, cell: float | str | None) -> tuple[str, str]:
    if cell is None:
        return "", FAINT
    if isinstance(cell, str):
        return (cell if len(cell) <= LONGEST_CELL else f"{cell[: LONGEST_CELL - 1]}…"), TEXT
    properties = {
        one["id"]: one["value"]
        for override in panel["fieldConfig"]["overrides"]
        if override["matcher"]["options"] == heading
        for one in override["properties"]
    }
    shown = mapped(properties.get("mappings", []), cell)
    if shown:
        return shown
    color = at_or_below(properties["thresholds"]["steps"], cell) if "thresholds" in properties else TEXT
    return UNITS[properties["unit"]](cell), color


PAINTERS: Mapping[str, Callable[[Axes, Mapping[str, Any], Source], None]] = {
    "timeseries": _paint_time_series,
    "state-timeline": _paint_state_timeline,
    "stat": _paint_stat,
    "table": _paint_table,
}


def main() -> None:
    """Write one picture per dashboard."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", metavar="URL")
    parser.add_argument("--end", type=float, default=time.time(), metavar="UNIX_TIME")
    parser.add_argument("--hours", type=float, default=4.0)
    parser.add_argument("--node", default=".+", metavar="REGEX", help="the node of the boards on one node")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    args = parser.parse_args()
    mpl.use("agg")
    args.out.mkdir(parents=True, exist_ok=True)
    for board in BOARDS:
        node = args.node if board.uid in ONE_NODE else ".+"
        source = Source(args.prometheus, args.end - args.hours * 3600, args.end, node)
        figure = draw(board.as_json(), source)
        name = board.uid.removeprefix("kvwatch-")
        figure.savefig(args.out / f"dashboard-{name}.png", dpi=90, facecolor=BACKGROUND)


if __name__ == "__main__":
    main()
