"""A failed start's numbers against the block arithmetic for its model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvwatch.blockmath.device import Device
from kvwatch.blockmath.errors import Refused, Unsupported
from kvwatch.blockmath.flags import Flags
from kvwatch.blockmath.pool import Pool, plan_pool
from kvwatch.blockmath.releases import Release
from kvwatch.observe.startlog import Finding

GIB = 1 << 30
ROUNDING_BYTES = 0.005 * GIB
"""The log prints two decimals of a GiB."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What the arithmetic says.

    Attributes:
        sentences: the comparisons, for people.
        plan: how this model's pool is planned; None unless every comparison agreed.
    """

    sentences: tuple[str, ...] = ()
    plan: PoolPlanner | None = None


@dataclass(frozen=True, slots=True)
class PoolPlanner:
    """One model on one kind of card and release, to be planned with any flags."""

    config: Mapping[str, Any]
    flags: Flags
    device: Device
    release: Release

    def pool(self, **changes: Any) -> Pool:
        """The pool with some flags changed.

        Raises:
            Refused, Unsupported: as `plan_pool`.
        """
        flags = self.flags.with_changes(**changes)
        return plan_pool(self.config, flags, device=self.device, release=self.release)

    def longest(self, length: int, available_gib: float, **changes: Any) -> int | None:
        """The longest length up to ``length`` that fits into what the log calls available, on the safe side
        of its rounding; None where the pool cannot be planned.
        """
        try:
            pool = self.pool(max_model_len=length, **changes)
        except (Refused, Unsupported):
            return None
        return pool.longest_length(available_bytes(pool, available_gib * GIB - ROUNDING_BYTES), length)

    def state_slots(self, length: int, available_gib: float) -> int | None:
        """State slots that the model would have; None for a model that needs none."""
        pool = self.pool(max_model_len=length)
        if not any(group.is_state for group in pool.groups):
            return None
        return pool.num_blocks(available_bytes(pool, available_gib * GIB - ROUNDING_BYTES))


def available_bytes(pool: Pool, checked: float) -> tuple[int, ...]:
    """KV memory per stage of which, less the block that is kept back, the log printed ``checked`` bytes."""
    return tuple(max(int(checked), 0) + kept for kept in pool.kept_back_bytes)


def check(finding: Finding, planner: PoolPlanner) -> Checked:
    """Compare a failure's numbers with the arithmetic; empty where the kind has none to compare."""
    comparison = _COMPARISONS.get(finding.kind)
    if comparison is None:
        return Checked()
    try:
        agreements = comparison(finding, planner)
    except Unsupported as unsupported:
        return Checked((f"Not checked: {unsupported}",))
    except Refused as refused:
        if refused.kind == finding.kind:
            return Checked((f"The same from the model's configuration: {refused}",))
        return Checked((f"Differs: by the arithmetic vLLM refuses this configuration earlier ({refused}).",))
    sentences = tuple(("Agrees: " if agreed else "Differs: ") + text for agreed, text in agreements)
    return Checked(sentences, planner if agreements and all(agreed for agreed, _ in agreements) else None)


Agreements = list[tuple[bool, str]]


def _kv_needed(finding: Finding, planner: PoolPlanner) -> Agreements:
    length, estimate = int(finding.printed("max_model_len")), finding.number("est_len")
    need, available = finding.printed("need_gib"), finding.printed("avail_gib")
    pool = planner.pool(max_model_len=length)
    computed = max(pool.need_bytes(length)) / GIB
    agreements = [
        (
            abs(computed - need) <= 0.011,
            f"{length} tokens need {computed:.2f} GiB by the arithmetic, {need:.2f} GiB by the log.",
        )
    ]
    if estimate is not None:
        low, high = (
            pool.longest_length(available_bytes(pool, available * GIB + slack), length)
            for slack in (-ROUNDING_BYTES, ROUNDING_BYTES)
        )
        between = f"{low}" if low == high else f"{low} to {high}"
        agreements.append(
            (
                low <= estimate <= high,
                f"{available:.2f} GiB hold {between} tokens by the arithmetic, {int(estimate)} by the log.",
            )
        )
    return agreements


def _derived(finding: Finding, planner: PoolPlanner) -> Agreements:
    length = int(finding.printed("max_model_len"))
    allowed = planner.pool(max_model_len=length).settings.derived_max_model_len
    return [(False, f"by the arithmetic config.json allows {allowed} tokens and so {length}.")]


def _heads(finding: Finding, planner: PoolPlanner) -> Agreements:
    size = int(finding.printed("tensor_parallel_size"))
    planner.pool(tensor_parallel_size=size)
    return [(False, f"by the arithmetic the heads can be shared out over {size} GPUs.")]


_COMPARISONS = {
    "kv_needed_gt_available": _kv_needed,
    "max_model_len_gt_derived": _derived,
    "indivisible_heads": _heads,
}
