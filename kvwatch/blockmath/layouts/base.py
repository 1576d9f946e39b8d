"""What a family's function gets and gives."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from kvwatch.blockmath.backends import Backend, dense_backend
from kvwatch.blockmath.device import Device
from kvwatch.blockmath.errors import Refused, Unsupported
from kvwatch.blockmath.flags import Flags
from kvwatch.blockmath.modelconfig import ModelConfig, Section
from kvwatch.blockmath.releases import Release
from kvwatch.blockmath.settings import DTYPE_BYTES, Settings, Traits, total_heads
from kvwatch.blockmath.specs import Kind, LayerSpec, ceil_div

SHARED: Final = 0
"""Stands for the server's own block size in a spec that is not placed yet."""

Basis = Literal["exact", "inferred"]

PER_TOKEN_HEAD: Final = frozenset({"int8_per_token_head", "fp8_per_token_head", "int4_per_token_head"})
PACKED_BITS: Final[Mapping[str, tuple[int, int]]] = {
    "turboquant_k8v4": (8, 4),
    "turboquant_4bit_nc": (4, 4),
    "turboquant_k3v4_nc": (3, 4),
    "turboquant_3bit_nc": (3, 3),
}
"""Bits of a key's and a value's element in packed caches."""

KV_HEAD_FIELDS: Final = (
    "n_head_kv",
    "num_kv_heads",
    "num_key_value_heads",
    "multi_query_group_num",
    "num_attention_groups",
)


@dataclass(frozen=True, slots=True)
class Context:
    """What a family's function may look at."""

    config: ModelConfig
    settings: Settings
    flags: Flags
    device: Device
    release: Release
    traits: Traits

    @property
    def text(self) -> Section:
        """The language model's part of config.json."""
        return self.config.text

    def with_settings(self, **changes: Any) -> Context:
        """A copy with some settings replaced."""
        return replace(self, settings=replace(self.settings, **changes))

    @property
    def image_prefix(self) -> bool:
        """Tokens of one image see each other, whatever their order."""
        return self.traits.image_prefix

    @property
    def disable_window(self) -> bool:
        """Windows are taken out of the configuration."""
        return bool(self.flags.disable_sliding_window)

    @property
    def num_layers(self) -> int:
        """Hidden layers of the language model."""
        return self.text.whole("num_hidden_layers")


@dataclass(frozen=True, slots=True)
class Layout:
    """A model's KV layers on one rank, before block sizes are settled.

    Attributes:
        label: short name of the mix of kinds.
        templates: the specs that one layer registers, for each different layer.
        pattern: the template of each hidden layer.
        draft: specs that a draft model adds on the last stage.
        token_bytes: bytes of one token in one attention layer as the model-wide head count and size give
            them; sizes the blocks of hybrid models.
        basis: ``inferred`` where the architecture is unknown and its structure was read instead.
    """

    label: str
    templates: tuple[tuple[LayerSpec, ...], ...]
    pattern: Sequence[int]
    draft: tuple[LayerSpec, ...] = ()
    token_bytes: int | None = None
    skipped_token_bytes: int | None = None
    block_outermost: bool = False
    basis: Basis = "exact"

    @property
    def backends(self) -> tuple[Backend, ...]:
        """The attention backends in use, in layer order."""
        found = dict.fromkeys(spec.backend for specs in self.templates for spec in specs)
        return tuple(backend for backend in found if backend is not None)


@dataclass(frozen=True, slots=True)
class Family:
    """How the layers of some architectures are found.

    Attributes:
        layers: builds the layout.
        traits: what the architectures are.
    """

    layers: Callable[[Context], Layout]
    traits: Callable[[ModelConfig], Traits]


def head_size(text: Section) -> int:
    """Model-wide head size.

    Raises:
        Unsupported: config.json does not say.
    """
    stated = text.get("head_dim")
    if isinstance(stated, int) and stated > 0:
        return stated
    stated = text.get("hidden_size_per_head")
    if isinstance(stated, int):
        return stated
    heads = total_heads(text)
    if not heads:
        raise Unsupported(
            "incomplete_config", "config.json: neither head_dim nor num_attention_heads is given"
        )
    return text.whole("hidden_size") // heads


def kv_heads(text: Section) -> int:
    """Model-wide number of KV heads; the query heads' where nothing is said."""
    stated = text.first(*KV_HEAD_FIELDS)
    return int(stated) if stated is not None else total_heads(text)


