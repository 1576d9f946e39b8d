"""Would this model start on these cards, and what would its KV cache hold? Worked out with no GPU at hand.

Weights come from the model's own shapes, the KV pool and the checks are vLLM's arithmetic, and what is taken
beside both is an estimate with a stated bound (`kvwatch.forecast.allowance`). Cards are taken to be idle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from kvwatch.blockmath.device import Device
from kvwatch.blockmath.errors import Refused, Unsupported
from kvwatch.blockmath.flags import Flags
from kvwatch.blockmath.modelconfig import ModelConfig
from kvwatch.blockmath.pool import Pool, plan_pool
from kvwatch.blockmath.releases import Release
from kvwatch.blockmath.startup import RankMemory, Verdict, judge, requested_bytes
from kvwatch.forecast.allowance import (
    CONTEXT_DOUBT,
    GRAPH_DOUBT_SHARE,
    Allowance,
    allowances,
    context_bytes,
)
from kvwatch.forecast.shape import shape_of

if TYPE_CHECKING:
    from kvwatch.blockmath.weights import Weights

MODELLED_WEIGHTS_DOUBT: Final = 0.05
"""Share of the weights that a quantization scheme's layout may differ from the model of it."""

CHECKPOINT_DOUBT: Final = 0.10
"""Share of the checkpoint's files by which they may differ from what one GPU holds of them."""

IN_FLIGHT_SCHEMES: Final = frozenset({"fp8", "bitsandbytes", "experts_int8"})
"""Values of ``--quantization`` that vLLM applies to unquantized weights while it loads them."""

GIVEN_DOUBT: Final = 64 << 20
"""Bytes. Figures taken from a log are rounded and differ a little from run to run."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is asked.

    Attributes:
        config: the parsed config.json.
        flags: what the server is told.
        device: the card.
        release: the vLLM release.
        weight_bytes: per GPU, where they are known better than from config.json.
        non_kv_bytes: per GPU, everything beside the KV cache, as a log told it.
        checkpoint_bytes: of the whole model's files, for architectures whose weights are not known.
    """

    config: Mapping[str, Any]
    flags: Flags
    device: Device
    release: Release
    weight_bytes: int | None = None
    non_kv_bytes: int | None = None
    checkpoint_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Memory of each GPU of one pipeline stage. Bytes.

    Attributes:
        budget: what the utilization allows.
        weights: None where only the whole of the non-KV memory was given.
        allowance: the estimate of what comes beside; None where the whole was given.
        non_kv: everything that the KV cache does not get.
        available: left for the KV cache; negative where the rest alone is too large.
        uncertainty: how far ``available`` may be off.
    """

    budget: int
    weights: int | None
    allowance: Allowance | None
    non_kv: int
    available: int
    uncertainty: int


@dataclass(frozen=True, slots=True)
class Sizing:
    """The answer.

    Attributes:
        pool: the KV pool.
        stages: the memory of each pipeline stage's GPUs.
        weights: the model's weights; None where their size was given.
        verdict: of the checks; unknown where a margin is smaller than the estimate's uncertainty.
        num_blocks: of the pool; 0 where nothing is left for it.
        capacity_tokens: as the release's log would count them.
        max_concurrency: requests of the maximum length that fit at once; None for a model without KV cache.
        longest_length: the largest length that fits, 0 if none.
        safe_length: the same with the uncertainty against us: a length to type.
        assumptions: what was taken for granted, in words.
    """

    scenario: Scenario
    pool: Pool
    stages: tuple[StageMemory, ...]
    weights: Weights | None
    verdict: Verdict
    num_blocks: int
    capacity_tokens: int
    max_concurrency: float | None
    longest_length: int
    safe_length: int
    assumptions: tuple[str, ...]

    @property
    def feasible(self) -> bool | None:
        """True, False, or None where it is too close to call."""
        return self.verdict.feasible

    @property
    def length(self) -> int:
        """The maximum length in effect: with ``auto``, the one that the server would settle on."""
        settings = self.pool.settings
        return self.longest_length if settings.auto_length else settings.max_model_len

    @property
    def world_size(self) -> int:
        """GPUs that the server takes."""
        flags = self.scenario.flags
        return flags.tp * flags.pp * flags.dp

    @property
    def tightest(self) -> StageMemory:
        """The stage with the fewest blocks."""
        pairs = zip(self.stages, self.pool.bytes_per_block, strict=True)
        return min(pairs, key=lambda pair: pair[0].available / max(pair[1], 1))[0]


def size_up(scenario: Scenario) -> Sizing:
    """Work one scenario out.

    Raises:
        Refused: vLLM refuses these flags for this model.
        Unsupported: a part cannot be said.
    """
    flags, release = scenario.flags, scenario.release
    pool = plan_pool(scenario.config, flags, device=scenario.device, release=release)
    weights, stages = _memory(scenario, pool)
    context = context_bytes(flags, scenario.device, release)
    ranks = [
        RankMemory(
            gpu=f"cuda:{index * flags.tp}",
            stage=index,
            total_bytes=scenario.device.total_bytes,
            free_bytes=scenario.device.total_bytes - context,
            non_kv_bytes=stage.non_kv,
            foreign_bytes=0,
            graph_bytes=_late_graphs(stage.allowance),
            uncertainty_bytes=stage.uncertainty,
            free_uncertainty_bytes=_free_doubt(stage.allowance),
        )
        for index, stage in enumerate(stages)
    ]
    verdict = judge(pool, flags, ranks, release=release)
    available = [stage.available for stage in stages]
    limit = max(pool.settings.derived_max_model_len, pool.settings.max_model_len)
    longest = pool.longest_length(available, limit)
    safe = pool.longest_length([stage.available - stage.uncertainty for stage in stages], limit)
    settled = pool
    if pool.settings.auto_length and longest:
        settled = replace(pool, settings=replace(pool.settings, max_model_len=longest))
    blocks = max(0, settled.num_blocks(available))
    has_cache = bool(pool.groups)
    return Sizing(
        scenario=scenario,
        pool=pool,
        stages=stages,
        weights=weights,
        verdict=verdict,
        num_blocks=blocks,
        capacity_tokens=settled.capacity_tokens(blocks) if has_cache else 0,
        max_concurrency=settled.max_concurrency(blocks) if has_cache else None,
        longest_length=longest,
        safe_length=safe,
        assumptions=_assumptions(scenario, pool, weights),
    )


def _free_doubt(allowance: Allowance | None) -> int:
    """Of graphs within the budget, what they take beyond it finds room where activations were."""
    return int(CONTEXT_DOUBT + GRAPH_DOUBT_SHARE * (_late_graphs(allowance) or 0))


def _late_graphs(allowance: Allowance | None) -> int | None:
    """CUDA graphs that live outside of the budget."""
    return None if allowance is None or allowance.graphs_in_budget else allowance.graphs


def _memory(scenario: Scenario, pool: Pool) -> tuple[Weights | None, tuple[StageMemory, ...]]:
    flags, release = scenario.flags, scenario.release
    utilization = flags.gpu_memory_utilization or release.default_utilization
    budget = requested_bytes(scenario.device.total_bytes, utilization, release)
    if scenario.non_kv_bytes is not None:
        given = _stage(flags, budget, None, None, scenario.non_kv_bytes, GIVEN_DOUBT)
        return None, (given,) * len(pool.stages)
    weights = _weights(scenario)
    held, share = _held(scenario, weights, len(pool.stages))
    return weights, tuple(
        _stage(
            flags,
            budget,
            own,
            allowance,
            own + allowance.in_budget,
            allowance.uncertainty + int(share * own),
        )
        for own, allowance in zip(held, _beside(scenario, pool, weights), strict=True)
    )


def _weights(scenario: Scenario) -> Weights | None:
    """None where their size is given, or must be taken from the checkpoint's files."""
    if scenario.weight_bytes is not None:
        return None
    # A look at running servers, whose weights are measured, need not wait for the catalogue of architectures.
    from kvwatch.blockmath.weights import weight_bytes

    try:
        return weight_bytes(scenario.config, scenario.flags)
    except Unsupported:
        if scenario.checkpoint_bytes is None:
            raise
        return None


