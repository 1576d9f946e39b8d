"""Every recording and alert rule with its thresholds: the single source of the generated files.

Expressions keep the target's own labels (`without`), join on (job, instance), and say nothing of a target
whose first cycle is not done. Run build.py after a change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["critical", "warning", "info"]

# --- thresholds ---------------------------------------------------------------------------------------------

JOB = "kvwatch"
"""Value of `job` in the scrape configuration; only the rules on `up` need it."""

MARGIN_LOW_BYTES = 512 * 2**20
"""Two starts of one server differ by a few hundred MiB, so that less than this is luck."""
TREND_LEVEL_BYTES = 16 * 2**30
"""A fall from above this level is not yet news, however steep."""
TREND_HORIZON_SECONDS = 24 * 3600
"""Time for somebody to act within working hours."""
TREND_SAMPLES = 240
"""Of the 360 that six hours have at one evaluation a minute: the daemon may have been away for two hours."""
FOREIGN_BYTES = 256 * 2**20
"""A CUDA context alone takes about this much; what holds less does nothing with the card."""
UNATTRIBUTED_BYTES = 2**30
"""Drivers and firmware keep some hundred MiB that no process owns."""
SATURATED_RATIO = 0.95
"""Above this share of the pool, the next long request evicts another."""
STALE_SECONDS = 120
"""Eight cycles at the default interval of 15 s."""

EVALUATION_INTERVAL = "1m"

# --- annotations --------------------------------------------------------------------------------------------

SERVER = "{{ $labels.server }} on {{ $labels.instance }}"
OWN_ALERT_ADVICE = ("length_near_limit", "utilizations_exceed_card")
"""Advice that has an alert of its own."""


def lookup(expression: str, labels: tuple[str, ...], text: str) -> str:
    """Template text about the first series that an instant query finds; nothing where it finds none.

    Each ``%q`` of the expression takes one of the alert's labels; on both sides of a join, so that neither
    looks at the whole fleet. Within `text`, ``.`` is the series.
    """
    values = " ".join(f"$labels.{label}" for label in labels)
    found = f"{{{{ with printf `{expression}` {values} | query }}}}"
    return f"{found}{{{{ with first . }}}}{text}{{{{ end }}}}{{{{ end }}}}"


_NODE = ("job", "instance")
_SELF = (*_NODE, "server")
_SERIES = "job=%q,instance=%q,server=%q"


def blocking_check(family: str) -> str:
    """The check that stops the start, from a ``…_blocked`` family."""
    return lookup(f"{family}{{{_SERIES}}} == 1", _SELF, " vLLM's check {{ .Labels.check }} would stop it.")


MISSING = lookup(
    f"topk(1, -kvwatch_restart_margin_bytes{{{_SERIES}}}"
    f" and on (job, instance, server, check) kvwatch_restart_blocked{{{_SERIES}}} == 1)",
    _SELF * 2,
    " {{ .Value | humanize1024 }}B are missing on GPU {{ .Labels.gpu }}.",
)
HOLDER = lookup(
    'topk(1, kvwatch_holder_memory_bytes{job=%q,instance=%q,pid!=""}'
    f" and on (job, instance, gpu) kvwatch_restart_margin_bytes{{{_SERIES}}})",
    (*_NODE, *_SELF),
    " Largest holder beside it: {{ .Labels.owner }} process {{ .Labels.process }} of {{ .Labels.user }}"
    " (PID {{ .Labels.pid }}, {{ .Value | humanize1024 }}B on GPU {{ .Labels.gpu }}).",
)
HOLDER_OF_GPU = lookup(
    'topk(1, kvwatch_holder_memory_bytes{job=%q,instance=%q,gpu=%q,owner=%q,pid!=""})',
    (*_NODE, "gpu", "owner"),
    " Largest: {{ .Labels.process }} of {{ .Labels.user }} (PID {{ .Labels.pid }},"
    " {{ .Value | humanize1024 }}B{{ with .Labels.workload }}, {{ . }}{{ end }}).",
)
LENGTH = lookup(
    f"kvwatch_restart_max_model_len_tokens{{{_SERIES}}} > 0",
    _SELF,
    ' It would start with --max-model-len {{ .Value | printf "%.0f" }}.',
)
MARGIN = lookup(
    f"server:kvwatch_restart_margin_bytes:min{{{_SERIES}}}",
    _SELF,
    " {{ .Value | humanize1024 }}B are left at the tightest check.",
)
CHANGED_SETTINGS = (
    f"{{{{ range printf `kvwatch_pending_change{{{_SERIES}}} == 1`"
    " $labels.job $labels.instance $labels.server | query }} {{ .Labels.setting }}{{ end }}"
)

# --- rules --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Recording:
    """One recording rule; the name is level:metric:operation."""

    record: str
    expr: str


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert rule.

    Attributes:
        wait: how long the expression must hold (`for`).
        keep: how long it fires on without data, so that a restart of kvwatch resolves nothing.
        summary: one sentence without a template.
        description: a template: what, which, how much, and what to type.
    """

    name: str
    expr: str
    severity: Severity
    wait: str
    summary: str
    description: str
    keep: str | None = None


