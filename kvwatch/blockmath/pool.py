"""The pool of KV blocks: bytes per block, blocks, tokens, and what a request of some length needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvwatch.blockmath import blocksize
from kvwatch.blockmath import settings as settings_module
from kvwatch.blockmath.device import Device
from kvwatch.blockmath.drafts import with_draft
from kvwatch.blockmath.encoders import check_encoders
from kvwatch.blockmath.errors import Refused
from kvwatch.blockmath.families import check_release, family_of, traits_of
from kvwatch.blockmath.flags import Flags
from kvwatch.blockmath.grouping import (
    CountedLayers,
    Group,
    Stage,
    bytes_per_block,
    count_layers,
    group_layers,
)
from kvwatch.blockmath.layouts.base import Basis, Context, Layout
from kvwatch.blockmath.modelconfig import ModelConfig
from kvwatch.blockmath.releases import Release
from kvwatch.blockmath.settings import Settings
from kvwatch.blockmath.specs import Growth, LayerSpec, Load

MAMBA_MODES: Final = {"one": "none", "length": "all"}
"""The cache mode that counts state blocks as releases before the modes did."""


@dataclass(frozen=True, slots=True)
class PoolStage:
    """One pipeline stage's share of the pool.

    Attributes:
        bytes_per_block: bytes that one block takes on each of the stage's GPUs.
        num_layers: layers with cache, per group.
    """

    bytes_per_block: int
    num_layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Demand:
    """What the check for one request adds up: for each stage, bytes per block of each kind of growth.

    Attributes:
        growths: the distinct ways in which blocks grow with the length.
        weights: bytes per stage and growth.
    """

    growths: tuple[Growth, ...]
    weights: tuple[tuple[int, ...], ...]

    def bytes(self, length: int) -> tuple[int, ...]:
        """Bytes per stage at a length."""
        blocks = [growth.blocks(length) for growth in self.growths]
        return tuple(
            sum(weight * count for weight, count in zip(weights, blocks, strict=True))
            for weights in self.weights
        )

    def fits(self, length: int, room: Sequence[int]) -> bool:
        """Whether every stage has room."""
        blocks = [growth.blocks(length) for growth in self.growths]
        for weights, left in zip(self.weights, room, strict=True):
            if sum(map(int.__mul__, weights, blocks)) > left:
                return False
        return True


@dataclass(frozen=True, slots=True)
class Pool:
    """How a server's KV memory is cut into blocks.

    Attributes:
        settings: what vLLM runs with.
        layout: short label of the kinds of layers, for example ``sliding+full``.
        basis: ``exact``, or ``inferred`` for an architecture that was read by its structure.
        stages: the pipeline stages.
        groups: layers that share a block table.
        growths: how each group's blocks grow with the length of a request.
        demand: what the check for one request adds up.
        release: the release whose rules hold.
        blocks_override: ``--num-gpu-blocks-override``.
        vocabulary: tokens of the vocabulary, which size the sampler's logits; None where not known.
    """

    settings: Settings
    layout: str
    basis: Basis
    stages: tuple[PoolStage, ...]
    groups: tuple[Group, ...]
    growths: tuple[Growth, ...]
    demand: Demand
    release: Release
    blocks_override: int | None = None
    vocabulary: int | None = None

    @property
    def bytes_per_block(self) -> tuple[int, ...]:
        """Bytes of one block on a GPU, per stage."""
        return tuple(stage.bytes_per_block for stage in self.stages)

    @property
    def kept_back_bytes(self) -> tuple[int, ...]:
        """Bytes that the check for one request leaves out, per stage: one block where the release reserves
        it.
        """
        if not self.release.reserves_null_block:
            return (0,) * len(self.stages)
        return self.bytes_per_block

    @property
    def kv_bytes_per_token(self) -> float | None:
        """Bytes that one more token of a long request takes on a GPU, over all stages; None where it takes
        none.
        """
        unbounded = [growth.block_size * growth.shards for growth in self.growths if growth.limit is None]
        if not unbounded:
            return None
        return sum(self.bytes_per_block) * sum(1 / tokens for tokens in unbounded)

    def blocks_per_request(self, length: int) -> tuple[int, ...]:
        """Blocks that one request of ``length`` tokens takes, per group."""
        return tuple(growth.blocks(length) for growth in self.growths)

    def need_bytes(self, length: int) -> tuple[int, ...]:
        """Bytes that the check for one request of ``length`` tokens asks for, per stage."""
        return self.demand.bytes(length)

    def num_blocks(self, available: int | Sequence[int]) -> int:
        """Blocks of the pool, the least over stages.

        Args:
            available: bytes for KV on each GPU; one figure, or one per stage.
        """
        if self.blocks_override is not None:
            return self.blocks_override
        if not self.groups:
            return 1
        return min(
            given // stage.bytes_per_block
            for given, stage in zip(self._per_stage(available), self.stages, strict=True)
        )

    def capacity_tokens(self, num_blocks: int) -> int:
        """Tokens that the release's log calls the KV cache size."""
        match self.release.capacity:
            case "concurrency":
                return int(self.max_concurrency(num_blocks) * self.settings.max_model_len)
            case "blocks_per_group":
                size = min((group.spec.block_size for group in self.groups), default=self.settings.block_size)
                return num_blocks // max(len(self.groups), 1) * size * self.settings.dcp
            case "blocks_times_size":
                return num_blocks * self.settings.block_size

    def max_concurrency(self, num_blocks: int) -> float:
        """Requests of the maximum length that the blocks hold at once.

        Raises:
            Refused: the model has no KV cache.
        """
        blocks = sum(self.blocks_per_request(self.settings.max_model_len))
        if not blocks:
            raise Refused("no_kv_cache", "a model without KV cache has no concurrency limit of this kind")
        return num_blocks / blocks

    def fits(self, length: int, available: int | Sequence[int]) -> bool:
        """Whether one request of ``length`` tokens passes the check."""
        return self.demand.fits(length, self.check_bytes(available))

    def longest_length(self, available: int | Sequence[int], limit: int | None = None) -> int:
        """The largest length up to ``limit`` that passes the check; 0 where not one token does.

        Args:
            available: bytes for KV on each GPU; one figure, or one per stage.
            limit: the longest length tried, by default the maximum length in effect.
        """
        top = self.settings.max_model_len if limit is None else limit
        room = self.check_bytes(available)
        fits = self.demand.fits
        if top < 1 or not fits(1, room):
            return 0
        if fits(top, room):
            return top
        low, high = 1, top
        while high - low > 1:
            middle = (low + high) // 2
            if fits(middle, room):
                low = middle
            else:
                high = middle
        return low

    def check_bytes(self, available: int | Sequence[int]) -> tuple[int, ...]:
        """Bytes that the check for one request compares with, per stage."""
        if self.blocks_override is not None and self.release.override_in_check:
            given = tuple(self.blocks_override * size for size in self.bytes_per_block)
        else:
            given = self._per_stage(available)
        if self.release.admission == "whole_model_groups":
            given = (min(given),) * len(given)
        return tuple(have - kept for have, kept in zip(given, self.kept_back_bytes, strict=True))

    def _per_stage(self, available: int | Sequence[int]) -> tuple[int, ...]:
        if isinstance(available, int):
            return (available,) * len(self.stages)
        if len(available) != len(self.stages):
            raise ValueError(f"{len(available)} figures given for {len(self.stages)} pipeline stages")
        return tuple(available)