def _held(scenario: Scenario, weights: Weights | None, stages: int) -> tuple[tuple[int, ...], float]:
    """Bytes of weights on a GPU of each stage, and the share of them that is in doubt."""
    if weights is not None:
        pairs = zip(weights.bytes_per_rank, weights.mla_absorbed_bytes, strict=True)
        held = tuple(own + absorbed for own, absorbed in pairs)
        return held, 0.0 if weights.basis == "exact" else MODELLED_WEIGHTS_DOUBT
    if scenario.weight_bytes is not None:
        return (scenario.weight_bytes,) * stages, 0.0
    whole = scenario.checkpoint_bytes or 0
    return (whole // (scenario.flags.tp * stages),) * stages, CHECKPOINT_DOUBT


def _beside(scenario: Scenario, pool: Pool, weights: Weights | None) -> tuple[Allowance, ...]:
    if scenario.release.engine == "V0":
        raise Unsupported(
            "activation_unknown",
            "what the V0 engine takes beside weights is not modelled: give the non-KV memory from its log",
        )
    shape = shape_of(ModelConfig.read(scenario.config, scenario.flags.hf_overrides))
    if shape is None:
        raise Unsupported("incomplete_config", "config.json: hidden_size or num_hidden_layers is missing")
    quantization = weights.quantization if weights else None
    beside = allowances(shape, pool, scenario.flags, scenario.device, quantization)
    if scenario.weight_bytes is None:
        return beside
    # Logs count the tables among the weights.
    return tuple(replace(each, rotary=0) for each in beside)


def _stage(
    flags: Flags, budget: int, weights: int | None, allowance: Allowance | None, non_kv: int, doubt: int
) -> StageMemory:
    told = flags.kv_cache_memory_bytes
    available = told or budget - non_kv
    return StageMemory(budget, weights, allowance, non_kv, available, 0 if told else doubt)


def _assumptions(scenario: Scenario, pool: Pool, weights: Weights | None) -> tuple[str, ...]:
    found = ["the cards are idle: nothing else holds memory"]
    if pool.basis == "inferred":
        found.append("the architecture is not known; its KV layers were read from its structure")
    asked = scenario.flags.quantization
    if asked and asked not in IN_FLIGHT_SCHEMES and not scenario.config.get("quantization_config"):
        found.append(f"there is a checkpoint quantized with {asked}")
    if weights is not None:
        found += weights.assumptions
    elif scenario.weight_bytes is None and scenario.non_kv_bytes is None:
        found.append("weights are taken to be as large as the checkpoint's files, divided by the GPUs")
    if scenario.flags.cpu_offload_gb:
        found.append("--cpu-offload-gb is not taken into account")
    return tuple(found)


def try_size_up(scenario: Scenario) -> Sizing | str:
    """`size_up`, or the reason why there is no answer."""
    try:
        return size_up(scenario)
    except (Refused, Unsupported) as reason:
        return str(reason)
