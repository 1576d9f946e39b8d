"""What a family's function gets and gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from kvwatch.blockmath.errors import Unsupported
from kvwatch.blockmath.modelconfig import ModelConfig, Section
from kvwatch.blockmath.settings import DTYPE_BYTES, Settings, Traits, total_heads
from kvwatch.blockmath.specs import Kind, LayerSpec

SHARED: Final = 0
"""Stands for the server's own block size in a spec that is not placed yet."""

Basis = Literal["exact", "inferred"]

PER_TOKEN_HEAD: Final = frozenset({"int8_per_token_head", "fp8_per_token_head", "int4_per_token_head"})
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

    @property
    def text(self) -> Section:
        """The language model's part of config.json."""
        return self.config.text

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
        pattern: the template of each hidden layer; -1 for a layer without cache.
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
    basis: Basis = "exact"


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
    """KV heads on one rank: split, or replicated past one per rank."""
    return max(1, heads // tp)


def attention(
    settings: Settings,
    heads: int,
    size: int,
    *,
    size_v: int | None = None,
    window: int | None = None,
    chunk: int | None = None,
    kind: Kind | None = None,
    cache: str | None = None,
) -> LayerSpec:
    """The spec of a standard attention layer on one rank, at the server's block size.

    Args:
        settings: what vLLM runs with.
        heads: KV heads of the whole model's layer.
        size: head size of K.
        size_v: head size of V where it differs.
        window: sliding window in tokens.
        chunk: chunk in tokens.
        kind: only where window and chunk do not say it.
        cache: cache element type of this layer where it is not the model's.
    """
    value_size = size if size_v is None else size_v
    element = cache or settings.cache_element
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
    )


def content_bytes(size: int, size_v: int, element: str) -> int:
    """Bytes of K and V of one head and token.

    Raises:
        Unsupported: the element type is not known.
    """
    if element in PER_TOKEN_HEAD:
        data = (size + size_v) // 2 if element.startswith("int4") else size + size_v
        return data + 8
    if element == "nvfp4":
        return size // 2 + size // 16 + size_v // 2 + size_v // 16
    item = DTYPE_BYTES.get(element)
    if item is None:
        raise Unsupported("cache_dtype", f"KV cache of type {element!r} is not known here")
    return (size + size_v) * item


def plain(_: ModelConfig) -> Traits:
    """Traits of a decoder with nothing special."""
    return Traits()


def uniform(context: Context, spec: LayerSpec, label: str, layers: int | None = None) -> Layout:
    """A layout whose layers are all alike."""
    count = context.num_layers if layers is None else layers
    return Layout(label, ((spec,),), (0,) * count, token_bytes=spec.state_bytes)


def values(text: Section, name: str) -> list[Any] | None:
    """A list field, or None where it is absent."""
    value = text.get(name)
    return list(value) if isinstance(value, list | tuple) else None
