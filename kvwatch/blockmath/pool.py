"""From config.json and flags to a pool. What does not depend on lengths is worked out once for many plans."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from kvwatch.blockmath import blocksize
from kvwatch.blockmath import settings as settings_module
from kvwatch.blockmath.blockpool import Pool, PoolStage
from kvwatch.blockmath.demand import Demand
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

__all__ = ["Planner", "Pool", "PoolStage", "Shape", "plan_pool", "shape_of"]

MAMBA_MODES: Final = {"one": "none", "length": "all"}
"""The cache mode that counts state blocks as releases before the modes did."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's groups under some flags, whatever the lengths.

    Attributes:
        label: short name of the kinds of layers.
        basis: how the layers were found.
        stages: the pipeline stages.
        groups: layers that share a block table.
        layers: the distinct layers before they were grouped.
        block_size: tokens in a block of attention.
        mamba_block_size: tokens that a state block stands for.
    """

    label: str
    basis: Basis
    stages: tuple[PoolStage, ...]
    groups: tuple[Group, ...]
    layers: CountedLayers
    block_size: int
    mamba_block_size: int
    _needs: dict[tuple[object, ...], tuple[tuple[Growth, ...], Demand]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def pool(
        self,
        settings: Settings,
        *,
        release: Release,
        blocks_override: int | None = None,
        vocabulary: int | None = None,
    ) -> Pool:
        """The pool at some lengths."""
        growths, demand = self._need(settings, release)
        return Pool(
            settings=settings,
            layout=self.label,
            basis=self.basis,
            stages=self.stages,
            groups=self.groups,
            growths=growths,
            demand=demand,
            release=release,
            blocks_override=blocks_override,
            vocabulary=vocabulary,
        )

    def _need(self, settings: Settings, release: Release) -> tuple[tuple[Growth, ...], Demand]:
        """How the groups grow with a request, and what that asks of the pool; found once for each load."""
        mode = MAMBA_MODES.get(release.mamba_need, settings.mamba_cache_mode)
        tokens, encoder = settings.max_in_flight_tokens, settings.max_num_encoder_input_tokens
        key = (tokens, encoder, settings.dcp, mode, release.admission, release.sums_groups)
        if key not in self._needs:
            load = Load(
                max_in_flight_tokens=tokens,
                max_encoder_tokens=encoder,
                dcp=settings.dcp,
                mamba_cache_mode=mode,
            )
            specs = {id(group.spec): group.spec for group in self.groups}
            known = {name: spec.growth(load) for name, spec in specs.items()}
            growths = tuple(known[id(group.spec)] for group in self.groups)
            self._needs[key] = growths, self._demand(growths, load, release)
        return self._needs[key]

    def _demand(self, growths: Sequence[Growth], load: Load, release: Release) -> Demand:
        if release.admission == "layers":
            return self._demand_of_layers(load)
        sizes = [stage.bytes_per_block for stage in self.stages]
        if release.admission == "whole_model_groups":
            sizes = [sum(sizes)] * len(sizes)
        counted = Counter(growths if release.sums_groups else growths[:1])
        rows = {growth: [size * times for size in sizes] for growth, times in counted.items()}
        return Demand.of(rows, len(sizes))

    def _demand_of_layers(self, load: Load) -> Demand:
        """The sum over layers, each at its own page size, as before whole groups were counted."""
        rows: dict[Growth, list[int]] = {}
        for spec, counts in self.layers.items():
            row = rows.setdefault(spec.growth(load), [0] * len(self.stages))
            for stage, count in enumerate(counts):
                row[stage] += spec.page_bytes * count
        return Demand.of(rows, len(self.stages))


def shape_of(
    stages: Sequence[Stage],
    settings: Settings,
    *,
    label: str,
    basis: Basis = "exact",
    block_outermost: bool = False,
) -> Shape:
    """Group layers that are already known.

    Args:
        stages: each pipeline stage's layer specs with their numbers of layers, in first-seen order.
        settings: what vLLM runs with.
        label: short name of the mix of kinds.
        basis: how the layers were found.
        block_outermost: the cache keeps all layers of a block together.

    Raises:
        Refused: vLLM cannot plan these layers.
    """
    groups = group_layers(stages, hybrid_manager=settings.hybrid_manager, block_outermost=block_outermost)
    planned = tuple(
        PoolStage(
            bytes_per_block(groups, index, block_outermost=block_outermost) if groups else 0,
            tuple(sum(counts[index] for _, counts in group.members) for group in groups),
        )
        for index in range(len(stages))
    )
    if groups and not all(stage.bytes_per_block for stage in planned):
        raise Refused("empty_stage", "a pipeline stage has no layer with KV cache")
    return Shape(
        label=label,
        basis=basis,
        stages=planned,
        groups=groups,
        layers=count_layers(stages),
        block_size=settings.block_size,
        mamba_block_size=settings.mamba_block_size,
    )


class Planner:
    """Plans pools of one model on one kind of card under one release.

    Args:
        config: the parsed config.json. Quantized checkpoints of ModelOpt may keep a ``quantization_config``
            in a file of its own, ``hf_quant_config.json``; it belongs in here, as vLLM reads it.
        device: the card.
        release: the vLLM release.
        overrides: ``--hf-overrides``, which the flags of every plan then have to name as well.

    Raises:
        Unsupported: the core cannot say, of this architecture or of this release.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        device: Device,
        release: Release,
        overrides: Mapping[str, Any] | None = None,
    ) -> None:
        self._overrides = overrides or None
        self._device = device
        self._release = release
        self._model = ModelConfig.read(config, overrides)
        self._family = family_of(self._model)
        self._traits = traits_of(self._model, self._family)
        check_release(self._traits, release)
        vocabulary = self._model.text.get("vocab_size")
        self._vocabulary = vocabulary if isinstance(vocabulary, int) else None
        self._lengths: dict[bool, float] = {}
        self._shapes: dict[tuple[object, ...], Shape] = {}

    def plan(self, flags: Flags, *, effective_block_size: int | None = None) -> Pool:
        """Plan the pool of one server.

        Args:
            flags: what the server was told.
            effective_block_size: the block size that a running server reports, instead of the backend's
                default.

        Raises:
            Refused: vLLM refuses these flags for this model by arithmetic.
            Unsupported: the core cannot say.
            ValueError: the flags override config.json in another way than this planner does.
        """
        if (flags.hf_overrides or None) != self._overrides:
            raise ValueError("a planner holds one model: its overrides and those of the flags differ")
        settings = settings_module.resolve(
            self._model,
            self._traits,
            flags,
            device=self._device,
            release=self._release,
            stated_length=self._stated_length(flags),
        )
        key = _shape_key(settings, flags, effective_block_size)
        shape = self._shapes.get(key)
        if shape is None:
            shape = self._shapes[key] = self._shape(settings, flags, effective_block_size)
        if (shape.block_size, shape.mamba_block_size) != (settings.block_size, settings.mamba_block_size):
            settings = replace(settings, block_size=shape.block_size, mamba_block_size=shape.mamba_block_size)
        return shape.pool(
            settings,
            release=self._release,
            blocks_override=flags.num_gpu_blocks_override,
            vocabulary=self._vocabulary,
        )

    def _stated_length(self, flags: Flags) -> float:
        without_window = bool(flags.disable_sliding_window)
        length = self._lengths.get(without_window)
        if length is None:
            length = self._lengths[without_window] = settings_module.derived_length(self._model, flags)
        return length

    def _shape(self, settings: Settings, flags: Flags, effective: int | None) -> Shape:
        check_encoders(self._model, flags.tp)
        context = Context(self._model, settings, flags, self._device, self._release, self._traits)
        layout = with_draft(self._family.layers(context), context)
        layout, settled = blocksize.settle(layout, settings, release=self._release, effective=effective)
        return shape_of(
            split_stages(layout, settings.pp),
            settled,
            label=layout.label,
            basis=layout.basis,
            block_outermost=layout.block_outermost,
        )


