"""The metric contract: every family kvwatch publishes, to which rules, dashboards and docs are checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Family:
    """One metric family.

    Attributes:
        name: as it stands on the page; a counter's ends in ``_total``.
        labels: every label a sample carries, in order.
        help: one line, with the unit and what an absent sample means where that matters.
    """

    name: str
    kind: Literal["gauge", "counter"]
    labels: tuple[str, ...]
    help: str


def _gauge(name: str, labels: str, text: str) -> Family:
    return Family(name, "gauge", tuple(labels.split()), text)


def _counter(name: str, labels: str, text: str) -> Family:
    return Family(name, "counter", tuple(labels.split()), text)


FAMILIES: tuple[Family, ...] = (
    # GPUs
    _gauge(
        "kvwatch_gpu_info",
        "gpu uuid name pci_bus_id mig_profile",
        "A GPU or MIG instance; always 1. Absent where it does not tell its UUID, as when it is lost.",
    ),
    _gauge("kvwatch_gpu_memory_total_bytes", "gpu uuid", "Memory of the card as NVML counts it."),
    _gauge(
        "kvwatch_gpu_memory_reserved_bytes",
        "gpu uuid",
        "Memory that driver and firmware keep; absent where the driver does not tell it from used.",
    ),
    _gauge("kvwatch_gpu_memory_used_bytes", "gpu uuid", "Memory in use, without the reserved part."),
    _gauge("kvwatch_gpu_memory_free_bytes", "gpu uuid", "Memory that nobody holds."),
    _gauge(
        "kvwatch_gpu_memory_held_bytes",
        "gpu uuid owner server",
        "Memory per class of holder: server, neighbour, orphan, foreign, allowed, releasing (on its way back"
        " from processes that have just ended), unattributed (no visible process).",
    ),
    _gauge(
        "kvwatch_holder_memory_bytes",
        "gpu uuid pid process owner user workload",
        'Memory of one orphan, foreign or neighbour process; the smaller ones are folded into pid="".',
    ),
    _gauge("kvwatch_holder_start_timestamp_seconds", "gpu pid", "When such a process started, Unix time."),
    _gauge(
        "kvwatch_process_visibility",
        "gpu",
        "Share of the processes on the card that kvwatch can resolve; owner alerts are silenced below 1."
        " Absent where NVML does not list the processes.",
    ),
    # servers
    _gauge(
        "kvwatch_server_info",
        "server model version endpoint layout basis",
        "A vLLM server; layout of its KV cache and basis of its forecast, empty where unknown; always 1.",
    ),
    _gauge("kvwatch_server_up", "server", "1 where the server's /metrics answered in this cycle, else 0."),
    _gauge("kvwatch_kv_cache_blocks", "server engine", "Blocks in the KV cache pool."),
    _gauge("kvwatch_kv_cache_block_size_tokens", "server engine", "Tokens in one block."),
    _gauge("kvwatch_kv_cache_bytes", "server engine", "Bytes of the pool on each GPU of the engine."),
    _gauge(
        "kvwatch_kv_cache_capacity_tokens",
        "server engine",
        "Tokens the pool holds, as the server itself counts them.",
    ),
    _gauge("kvwatch_kv_cache_usage_ratio", "server engine", "Share of the pool in use, 0 to 1."),
    _gauge(
        "kvwatch_kv_cache_full_timestamp_seconds",
        "server engine",
        "When the pool is full if its use goes on rising, Unix time; absent where it does not rise steadily.",
    ),
    _gauge("kvwatch_kv_headroom_tokens", "server engine", "Tokens that still fit now."),
    _gauge("kvwatch_kv_headroom_requests", "server engine", "Requests of full length that still fit now."),
    _gauge(
        "kvwatch_kv_cache_max_concurrency",
        "server engine",
        "Requests of full length that the whole pool holds.",
    ),
    _gauge("kvwatch_requests_waiting", "server engine", "Requests that wait for room or for their turn."),
    _gauge(
        "kvwatch_requests_waiting_by_reason",
        "server engine reason",
        "The same by what they wait for, as the server names it (0.20 and later).",
    ),
    _counter(
        "kvwatch_preemptions_total",
        "server engine",
        "Running requests that lost their blocks to others, as the server counts them.",
    ),
    _gauge("kvwatch_max_model_len_tokens", "server", "Longest request that the running server accepts."),
    _gauge(
        "kvwatch_server_non_kv_bytes",
        "server gpu",
        "Weights, activations, graphs and the rest beside the KV cache, measured on the running server.",
    ),
    # restart forecast
    _gauge(
        "kvwatch_restart_feasible",
        "server",
        "1 where the server would start again with the same flags, 0 where not; absent where unknown.",
    ),
    _gauge(
        "kvwatch_restart_blocked", "server check", "1 for the first start-up check that would fail, else 0."
    ),
    _gauge(
        "kvwatch_restart_margin_bytes",
        "server gpu check",
        "Bytes left at a start-up check; negative is how much is missing.",
    ),
    _gauge(
        "kvwatch_restart_max_model_len_tokens",
        "server",
        "Largest max_model_len that would start now; 0 where none would.",
    ),
    _gauge(
        "kvwatch_restart_margin_slope_bytes_per_second",
        "server",
        "How fast the margin that is used up first falls, negative; absent where none falls steadily.",
    ),
    _gauge(
        "kvwatch_restart_infeasible_timestamp_seconds",
        "server",
        "When that margin is used up if the fall goes on, Unix time; absent where none falls steadily.",
    ),
    _gauge(
        "kvwatch_restart_together_feasible",
        "server",
        "1 where the server would start as the last of those that share its cards; absent where none does.",
    ),
    _gauge(
        "kvwatch_wake_feasible",
        "server",
        "1 where a sleeping server finds the memory it needs to wake, 0 where not; absent for one awake.",
    ),
    _gauge(
        "kvwatch_wake_margin_bytes",
        "server",
        "Bytes left on the tightest card when it wakes; negative is how much is missing.",
    ),
    # requests and prevention
    _gauge(
        "kvwatch_request_tokens",
        "server quantile",
        "Upper bound of the length of this share of the finished requests, prompt and answer together.",
    ),
    _gauge(
        "kvwatch_requests_near_limit_ratio",
        "server",
        "Estimated share of the finished requests above nine tenths of max_model_len.",
    ),
    _gauge("kvwatch_advice", "server rule", "1 where a rule of prevention is broken; absent where not."),
    # planned changes
    _gauge(
        "kvwatch_plan_feasible",
        "server plan",
        "1 where the server would start with the plan's flags, 0 where not; absent where unknown.",
    ),
    _gauge(
        "kvwatch_plan_blocked", "server plan check", "1 for the first check that the plan would fail, else 0."
    ),
    _gauge(
        "kvwatch_plan_margin_bytes",
        "server plan check",
        "Bytes left at a check under the plan, on the tightest GPU; negative is how much is missing.",
    ),
    _gauge(
        "kvwatch_plan_max_model_len_tokens",
        "server plan",
        "Largest max_model_len that would start now with the plan's other flags.",
    ),
    # pending changes
    _gauge(
        "kvwatch_pending_change",
        "server setting",
        "1 for each setting that the next start has otherwise, as the files on disk stand.",
    ),
    _gauge(
        "kvwatch_pending_feasible",
        "server",
        "1 where the next start would succeed as the files stand, 0 where not; absent where unknown or where"
        " nothing is pending.",
    ),
    _gauge(
        "kvwatch_pending_blocked",
        "server check",
        "1 for the first check that the next start would fail, else 0; absent like kvwatch_pending_feasible.",
    ),
    _gauge(
        "kvwatch_forecast_unknown",
        "server forecast reason",
        "1 where a forecast could not be made, with the reason.",
    ),
    # kvwatch itself
    _gauge("kvwatch_up", "", "1 once a cycle has been completed."),
    _gauge("kvwatch_build_info", "version python simulated", "The running kvwatch; always 1."),
    _gauge("kvwatch_source_up", "source", "1 where a source answered in this cycle, else 0."),
    _gauge(
        "kvwatch_source_last_success_timestamp_seconds",
        "source",
        "When a source last answered, Unix time; absent before the first answer.",
    ),
    _gauge(
        "kvwatch_source_duration_seconds",
        "source",
        "How long the source took in this cycle; absent where it gave no answer.",
    ),
    _gauge("kvwatch_cycle_duration_seconds", "", "How long the last cycle took."),
    _gauge("kvwatch_cycle_timestamp_seconds", "", "When the last cycle began, Unix time."),
    _counter("kvwatch_cycles_total", "", "Cycles completed since the start."),
    _counter("kvwatch_errors_total", "source reason", "Failures met, by source and reason."),
    _gauge(
        "kvwatch_config_last_reload_successful",
        "",
        "1 where the configuration in use is the file's latest, 0 where the last reload was refused.",
    ),
    _gauge("kvwatch_config_last_reload_success_timestamp_seconds", "", "When that was, Unix time."),
)

BY_NAME: dict[str, Family] = {family.name: family for family in FAMILIES}
