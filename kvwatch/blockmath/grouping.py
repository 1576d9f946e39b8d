"""Layers to groups that share a block table, as vLLM's planner forms them.

The input is counted, not listed: for each pipeline stage its distinct layer specs in first-seen order with
their numbers of layers. Layers of one spec stand in stage order, so which of them a strided split takes
follows from counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from kvwatch.blockmath.errors import Refused
from kvwatch.blockmath.specs import (
    FULL_KINDS,
    WINDOW_KINDS,
    Kind,
    LayerSpec,
    ceil_div,
    round_up,
)

Counts = tuple[int, ...]
"""Numbers of layers per pipeline stage."""

Stage = Sequence[tuple[LayerSpec, int]]
"""One stage's distinct specs in first-seen order, with their numbers of layers."""

CountedLayers = dict[LayerSpec, Counts]
"""The whole model's distinct specs in first-seen order."""


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share one block table.

    Attributes:
        spec: the spec that says how many blocks a request takes.
        members: each distinct spec of the group with its numbers of layers per stage.
        uniform_type: the specs differ (in page size, say) but grow alike.
    """

    spec: LayerSpec
    members: tuple[tuple[LayerSpec, Counts], ...]
    uniform_type: bool = False

    @property
    def is_state(self) -> bool:
        """Whether the group holds recurrent states."""
        return self.spec.kind is Kind.MAMBA

    @property
    def num_layers(self) -> int:
        """Layers of the group over all stages."""
        return sum(sum(counts) for _, counts in self.members)

    def page_bytes(self, stage: int) -> int:
        """Bytes of the group's layers in one block of one stage."""
        return sum(spec.page_bytes * counts[stage] for spec, counts in self.members)

    def strided_bytes(self, stage: int) -> int:
        """The same, each page rounded up to its own stride."""
        return sum(round_up(spec.page_bytes, spec.stride) * counts[stage] for spec, counts in self.members)


def count_layers(stages: Sequence[Stage]) -> CountedLayers:
    """Join the stages: each distinct spec with its numbers of layers per stage, in first-seen order."""
    joined: dict[LayerSpec, list[int]] = {}
    for index, stage in enumerate(stages):
        for spec, count in stage:
            joined.setdefault(spec, [0] * len(stages))[index] += count
    return {spec: tuple(counts) for spec, counts in joined.items()}


def group_layers(
    stages: Sequence[Stage], *, hybrid_manager: bool = True, block_outermost: bool = False
) -> tuple[Group, ...]:
    """Split a model's layers into groups.

    Args:
        stages: each pipeline stage's specs with their numbers of layers.
        hybrid_manager: False makes window and chunk layers keep the whole length, like full attention.
        block_outermost: the cache layout keeps all layers of a block together, which lets pages differ in
            size.

    Returns:
        The groups in vLLM's order; none for a model without KV cache.

    Raises:
        Refused: vLLM cannot plan these layers together.
    """
    layers = count_layers(stages)
    if not layers:
        return ()
    if not hybrid_manager:
        layers = _promote_all(layers)
    merged = _merge(list(layers))
    if merged is not None:
        return (Group(merged, ((merged, _add(layers.values())),)),)
    if _is_uniform_type(list(layers)):
        return (_uniform_group(layers),)
    if block_outermost and len({spec.page_bytes for spec in layers}) > 1:
        return _packed_groups(layers)
    try:
        unified = _unify_pages(layers)
    except Refused:
        promoted = _promote_windows_beside_mla(layers)
        if promoted is None:
            raise
        return (_uniform_group(promoted),)
    return _equal_page_groups(unified)


def bytes_per_block(groups: Sequence[Group], stage: int, *, block_outermost: bool = False) -> int:
    """Bytes that one block takes in one stage's pool: the largest group's pages."""
    if not block_outermost:
        return max(group.strided_bytes(stage) for group in groups)
    strides = [spec.stride for group in groups for spec, counts in group.members if counts[stage]]
    return round_up(max(group.page_bytes(stage) for group in groups), math.lcm(*strides))


def _add(counts: Iterable[Counts]) -> Counts:
    return tuple(map(sum, zip(*counts, strict=True)))


def _uniform_group(layers: CountedLayers) -> Group:
    return Group(next(iter(layers)), tuple(layers.items()), uniform_type=True)


def _merge(specs: Sequence[LayerSpec]) -> LayerSpec | None:
    """One spec for all, where full-attention layers may differ in the window they compute; None where they
    differ more.
    """
    first = specs[0]
    if len(specs) == 1:
        return first
    if first.kind is not Kind.FULL:
        return None
    plain = [replace(spec, window=None, chunk=None) for spec in specs]
    if any(spec.kind is not Kind.FULL for spec in specs) or any(spec != plain[0] for spec in plain):
        return None
    windows = {spec.window for spec in specs} - {None}
    chunks = {spec.chunk for spec in specs} - {None}
    if len(windows) > 1 or len(chunks) > 1:
        raise Refused(
            "mixed_windows",
            "All attention layers in the same KV cache group must have the same window size.",
        )
    if windows and chunks:
        return None
    return replace(plain[0], window=next(iter(windows), None), chunk=next(iter(chunks), None))


