"""What each alert does over time: it fires, it does not, it resolves.

Values are in promtool's notation, a minute apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Firing:
    """One alert that fires, without the labels `job`, `instance`, `alertname` and `severity`."""

    labels: Mapping[str, str]
    description: str


@dataclass(frozen=True, slots=True)
class Case:
    """One alert under one history.

    Attributes:
        series: values by `family{labels}`; the target's labels are added.
        expected: what fires, by time since the start; nothing where empty.
    """

    alert: str
    name: str
    series: Mapping[str, str]
    expected: Mapping[str, tuple[Firing, ...]]


CHAT = {"server": "chat"}
LONG = "+0x700"


def fires(description: str, **labels: str) -> tuple[Firing, ...]:
    return (Firing(labels, description),)


def fires_chat(description: str, **labels: str) -> tuple[Firing, ...]:
    return fires(description, server="chat", **labels)


FEASIBLE = 'kvwatch_restart_feasible{server="chat"}'
FREE_MEMORY = 'kvwatch_restart_margin_bytes{server="chat",gpu="0",check="free_memory"}'
ONE_REQUEST = 'kvwatch_restart_margin_bytes{server="chat",gpu="0",check="one_request"}'
BLOCKED = 'kvwatch_restart_blocked{server="chat",check="free_memory"}'
LONGEST = 'kvwatch_restart_max_model_len_tokens{server="chat"}'
ETA = 'kvwatch_restart_infeasible_timestamp_seconds{server="chat"}'
SLOPE = 'kvwatch_restart_margin_slope_bytes_per_second{server="chat"}'
NOTEBOOK = (
    'kvwatch_holder_memory_bytes{gpu="0",uuid="U",pid="77",process="ipykernel_launcher",'
    'owner="foreign",user="dana",workload="jupyter.service"}'
)
WORKER = (
    'kvwatch_holder_memory_bytes{gpu="0",uuid="U",pid="78",process="VLLM::Worker_TP0",'
    'owner="orphan",user="vllm",workload=""}'
)
ELSEWHERE = NOTEBOOK.replace('gpu="0"', 'gpu="7"').replace('pid="77"', 'pid="99"')
BESIDE = " Largest holder beside it: foreign process ipykernel_launcher of dana (PID 77, 2GiB on GPU 0)."
VISIBLE = 'kvwatch_process_visibility{gpu="0"}'


def held(owner: str) -> str:
    return f'kvwatch_gpu_memory_held_bytes{{gpu="0",uuid="U",owner="{owner}",server=""}}'


INFEASIBLE = "If chat on gpu1:9744 stopped now, it would not come back with the same flags."
FALLING = f"{12 * GIB}-{GIB // 60}x700"
"""12 GiB that lose 1 GiB an hour."""
SAWTOOTH = " ".join([f"{3 * GIB}-{2 * GIB // 90}x90"] * 8)
"""Falls from 3 GiB to 1 GiB in an hour and a half, then recovers."""

RESTART = (
    Case(
        "KVWatchRestartInfeasible",
        "names check, bytes, holder and length, and resolves",
        {
            FEASIBLE: "1+0x4 0+0x20 1+0x20",
            BLOCKED: "0+0x4 1+0x20 0+0x20",
            FREE_MEMORY: f"{GIB}+0x4 -{GIB}+0x20 {GIB}+0x20",
            ONE_REQUEST: f"-{3 * GIB}+0x60",
            LONGEST: "16384+0x4 0+0x10 8192+0x20",
            NOTEBOOK: f"{2 * GIB}+0x60",
            WORKER: f"{GIB}+0x60",
            ELSEWHERE: f"{9 * GIB}+0x60",
        },
        {
            "4m": (),
            "6m": (),
            "8m": fires_chat(
                f"{INFEASIBLE} vLLM's check free_memory would stop it. 1GiB are missing on GPU 0.{BESIDE}"
            ),
            "20m": fires_chat(
                f"{INFEASIBLE} vLLM's check free_memory would stop it. 1GiB are missing on GPU 0.{BESIDE}"
                " It would start with --max-model-len 8192."
            ),
            "30m": (),
        },
    ),
    Case(
        "KVWatchRestartInfeasible",
        "survives a restart of kvwatch",
        {"kvwatch_up": "1+0x20 stale 1+0x40", FEASIBLE: "0+0x20 stale 0+0x40"},
        {"20m": fires_chat(INFEASIBLE), "21m": fires_chat(INFEASIBLE), "24m": fires_chat(INFEASIBLE)},
    ),
    Case(
        "KVWatchRestartInfeasible",
        "ends when the server is gone",
        {FEASIBLE: "0+0x20 stale"},
        {"20m": fires_chat(INFEASIBLE), "25m": ()},
    ),
    Case(
        "KVWatchRestartInfeasible",
        "ignores churn shorter than its wait",
        {FEASIBLE: "0 1 " * 30},
        {"10m": (), "31m": (), "59m": ()},
    ),
    Case(
        "KVWatchRestartInfeasible",
        "waits for the first cycle",
        {"kvwatch_up": "0+0x60", FEASIBLE: "0+0x60"},
        {"30m": ()},
    ),
    Case(
        "KVWatchRestartInfeasibleSoon",
        "fires on the daemon's trend and resolves with it",
        {
            FEASIBLE: "1" + LONG,
            FREE_MEMORY: f"{4 * GIB}" + LONG,
            NOTEBOOK: f"{2 * GIB}" + LONG,
            ETA: "36000+0x120 stale",
            SLOPE: "-100000+0x120 stale",
        },
        {
            "10m": (),
            "1h": fires_chat(
                "At the present pace, chat on gpu1:9744 cannot be restarted any more in 9h 0m 0s."
                f" 4GiB are left at the tightest check.{BESIDE}"
            ),
            "3h": (),
        },
    ),
    Case(
        "KVWatchRestartInfeasibleSoon",
        "leaves a crossing in three days alone",
        {FEASIBLE: "1" + LONG, FREE_MEMORY: f"{4 * GIB}" + LONG, ETA: "260000" + LONG, SLOPE: "-1" + LONG},
        {"30m": (), "10m": ()},
    ),
    Case(
        "KVWatchRestartInfeasibleSoon",
        "leaves a high margin alone",
        {FEASIBLE: "1" + LONG, FREE_MEMORY: f"{40 * GIB}" + LONG, ETA: "36000" + LONG, SLOPE: "-1" + LONG},
        {"1h": ()},
    ),
    Case(
        "KVWatchRestartInfeasibleSoon",
        "gives way to what has come true",
        {FEASIBLE: "0" + LONG, FREE_MEMORY: "-1" + LONG, ETA: "60" + LONG, SLOPE: "-1" + LONG},
        {"1h": ()},
    ),
    Case(
        "KVWatchRestartInfeasiblePredicted",
        "fires on a steady fall, not before it was watched",
        {FEASIBLE: "1" + LONG, FREE_MEMORY: FALLING, NOTEBOOK: f"{2 * GIB}" + LONG},
        {
            "3h": (),
            "6h": fires_chat(
                "Over six hours the margin of chat on gpu1:9744 at the check free_memory fell at a pace that"
                f" uses it up within a day. 6GiB are left at the tightest check.{BESIDE}",
                check="free_memory",
            ),
        },
    ),
    Case(
        "KVWatchRestartInfeasiblePredicted",
        "resolves when the fall ends",
        {FEASIBLE: "1" + LONG, FREE_MEMORY: f"{12 * GIB}-{GIB // 60}x360 {6 * GIB}+0x300"},
        {
            "6h": fires_chat(
                "Over six hours the margin of chat on gpu1:9744 at the check free_memory fell at a pace that"
                " uses it up within a day. 6GiB are left at the tightest check.",
                check="free_memory",
            ),
            "8h30m": (),
            "11h": (),
        },
    ),
    Case(
        "KVWatchRestartInfeasiblePredicted",
        "leaves it to the daemon where that has a trend",
        {FEASIBLE: "1" + LONG, FREE_MEMORY: FALLING, ETA: "100000" + LONG},
        {"6h": ()},
    ),
    Case(
        "KVWatchRestartInfeasiblePredicted",
        "sees no trend in a sawtooth",
        {FEASIBLE: "1" + LONG, FREE_MEMORY: SAWTOOTH},
        {f"{hours}h{minutes}m": () for hours in range(5, 12) for minutes in (0, 20, 40)},
    ),
    Case(
        "KVWatchRestartInfeasiblePredicted",
        "sees no trend in one step",
        {FEASIBLE: "1" + LONG, FREE_MEMORY: f"{12 * GIB}+0x300 {2 * GIB}+0x400"},
        {f"{hours}h{minutes}m": () for hours in range(5, 11) for minutes in (0, 20, 40)},
    ),
    Case(
        "KVWatchRestartInfeasiblePredicted",
        "sees through restarts of kvwatch",
        {
            FEASIBLE: "1" + LONG,
            FREE_MEMORY: f"{12 * GIB}-{GIB // 60}x200 stale {8 * GIB + 35 * GIB // 60}-{GIB // 60}x200",
        },
        {
            "6h": fires_chat(
                "Over six hours the margin of chat on gpu1:9744 at the check free_memory fell at a pace that"
                " uses it up within a day. 5.95GiB are left at the tightest check.",
                check="free_memory",
            )
        },
    ),
    Case(
        "KVWatchRestartMarginLow",
        "fires below half a GiB and resolves",
        {
            FEASIBLE: "1+0x90",
            FREE_MEMORY: f"{GIB}+0x9 {256 * MIB}+0x30 {GIB}+0x50",
            NOTEBOOK: f"{2 * GIB}+0x90",
        },
        {
            "20m": (),
            "30m": fires_chat(
                f"A restart of chat on gpu1:9744 has 256MiB to spare, less than starts differ by.{BESIDE}"
            ),
            "50m": (),
        },
    ),
    Case(
        "KVWatchRestartMarginLow",
        "does not count what a full request leaves",
        {FEASIBLE: "1+0x90", FREE_MEMORY: f"{GIB}+0x90", ONE_REQUEST: "0+0x90"},
        {"1h": ()},
    ),
    Case(
        "KVWatchRestartMarginLow",
        "gives way to the infeasible restart",
        {FEASIBLE: "0+0x90", FREE_MEMORY: "-5+0x90"},
        {"1h": ()},
    ),
    Case(
        "KVWatchWakeUpInfeasible",
        "names the holder and resolves",
        {
            'kvwatch_wake_feasible{server="chat"}': "1+0x4 0+0x20 1+0x20",
            'kvwatch_wake_margin_bytes{server="chat"}': f"-{GIB}+0x60",
            'kvwatch_gpu_memory_held_bytes{gpu="0",uuid="U",owner="server",server="chat"}': "1000+0x60",
            NOTEBOOK: f"{2 * GIB}+0x60",
            ELSEWHERE: f"{9 * GIB}+0x60",
        },
        {
            "6m": (),
            "10m": fires_chat(
                "chat on gpu1:9744 sleeps, and others hold the memory that it needs to wake up."
                " 1GiB are missing. Largest holder beside it: ipykernel_launcher of dana"
                " (PID 77, 2GiB on GPU 0)."
            ),
            "40m": (),
        },
    ),
    Case(
        "KVWatchForecastUnknown",
        "fires after an hour, names the reason, and resolves",
        {
            'kvwatch_forecast_unknown{server="chat",forecast="restart",reason="model_unreadable"}': (
                "1+0x80 stale"
            )
        },
        {
            "50m": (),
            "70m": fires_chat(
                "The forecast restart of chat on gpu1:9744 is unknown: model_unreadable.",
                forecast="restart",
                reason="model_unreadable",
            ),
            "90m": (),
        },
    ),
)

PENDING_CHECK = 'kvwatch_pending_blocked{server="chat",check="one_request"}'
PENDING_LENGTH = 'kvwatch_pending_change{server="chat",setting="max_model_len"}'
PLAN = 'server="chat",plan="ctx-64k"'

CHANGES = (
    Case(
        "KVWatchPendingChangeInfeasible",
        "names the settings and the check, and resolves",
        {
            'kvwatch_pending_feasible{server="chat"}': "1+0x4 0+0x20 1+0x20",
            PENDING_CHECK: "0+0x4 1+0x20 0+0x20",
            PENDING_LENGTH: "1+0x60",
        },
        {
            "6m": (),
            "10m": fires_chat(
                "Changed on disk since chat on gpu1:9744 started: max_model_len. With that, its next start"
                " would fail. vLLM's check one_request would stop it."
            ),
            "40m": (),
        },
    ),
    Case(
        "KVWatchPendingChange",
        "lists the settings and resolves",
        {PENDING_LENGTH: "1+0x30 stale"},
        {
            "5m": (),
            "20m": fires_chat("Changed on disk since chat on gpu1:9744 started: max_model_len."),
            "40m": (),
        },
    ),
    Case(
        "KVWatchPendingChange",
        "leaves the time of a deployment alone",
        {PENDING_LENGTH: "_ 1+0x6 stale"},
        {"1h": ()},
    ),
    Case(
        "KVWatchPlanInfeasible",
        "names check, bytes and length, and resolves",
        {
            f"kvwatch_plan_feasible{{{PLAN}}}": "1+0x4 0+0x30 1+0x20",
            f'kvwatch_plan_blocked{{{PLAN},check="one_request"}}': "0+0x4 1+0x30 0+0x20",
            f'kvwatch_plan_margin_bytes{{{PLAN},check="one_request"}}': f"{GIB}+0x4 -{GIB}+0x30 {GIB}+0x20",
            f"kvwatch_plan_max_model_len_tokens{{{PLAN}}}": "40960+0x60",
        },
        {
            "10m": (),
            "20m": fires_chat(
                "With the plan ctx-64k, chat on gpu1:9744 would not start. vLLM's check one_request would"
                " stop it. 1GiB are missing. It would start with --max-model-len 40960.",
                plan="ctx-64k",
            ),
            "50m": (),
        },
    ),
)

HOLDERS = (
    Case(
        "KVWatchForeignVRAM",
        "names the process and resolves",
        {
            held("foreign"): f"0+0x4 {2 * GIB}+0x30 0+0x30",
            FREE_MEMORY: "1+0x80",
            VISIBLE: "1+0x80",
            NOTEBOOK: f"{2 * GIB}+0x80",
        },
        {
            "10m": (),
            "20m": fires(
                "Foreign processes hold 2GiB on GPU 0 of gpu1:9744. Largest: ipykernel_launcher of dana"
                " (PID 77, 2GiB, jupyter.service).",
                gpu="0",
                owner="foreign",
            ),
            "50m": (),
        },
    ),
    Case(
        "KVWatchForeignVRAM",
        "leaves cards without a vLLM server alone",
        {held("foreign"): f"{9 * GIB}+0x80", VISIBLE: "1+0x80"},
        {"1h": ()},
    ),
    Case(
        "KVWatchForeignVRAM",
        "is silent where processes cannot be resolved",
        {held("foreign"): f"{9 * GIB}+0x80", FREE_MEMORY: "1+0x80", VISIBLE: "0.5+0x80"},
        {"1h": ()},
    ),
    Case(
        "KVWatchOrphanedVLLM",
        "names the process and resolves",
        {
            held("orphan"): f"0+0x4 {GIB}+0x30 0+0x30",
            FREE_MEMORY: "1+0x80",
            VISIBLE: "1+0x80",
            WORKER: f"{GIB}+0x80",
        },
        {
            "8m": (),
            "12m": fires(
                "What is left of a vLLM server holds 1GiB on GPU 0 of gpu1:9744."
                " Largest: VLLM::Worker_TP0 of vllm (PID 78, 1GiB).",
                gpu="0",
                owner="orphan",
            ),
            "50m": (),
        },
    ),
    Case(
        "KVWatchUnattributedVRAM",
        "fires above what a driver keeps and resolves",
        {
            held("unattributed"): f"{500 * MIB}+0x4 {2 * GIB}+0x30 {500 * MIB}+0x30",
            FREE_MEMORY: "1+0x80",
            VISIBLE: "1+0x80",
        },
        {
            "15m": (),
            "25m": fires(
                "2GiB on GPU 0 of gpu1:9744 belong to no process that kvwatch can see.",
                gpu="0",
                owner="unattributed",
            ),
            "60m": (),
        },
    ),
    Case(
        "KVWatchVisibilityLost",
        "fires and resolves",
        {VISIBLE: "1+0x4 0+0x20 1+0x20"},
        {
            "10m": (),
            "20m": fires(
                "kvwatch resolves 0% of the processes on GPU 0 of gpu1:9744."
                " The alerts on owners are silent meanwhile.",
                gpu="0",
            ),
            "40m": (),
        },
    ),
    Case(
        "KVWatchGPUOvercommitted",
        "fires and resolves",
        {
            'kvwatch_restart_together_feasible{server="chat"}': "1+0x4 0+0x30 1+0x30",
            FEASIBLE: "1+0x80",
        },
        {
            "15m": (),
            "25m": fires_chat(
                "chat on gpu1:9744 shares a card with others, and together they claim more than all of it:"
                " after a reboot, not all would start. Lower --gpu-memory-utilization of one of them.",
            ),
            "50m": (),
        },
    ),
)

USAGE = 'kvwatch_kv_cache_usage_ratio{server="chat",engine="0"}'
PREEMPTIONS = 'kvwatch_preemptions_total{server="chat",engine="0"}'

USE = (
    Case(
        "KVWatchKVCacheSaturated",
        "fires on preemptions in a full cache and resolves",
        {
            USAGE: "0.5+0x9 0.99+0x40 0.5+0x40",
            PREEMPTIONS: "0+0x9 0+6x40 246+0x40",
            'kvwatch_requests_waiting{server="chat",engine="0"}': "9+0x90",
        },
        {
            "15m": (),
            "30m": fires_chat(
                "The KV cache of chat on gpu1:9744 is 99% full and requests are preempted. 9 requests wait."
            ),
            "60m": (),
        },
    ),
    Case(
        "KVWatchKVCacheSaturated",
        "leaves a full cache without preemptions alone",
        {USAGE: "0.99+0x90", PREEMPTIONS: "5+0x90"},
        {"1h": ()},
    ),
    Case(
        "KVWatchLengthNearLimit",
        "names both lengths and resolves",
        {
            'kvwatch_advice{server="chat",rule="length_near_limit"}': "1+0x80 stale",
            'kvwatch_max_model_len_tokens{server="chat"}': "16384+0x100",
            LONGEST: "32768+0x100",
        },
        {
            "50m": (),
            "70m": fires_chat(
                "Requests to chat on gpu1:9744 come within a tenth of its max_model_len."
                " It accepts 16384 tokens. It would start with --max-model-len 32768.",
                rule="length_near_limit",
            ),
            "90m": (),
        },
    ),
    Case(
        "KVWatchAdvice",
        "names the rule and resolves",
        {'kvwatch_advice{server="chat",rule="length_not_set"}': "1+0x80 stale"},
        {
            "50m": (),
            "70m": fires_chat(
                "chat on gpu1:9744 breaks the rule length_not_set;"
                " `kvwatch status` on the node says what to type.",
                rule="length_not_set",
            ),
            "90m": (),
        },
    ),
    Case(
        "KVWatchAdvice",
        "leaves out what has an alert of its own",
        {'kvwatch_advice{server="chat",rule="length_near_limit"}': "1+0x100"},
        {"90m": ()},
    ),
)

SELF = (
    Case(
        "KVWatchDown",
        "fires and resolves",
        {"up": "1+0x4 0+0x20 1+0x20"},
        {
            "6m": (),
            "15m": fires("kvwatch on gpu1:9744 does not answer: nothing is known of the node's servers."),
            "30m": (),
        },
    ),
    Case("KVWatchDown", "leaves one missed scrape alone", {"up": "1+0x4 0 1+0x20"}, {"6m": (), "12m": ()}),
    Case(
        "KVWatchStale",
        "fires when cycles stop and resolves",
        {"kvwatch_cycle_timestamp_seconds": "0+60x10 600+0x20 1920+60x20"},
        {
            "12m": (),
            "25m": fires("The last cycle of kvwatch on gpu1:9744 began 15m 0s ago."),
            "45m": (),
        },
    ),
    Case(
        "KVWatchSourceDown",
        "names the source and resolves",
        {
            'kvwatch_source_up{source="nvml"}': "1+0x4 0+0x20 1+0x20",
            'kvwatch_source_last_success_timestamp_seconds{source="nvml"}': "240+0x60",
        },
        {
            "8m": (),
            "14m": fires(
                "The source nvml of kvwatch on gpu1:9744 does not answer. It last did 10m 0s ago.",
                source="nvml",
            ),
            "30m": (),
        },
    ),
    Case(
        "KVWatchConfigReloadFailed",
        "fires and resolves",
        {"kvwatch_config_last_reload_successful": "1+0x4 0+0x20 1+0x20"},
        {
            "8m": (),
            "14m": fires(
                "kvwatch on gpu1:9744 runs on with its old configuration;"
                " `kvwatch check-config` on the node names the line."
            ),
            "30m": (),
        },
    ),
)

CASES = (*RESTART, *CHANGES, *HOLDERS, *USE, *SELF)