def heads_per_rank(heads: int, tp: int) -> int:
    """KV heads on one rank: split, or replicated past one per rank.

    Raises:
        Refused: neither number divides the other.
    """
    if (heads % tp if heads >= tp else tp % heads) != 0:
        raise Refused("indivisible_heads", f"{heads} KV heads cannot be split over tensor parallel size {tp}")
    return max(1, heads // tp)


def attention(
    context: Context,
    heads: int,
    size: int,
    *,
    size_v: int | None = None,
    window: int | None = None,
    chunk: int | None = None,
    kind: Kind | None = None,
    cache: str | None = None,
    sinks: bool = False,
) -> LayerSpec:
    """The spec of a standard attention layer on one rank, at the server's block size.

    Args:
        context: what vLLM runs with.
        heads: KV heads of the whole model's layer.
        size: head size of K.
        size_v: head size of V where it differs.
        window: sliding window in tokens.
        chunk: chunk in tokens.
        kind: only where window and chunk do not say it.
        cache: the layer's cache type as a flag value, where it is not the model's.
        sinks: the layer has attention sinks.

    Raises:
        Unsupported: the cache type is not known.
    """
    settings = context.settings
    flag = settings.cache_dtype if cache is None else cache
    element = settings.dtype if flag == "auto" else flag
    value_size = size if size_v is None else size_v
    local_heads = heads_per_rank(heads, settings.tp)
    if kind is None:
        kind = Kind.SLIDING if window else Kind.CHUNKED if chunk else Kind.FULL
    return LayerSpec(
        kind=kind,
        block_size=SHARED,
        state_bytes=local_heads * content_bytes(size, value_size, element),
        window=window,
        chunk=chunk,
        shape=(local_heads, size, value_size, element),
        backend=dense_backend(
            context.device,
            head_size=size,
            dtype=settings.dtype,
            cache=flag,
            sinks=sinks,
            image_prefix=context.image_prefix,
            block_size=settings.block_size if settings.block_size_given else None,
        ),
    )


def content_bytes(size: int, size_v: int, element: str) -> int:
    """Bytes of K and V of one head and token.

    Raises:
        Unsupported: the element type is not known.
    """
    if element in PER_TOKEN_HEAD:
        data = (size + size_v) // 2 if element.startswith("int4") else size + size_v
        return data + 8
    if element in PACKED_BITS:
        return _packed_bytes(size, size_v, *PACKED_BITS[element])
    if element == "nvfp4":
        return size // 2 + size // 16 + size_v // 2 + size_v // 16
    item = DTYPE_BYTES.get(element)
    if item is None:
        raise Unsupported("cache_dtype", f"KV cache of type {element!r} is not known here")
    return (size + size_v) * item


def _packed_bytes(size: int, size_v: int, key_bits: int, value_bits: int) -> int:
    """Bytes of a packed K and V: quantized keys carry a norm, values a scale and a zero point; an even
    number.
    """
    keys = size if key_bits == 8 else ceil_div(size * key_bits, 8) + 2
    slot = keys + ceil_div(size_v * value_bits, 8) + 4
    return slot + slot % 2


def plain(_: ModelConfig) -> Traits:
    """Traits of a decoder with nothing special."""
    return Traits()


_LABELS: Final = (
    (Kind.MAMBA, "mamba"),
    (Kind.RING, "ring"),
    (Kind.CROSS, "cross"),
    (Kind.CHUNKED, "chunked"),
    (Kind.SLIDING_MLA, "sliding-mla"),
    (Kind.SLIDING, "sliding"),
    (Kind.MLA, "mla"),
    (Kind.FULL, "full"),
)

Registered = LayerSpec | tuple[LayerSpec, ...] | None
"""What one hidden layer registers: one cache, several, or none."""


def layout_of(
    layers: Sequence[Registered],
    *,
    label: str | None = None,
    token_bytes: int | None = None,
    draft: Sequence[LayerSpec] = (),
    skipped_token_bytes: int | None = None,
    block_outermost: bool = False,
) -> Layout:
    """A layout from what each hidden layer registers; layers that are one and the same object share a
    template.

    Args:
        layers: one entry per hidden layer.
        label: where the kinds do not say enough.
        token_bytes: bytes of a token in one attention layer, for hybrid models.
        draft: specs that a draft model adds.
        skipped_token_bytes: bytes of a token in one layer whose cache is left unquantized.
        block_outermost: the cache keeps all layers of a block together.
    """
    places: dict[int, int] = {}
    templates: list[tuple[LayerSpec, ...]] = []
    pattern: list[int] = []
    for entry in layers:
        place = places.get(id(entry))
        if place is None:
            specs = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
            place = places[id(entry)] = len(templates)
            templates.append(specs)
        pattern.append(place)
    kinds = {spec.kind for specs in templates for spec in specs}
    return Layout(
        label=label or label_of(kinds),
        templates=tuple(templates),
        pattern=pattern,
        draft=tuple(draft),
        token_bytes=token_bytes,
        skipped_token_bytes=skipped_token_bytes,
        block_outermost=block_outermost,
    )


def label_of(kinds: Collection[Kind]) -> str:
    """Short name of a mix of kinds."""
    if not kinds or set(kinds) == {Kind.MAMBA}:
        return "attention-free" if kinds else "no-cache"
    return "+".join(name for kind, name in _LABELS if kind in kinds)


def values(text: Section, name: str) -> list[Any] | None:
    """A list field, or None where it is absent."""
    value = text.get(name)
    return list(value) if isinstance(value, list | tuple) else None