def _try_merge(specs: Sequence[LayerSpec]) -> LayerSpec | None:
    try:
        return _merge(specs)
    except Refused:
        return None


def _grows_like(spec: LayerSpec) -> tuple[object, ...]:
    """What must be equal for layers to share a block table although their pages differ."""
    if spec.kind in FULL_KINDS:
        return ("full",)
    if spec.kind in WINDOW_KINDS:
        return (spec.kind, spec.window)
    if spec.kind is Kind.MAMBA:
        return (spec.kind, spec.page_bytes, spec.speculative_blocks, spec.checkpoint_blocks, spec.shape[:1])
    return (spec.kind, spec.chunk)


def _is_uniform_type(specs: Sequence[LayerSpec]) -> bool:
    return len({(spec.block_size, spec.dcp_sharded, *_grows_like(spec)) for spec in specs}) == 1


def _promote_all(layers: CountedLayers) -> CountedLayers:
    """Without the hybrid manager: windows and chunks keep the whole length, sharded and replicated layers
    apart.
    """
    promoted: dict[LayerSpec, LayerSpec] = {}
    for sharded in (True, False):
        part = [spec for spec in layers if (spec.dcp_sharded or spec.kind is Kind.MAMBA) is sharded]
        if part:
            promoted |= dict(zip(part, _promote(part), strict=True))
    return _recount((promoted[spec], counts) for spec, counts in layers.items())


def _recount(pairs: Iterable[tuple[LayerSpec, Counts]]) -> CountedLayers:
    joined: CountedLayers = {}
    for spec, counts in pairs:
        joined[spec] = _add([joined[spec], counts]) if spec in joined else counts
    return joined


_PROMOTED_KIND = {Kind.SLIDING_MLA: Kind.MLA, Kind.SLIDING: Kind.FULL, Kind.CHUNKED: Kind.FULL}


def _promote(specs: Sequence[LayerSpec]) -> list[LayerSpec]:
    if _merge(specs) is not None or _is_uniform_type(specs):
        return list(specs)
    full_sizes = {spec.block_size for spec in specs if spec.kind in FULL_KINDS}
    result = list(specs)
    if full_sizes:
        shared = next(iter(full_sizes)) if len(full_sizes) == 1 else None
        result = [_as_full(spec, shared or spec.block_size) for spec in specs]
    if _merge(result) is None and not _is_uniform_type(result):
        raise Refused("hybrid_manager_off", "Failed to promote local KV cache specs to one unified type.")
    return result