def _shape_key(settings: Settings, flags: Flags, effective: int | None) -> tuple[object, ...]:
    """All that layers and groups depend on."""
    drafting = flags.speculative_config
    return (
        settings.dtype,
        settings.cache_dtype,
        settings.block_size,
        settings.block_size_given,
        settings.mamba_block_size,
        settings.mamba_cache_mode,
        settings.hybrid_manager,
        settings.tp,
        settings.pp,
        settings.dcp,
        settings.skip_layers,
        settings.conv_state_dtype,
        settings.ssm_state_dtype,
        flags.disable_sliding_window,
        json.dumps(drafting, sort_keys=True, default=str) if drafting else None,
        effective,
    )


def plan_pool(
    config: Mapping[str, Any],
    flags: Flags,
    *,
    device: Device,
    release: Release,
    effective_block_size: int | None = None,
) -> Pool:
    """Plan the pool of one server; see Planner for many of one model.

    Args:
        config: the parsed config.json, with ModelOpt's ``hf_quant_config.json`` as its
            ``quantization_config``.
        flags: what the server was told.
        device: the card.
        release: the vLLM release.
        effective_block_size: the block size that a running server reports, instead of the backend's default.

    Raises:
        Refused: vLLM refuses these flags for this model by arithmetic.
        Unsupported: the core cannot say, of this architecture or of this release.
    """
    planner = Planner(config, device=device, release=release, overrides=flags.hf_overrides)
    return planner.plan(flags, effective_block_size=effective_block_size)


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
