"""Grafana's dashboard JSON out of small records: the few kinds of panel that the boards use."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

SCHEMA_VERSION = 39
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24
Unit = Literal[
    "bytes", "short", "none", "percentunit", "s", "dtdurations", "dateTimeFromNow", "cps", "binBps"
]
Steps = tuple[tuple[float | None, str], ...]
"""Thresholds: from this value on, which colour; the first from minus infinity."""


@dataclass(frozen=True, slots=True)
class Query:
    """One expression; `legend` is Grafana's template over labels."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Value:
    """How one number is shown instead of itself."""

    number: int
    text: str
    color: str


@dataclass(frozen=True, slots=True)
class Panel:
    """What every panel has."""

    title: str
    description: str
    unit: Unit
    width: int
    height: int = 8
    thresholds: Steps = ((None, "text"),)
    values: tuple[Value, ...] = ()

    def queries(self) -> tuple[Query, ...]:
        """The panel's expressions, in the order of their refIds A, B, C …"""
        raise NotImplementedError

    def specifics(self) -> dict[str, Any]:
        """Type, options and what else only this kind of panel has."""
        raise NotImplementedError

    def custom(self) -> dict[str, Any]:
        """Display options of the fields."""
        return {}

    def as_json(self, number: int, x: int, y: int) -> dict[str, Any]:
        """The panel at a place in the grid."""
        specifics = self.specifics()
        defaults: dict[str, Any] = {
            "unit": self.unit,
            "noValue": "no data",
            "mappings": [_mapping(self.values)] if self.values else [],
            "thresholds": {
                "mode": "absolute",
                "steps": [{"value": value, "color": color} for value, color in self.thresholds],
            },
            "color": {"mode": "thresholds" if len(self.thresholds) > 1 or self.values else "palette-classic"},
        }
        if custom := self.custom():
            defaults["custom"] = custom
        return {
            "id": number,
            "title": self.title,
            "description": self.description,
            "datasource": DATASOURCE,
            "gridPos": {"x": x, "y": y, "w": self.width, "h": self.height},
            "fieldConfig": {"defaults": defaults, "overrides": specifics.pop("overrides", [])},
            "targets": [
                self.target(query, ref)
                for query, ref in zip(self.queries(), string.ascii_uppercase, strict=False)
            ],
            **specifics,
        }

    def target(self, query: Query, ref: str) -> dict[str, Any]:
        """One query over the time range."""
        return {
            "refId": ref,
            "datasource": DATASOURCE,
            "expr": query.expr,
            "legendFormat": query.legend,
            "range": True,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSeries(Panel):
    """Lines over time, or areas on top of each other."""

    lines: tuple[Query, ...]
    stacked: bool = False
    colors: Mapping[str, str] = field(default_factory=dict)

    def queries(self) -> tuple[Query, ...]:
        return self.lines

    def custom(self) -> dict[str, Any]:
        return {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 60 if self.stacked else 8,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"mode": "normal" if self.stacked else "none", "group": "A"},
        }

    def specifics(self) -> dict[str, Any]:
        return {
            "type": "timeseries",
            "options": {
                "legend": {
                    "displayMode": "list",
                    "placement": "bottom",
                    "showLegend": True,
                    "calcs": [],
                },
                "tooltip": {"mode": "multi", "sort": "desc"},
            },
            "overrides": [_color(name, color) for name, color in self.colors.items()],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Stat(Panel):
    """One number, or one per series."""

    query: Query
    height: int = 4

    def queries(self) -> tuple[Query, ...]:
        return (self.query,)

    def target(self, query: Query, ref: str) -> dict[str, Any]:
        return _instant(query, ref, "time_series")

    def specifics(self) -> dict[str, Any]:
        return {
            "type": "stat",
            "options": {
                "reduceOptions": {"values": False, "calcs": ["lastNotNull"], "fields": ""},
                "orientation": "auto",
                "textMode": "auto",
                "colorMode": "value",
                "graphMode": "none",
                "justifyMode": "auto",
            },
        }


@dataclass(frozen=True, slots=True)
class Column:
    """A column of numbers: one expression with the table's labels on each series."""

    title: str
    expr: str
    unit: Unit = "short"
    values: tuple[Value, ...] = ()
    thresholds: Steps = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Table(Panel):
    """One row per combination of labels.

    Attributes:
        labels: label and heading of the columns that name the row.
        columns: those with numbers; rows appear where any of them has a value.
        sort: heading of the column that orders the rows, and whether its largest come first.
    """

    labels: tuple[tuple[str, str], ...]
    columns: tuple[Column, ...]
    sort: tuple[str, bool]

    def queries(self) -> tuple[Query, ...]:
        return tuple(Query(column.expr) for column in self.columns)

    def target(self, query: Query, ref: str) -> dict[str, Any]:
        return _instant(query, ref, "table")

    @property
    def fields(self) -> tuple[str, ...]:
        """Grafana's name of each column of numbers."""
        if len(self.columns) == 1:
            return ("Value",)
        return tuple(f"Value #{ref}" for ref, _ in zip(string.ascii_uppercase, self.columns, strict=False))

    def specifics(self) -> dict[str, Any]:
        names = dict(self.labels)
        numbers = dict(zip(self.fields, (column.title for column in self.columns), strict=True))
        heading, descending = self.sort
        return {
            "type": "table",
            "options": {
                "showHeader": True,
                "cellHeight": "sm",
                "sortBy": [{"displayName": heading, "desc": descending}],
            },
            "transformations": [
                {"id": "merge", "options": {}},
                {
                    "id": "organize",
                    "options": {
                        "excludeByName": {"Time": True},
                        "indexByName": {name: place for place, name in enumerate([*names, *numbers])},
                        "renameByName": names | numbers,
                    },
                },
            ],
            "overrides": [_column(column) for column in self.columns],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTimeline(Panel):
    """Bands of states over time."""

    lines: tuple[Query, ...]

    def queries(self) -> tuple[Query, ...]:
        return self.lines

    def custom(self) -> dict[str, Any]:
        return {"lineWidth": 0, "fillOpacity": 80}

    def specifics(self) -> dict[str, Any]:
        return {
            "type": "state-timeline",
            "options": {
                "mergeValues": True,
                "showValue": "never",
                "alignValue": "left",
                "rowHeight": 0.8,
                "legend": {
                    "displayMode": "list",
                    "placement": "bottom",
                    "showLegend": True,
                    "calcs": [],
                },
                "tooltip": {"mode": "single", "sort": "none"},
            },
        }


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice of label values, all of them by default."""

    name: str
    label: str
    query: str

    def as_json(self) -> dict[str, Any]:
        return {
            "type": "query",
            "name": self.name,
            "label": self.label,
            "datasource": DATASOURCE,
            "query": {"query": self.query, "refId": f"variable-{self.name}"},
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".+",
            "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        }


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard; panels fill rows from left to right."""

    uid: str
    title: str
    description: str
    variables: Sequence[Variable]
    panels: Sequence[Panel]

    def as_json(self) -> dict[str, Any]:
        """The whole dashboard."""
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.description,
            "tags": ["kvwatch", "vllm"],
            "editable": False,
            "graphTooltip": 1,
            "schemaVersion": SCHEMA_VERSION,
            "time": {"from": "now-6h", "to": "now"},
            "timezone": "browser",
            "refresh": "30s",
            "links": [
                {
                    "type": "dashboards",
                    "title": "kvwatch",
                    "tags": ["kvwatch"],
                    "asDropdown": True,
                    "includeVars": True,
                    "keepTime": True,
                    "icon": "external link",
                    "tooltip": "",
                    "targetBlank": False,
                }
            ],
            "annotations": {"list": []},
            "templating": {"list": [_datasource(), *(one.as_json() for one in self.variables)]},
            "panels": _placed(self.panels),
        }


def _placed(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    placed = []
    x = y = row_height = 0
    for number, panel in enumerate(panels, 1):
        if x + panel.width > WIDTH:
            x, y, row_height = 0, y + row_height, 0
        placed.append(panel.as_json(number, x, y))
        x, row_height = x + panel.width, max(row_height, panel.height)
    return placed


def _datasource() -> dict[str, Any]:
    return {
        "type": "datasource",
        "name": "datasource",
        "label": "Data source",
        "query": "prometheus",
        "current": {},
    }


def _instant(query: Query, ref: str, shape: str) -> dict[str, Any]:
    return {
        "refId": ref,
        "datasource": DATASOURCE,
        "expr": query.expr,
        "legendFormat": query.legend,
        "instant": True,
        "range": False,
        "format": shape,
    }


def _mapping(values: Sequence[Value]) -> dict[str, Any]:
    return {
        "type": "value",
        "options": {
            str(value.number): {"text": value.text, "color": value.color, "index": place}
            for place, value in enumerate(values)
        },
    }


def _color(name: str, color: str) -> dict[str, Any]:
    return {
        "matcher": {"id": "byName", "options": name},
        "properties": [{"id": "color", "value": {"mode": "fixed", "fixedColor": color}}],
    }


def _column(column: Column) -> dict[str, Any]:
    properties: list[dict[str, Any]] = [{"id": "unit", "value": column.unit}]
    if column.values:
        properties.append({"id": "mappings", "value": [_mapping(column.values)]})
    if column.thresholds:
        steps = [{"value": value, "color": color} for value, color in column.thresholds]
        properties.append({"id": "thresholds", "value": {"mode": "absolute", "steps": steps}})
    if column.values or column.thresholds:
        properties.append({"id": "custom.cellOptions", "value": {"type": "color-text"}})
    return {"matcher": {"id": "byName", "options": column.title}, "properties": properties}
