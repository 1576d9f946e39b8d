"""The pool of KV blocks: bytes per block, blocks, tokens, and what a request of some length needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvwatch.blockmath import blocksize
from kvwatch.blockmath import settings as settings_module
from kvwatch.blockmath.device import Device
from kvwatch.blockmath.errors import Refused
from kvwatch.blockmath.families import UNSPLIT, family_of
from kvwatch.blockmath.flags import Flags
from kvwatch.blockmath.grouping import Group, Stage, bytes_per_block, group_layers
from kvwatch.blockmath.layouts.base import Basis, Context, Layout
from kvwatch.blockmath.modelconfig import ModelConfig
from kvwatch.blockmath.releases import Release
from kvwatch.blockmath.settings import Settings
from kvwatch.blockmath.specs import LayerSpec, Load


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
class Pool:
    """How a server's KV memory is cut into blocks.

    Attributes:
        settings: what vLLM runs with.
        layout: short label of the kinds of layers, for example ``sliding+full``.
        basis: ``exact``, or ``inferred`` for an architecture that was read by its structure.
        stages: the pipeline stages.
        groups: layers that share a block table.
        load: what a request brings along beside its length.
        release: the release whose rules hold.
        blocks_override: ``--num-gpu-blocks-override``.
        vocabulary: tokens of the vocabulary, which size the sampler's logits; None where not known.
    """

    settings: Settings
    layout: str
    basis: Basis
    stages: tuple[PoolStage, ...]
    groups: tuple[Group, ...]
    load: Load
    release: Release
    blocks_override: int | None = None
    vocabulary: int | None = None

    @property
    def bytes_per_block(self) -> tuple[int, ...]:
        """Bytes of one block on a GPU, per stage."""
        return tuple(stage.bytes_per_block for stage in self.stages)

    @property
    def kept_back_bytes(self) -> tuple[int, ...]:
        """Bytes that the check for one request leaves out, per stage: one block on releases that reserve
        it.
        """
        if not self.release.reserves_null_block:
            return (0,) * len(self.stages)
        return self.bytes_per_block

    @property
    def kv_bytes_per_token(self) -> float | None:
        """Bytes that one more token of a long request takes, over all stages; None where lengths cost in
        steps only.
        """
        near, far = (1 << 40), (1 << 40) + (1 << 30)
        grown = sum(self.need_bytes(far)) - sum(self.need_bytes(near))
        return grown / (far - near) if grown else None

    def blocks_per_request(self, length: int) -> tuple[int, ...]:
        """Blocks that one request of ``length`` tokens takes, per group."""
        return tuple(group.blocks(length, self.load) for group in self.groups)

    def need_bytes(self, length: int) -> tuple[int, ...]:
        """Bytes that the check for one request of ``length`` tokens asks for, per stage."""
        blocks = self.blocks_per_request(length)
        total = sum(blocks) if self.release.sums_groups else sum(blocks[:1])
        return tuple(stage.bytes_per_block * total for stage in self.stages)

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
        return all(
            need <= left
            for need, left in zip(self.need_bytes(length), self.check_bytes(available), strict=True)
        )

    def longest_length(self, available: int | Sequence[int], limit: int | None = None) -> int:
        """The largest length up to ``limit`` that passes the check; 0 where not one token does.

        Args:
            available: bytes for KV on each GPU; one figure, or one per stage.
            limit: the longest length tried, by default the maximum length in effect.
        """
        top = self.settings.max_model_len if limit is None else limit
        if top < 1 or not self.fits(1, available):
            return 0
        if self.fits(top, available):
            return top
        low, high = 1, top
        while high - low > 1:
            middle = (low + high) // 2
            if self.fits(middle, available):
                low = middle
            else:
                high = middle
        return low

    def check_bytes(self, available: int | Sequence[int]) -> tuple[int, ...]:
        """Bytes that the check for one request compares with, per stage."""
        if self.blocks_override is not None and self.release.override_in_check:
            given = tuple(self.blocks_override * stage.bytes_per_block for stage in self.stages)
        else:
            given = self._per_stage(available)
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
        config: the parsed config.json.
        flags: what the server was told.
        device: the card.
        release: the vLLM release.
        effective_block_size: the block size that a running server reports, instead of the backend's default.

    Raises:
        Refused: vLLM refuses these flags for this model by arithmetic.
        Unsupported: the core cannot say.
    """
    model = ModelConfig.read(config, flags.hf_overrides)
    family = family_of(model)
    traits = family.traits(model)
    if model.architecture in UNSPLIT:
        traits = replace(traits, pipeline=False)
    resolved = settings_module.resolve(model, traits, flags, device=device, release=release)
    layout = family.layers(Context(model, resolved, flags, device, release, traits))
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

    Raises:
        Refused: vLLM cannot plan these layers.
    """
    groups = group_layers(stages, hybrid_manager=settings.hybrid_manager, block_outermost=block_outermost)
    load = Load(
        max_in_flight_tokens=settings.max_in_flight_tokens,
        max_encoder_tokens=settings.max_num_encoder_input_tokens,
        dcp=settings.dcp,
        mamba_cache_mode=settings.mamba_cache_mode,
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
    return Pool(settings, label, basis, planned, groups, load, release, blocks_override, vocabulary)


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
