"""What to change so that an infeasible start becomes feasible, each change verified by judging it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from kvwatch.blockmath.errors import Unsupported
from kvwatch.blockmath.flags import Flags
from kvwatch.blockmath.startup import Verdict
from kvwatch.forecast.modelled import judge_modelled
from kvwatch.forecast.situation import Situation
from kvwatch.node import Holder, NodeSnapshot
from kvwatch.ownership import Owner
from kvwatch.units import bytes_text

MAX_UTILIZATION = 0.98
"""Above this the CUDA graphs and the sampler, which live outside the budget, have no room left."""

COSTLY = frozenset({"quantization", "tensor_parallel_size"})
"""Actions that change the weights or take more cards."""

_FP8_SINCE = (8, 9)
"""Compute capability of the first cards with 8-bit floating point numbers."""

_IN_THE_WAY = (Owner.ORPHAN, Owner.FOREIGN, Owner.ALLOWED, Owner.NEIGHBOUR)


@dataclass(frozen=True, slots=True)
class Remedy:
    """One change that makes the start feasible.

    Attributes:
        action: ``stop_holder`` or the name of the flag that changes.
        flags: what to type on the command line, empty for `stop_holder`.
        text: the same for people.
        pids: processes to stop, for `stop_holder`.
    """

    action: str
    flags: str
    text: str
    pids: tuple[int, ...] = ()


def remedies(found: Situation, verdict: Verdict, snapshot: NodeSnapshot) -> tuple[Remedy, ...]:
    """Single changes that turn the verdict, cheapest first: what must go, then what must be typed.

    Other weights and more cards are named only where nothing cheaper helps.
    """
    cheap = (
        *_stop_holders(found, snapshot),
        *_utilizations(found),
        *_lengths(verdict, found),
        *_cache_dtypes(found),
    )
    return cheap or (*_quantized(found, snapshot), *_more_cards(found, snapshot))


def _turns(found: Situation, changes: Flags) -> bool:
    try:
        return found.judge(changes).feasible is True
    except Unsupported:
        return False


def _stop_holders(found: Situation, snapshot: NodeSnapshot) -> Iterator[Remedy]:
    """The fewest, least wanted processes whose going is enough: orphans before foreign ones, large first."""
    states = [state for site in found.sites if (state := snapshot.gpu(site.gpu)) is not None]
    holders = sorted(
        (holder for state in states for holder in state.holders if _may_go(holder)),
        key=lambda holder: (_IN_THE_WAY.index(holder.ownership.owner), -(holder.used_bytes or 0)),
    )
    for count in range(1, len(holders) + 1):
        chosen = holders[:count]
        if found.judge(freed=_freed(chosen)).feasible:
            needed = _without_the_needless(found, chosen)
            yield Remedy(
                action="stop_holder",
                flags="",
                text="stop " + ", ".join(_holder_text(holder) for holder in needed),
                pids=tuple(dict.fromkeys(holder.pid for holder in needed)),
            )
            return


def _without_the_needless(found: Situation, chosen: list[Holder]) -> list[Holder]:
    """Drop each holder whose staying leaves the start feasible."""
    needed = list(chosen)
    for holder in chosen:
        rest = [other for other in needed if other is not holder]
        if found.judge(freed=_freed(rest)).feasible:
            needed = rest
    return needed


def _freed(holders: list[Holder]) -> Counter[str]:
    freed: Counter[str] = Counter()
    for holder in holders:
        freed[holder.gpu] += holder.used_bytes or 0
    return freed


def _may_go(holder: Holder) -> bool:
    return holder.ownership.owner in _IN_THE_WAY and holder.process is not None and bool(holder.used_bytes)


def _holder_text(holder: Holder) -> str:
    user = f" of {holder.process.user}" if holder.process and holder.process.user else ""
    held = bytes_text(holder.used_bytes or 0)
    return f"{holder.ownership.owner} {holder.name}{user} (pid {holder.pid}, {held} on GPU {holder.gpu})"


def _utilizations(found: Situation) -> Iterator[Remedy]:
    """The utilization nearest to the present one, in steps of 0.01, that starts."""
    present = found.flags.gpu_memory_utilization or found.release.default_utilization
    hundredths = sorted(
        range(1, round(MAX_UTILIZATION * 100) + 1), key=lambda step: abs(step / 100 - present)
    )
    for step in hundredths:
        changed = Flags(gpu_memory_utilization=step / 100)
        if not math.isclose(step / 100, present) and _turns(found, changed):
            typed = f"--gpu-memory-utilization {step / 100:.2f}"
            yield Remedy("gpu_memory_utilization", typed, f"{typed} instead of {present:g}")
            return


def _lengths(verdict: Verdict, found: Situation) -> Iterator[Remedy]:
    longest = verdict.longest_length
    if longest and _turns(found, Flags(max_model_len=longest)):
        typed = f"--max-model-len {longest}"
        yield Remedy(
            "max_model_len", typed, f"{typed} instead of {found.flags.max_model_len or 'the default'}"
        )


def _cache_dtypes(found: Situation) -> Iterator[Remedy]:
    if found.device.capability and found.device.capability < _FP8_SINCE:
        return
    if (found.flags.kv_cache_dtype or "auto") == "auto" and _turns(found, Flags(kv_cache_dtype="fp8")):
        typed = "--kv-cache-dtype fp8"
        yield Remedy("kv_cache_dtype", typed, f"{typed} (half the bytes per token)")


def _quantized(found: Situation, snapshot: NodeSnapshot) -> Iterator[Remedy]:
    if found.flags.quantization is None and _turns_modelled(found, Flags(quantization="fp8"), snapshot):
        typed = "--quantization fp8"
        yield Remedy("quantization", typed, f"{typed} (weights in 8 bits, estimated)")


def _more_cards(found: Situation, snapshot: NodeSnapshot) -> Iterator[Remedy]:
    """The smallest larger tensor-parallel size that the node has cards for."""
    for size in range(found.flags.tp + 1, len(snapshot.gpus) + 1):
        if _turns_modelled(found, Flags(tensor_parallel_size=size), snapshot):
            typed = f"--tensor-parallel-size {size}"
            yield Remedy("tensor_parallel_size", typed, f"{typed} (estimated)")
            return


def _turns_modelled(found: Situation, changes: Flags, snapshot: NodeSnapshot) -> bool:
    try:
        return judge_modelled(found, changes, snapshot).verdict.feasible is True
    except Unsupported:
        return False
