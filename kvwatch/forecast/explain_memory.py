"""Starts that failed on memory itself: held by others, or used up while loading, profiling or capturing."""

from __future__ import annotations

import math
from collections.abc import Mapping

from kvwatch.forecast.diagnosis import (
    SHOW_HOLDERS,
    Advice,
    Diagnosis,
    Draft,
    FailedStart,
    Rule,
    fewer_graphs,
    gib,
    more_gpus,
    quantized_weights,
    share_down,
    smaller_batches,
    smallest_useful_cache,
)
from kvwatch.observe.log_failures import size_gib


def free_lt_desired(s: FailedStart) -> Diagnosis:
    """Less is free than the server wants to take."""
    free, total = (
        min(finding.printed("free_gib") for finding in s.same_kind()),
        s.finding.printed("total_gib"),
    )
    util, desired = s.finding.number("util"), s.finding.number("desired_gib")
    cpu = s.finding.number("node") is not None
    where = "the host (CPU backend)" if cpu else _device(s)
    draft = Draft(
        s,
        f"Less memory is free on {where} than the server wants to take.",
        f"{gib(free)} of {gib(total)} are free"
        + (
            f"; it wants {gib(desired)} ({util:g} of the card)."
            if desired is not None and util is not None
            else "."
        ),
        f"Something else holds {gib(total - free)}"
        + ("." if cpu else ": another process, a server that was not stopped, or the desktop."),
        s.flags.kv_cache_memory_bytes is not None
        and "The check runs with --kv-cache-memory-bytes too, with the utilization's default unless given.",
    )
    if cpu:
        draft.add(Advice("Free memory of the host, or raise the container's limit."))
    else:
        draft.add(
            Advice(
                "Find what holds the memory and stop it (`kvwatch holders` names owners and leftover "
                "servers).",
                command=SHOW_HOLDERS,
            )
        )
    lower = share_down(free, total)
    if lower >= 0.1:
        fits = s.weights_gib is None or lower * total > s.weights_gib
        draft.add(
            Advice(
                "Takes only what is free; the weights and the KV cache must fit into that.",
                ("--gpu-memory-utilization", f"{lower:.2f}"),
            )
            if fits
            else f"Lowering --gpu-memory-utilization to {lower:.2f}: the weights need more than that."
        )
    else:
        draft.add(f"Lowering --gpu-memory-utilization: {gib(free)} are too little to serve from.")
    draft.add("Raising --gpu-memory-utilization: it asks for even more than is free.")
    if not cpu:
        draft.add("A shorter --max-model-len: this check does not look at it.")
    return draft.done()


def _device(s: FailedStart) -> str:
    devices = sorted({int(d) for f in s.same_kind() if (d := f.number("device")) is not None})
    if not devices:
        return "the GPU"
    return f"GPU {devices[0]}" if len(devices) == 1 else "GPUs " + ", ".join(map(str, devices))


def external_weights_gt_desired(s: FailedStart) -> Diagnosis:
    """Weights held by another process fill the budget."""
    held, desired = s.finding.printed("held_gib"), s.finding.number("desired_gib")
    draft = Draft(
        s,
        "The weights that another process holds for this server are larger than its whole budget.",
        f"{gib(held)} are held" + (f"; the budget is {gib(desired)}." if desired is not None else "."),
    )
    draft.add(s.raised_utilization(held + smallest_useful_cache(s) - (desired or 0)))
    draft.add("A shorter --max-model-len: the budget is gone before the KV cache.")
    return draft.done()


def memory_profiling_assert(s: FailedStart) -> Diagnosis:
    """Memory was released by someone else while this server measured."""
    initial, current = s.finding.number("initial_free_gib"), s.finding.number("current_free_gib")
    told = None
    if initial is not None and current is not None:
        told = f"{gib(initial)} were free before profiling, {gib(current)} after; it must not grow."
    draft = Draft(s, "Another process released GPU memory while this server was measuring its own use.", told)
    draft.add(
        Advice(
            "Start again once the other process is gone or at rest; start servers on one GPU one after "
            "another."
        ),
        Advice("See who shares the GPU.", command=SHOW_HOLDERS),
    )
    if initial is not None and initial == current and not s.since(0, 16):
        draft.add(
            Advice(
                "Upgrade to 0.16 or later: up to 0.15 the same amount before and after fails the check too."
            )
        )
    draft.add("Changing --gpu-memory-utilization or --max-model-len: neither has a part in this check.")
    return draft.done()


