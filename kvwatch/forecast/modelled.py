"""Starts that the running server's figures do not cover: another model, quantization, parallelism or batch.

The estimate of `kvwatch.forecast.sizing` is made for the running server and for the changed one; what was
measured on the running one, less its estimate, corrects the other. What both have in common cancels out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvwatch.blockmath.errors import Refused, Unsupported
from kvwatch.blockmath.flags import Flags
from kvwatch.blockmath.pool import Pool, plan_pool
from kvwatch.blockmath.settings import check_flags_exist
from kvwatch.blockmath.startup import RankMemory, Verdict, judge
from kvwatch.forecast.situation import RankSite, Situation, cuda_total, refused
from kvwatch.forecast.sizing import Scenario, Sizing, size_up
from kvwatch.node import NodeSnapshot
from kvwatch.units import bytes_text

BATCH_FLAGS = frozenset({"max_num_batched_tokens", "max_num_seqs", "enforce_eager", "enable_chunked_prefill"})
"""Flags that move activations and graphs only: weights and libraries stay as measured."""

MEASURED_DOUBT = 64 * 2**20
"""Bytes by which what was measured differs from start to start."""


@dataclass(frozen=True, slots=True)
class Modelled:
    """A verdict that rests on an estimate.

    Attributes:
        verdict: unknown where a margin is smaller than the estimate's doubt.
        assumptions: what the estimate takes for granted, in words.
    """

    verdict: Verdict
    assumptions: tuple[str, ...]


def judge_modelled(
    found: Situation,
    changes: Flags,
    snapshot: NodeSnapshot,
    config: Mapping[str, Any] | None = None,
) -> Modelled:
    """Judge a start that changes more than the KV cache.

    Args:
        config: config.json of the model that the changes name; None for the running model.

    Raises:
        Unsupported: the estimate has no answer.
    """
    flags = found.flags.with_changes(**changes.given())
    swapped = config is not None
    config = found.config if config is None else config
    try:
        check_flags_exist(changes, found.release)
        before = size_up(Scenario(found.config, found.flags, found.device, found.release))
        after = size_up(Scenario(config, flags, found.device, found.release))
        block_size = None if swapped or flags.block_size else found.effective_block_size
        pool = plan_pool(
            config,
            flags,
            device=found.device,
            release=found.release,
            effective_block_size=block_size,
        )
    except Refused as refusal:
        return Modelled(refused(refusal), ())
    if flags.dp != found.flags.dp:
        raise Unsupported("activation_unknown", "another data-parallel size is not modelled")
    correction = _correction(found, before)
    sites, placed = _placed(found, flags, snapshot)
    cost = found.start_cost(flags)
    ranks = _ranks(sites, flags, pool, before, after, correction, changes, cost)
    verdict = judge(pool, flags, ranks, release=found.release)
    return Modelled(verdict, (*after.assumptions[1:], *placed, *_said(before, after, correction)))


def _correction(found: Situation, before: Sizing) -> int:
    """What was measured beyond the estimate of the same server, on the worst card."""
    differences = [
        site.non_kv - before.stages[site.stage].non_kv for site in found.sites if site.non_kv is not None
    ]
    if not differences:
        raise Unsupported("non_kv_memory_unknown", "nothing was measured that the estimate could start from")
    return max(differences)


def _ranks(
    sites: tuple[RankSite, ...],
    flags: Flags,
    pool: Pool,
    before: Sizing,
    after: Sizing,
    correction: int,
    changes: Flags,
    start_cost: int,
) -> list[RankMemory]:
    ranks = []
    for number, site in enumerate(sites):
        stage = number % (flags.tp * flags.pp) // flags.tp
        estimate = after.stages[stage]
        if changes.given().keys() <= BATCH_FLAGS:
            doubt = MEASURED_DOUBT + abs(estimate.non_kv - before.stages[stage].non_kv) // 2
        else:
            doubt = MEASURED_DOUBT + estimate.uncertainty
        ranks.append(
            RankMemory(
                gpu=site.gpu,
                stage=stage,
                total_bytes=site.total,
                free_bytes=None if site.free_next is None else site.free_next - start_cost,
                non_kv_bytes=max(0, estimate.non_kv + correction),
                uncertainty_bytes=doubt,
            )
        )
    if len({rank.stage for rank in ranks}) != len(pool.stages):
        raise Unsupported("gpu_unknown", "the node shows too few GPUs for this parallelism")
    return ranks


def _placed(
    found: Situation, flags: Flags, snapshot: NodeSnapshot
) -> tuple[tuple[RankSite, ...], tuple[str, ...]]:
    """Where the ranks will run: on the server's cards, further ones on those with most memory free."""
    needed = flags.tp * flags.pp * flags.dp
    if needed <= len(found.sites):
        return found.sites[:needed], ()
    used = {site.gpu for site in found.sites}
    spare = [
        RankSite(gpu=state.gpu.index, stage=0, total=cuda_total(memory), free_next=memory.free, non_kv=None)
        for state in snapshot.gpus
        if (memory := state.gpu.memory) is not None and state.gpu.index not in used
    ]
    spare.sort(key=lambda site: -(site.free_next or 0))
    further = spare[: needed - len(found.sites)]
    if len(found.sites) + len(further) < needed:
        raise Unsupported("gpu_unknown", f"{needed} GPUs are needed, the node shows {len(snapshot.gpus)}")
    names = ", ".join(site.gpu for site in further)
    return (*found.sites, *further), (f"the further ranks run on GPU {names}",)


def _said(before: Sizing, after: Sizing, correction: int) -> tuple[str, ...]:
    step = after.tightest.non_kv - before.tightest.non_kv
    sign = "more" if step >= 0 else "less"
    return (
        f"non-KV memory modelled: {bytes_text(abs(step))} {sign} per GPU than now",
        f"the estimate for the running server was off by {bytes_text(correction)}, which is corrected for",
    )