def plan_pool(
    config: Mapping[str, Any],
    flags: Flags,
    *,
    device: Device,
    release: Release,
    effective_block_size: int | None = None,
) -> Pool:
    """Plan the pool of one server.

    Args:
        config: the parsed config.json. Quantized checkpoints of ModelOpt may keep a ``quantization_config``
            in a file of its own, ``hf_quant_config.json``; it belongs in here, as vLLM reads it.
        flags: what the server was told.
        device: the card.
        release: the vLLM release.
        effective_block_size: the block size that a running server reports, instead of the backend's default.

    Raises:
        Refused: vLLM refuses these flags for this model by arithmetic.
        Unsupported: the core cannot say, of this architecture or of this release.
    """
    model = ModelConfig.read(config, flags.hf_overrides)
    family = family_of(model)
    traits = traits_of(model, family)
    check_release(traits, release)
    resolved = settings_module.resolve(model, traits, flags, device=device, release=release)
    check_encoders(model, flags.tp)
    context = Context(model, resolved, flags, device, release, traits)
    layout = with_draft(family.layers(context), context)
    layout, resolved = blocksize.settle(layout, resolved, release=release, effective=effective_block_size)
    vocabulary = model.text.get("vocab_size")
    return pool_of(
        split_stages(layout, resolved.pp),
        resolved,
        release=release,
        label=layout.label,
        basis=layout.basis,
        blocks_override=flags.num_gpu_blocks_override,
        block_outermost=layout.block_outermost,
        vocabulary=vocabulary if isinstance(vocabulary, int) else None,
    )