def _oom_why(s: FailedStart) -> str | None:
    tried, free, total = (size_gib(s.finding.numbers, name) for name in ("tried", "free", "total"))
    if tried is None:
        return None
    text = f"An allocation of {_small(tried)} failed"
    if free is not None:
        text += f" with {_small(free)} free"
    return text + (f" of {gib(total)}." if total is not None else ".")


def _small(size: float) -> str:
    return gib(size) if size >= 1 else f"{size * 1024:.0f} MiB"


def _lower_utilization(s: FailedStart, by: float, text: str) -> Advice:
    if s.utilization is None or s.utilization - by < 0.1:
        return Advice(f"{text} Lower --gpu-memory-utilization by {by:.2f}.")
    return Advice(text, ("--gpu-memory-utilization", f"{s.utilization - by:.2f}"))


def _slack(s: FailedStart) -> float:
    """Utilization to give back: the failed allocation and half a GiB, at least 0.05 on an 80 GiB card."""
    tried = size_gib(s.finding.numbers, "tried") or 0
    free = size_gib(s.finding.numbers, "free") or 0
    if s.total_gib is None:
        return 0.05
    return max(0.05, math.ceil((tried - free + 0.5) / s.total_gib * 100) / 100)


_NO_MORE = (
    "Raising --gpu-memory-utilization: it leaves even less outside the budget, where this allocation failed."
)


def cuda_oom_load(s: FailedStart) -> Diagnosis:
    """The weights do not fit."""
    return (
        Draft(s, "The weights do not fit into the memory that is free on the GPU.", _oom_why(s))
        .add(
            *_stop_listed(s),
            more_gpus(s),
            quantized_weights(),
            Advice("Keeps part of the weights in host memory (slow).", ("--cpu-offload-gb", "8")),
            "Changing --gpu-memory-utilization, either way: it sizes the KV cache, not the loading of "
            "weights.",
            "A shorter --max-model-len: the KV cache is allocated after the weights.",
        )
        .done()
    )


def cuda_oom_profile(s: FailedStart) -> Diagnosis:
    """Out of memory while the stage is profiling or unknown."""
    during = " in the profiling run" if s.finding.stage == "profile" else ""
    return (
        Draft(s, f"The GPU ran out of memory{during}.", _oom_why(s))
        .add(
            *_stop_listed(s),
            smaller_batches(s),
            quantized_weights(),
            more_gpus(s),
            _NO_MORE,
        )
        .done()
    )


def cuda_oom_kv_alloc(s: FailedStart) -> Diagnosis:
    """The KV cache that was planned could not be allocated."""
    draft = Draft(
        s,
        "The KV cache that was planned could not be allocated.",
        _oom_why(s),
        "The plan is made from the profile; memory taken by another process since then is not in it.",
    )
    if s.flags.num_gpu_blocks_override is not None:
        draft.add(
            Advice("Drop --num-gpu-blocks-override: it is larger than the memory, and nothing checks that.")
        )
    if s.flags.kv_cache_memory_bytes is not None:
        draft.add(Advice("Lower or drop --kv-cache-memory-bytes: it is taken as given, not measured."))
    if s.flags.enable_sleep_mode:
        draft.add(Advice("Drop --enable-sleep-mode: with it the available memory has been over-estimated."))
    return draft.add(
        *_stop_listed(s),
        _lower_utilization(s, _slack(s), "Plans a smaller KV cache."),
        "Raising --gpu-memory-utilization: it plans an even larger KV cache.",
    ).done()


def cuda_oom_cudagraph_capture(s: FailedStart) -> Diagnosis:
    """CUDA graphs found no room beside the budget."""
    draft = Draft(s, "The CUDA graphs did not fit into what the KV cache left of the card.", _oom_why(s))
    if s.since(0, 18) and s.before(0, 20) and not s.graph_estimate_gib:
        draft.add(
            Advice(
                "Sets memory for the graphs aside before the KV cache is sized (the default from 0.20).",
                environment=("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1",),
            )
        )
    return draft.add(
        _lower_utilization(
            s, _slack(s), "Leaves more of the card outside the budget, where graphs are captured."
        ),
        *fewer_graphs(),
        _NO_MORE,
    ).done()


