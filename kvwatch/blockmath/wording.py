"""vLLM's own sentences for the checks that stop a start, per release."""

from __future__ import annotations

from typing import Final

from kvwatch.blockmath.releases import Release

_LINK: Final = " See https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details."
_GIB: Final = 1 << 30


def rounded_gib(size: int) -> str:
    """GiB as current releases print them: two digits at most, so ``4.0``."""
    return str(round(size / _GIB, 2))


def _gib(size: int, release: Release) -> str:
    if release.length_wording in ("estimate_rounded", "cpu_clause"):
        return rounded_gib(size)
    return f"{size / _GIB:.2f}"


def free_memory(
    release: Release, *, device: str, free: int, total: int, utilization: float, requested: int
) -> str:
    """Less memory is free than the budget asks for."""
    name = f" {device}" if release.free_memory_names_device else ""
    return (
        f"Free memory on device{name} ({rounded_gib(free)}/{rounded_gib(total)} GiB) on startup "
        f"is less than desired GPU memory utilization ({utilization}, {rounded_gib(requested)} GiB). "
        "Decrease GPU memory utilization or reduce GPU memory used by other processes."
    )


def no_kv_memory(release: Release) -> str:
    """Nothing is left for blocks."""
    clause = (
        " (this flag also controls CPU memory reservation on the CPU backend, despite its name)"
        if release.cpu_clause
        else ""
    )
    link = _LINK if release.documentation_link else ""
    return (
        "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing "
        f"the engine{clause}.{link}"
    )


def one_request(
    release: Release, *, length: int, need: int, available: int, longest: int, tokens: int
) -> str:
    """One request of the maximum length does not fit.

    Args:
        release: the vLLM release.
        length: the maximum length.
        need: bytes it needs.
        available: bytes the check compares with.
        longest: the longest length that fits.
        tokens: tokens that the blocks hold (V0's figure).
    """
    wording = release.length_wording
    if wording == "v0_tokens":
        return (
            f"The model's max seq len ({length}) is larger than the maximum number of tokens that can be "
            f"stored in KV cache ({tokens}). Try increasing `gpu_memory_utilization` or decreasing "
            "`max_model_len` when initializing the engine."
        )
    whose = "model's" if wording == "cpu_clause" else "models's"
    unit = "GB" if wording == "gb" else "GiB"
    estimate = {
        "gb": "",
        "estimate_lost": "Based on the available memory,  ",
    }.get(
        wording,
        f"Based on the available memory, the estimated maximum model length is {longest}. "
        if longest
        else "",
    )
    clause = " (which also controls CPU memory on the CPU backend)" if release.cpu_clause else ""
    link = _LINK if release.documentation_link else ""
    return (
        f"To serve at least one request with the {whose} max seq len ({length}), "
        f"({_gib(need, release)} {unit} KV cache is needed, which is larger than the available KV cache "
        f"memory ({_gib(available, release)} {unit}). {estimate}Try increasing `gpu_memory_utilization`"
        f"{clause} or decreasing `max_model_len` when initializing the engine.{link}"
    )


def no_automatic_length() -> str:
    """Not one token fits, so no length can be found."""
    return (
        "Cannot auto-fit max_model_len: not enough GPU memory available to serve even a single token. "
        "Try increasing `gpu_memory_utilization`."
    )


def state_slots(*, max_num_seqs: int, num_blocks: int) -> str:
    """Fewer state blocks than requests in a batch."""
    return (
        f"max_num_seqs ({max_num_seqs}) exceeds available Mamba cache blocks ({num_blocks}). Each decode "
        "sequence requires one Mamba cache block, so CUDA graph capture cannot proceed. Please lower "
        f"max_num_seqs to at most {num_blocks} or increase gpu_memory_utilization."
    )


def sampler_warmup(*, max_num_seqs: int) -> str:
    """The logits of a full batch do not fit beside everything else."""
    return (
        f"CUDA out of memory occurred when warming up sampler with {max_num_seqs} dummy requests. Please try "
        "lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the engine."
    )


def graph_capture() -> str:
    """CUDA graphs do not fit above the budget."""
    return "CUDA out of memory while capturing CUDA graphs."
