"""How fast tokens could come, if memory bandwidth were the only limit. An estimate, and an upper one.

A decoding step reads the weights once and each request's KV cache once. Of a mixture of experts only those
experts are read that some token of the batch goes to, which is taken as the expectation of random routing.
Kernels, communication between GPUs and scheduling cost time beside that: a server stays below these figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvwatch.blockmath.errors import Refused, Unsupported
from kvwatch.blockmath.modelconfig import ModelConfig
from kvwatch.blockmath.pool import Pool
from kvwatch.blockmath.specs import FULL_KINDS, Kind, LayerSpec
from kvwatch.blockmath.weights import weight_bytes
from kvwatch.forecast.shape import Experts, shape_of, with_experts
from kvwatch.forecast.sizing import Scenario, Sizing


@dataclass(frozen=True, slots=True)
class DecodeEstimate:
    """One batch size.

    Attributes:
        batch: requests that decode together in one engine.
        context: tokens that each of them has in the KV cache.
        tokens_per_second: of the whole batch.
        per_request: of each request.
        fits: the KV cache holds that many requests of that length.
    """

    batch: int
    context: int
    tokens_per_second: float
    per_request: float
    fits: bool


def decode_estimates(
    sizing: Sizing, bandwidth: float, *, context: int, batches: Sequence[int]
) -> tuple[DecodeEstimate, ...]:
    """Tokens per second by batch size.

    Args:
        sizing: the server.
        bandwidth: of one card, in bytes per second.
        context: tokens that each request has in the KV cache.
        batches: requests that decode together.
    """
    reader = _Reader(sizing)
    largest = largest_batch(sizing, context)
    return tuple(
        DecodeEstimate(batch, context, rate, rate / batch, batch <= largest)
        for batch in batches
        if (rate := batch * bandwidth / reader.step_bytes(batch, context))
    )


def largest_batch(sizing: Sizing, context: int) -> int:
    """Requests of one length that the KV cache and the scheduler take at once."""
    scheduled = sizing.pool.settings.max_num_seqs
    per_request = sum(sizing.pool.blocks_per_request(context))
    return min(sizing.num_blocks // per_request, scheduled) if per_request else scheduled


class _Reader:
    """Bytes that one step reads, summed over pipeline stages, which work one after the other."""

    def __init__(self, sizing: Sizing) -> None:
        self._pool = sizing.pool
        self._weights = sum(stage.weights or stage.non_kv for stage in sizing.stages)
        self._experts, self._each = _expert_bytes(sizing.scenario)

    def step_bytes(self, batch: int, context: int) -> float:
        return self._weights - self._idle_bytes(batch) + batch * request_bytes(self._pool, context)

    def _idle_bytes(self, batch: int) -> float:
        if self._experts is None:
            return 0.0
        missed = (1 - self._experts.active / self._experts.count) ** batch
        return self._each * self._experts.count * missed


def request_bytes(pool: Pool, context: int) -> float:
    """KV cache that one request with so many tokens reads in a step on one rank, over all stages."""
    return sum(
        sum(counts) * _layer_bytes(spec, context, pool.settings.dcp)
        for group in pool.groups
        for spec, counts in group.members
    )


def _layer_bytes(spec: LayerSpec, context: int, dcp: int) -> float:
    if spec.kind in (Kind.MAMBA, Kind.RING):
        return spec.unpadded_bytes
    tokens = min(context, spec.window or spec.chunk or context)
    shards = dcp if spec.kind in FULL_KINDS and spec.dcp_sharded else 1
    return spec.state_bytes * tokens / spec.tokens_per_state / shards


def _expert_bytes(scenario: Scenario) -> tuple[Experts | None, float]:
    """The experts, and the bytes that one expert of every layer takes over the stages."""
    model = ModelConfig.read(scenario.config, scenario.flags.hf_overrides)
    shape = shape_of(model)
    if shape is None or shape.experts is None or scenario.weight_bytes or scenario.non_kv_bytes:
        return None, 0.0
    experts = shape.experts
    fewer = experts.count // 2
    config = with_experts(scenario.config, model.text, experts.field, fewer)
    try:
        rest = sum(weight_bytes(config, scenario.flags).bytes_per_rank)
        whole = sum(weight_bytes(scenario.config, scenario.flags).bytes_per_rank)
    except (Refused, Unsupported):
        return None, 0.0
    return experts, (whole - rest) / (experts.count - fewer)