def cuda_oom_sampler_warmup(s: FailedStart) -> Diagnosis:
    """The logits of max_num_seqs sequences did not fit beside the budget."""
    requests = s.finding.number("dummy_requests")
    seqs = int(requests) if requests is not None else s.max_num_seqs
    what = "pooler" if s.finding.kind == "cuda_oom_pooler_warmup" else "sampler"
    return (
        Draft(
            s,
            f"The {what}'s warm-up with {seqs} sequences did not fit into what the KV cache left of the "
            "card.",
            _oom_why(s),
            "It takes about sequences x vocabulary x 4 bytes, several times over, on every GPU: tensor "
            "parallelism does not divide it.",
        )
        .add(
            Advice(
                "A quarter of the sequences, a quarter of the memory.",
                ("--max-num-seqs", str(max(seqs // 4, 1))),
            )
            if seqs > 1
            else None,
            _lower_utilization(s, _slack(s), "Leaves more of the card outside the budget."),
            _NO_MORE,
        )
        .done()
    )


def cuda_oom_runtime(s: FailedStart) -> Diagnosis:
    """The server started, and ran out later."""
    return (
        Draft(s, "The server had started and ran out of GPU memory while serving.", _oom_why(s))
        .add(
            *_stop_listed(s),
            _lower_utilization(s, _slack(s), "Leaves more of the card for what grows at run time."),
            smaller_batches(s),
            _NO_MORE,
        )
        .done()
    )


def cuda_oom_foreign_listed(s: FailedStart) -> Diagnosis:
    """Torch names other processes on the GPU."""
    return (
        Draft(
            s,
            "The GPU ran out of memory, and other processes hold part of it.",
            _oom_why(s),
            _listed(s),
        )
        .add(
            *_stop_listed(s),
            "Raising --gpu-memory-utilization: the memory is held by others.",
            "A shorter --max-model-len, before the others are gone.",
        )
        .done()
    )


def _holders(s: FailedStart) -> list[tuple[str, float]]:
    """PID and GiB of the processes that torch lists, the largest first."""
    listed = s.finding.numbers.get("holders_gib")
    sizes = [(pid, size) for pid, size in listed.items() if size] if isinstance(listed, dict) else []
    return sorted(sizes, key=lambda holder: -holder[1])


def _listed(s: FailedStart) -> str:
    return "Listed: " + ", ".join(f"PID {pid} {gib(size)}" for pid, size in _holders(s)) + "."


def _stop_listed(s: FailedStart) -> tuple[Advice, ...]:
    pids = [pid for pid, _ in _holders(s)]
    if s.finding.kind != "cuda_oom_foreign_listed":
        return (
            Advice("See whether anything else holds memory on the GPU, and stop it.", command=SHOW_HOLDERS),
        )
    if "this process" in s.finding.text:
        return (
            Advice(
                "Stops what else holds the GPU's memory. Look first: in a container the PIDs are the host's.",
                command="kill " + " ".join(pids),
            ),
        )
    return (
        Advice(
            "Find out which of them are not this server's own workers, and stop those. In a container the "
            "PIDs are the host's.",
            command=f"ps -o pid,user,lstart,args -p {','.join(pids)}",
        ),
    )


def host_oom_killed(s: FailedStart) -> Diagnosis:
    """The kernel killed a process; the GPU has no part in it."""
    draft = Draft(
        s,
        "A process was killed from outside, most often because the host (not the GPU) ran out of memory.",
        "vLLM writes nothing in that case; the kernel log names the process.",
    )
    draft.add(
        Advice(
            "See what the kernel says.", command="dmesg -T | grep -iE 'out of memory|oom-kill|killed process'"
        ),
        Advice(
            "Raise the memory limit of the container or pod; loading a model can take its size in host "
            "memory."
        ),
    )
    if s.flags.cpu_offload_gb:
        draft.add(Advice("Lower --cpu-offload-gb: it pins that much host memory per GPU."))
    if not s.since(0, 18):
        draft.add(
            Advice("Takes no host memory for swapped blocks (releases up to 0.17).", ("--swap-space", "0"))
        )
    draft.add("Changing --gpu-memory-utilization or --max-model-len: both are about GPU memory.")
    return draft.done()


RULES: Mapping[str, Rule] = {
    "free_lt_desired": free_lt_desired,
    "external_weights_gt_desired": external_weights_gt_desired,
    "memory_profiling_assert": memory_profiling_assert,
    "cuda_oom": cuda_oom_profile,
    "cuda_oom_load": cuda_oom_load,
    "cuda_oom_kv_alloc": cuda_oom_kv_alloc,
    "cuda_oom_cudagraph_capture": cuda_oom_cudagraph_capture,
    "cuda_oom_sampler_warmup": cuda_oom_sampler_warmup,
    "cuda_oom_pooler_warmup": cuda_oom_sampler_warmup,
    "cuda_oom_runtime": cuda_oom_runtime,
    "cuda_oom_foreign_listed": cuda_oom_foreign_listed,
    "host_oom_killed": host_oom_killed,
}
