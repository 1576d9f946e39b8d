"""One server: its KV cache now, its restarts, plans and pending changes."""

from __future__ import annotations

from dashboards.boards.common import (
    ANSWERS,
    JOBS,
    MARGIN,
    NODE_LABEL,
    NODES,
    SERVER,
    SERVER_LABEL,
    SERVERS,
    STARTS,
    USAGE,
    YES,
)
from dashboards.grafana import Board, Column, Panel, Query, Stat, Table, TimeSeries, Unit, Value

POOL_COLUMNS: tuple[tuple[str, str, Unit], ...] = (
    ("Blocks", "kvwatch_kv_cache_blocks", "none"),
    ("Tokens in a block", "kvwatch_kv_cache_block_size_tokens", "none"),
    ("Size", "kvwatch_kv_cache_bytes", "bytes"),
    ("Tokens", "kvwatch_kv_cache_capacity_tokens", "none"),
    ("Full requests", "kvwatch_kv_cache_max_concurrency", "short"),
)


def _pool_column(title: str, family: str, unit: Unit) -> Column:
    return Column(title, f"max by (instance, server, engine) ({family}{{{SERVER}}})", unit)


def _panels() -> tuple[Panel, ...]:
    return (
        Stat(
            "Restart",
            "Whether the server would start again with the same flags.",
            "none",
            4,
            values=STARTS,
            query=Query(f"min(kvwatch_restart_feasible{{{SERVER}}})"),
        ),
        Stat(
            "Longest that would start",
            "Largest max_model_len whose checks all pass now; 0 where none does.",
            "none",
            4,
            query=Query(f"min(kvwatch_restart_max_model_len_tokens{{{SERVER}}})"),
        ),
        Stat(
            "Length now",
            "max_model_len of the running server.",
            "none",
            4,
            query=Query(f"max(kvwatch_max_model_len_tokens{{{SERVER}}})"),
        ),
        Stat(
            "KV cache used",
            "Share of the pool in use, on the fullest engine.",
            "percentunit",
            4,
            thresholds=USAGE,
            query=Query(f"max(kvwatch_kv_cache_usage_ratio{{{SERVER}}})"),
        ),
        Stat(
            "Room now",
            "Tokens that still fit.",
            "short",
            4,
            query=Query(f"sum(kvwatch_kv_headroom_tokens{{{SERVER}}})"),
        ),
        Stat(
            "Full requests that fit now",
            "Requests of max_model_len tokens that still fit.",
            "none",
            4,
            query=Query(f"sum(kvwatch_kv_headroom_requests{{{SERVER}}})"),
        ),
        TimeSeries(
            "KV cache usage",
            "Share of the pool in use by engine.",
            "percentunit",
            8,
            lines=(
                Query(
                    f"kvwatch_kv_cache_usage_ratio{{{SERVER}}}", "{{instance}} {{server}} engine {{engine}}"
                ),
            ),
        ),
        TimeSeries(
            "Waiting and preempted",
            "Requests that wait, and running ones that lost their blocks, per second.",
            "short",
            8,
            lines=(
                Query(
                    f"sum by (instance, server) (kvwatch_requests_waiting{{{SERVER}}})",
                    "{{instance}} {{server}} waiting",
                ),
                Query(
                    f"sum by (instance, server, reason) (kvwatch_requests_waiting_by_reason{{{SERVER}}})",
                    "{{instance}} {{server}} waiting: {{reason}}",
                ),
                Query(
                    "sum by (instance, server)"
                    f" (rate(kvwatch_preemptions_total{{{SERVER}}}[$__rate_interval]))",
                    "{{instance}} {{server}} preempted/s",
                ),
            ),
        ),
        TimeSeries(
            "Length of requests",
            "Upper bound of finished requests' length by quantile, beside what the server accepts.",
            "short",
            8,
            lines=(
                Query(
                    f"max by (instance, server, quantile) (kvwatch_request_tokens{{{SERVER}}})",
                    "{{instance}} {{server}} {{quantile}}",
                ),
                Query(
                    f"max by (instance, server) (kvwatch_max_model_len_tokens{{{SERVER}}})",
                    "{{instance}} {{server}} limit",
                ),
            ),
        ),
        TimeSeries(
            "Restart margin",
            "By check, smallest over the cards. Below zero the server would not come back.",
            "bytes",
            12,
            lines=(
                Query(
                    f"min by (instance, server, check) (kvwatch_restart_margin_bytes{{{SERVER}}})",
                    "{{instance}} {{server}} {{check}}",
                ),
            ),
        ),
        TimeSeries(
            "Largest length that would start",
            "Beside the running one.",
            "short",
            12,
            lines=(
                Query(
                    f"min by (instance, server) (kvwatch_restart_max_model_len_tokens{{{SERVER}}})",
                    "{{instance}} {{server}} would start",
                ),
                Query(
                    f"max by (instance, server) (kvwatch_max_model_len_tokens{{{SERVER}}})",
                    "{{instance}} {{server}} runs",
                ),
            ),
        ),
        Table(
            "Plans",
            "Changes written down in kvwatch.yaml, judged without being made.",
            "short",
            12,
            labels=(NODE_LABEL, SERVER_LABEL, ("plan", "Plan")),
            columns=(
                Column(
                    "Start",
                    f"min by (instance, server, plan) (kvwatch_plan_feasible{{{SERVER}}})",
                    values=STARTS,
                ),
                Column(
                    "Margin",
                    f"min by (instance, server, plan) (kvwatch_plan_margin_bytes{{{SERVER}}})",
                    "bytes",
                    thresholds=MARGIN,
                ),
                Column(
                    "Longest",
                    f"min by (instance, server, plan) (kvwatch_plan_max_model_len_tokens{{{SERVER}}})",
                    "none",
                ),
            ),
            sort=("Margin", False),
        ),
        TimeSeries(
            "Plan margin",
            "Bytes left at the tightest check under each plan.",
            "bytes",
            12,
            lines=(
                Query(
                    f"min by (instance, server, plan) (kvwatch_plan_margin_bytes{{{SERVER}}})",
                    "{{instance}} {{server}} {{plan}}",
                ),
            ),
        ),
        Table(
            "Next start",
            "Settings that the next start has otherwise, as the files on disk stand, and whether it starts.",
            "short",
            8,
            labels=(NODE_LABEL, SERVER_LABEL, ("setting", "Changed setting")),
            columns=(
                Column(
                    "Changed",
                    f"max by (instance, server, setting) (kvwatch_pending_change{{{SERVER}}})",
                    values=(Value(1, "yes", "yellow"),),
                ),
                Column(
                    "Start",
                    f"min by (instance, server, setting) (kvwatch_pending_feasible{{{SERVER}}}"
                    f" * on (job, instance, server) group_right () kvwatch_pending_change{{{SERVER}}})",
                    values=STARTS,
                ),
            ),
            sort=("Server", False),
        ),
        Table(
            "Advice",
            "Rules of prevention that are broken; `kvwatch status` says what to type.",
            "short",
            8,
            labels=(NODE_LABEL, SERVER_LABEL, ("rule", "Rule")),
            columns=(
                Column(
                    "Broken",
                    f"max by (instance, server, rule) (kvwatch_advice{{{SERVER}}} == 1)",
                    values=(Value(1, "broken", "yellow"),),
                ),
            ),
            sort=("Rule", False),
        ),
        Table(
            "Not known",
            "Forecasts that lack an input.",
            "short",
            8,
            labels=(NODE_LABEL, SERVER_LABEL, ("forecast", "Forecast"), ("reason", "Reason")),
            columns=(
                Column(
                    "Unknown",
                    f"max by (instance, server, forecast, reason) (kvwatch_forecast_unknown{{{SERVER}}})",
                    values=(Value(1, "unknown", "yellow"),),
                ),
            ),
            sort=("Server", False),
        ),
        Table(
            "Outlook",
            "Where the margin is heading, how a start after the card's other servers would go, and whether a"
            " sleeping server could wake. Empty where it does not apply.",
            "short",
            24,
            6,
            labels=(
                NODE_LABEL,
                SERVER_LABEL,
            ),
            columns=(
                Column(
                    "Answers",
                    f"min by (instance, server) (kvwatch_server_up{{{SERVER}}})",
                    values=ANSWERS,
                ),
                Column(
                    "Starts last",
                    f"min by (instance, server) (kvwatch_restart_together_feasible{{{SERVER}}})",
                    values=STARTS,
                ),
                Column(
                    "Margin moves by",
                    f"min by (instance, server) (kvwatch_restart_margin_slope_bytes_per_second{{{SERVER}}})",
                    "binBps",
                ),
                Column(
                    "Used up in",
                    "min by (instance, server)"
                    f" (kvwatch_restart_infeasible_timestamp_seconds{{{SERVER}}} - time())",
                    "dtdurations",
                ),
                Column(
                    "Could wake", f"min by (instance, server) (kvwatch_wake_feasible{{{SERVER}}})", values=YES
                ),
                Column(
                    "Wake-up margin",
                    f"min by (instance, server) (kvwatch_wake_margin_bytes{{{SERVER}}})",
                    "bytes",
                    thresholds=MARGIN,
                ),
                Column(
                    "Requests near the limit",
                    f"max by (instance, server) (kvwatch_requests_near_limit_ratio{{{SERVER}}})",
                    "percentunit",
                ),
            ),
            sort=("Server", False),
        ),
        Table(
            "The pool",
            "The KV cache as it is, by engine, and when it is full if it goes on filling as it does.",
            "short",
            24,
            5,
            labels=(NODE_LABEL, SERVER_LABEL, ("engine", "Engine")),
            columns=(
                *(_pool_column(*column) for column in POOL_COLUMNS),
                Column(
                    "Full in",
                    "min by (instance, server, engine)"
                    f" (kvwatch_kv_cache_full_timestamp_seconds{{{SERVER}}} - time())",
                    "dtdurations",
                ),
            ),
            sort=("Server", False),
        ),
        Table(
            "Memory beside the pool",
            "Weights, activations, graphs and the rest, measured on the running server.",
            "short",
            12,
            6,
            labels=(NODE_LABEL, SERVER_LABEL, ("gpu", "GPU")),
            columns=(
                Column(
                    "Not KV cache",
                    f"max by (instance, server, gpu) (kvwatch_server_non_kv_bytes{{{SERVER}}})",
                    "bytes",
                ),
            ),
            sort=("Server", False),
        ),
        Table(
            "What runs",
            "Model, release of vLLM and layout of the KV cache.",
            "short",
            12,
            6,
            labels=(NODE_LABEL, SERVER_LABEL, ("model", "Model"), ("version", "vLLM"), ("layout", "Layout")),
            columns=(
                Column(
                    "Known",
                    f"max by (instance, server, model, version, layout) (kvwatch_server_info{{{SERVER}}})",
                    values=(Value(1, "yes", "green"),),
                ),
            ),
            sort=("Server", False),
        ),
    )


BOARD = Board(
    "kvwatch-server",
    "kvwatch / server",
    "One vLLM server: its KV cache now, and its restarts, plans and pending changes.",
    (JOBS, NODES, SERVERS),
    _panels(),
)
