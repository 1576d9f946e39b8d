"""All nodes, worst first."""

from __future__ import annotations

from dashboards.boards.common import (
    JOBS,
    MARGIN,
    NODE,
    NODE_LABEL,
    NODES,
    NONE_IS_GOOD,
    OWNER_COLORS,
    SERVER_LABEL,
)
from dashboards.grafana import Board, Column, Panel, Query, Stat, Table, TimeSeries


def _panels() -> tuple[Panel, ...]:
    blocked = f"on (job, instance, server, check) (kvwatch_restart_blocked{{{NODE}}} == 1)"
    return (
        Stat(
            "Nodes",
            "Nodes whose kvwatch has completed a cycle.",
            "short",
            5,
            query=Query(f"sum(kvwatch_up{{{NODE}}})"),
        ),
        Stat(
            "Servers",
            "vLLM servers that kvwatch knows.",
            "short",
            5,
            query=Query(f"count(kvwatch_server_up{{{NODE}}})"),
        ),
        Stat(
            "Would not start again",
            "Servers that run now and would fail a restart.",
            "short",
            5,
            thresholds=NONE_IS_GOOD,
            query=Query(f"sum(kvwatch_restart_feasible{{{NODE}}} == bool 0)"),
        ),
        Stat(
            "Not known",
            "Servers without a restart verdict: an input is missing. They are not counted as good.",
            "short",
            5,
            thresholds=((None, "green"), (1, "yellow")),
            query=Query(
                f"count(kvwatch_server_up{{{NODE}}}"
                f" unless on (job, instance, server) kvwatch_restart_feasible{{{NODE}}}) or vector(0)"
            ),
        ),
        Stat(
            "Held by leftovers",
            "VRAM of processes whose vLLM server is dead.",
            "bytes",
            4,
            thresholds=NONE_IS_GOOD,
            query=Query(f'sum(kvwatch_gpu_memory_held_bytes{{{NODE},owner="orphan"}})'),
        ),
        Table(
            "Nodes, least headroom first",
            "Headroom is the smallest margin over all servers, cards and checks of the node.",
            "short",
            24,
            labels=(NODE_LABEL,),
            columns=(
                Column(
                    "Headroom",
                    f"min by (instance) (kvwatch_restart_margin_bytes{{{NODE}}})",
                    "bytes",
                    thresholds=MARGIN,
                ),
                Column(
                    "Would fail",
                    f"sum by (instance) (kvwatch_restart_feasible{{{NODE}}} == bool 0)",
                    thresholds=NONE_IS_GOOD,
                ),
                Column("Servers", f"count by (instance) (kvwatch_server_up{{{NODE}}})"),
                Column("GPUs", f"count by (instance) (kvwatch_gpu_info{{{NODE}}})"),
                Column("VRAM", f"sum by (instance) (kvwatch_gpu_memory_total_bytes{{{NODE}}})", "bytes"),
                Column("Free", f"sum by (instance) (kvwatch_gpu_memory_free_bytes{{{NODE}}})", "bytes"),
                Column(
                    "Foreign",
                    f'sum by (instance) (kvwatch_gpu_memory_held_bytes{{{NODE},owner="foreign"}})',
                    "bytes",
                ),
                Column(
                    "Leftovers",
                    f'sum by (instance) (kvwatch_gpu_memory_held_bytes{{{NODE},owner="orphan"}})',
                    "bytes",
                ),
            ),
            sort=("Headroom", False),
        ),
        Table(
            "What to do: servers that would fail",
            "The check that stops each, what is missing there, and the largest max_model_len that would start"
            " now (0: none).",
            "short",
            12,
            labels=(NODE_LABEL, SERVER_LABEL, ("check", "Check")),
            columns=(
                Column(
                    "Missing",
                    "max by (instance, server, check)"
                    f" (-kvwatch_restart_margin_bytes{{{NODE}}} and {blocked})",
                    "bytes",
                ),
                Column(
                    "Would start with length",
                    f"max by (instance, server, check) (kvwatch_restart_max_model_len_tokens{{{NODE}}}"
                    " * on (job, instance, server) group_right ()"
                    f" (kvwatch_restart_blocked{{{NODE}}} == 1))",
                    "none",
                ),
            ),
            sort=("Missing", True),
        ),
        Table(
            "What to do: who could give memory back",
            "The largest processes that belong to no server.",
            "short",
            12,
            labels=(
                NODE_LABEL,
                ("gpu", "GPU"),
                ("pid", "PID"),
                ("process", "Process"),
                ("owner", "Class"),
                ("user", "User"),
            ),
            columns=(
                Column(
                    "Holds",
                    "topk(20, sum by (instance, gpu, pid, process, owner, user)"
                    f' (kvwatch_holder_memory_bytes{{{NODE},owner=~"orphan|foreign"}}))',
                    "bytes",
                ),
            ),
            sort=("Holds", True),
        ),
        TimeSeries(
            "Headroom by node",
            "Smallest margin of each node over time; below zero something would not start.",
            "bytes",
            12,
            lines=(Query(f"min by (instance) (kvwatch_restart_margin_bytes{{{NODE}}})", "{{instance}}"),),
        ),
        TimeSeries(
            "Held beside the servers",
            "VRAM of everything but vLLM servers, by class of holder, over all cards of the chosen nodes.",
            "bytes",
            12,
            stacked=True,
            colors=OWNER_COLORS,
            lines=(
                Query(
                    f'sum by (owner) (kvwatch_gpu_memory_held_bytes{{{NODE},owner!="server"}})',
                    "{{owner}}",
                ),
            ),
        ),
    )


BOARD = Board(
    "kvwatch-fleet",
    "kvwatch / fleet",
    "All nodes: which servers would not start again, where there is room, and what to do.",
    (JOBS, NODES),
    _panels(),
)