def pool_of(
    stages: Sequence[Stage],
    settings: Settings,
    *,
    release: Release,
    label: str,
    basis: Basis = "exact",
    blocks_override: int | None = None,
    block_outermost: bool = False,
    vocabulary: int | None = None,
) -> Pool:
    """Plan the pool of layers that are already known.

    Args:
        stages: each pipeline stage's layer specs with their numbers of layers, in first-seen order.
        settings: what vLLM runs with.
        release: the vLLM release.
        label: short name of the mix of kinds.
        basis: how the layers were found.
        blocks_override: ``--num-gpu-blocks-override``.
        block_outermost: the cache keeps all layers of a block together.
        vocabulary: tokens of the vocabulary.

    Raises:
        Refused: vLLM cannot plan these layers.
    """
    groups = group_layers(stages, hybrid_manager=settings.hybrid_manager, block_outermost=block_outermost)
    mode = MAMBA_MODES.get(release.mamba_need, settings.mamba_cache_mode)
    load = Load(
        max_in_flight_tokens=settings.max_in_flight_tokens,
        max_encoder_tokens=settings.max_num_encoder_input_tokens,
        dcp=settings.dcp,
        mamba_cache_mode=mode,
    )
    planned = tuple(
        PoolStage(
            bytes_per_block(groups, index, block_outermost=block_outermost) if groups else 0,
            tuple(sum(counts[index] for _, counts in group.members) for group in groups),
        )
        for index in range(len(stages))
    )
    if groups and not all(stage.bytes_per_block for stage in planned):
        raise Refused("empty_stage", "a pipeline stage has no layer with KV cache")
    growths = tuple(group.spec.growth(load) for group in groups)
    return Pool(
        settings=settings,
        layout=label,
        basis=basis,
        stages=planned,
        groups=groups,
        growths=growths,
        demand=_demand(planned, growths, count_layers(stages), load, release),
        release=release,
        blocks_override=blocks_override,
        vocabulary=vocabulary,
    )


def _demand(
    stages: Sequence[PoolStage],
    growths: Sequence[Growth],
    layers: CountedLayers,
    load: Load,
    release: Release,
) -> Demand:
    if release.admission == "layers":
        return _demand_of_layers(len(stages), layers, load)
    counted = Counter(growths if release.sums_groups else growths[:1])
    sizes = [stage.bytes_per_block for stage in stages]
    if release.admission == "whole_model_groups":
        sizes = [sum(sizes)] * len(sizes)
    return Demand(tuple(counted), tuple(tuple(size * times for times in counted.values()) for size in sizes))


def _demand_of_layers(stages: int, layers: CountedLayers, load: Load) -> Demand:
    """The sum over layers, each at its own page size, as before whole groups were counted."""
    sums: dict[Growth, list[int]] = {}
    for spec, counts in layers.items():
        row = sums.setdefault(spec.growth(load), [0] * stages)
        for stage, count in enumerate(counts):
            row[stage] += spec.page_bytes * count
    return Demand(tuple(sums), tuple(zip(*sums.values(), strict=True)) if sums else ((),) * stages)


def partition(layers: int, stages: int) -> list[int]:
    """Numbers of hidden layers per pipeline stage: the odd ones go to the stages before the last."""
    sizes = [layers // stages] * stages
    for index in range(2, layers % stages + 2):
        sizes[-index] += 1
    return sizes


def split_stages(layout: Layout, pp: int) -> list[Stage]:
    """Each stage's distinct specs with their numbers of layers."""
    stages: list[Stage] = []
    start = 0
    for size in partition(len(layout.pattern), pp):
        counted: dict[LayerSpec, int] = {}
        for index, count in Counter(layout.pattern[start : start + size]).items():
            for spec in layout.templates[index]:
                counted[spec] = counted.get(spec, 0) + count
        stages.append(list(counted.items()))
        start += size
    if layout.draft:
        last = dict(stages[-1])
        for spec in layout.draft:
            last[spec] = last.get(spec, 0) + 1
        stages[-1] = list(last.items())
    return stages