def _as_full(spec: LayerSpec, block_size: int) -> LayerSpec:
    kind = _PROMOTED_KIND.get(spec.kind)
    if kind is None:
        return spec
    padded = spec.padded_bytes
    if padded is not None:
        padded = max(padded, spec.unpadded_bytes * block_size // spec.block_size)
    return replace(spec, kind=kind, block_size=block_size, padded_bytes=padded, retained_tokens=0)


def _promote_windows_beside_mla(layers: CountedLayers) -> CountedLayers | None:
    kinds = {spec.kind for spec in layers}
    if kinds & {Kind.SLIDING_MLA, Kind.CHUNKED} or not {Kind.MLA, Kind.SLIDING} <= kinds:
        return None
    try:
        promoted = _recount(zip(_promote(list(layers)), layers.values(), strict=True))
    except Refused:
        return None
    return promoted if _is_uniform_type(list(promoted)) else None


def _unify_pages(layers: CountedLayers) -> CountedLayers:
    """Bring all layers to one page size: longer blocks where that divides, padding where it does not."""
    largest = max(spec.page_bytes for spec in layers)
    return _recount((_unified(spec, largest), counts) for spec, counts in layers.items())


def _unified(spec: LayerSpec, largest: int) -> LayerSpec:
    if spec.page_bytes == largest:
        return spec
    if spec.kind is Kind.MAMBA:
        return replace(spec, padded_bytes=largest)
    if largest % spec.page_bytes == 0:
        longer = spec.with_block_size(spec.block_size * (largest // spec.page_bytes))
        if longer.page_bytes == largest:
            return longer
    elif spec.kind is not Kind.MLA:
        return replace(spec, padded_bytes=largest)
    raise Refused("page_sizes", "page size is not divisible by the maximum page size and cannot be padded.")


def _equal_page_groups(layers: CountedLayers) -> tuple[Group, ...]:
    buckets: list[list[LayerSpec]] = []
    for spec in layers:
        for bucket in buckets:
            if bucket[0].kind is spec.kind and _try_merge([*bucket, spec]) is not None:
                bucket.append(spec)
                break
        else:
            buckets.append([spec])
    sizes = [sum(sum(layers[spec]) for spec in bucket) for bucket in buckets]
    size = max(sizes) if max(sizes) < min(sizes) * 1.5 else min(sizes)
    groups: list[Group] = []
    for bucket, count in zip(buckets, sizes, strict=True):
        merged = _merge(bucket)
        assert merged is not None
        runs = [layers[spec] for spec in bucket]
        ways = ceil_div(count, size)
        groups += [Group(merged, ((merged, _stride(runs, way, ways)),)) for way in range(ways)]
    return tuple(groups)


def _stride(runs: Sequence[Counts], way: int, ways: int) -> Counts:
    """How many of a list's items, per stage, a stride takes: the list is the runs one after another, each
    by stage.
    """
    taken = [0] * len(runs[0])
    start = 0
    for run in runs:
        for stage, end in enumerate(accumulate(run, initial=start)):
            if stage:
                taken[stage - 1] += _hits(end, way, ways) - _hits(start, way, ways)
            start = end
    return tuple(taken)


def _hits(end: int, way: int, ways: int) -> int:
    """Positions below ``end`` that leave the remainder ``way``."""
    return (end - way + ways - 1) // ways


def _packed_groups(layers: CountedLayers) -> tuple[Group, ...]:
    """Groups for layouts that keep all layers of a block together: pages of several sizes lie side by
    side.
    """
    buckets: list[CountedLayers] = []
    for spec, counts in layers.items():
        alike = next((part for part in buckets if _is_uniform_type([*part, spec])), None)
        if alike is None:
            buckets.append({spec: counts})
        else:
            alike[spec] = counts
    packed = [_Packed.of(part) for part in buckets]
    floor = max((bucket.repeats for bucket in packed if bucket.balanced and len(bucket.pages) > 1), default=0)
    repeats = (
        _least_padding([bucket.repeats for bucket in packed if bucket.balanced], floor) if floor else None
    )

    def ways(bucket: _Packed) -> int:
        return ceil_div(bucket.repeats, repeats) if bucket.balanced and repeats else 1

    def is_state(bucket: _Packed) -> bool:
        kind = bucket.first.kind
        return kind in (Kind.MAMBA, Kind.RING) or (repeats is None and kind in WINDOW_KINDS)

    anchor = max(bucket.widest(bucket.num_layers if is_state(bucket) else ways(bucket)) for bucket in packed)
    groups: list[Group] = []
    for bucket in packed:
        parts = ways(bucket)
        if is_state(bucket):
            states = max(anchor // bucket.first.page_bytes, 1)
            parts = max(parts, ceil_div(bucket.num_layers, states))
        groups += bucket.split(parts)
    return tuple(groups)


@dataclass(frozen=True, slots=True)
class _Packed:
    """Layers that grow alike, by page size."""

    layers: CountedLayers
    pages: dict[int, CountedLayers]

    @classmethod
    def of(cls, layers: CountedLayers) -> _Packed:
        pages: dict[int, CountedLayers] = {}
        for spec, counts in layers.items():
            pages.setdefault(spec.page_bytes, {})[spec] = counts
        return cls(layers, pages)

    @property
    def first(self) -> LayerSpec:
        return next(iter(self.layers))

    @property
    def num_layers(self) -> int:
        return sum(map(sum, self.layers.values()))

    def _sizes(self) -> list[int]:
        return [sum(map(sum, part.values())) for part in self.pages.values()]

    @property
    def balanced(self) -> bool:
        return len(set(self._sizes())) == 1

    @property
    def repeats(self) -> int:
        return max(self._sizes())

    def widest(self, ways: int) -> int:
        """Page bytes of the largest of the groups that the bucket splits into."""
        return sum(ceil_div(size, ways) * page for size, page in zip(self._sizes(), self.pages, strict=True))

    def split(self, ways: int) -> list[Group]:
        if ways == 1:
            return [_uniform_group(self.layers)]
        if not self.balanced:
            raise Refused("kv_layout", "Some layers are not assigned to any group.")
        runs = {next(iter(part)): _add(part.values()) for part in self.pages.values()}
        return [
            Group(
                self.first,
                tuple((spec, _stride([run], way, ways)) for spec, run in runs.items()),
                uniform_type=True,
            )
            for way in range(ways)
        ]


def _least_padding(values: Sequence[int], floor: int) -> int:
    """The divisor not below ``floor`` that pads the values up by the least; the largest such divisor."""
    top = max(values)
    if floor > top:
        return floor
    return min(range(top, floor - 1, -1), key=lambda divisor: sum(-value % divisor for value in values))
