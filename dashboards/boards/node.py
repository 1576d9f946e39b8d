"""One node: whose memory, which verdicts."""

from __future__ import annotations

from dashboards.boards.common import JOBS, MARGIN, NODE, NODE_LABEL, NODES, OWNER_COLORS, SERVER_LABEL, STARTS
from dashboards.grafana import Board, Column, Panel, Query, StateTimeline, Steps, Table, TimeSeries, Unit

CARD_COLUMNS: tuple[tuple[str, str, Unit, Steps], ...] = (
    ("Total", "kvwatch_gpu_memory_total_bytes", "bytes", ()),
    ("Reserved", "kvwatch_gpu_memory_reserved_bytes", "bytes", ()),
    ("Used", "kvwatch_gpu_memory_used_bytes", "bytes", ()),
    ("Free", "kvwatch_gpu_memory_free_bytes", "bytes", ()),
    ("Seen", "kvwatch_process_visibility", "percentunit", ((None, "red"), (1, "green"))),
)


def _card_column(title: str, family: str, unit: Unit, thresholds: Steps) -> Column:
    named = f"{family}{{{NODE}}} * on (job, instance, gpu) group_left (name) kvwatch_gpu_info{{{NODE}}}"
    return Column(title, f"max by (instance, gpu, name) ({named})", unit, thresholds=thresholds)


def _panels() -> tuple[Panel, ...]:
    holder = f"kvwatch_holder_memory_bytes{{{NODE}}}"
    return (
        Table(
            "Cards",
            "GPUs and MIG instances with their memory. Seen: share of the processes that kvwatch resolves.",
            "short",
            24,
            6,
            labels=(NODE_LABEL, ("gpu", "GPU"), ("name", "Name")),
            columns=tuple(_card_column(*column) for column in CARD_COLUMNS),
            sort=("GPU", False),
        ),
        TimeSeries(
            "VRAM by owner",
            "What each class of holder has on the chosen nodes, on top of each other, and what is free.",
            "bytes",
            8,
            9,
            stacked=True,
            colors=OWNER_COLORS,
            lines=(
                Query(f"sum by (owner) (kvwatch_gpu_memory_held_bytes{{{NODE}}}) > 0", "{{owner}}"),
                Query(f"sum(kvwatch_gpu_memory_free_bytes{{{NODE}}})", "free"),
            ),
        ),
        TimeSeries(
            "Held beside the servers",
            "The same without the servers' own memory: what a restart has to live with.",
            "bytes",
            8,
            9,
            stacked=True,
            colors=OWNER_COLORS,
            lines=(
                Query(
                    f'sum by (owner) (kvwatch_gpu_memory_held_bytes{{{NODE},owner!="server"}})',
                    "{{owner}}",
                ),
            ),
        ),
        TimeSeries(
            "Free memory by card",
            "What a start on each card would find beside its own memory.",
            "bytes",
            8,
            9,
            lines=(
                Query(
                    f"sum by (instance, gpu) (kvwatch_gpu_memory_free_bytes{{{NODE}}})",
                    "{{instance}} GPU {{gpu}}",
                ),
            ),
        ),
        Table(
            "Holders beside the servers",
            "Orphan, foreign and neighbour processes. The smaller ones are one row without a PID.",
            "short",
            24,
            labels=(
                NODE_LABEL,
                ("gpu", "GPU"),
                ("pid", "PID"),
                ("process", "Process"),
                ("owner", "Class"),
                ("user", "User"),
                ("workload", "Container, pod or unit"),
            ),
            columns=(
                Column(
                    "Holds",
                    f"max by (instance, gpu, pid, process, owner, user, workload) ({holder})",
                    "bytes",
                ),
                Column(
                    "Since",
                    "max by (instance, gpu, pid, process, owner, user, workload)"
                    f" ((time() - kvwatch_holder_start_timestamp_seconds{{{NODE}}})"
                    f" * on (job, instance, gpu, pid) group_right () ({holder} > bool 0))",
                    "dtdurations",
                ),
            ),
            sort=("Holds", True),
        ),
        Table(
            "Verdicts",
            "Whether each server would start again, and the largest max_model_len that would.",
            "short",
            12,
            labels=(NODE_LABEL, SERVER_LABEL),
            columns=(
                Column(
                    "Restart",
                    f"max by (instance, server) (kvwatch_restart_feasible{{{NODE}}})",
                    values=STARTS,
                ),
                Column(
                    "Margin",
                    f"min by (instance, server) (kvwatch_restart_margin_bytes{{{NODE}}})",
                    "bytes",
                    thresholds=MARGIN,
                ),
                Column(
                    "Length now",
                    f"max by (instance, server) (kvwatch_max_model_len_tokens{{{NODE}}})",
                    "none",
                ),
                Column(
                    "Longest",
                    f"max by (instance, server) (kvwatch_restart_max_model_len_tokens{{{NODE}}})",
                    "none",
                ),
            ),
            sort=("Margin", False),
        ),
        StateTimeline(
            "Would start again",
            "The restart verdict of each server over time. A gap is unknown.",
            "short",
            12,
            values=STARTS,
            lines=(
                Query(
                    f"max by (instance, server) (kvwatch_restart_feasible{{{NODE}}})",
                    "{{instance}} {{server}}",
                ),
            ),
        ),
        TimeSeries(
            "Restart margin by check",
            "Smallest over the cards, for each server and start-up check. Below zero the check fails.",
            "bytes",
            24,
            lines=(
                Query(
                    f"min by (instance, server, check) (kvwatch_restart_margin_bytes{{{NODE}}})",
                    "{{instance}} {{server}} {{check}}",
                ),
            ),
        ),
    )


BOARD = Board(
    "kvwatch-node",
    "kvwatch / node",
    "One node: who holds the memory of its cards, and what its servers' restarts would find.",
    (JOBS, NODES),
    _panels(),
)
