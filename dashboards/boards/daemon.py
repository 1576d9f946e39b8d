"""kvwatch itself."""

from __future__ import annotations

from dashboards.boards.common import ANSWERS, JOBS, NODE, NODE_LABEL, NODES, NONE_IS_GOOD
from dashboards.grafana import Board, Column, Panel, Query, Stat, Table, TimeSeries


def _panels() -> tuple[Panel, ...]:
    return (
        Stat(
            "Running",
            "Daemons that Prometheus reaches and that have completed a cycle.",
            "none",
            6,
            query=Query(f"sum(kvwatch_up{{{NODE}}})"),
        ),
        Stat(
            "Oldest look",
            "Time since the last cycle began, on the node where that is longest ago.",
            "s",
            6,
            thresholds=((None, "green"), (60, "yellow"), (120, "red")),
            query=Query(f"max(time() - kvwatch_cycle_timestamp_seconds{{{NODE}}})"),
        ),
        Stat(
            "Refused configurations",
            "Nodes whose last reload was refused; they run on with the old configuration.",
            "none",
            6,
            thresholds=NONE_IS_GOOD,
            query=Query(f"sum(kvwatch_config_last_reload_successful{{{NODE}}} == bool 0)"),
        ),
        Stat(
            "Sources without an answer",
            "NVML, /proc, servers and model files, over all nodes.",
            "none",
            6,
            thresholds=NONE_IS_GOOD,
            query=Query(f"sum(kvwatch_source_up{{{NODE}}} == bool 0)"),
        ),
        TimeSeries(
            "Cycle duration",
            "How long one look at the node takes.",
            "s",
            12,
            lines=(Query(f"kvwatch_cycle_duration_seconds{{{NODE}}}", "{{instance}}"),),
        ),
        TimeSeries(
            "Cycles per second",
            "One per poll.interval; zero means that kvwatch has stopped looking.",
            "cps",
            12,
            lines=(
                Query(
                    f"sum by (instance) (rate(kvwatch_cycles_total{{{NODE}}}[$__rate_interval]))",
                    "{{instance}}",
                ),
            ),
        ),
        TimeSeries(
            "Source duration",
            "Slowest node of each source. A gap is a source without an answer.",
            "s",
            12,
            lines=(Query(f"max by (source) (kvwatch_source_duration_seconds{{{NODE}}})", "{{source}}"),),
        ),
        TimeSeries(
            "Errors per second",
            "By source and reason.",
            "cps",
            12,
            lines=(
                Query(
                    f"sum by (source, reason) (rate(kvwatch_errors_total{{{NODE}}}[$__rate_interval]))",
                    "{{source}} {{reason}}",
                ),
            ),
        ),
        Table(
            "Sources",
            "When each source last answered.",
            "short",
            12,
            labels=(NODE_LABEL, ("source", "Source")),
            columns=(
                Column("Now", f"min by (instance, source) (kvwatch_source_up{{{NODE}}})", values=ANSWERS),
                Column(
                    "Last answer",
                    "max by (instance, source)"
                    f" (time() - kvwatch_source_last_success_timestamp_seconds{{{NODE}}})",
                    "dtdurations",
                ),
            ),
            sort=("Last answer", True),
        ),
        Table(
            "Versions",
            "What runs where, and for how long it has had its configuration.",
            "short",
            12,
            labels=(NODE_LABEL, ("version", "kvwatch"), ("python", "Python")),
            columns=(
                Column(
                    "Configuration read",
                    "max by (instance, version, python)"
                    f" ((time() - kvwatch_config_last_reload_success_timestamp_seconds{{{NODE}}})"
                    f" * on (job, instance) group_right () kvwatch_build_info{{{NODE}}})",
                    "dtdurations",
                ),
            ),
            sort=("Node", False),
        ),
    )


BOARD = Board(
    "kvwatch-self",
    "kvwatch / kvwatch",
    "kvwatch itself: cycles, sources, errors, configuration.",
    (JOBS, NODES),
    _panels(),
)