def guarded(expr: str) -> str:
    """The expression, for targets that have completed a cycle."""
    return f"{expr}\nand on (job, instance) kvwatch_up == 1"


NODE_RECORDINGS = (
    Recording(
        "node:kvwatch_gpu_memory_total_bytes:sum", "sum without (gpu, uuid) (kvwatch_gpu_memory_total_bytes)"
    ),
    Recording(
        "node:kvwatch_gpu_memory_free_bytes:sum", "sum without (gpu, uuid) (kvwatch_gpu_memory_free_bytes)"
    ),
    Recording(
        "node:kvwatch_gpu_memory_held_bytes:sum",
        "sum without (gpu, uuid, server) (kvwatch_gpu_memory_held_bytes)",
    ),
    Recording(
        "node:kvwatch_restart_infeasible:sum",
        "sum without (server) (kvwatch_restart_feasible == bool 0)",
    ),
    Recording(
        "node:kvwatch_restart_margin_bytes:min",
        "min without (server, gpu, check) (kvwatch_restart_margin_bytes)",
    ),
)
SERVER_RECORDINGS = (
    Recording(
        "server_check:kvwatch_restart_margin_bytes:min", "min without (gpu) (kvwatch_restart_margin_bytes)"
    ),
    Recording(
        "server:kvwatch_restart_margin_bytes:min",
        "min without (check) (server_check:kvwatch_restart_margin_bytes:min)",
    ),
    Recording(
        "server:kvwatch_kv_cache_usage_ratio:max", "max without (engine) (kvwatch_kv_cache_usage_ratio)"
    ),
    Recording("server:kvwatch_kv_headroom_tokens:sum", "sum without (engine) (kvwatch_kv_headroom_tokens)"),
    Recording(
        "server:kvwatch_preemptions:rate5m", "sum without (engine) (rate(kvwatch_preemptions_total[5m]))"
    ),
)
FLEET_RECORDINGS = (
    Recording("fleet:kvwatch_nodes:count", "count by (job) (kvwatch_up)"),
    Recording("fleet:kvwatch_servers:count", "count by (job) (kvwatch_server_info)"),
    Recording("fleet:kvwatch_restart_infeasible:sum", "sum by (job) (node:kvwatch_restart_infeasible:sum)"),
    Recording(
        "fleet:kvwatch_gpu_memory_held_bytes:sum",
        "sum by (job, owner) (node:kvwatch_gpu_memory_held_bytes:sum)",
    ),
    Recording(
        "fleet:kvwatch_gpu_memory_free_bytes:sum", "sum by (job) (node:kvwatch_gpu_memory_free_bytes:sum)"
    ),
)


def _held(owner: str, threshold: int) -> str:
    """VRAM of one class of holder beside a vLLM server, where every process could be resolved."""
    return guarded(
        f'sum without (uuid, server) (kvwatch_gpu_memory_held_bytes{{owner="{owner}"}}) > {threshold}\n'
        "and on (job, instance, gpu) kvwatch_restart_margin_bytes\n"
        "and on (job, instance, gpu) kvwatch_process_visibility == 1"
    )


_FALLS = "server_check:kvwatch_restart_margin_bytes:min"

RESTART_ALERTS = (
    Alert(
        "KVWatchRestartInfeasible",
        guarded("kvwatch_restart_feasible == 0"),
        "critical",
        "2m",
        "A vLLM server would not start again.",
        f"If {SERVER} stopped now, it would not come back with the same flags."
        f"{blocking_check('kvwatch_restart_blocked')}{MISSING}{HOLDER}{LENGTH}",
        keep="2m",
    ),
    Alert(
        "KVWatchRestartInfeasibleSoon",
        guarded(
            f"kvwatch_restart_infeasible_timestamp_seconds - time() < {TREND_HORIZON_SECONDS}\n"
            "and on (job, instance, server) kvwatch_restart_margin_slope_bytes_per_second < 0\n"
            f"and on (job, instance, server) server:kvwatch_restart_margin_bytes:min < {TREND_LEVEL_BYTES}\n"
            "and on (job, instance, server) kvwatch_restart_feasible == 1"
        ),
        "warning",
        "15m",
        "A vLLM server's restart margin falls steadily and is used up within a day.",
        f"At the present pace, {SERVER} cannot be restarted any more in {{{{ $value | humanizeDuration }}}}."
        f"{MARGIN}{HOLDER}",
        keep="5m",
    ),
    Alert(
        "KVWatchRestartInfeasiblePredicted",
        guarded(
            f"predict_linear({_FALLS}[6h], {TREND_HORIZON_SECONDS}) < 0\n"
            f"and deriv({_FALLS}[1h]) < 0\n"
            # Neither a sawtooth nor a step is lower throughout than it ever was, and still falling.
            f"and max_over_time({_FALLS}[1h]) < min_over_time({_FALLS}[4h] offset 2h)\n"
            f"and {_FALLS} >= 0 and {_FALLS} < {TREND_LEVEL_BYTES}\n"
            f"and count_over_time({_FALLS}[6h]) >= {TREND_SAMPLES}\n"
            "and on (job, instance, server) kvwatch_restart_feasible == 1\n"
            "unless on (job, instance, server) kvwatch_restart_infeasible_timestamp_seconds"
        ),
        "warning",
        "30m",
        "A vLLM server's restart margin has fallen for six hours and is used up within a day.",
        f"Over six hours the margin of {SERVER} at the check {{{{ $labels.check }}}} fell at a pace that uses"
        f" it up within a day.{MARGIN}{HOLDER}",
        keep="5m",
    ),
    Alert(
        "KVWatchRestartMarginLow",
        guarded(
            # What a full request needs changes with flags only; it is judged, and not luck.
            'min without (gpu, check) (kvwatch_restart_margin_bytes{check!="one_request"})'
            f" < {MARGIN_LOW_BYTES}\n"
            "and on (job, instance, server) kvwatch_restart_feasible == 1"
        ),
        "warning",
        "15m",
        "A vLLM server would barely start again.",
        f"A restart of {SERVER} has {{{{ $value | humanize1024 }}}}B to spare, less than starts differ by."
        f"{HOLDER}",
        keep="2m",
    ),
    Alert(
        "KVWatchWakeUpInfeasible",
        guarded("kvwatch_wake_feasible == 0"),
        "critical",
        "2m",
        "A sleeping vLLM server could not wake up.",
        f"{SERVER} sleeps, and others hold the memory that it needs to wake up."
        + lookup(
            f"-kvwatch_wake_margin_bytes{{{_SERIES}}}",
            _SELF,
            " {{ .Value | humanize1024 }}B are missing.",
        )
        + lookup(
            'topk(1, kvwatch_holder_memory_bytes{job=%q,instance=%q,pid!=""}'
            " and on (job, instance, gpu)"
            ' kvwatch_gpu_memory_held_bytes{job=%q,instance=%q,owner="server",server=%q})',
            (*_NODE, *_SELF),
            " Largest holder beside it: {{ .Labels.process }} of {{ .Labels.user }}"
            " (PID {{ .Labels.pid }}, {{ .Value | humanize1024 }}B on GPU {{ .Labels.gpu }}).",
        ),
        keep="2m",
    ),
    Alert(
        "KVWatchForecastUnknown",
        guarded("kvwatch_forecast_unknown == 1"),
        "info",
        "1h",
        "A forecast cannot be made.",
        f"The forecast {{{{ $labels.forecast }}}} of {SERVER} is unknown: {{{{ $labels.reason }}}}.",
    ),
)
CHANGE_ALERTS = (
    Alert(
        "KVWatchPendingChangeInfeasible",
        guarded("kvwatch_pending_feasible == 0"),
        "critical",
        "2m",
        "A change on disk would keep a vLLM server from starting.",
        f"Changed on disk since {SERVER} started:{CHANGED_SETTINGS}. With that, its next start would fail."
        f"{blocking_check('kvwatch_pending_blocked')}",
        keep="2m",
    ),
    Alert(
        "KVWatchPendingChange",
        guarded("max without (setting) (kvwatch_pending_change) == 1"),
        "info",
        "10m",
        "The next start of a vLLM server will differ from the running one.",
        f"Changed on disk since {SERVER} started:{CHANGED_SETTINGS}.",
    ),
    Alert(
        "KVWatchPlanInfeasible",
        guarded("kvwatch_plan_feasible == 0"),
        "warning",
        "10m",
        "A planned change would keep a vLLM server from starting.",
        f"With the plan {{{{ $labels.plan }}}}, {SERVER} would not start."
        + lookup(
            "kvwatch_plan_blocked{job=%q,instance=%q,server=%q,plan=%q} == 1",
            (*_SELF, "plan"),
            " vLLM's check {{ .Labels.check }} would stop it.",
        )
        + lookup(
            "topk(1, -kvwatch_plan_margin_bytes{job=%q,instance=%q,server=%q,plan=%q}"
            " and on (job, instance, server, plan, check)"
            " kvwatch_plan_blocked{job=%q,instance=%q,server=%q,plan=%q} == 1)",
            (*_SELF, "plan") * 2,
            " {{ .Value | humanize1024 }}B are missing.",
        )
        + lookup(
            "kvwatch_plan_max_model_len_tokens{job=%q,instance=%q,server=%q,plan=%q} > 0",
            (*_SELF, "plan"),
            ' It would start with --max-model-len {{ .Value | printf "%.0f" }}.',
        ),
        keep="2m",
    ),
)
HOLDER_ALERTS = (
    Alert(
        "KVWatchForeignVRAM",
        _held("foreign", FOREIGN_BYTES),
        "warning",
        "10m",
        "Something other than vLLM holds memory on a card that a vLLM server uses.",
        "Foreign processes hold {{ $value | humanize1024 }}B on GPU {{ $labels.gpu }} of"
        f" {{{{ $labels.instance }}}}.{HOLDER_OF_GPU}",
        keep="2m",
    ),
    Alert(
        "KVWatchOrphanedVLLM",
        _held("orphan", 0),
        "warning",
        "5m",
        "Processes of a dead vLLM server still hold memory.",
        "What is left of a vLLM server holds {{ $value | humanize1024 }}B on GPU {{ $labels.gpu }} of"
        f" {{{{ $labels.instance }}}}.{HOLDER_OF_GPU}",
        keep="2m",
    ),
    Alert(
        "KVWatchUnattributedVRAM",
        _held("unattributed", UNATTRIBUTED_BYTES),
        "warning",
        "15m",
        "No visible process owns memory that is held on a card.",
        "{{ $value | humanize1024 }}B on GPU {{ $labels.gpu }} of {{ $labels.instance }} belong to no process"
        " that kvwatch can see.",
        keep="2m",
    ),
    Alert(
        "KVWatchVisibilityLost",
        guarded("kvwatch_process_visibility < 1"),
        "warning",
        "10m",
        "kvwatch cannot see all processes that hold memory on a card.",
        "kvwatch resolves {{ $value | humanizePercentage }} of the processes on GPU {{ $labels.gpu }} of"
        " {{ $labels.instance }}. The alerts on owners are silent meanwhile.",
        keep="2m",
    ),
    Alert(
        "KVWatchGPUOvercommitted",
        guarded(
            "kvwatch_restart_together_feasible == 0\n"
            "and on (job, instance, server) kvwatch_restart_feasible == 1"
        ),
        "warning",
        "15m",
        "The servers of one card claim more memory than it has.",
        f"{SERVER} shares a card with others, and together they claim more than all of it: after a reboot,"
        " not all would start. Lower --gpu-memory-utilization of one of them.",
        keep="2m",
    ),
)
USE_ALERTS = (
    Alert(
        "KVWatchKVCacheSaturated",
        guarded(
            f"server:kvwatch_kv_cache_usage_ratio:max > {SATURATED_RATIO}\n"
            "and on (job, instance, server) server:kvwatch_preemptions:rate5m > 0"
        ),
        "warning",
        "10m",
        "A vLLM server's KV cache is full and requests lose their blocks.",
        f"The KV cache of {SERVER} is {{{{ $value | humanizePercentage }}}} full and requests are preempted."
        + lookup(
            f"sum(kvwatch_requests_waiting{{{_SERIES}}})",
            _SELF,
            ' {{ .Value | printf "%.0f" }} requests wait.',
        ),
    ),
    Alert(
        "KVWatchLengthNearLimit",
        guarded('kvwatch_advice{rule="length_near_limit"} == 1'),
        "warning",
        "1h",
        "Requests come close to the longest that a vLLM server accepts.",
        f"Requests to {SERVER} come within a tenth of its max_model_len."
        + lookup(
            f"kvwatch_max_model_len_tokens{{{_SERIES}}}",
            _SELF,
            ' It accepts {{ .Value | printf "%.0f" }} tokens.',
        )
        + LENGTH,
    ),
    Alert(
        "KVWatchAdvice",
        guarded(f'kvwatch_advice{{rule!~"{"|".join(OWN_ALERT_ADVICE)}"}} == 1'),
        "info",
        "1h",
        "A vLLM server is set up in a way that invites trouble.",
        f"{SERVER} breaks the rule {{{{ $labels.rule }}}}; `kvwatch status` on the node says what to type.",
    ),
)
SELF_ALERTS = (
    Alert(
        "KVWatchDown",
        f'up{{job="{JOB}"}} == 0',
        "warning",
        "5m",
        "Prometheus cannot scrape kvwatch on a node.",
        "kvwatch on {{ $labels.instance }} does not answer: nothing is known of the node's servers.",
    ),
    Alert(
        "KVWatchAbsent",
        f'absent(up{{job="{JOB}"}})',
        "warning",
        "15m",
        "Prometheus knows no kvwatch at all.",
        f"No target of the job {JOB} exists: no restart is being watched.",
    ),
    Alert(
        "KVWatchStale",
        guarded(f"time() - kvwatch_cycle_timestamp_seconds > {STALE_SECONDS}"),
        "warning",
        "5m",
        "kvwatch answers but has stopped looking.",
        "The last cycle of kvwatch on {{ $labels.instance }} began {{ $value | humanizeDuration }} ago.",
    ),
    Alert(
        "KVWatchSourceDown",
        guarded("kvwatch_source_up == 0"),
        "warning",
        "5m",
        "kvwatch gets no answer from one of its sources.",
        "The source {{ $labels.source }} of kvwatch on {{ $labels.instance }} does not answer."
        + lookup(
            "time() - kvwatch_source_last_success_timestamp_seconds{job=%q,instance=%q,source=%q}",
            (*_NODE, "source"),
            " It last did {{ .Value | humanizeDuration }} ago.",
        ),
    ),
    Alert(
        "KVWatchConfigReloadFailed",
        guarded("kvwatch_config_last_reload_successful == 0"),
        "warning",
        "5m",
        "kvwatch refused its new configuration.",
        "kvwatch on {{ $labels.instance }} runs on with its old configuration;"
        " `kvwatch check-config` on the node names the line.",
    ),
)

RECORDING_GROUPS: dict[str, tuple[Recording, ...]] = {
    "kvwatch.server": SERVER_RECORDINGS,
    "kvwatch.node": NODE_RECORDINGS,
    "kvwatch.fleet": FLEET_RECORDINGS,
}
ALERT_GROUPS: dict[str, tuple[Alert, ...]] = {
    "kvwatch.restart": RESTART_ALERTS,
    "kvwatch.changes": CHANGE_ALERTS,
    "kvwatch.holders": HOLDER_ALERTS,
    "kvwatch.use": USE_ALERTS,
    "kvwatch.self": SELF_ALERTS,
}
ALERTS: tuple[Alert, ...] = tuple(alert for group in ALERT_GROUPS.values() for alert in group)
