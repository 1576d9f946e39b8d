"""Architectures whose attention layers differ among themselves in more than the window."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final

from kvwatch.blockmath.layouts import layertypes
from kvwatch.blockmath.layouts.base import (
    Context,
    Layout,
    Registered,
    attention,
    head_size,
    kv_heads,
    layout_of,
    values,
)
from kvwatch.blockmath.modelconfig import ModelConfig
from kvwatch.blockmath.settings import Traits, total_heads
from kvwatch.blockmath.specs import Kind, LayerSpec

GEMMA4_IMAGE_TOKENS: Final = 2496
"""Tokens of the costliest item of Gemma 4's multimodal models (a video), which must fit in one batch."""


def gemma3n(context: Context) -> Layout:
    """Window and full layers; the last ones read the cache of earlier layers."""
    text = context.text
    own = context.num_layers - text.whole("num_kv_shared_layers", 0)
    types = layertypes.layer_types(text) or [layertypes.FULL] * context.num_layers
    heads, size = kv_heads(text), head_size(text)
    kinds = {
        layertypes.SLIDING: attention(context, heads, size, window=_window(context)),
        layertypes.FULL: attention(context, heads, size),
    }
    return layout_of([kinds[name] if index < own else None for index, name in enumerate(types)])


def _window(context: Context) -> int | None:
    return None if context.disable_window else layertypes.window(context.text)


def gemma4(context: Context) -> Layout:
    """Window layers, and full layers with wider heads and perhaps fewer of them; the last ones may share
    caches.
    """
    text = context.text
    types = layertypes.layer_types(text) or []
    own = context.num_layers - text.whole("num_kv_shared_layers", 0)
    global_size = int(text.get("global_head_dim") or 512)
    shared_heads = text.get("num_global_key_value_heads")
    if not text.get("attention_k_eq_v"):
        shared_heads = None
    kinds: dict[str, Registered] = {
        layertypes.SLIDING: attention(context, kv_heads(text), head_size(text), window=_window(context)),
        layertypes.FULL: attention(context, int(shared_heads or kv_heads(text)), global_size),
    }
    return layout_of(
        [kinds[name] if index < own else None for index, name in enumerate(types[: context.num_layers])]
    )


def gemma4_image_traits(config: ModelConfig) -> Traits:
    """Images whose tokens see each other must fit in one batch."""
    bidirectional = config.text.get("use_bidirectional_attention") == "vision"
    return Traits(image_prefix=bidirectional, image_tokens=GEMMA4_IMAGE_TOKENS if bidirectional else None)


def image_prefix_traits(_: ModelConfig) -> Traits:
    """Tokens of an image see each other."""
    return Traits(image_prefix=True)


def llama4(context: Context) -> Layout:
    """Chunked attention, with full attention in the layers without rotary positions."""
    text, count = context.text, context.num_layers
    rotary = values(text, "no_rope_layers")
    if not rotary:
        interval = text.whole("no_rope_layer_interval", 4)
        rotary = [int((index + 1) % interval != 0) for index in range(count)]
    chunk = text.get("attention_chunk_size")
    heads, size = kv_heads(text), head_size(text)
    chunked = attention(context, heads, size, chunk=chunk)
    full = attention(context, heads, size)
    return layout_of([chunked if rotates and chunk else full for rotates in rotary[:count]])


def llama4_traits(config: ModelConfig) -> Traits:
    """Chunks turn the hybrid manager off by default."""
    return Traits(chunked_attention=bool(config.text.get("attention_chunk_size")))


def nemotron_nas(context: Context) -> Layout:
    """Layers found by search: each with its own number of KV heads, or without attention."""
    text = context.text
    size = head_size(text)
    heads = total_heads(text)
    specs: dict[int, Registered] = {}

    def registered(block: Mapping[str, Any]) -> Registered:
        part = block["attention"]
        if part.get("no_op") or part.get("replace_with_linear"):
            return None
        share = int(part["n_heads_in_group"])
        return specs.setdefault(share, attention(context, heads // share, size))

    return layout_of([registered(block) for block in values(text, "block_configs") or []])


def whisper(context: Context) -> Layout:
    """A decoder whose layers attend to themselves and to the encoder's output."""
    text = context.text
    heads = text.whole("decoder_attention_heads")
    size = text.whole("d_model") // heads
    pair = (
        attention(context, heads, size),
        attention(context, heads, size, kind=Kind.CROSS),
    )
    return layout_of([pair] * text.whole("decoder_layers"))


def encoder_decoder_traits(_: ModelConfig) -> Traits:
    """Cross attention, on one pipeline stage."""
    return Traits(encoder_decoder=True, pipeline=False)


def falcon(context: Context) -> Layout:
    """Multi-query or grouped attention; with rotary or ALiBi positions the cache keeps the model's type."""
    text = context.text
    heads = total_heads(text)
    if text.get("new_decoder_architecture"):
        heads = int(text.first("num_kv_heads", "n_head_kv") or heads)
    elif text.get("multi_query"):
        heads = 1
    plain = text.get("alibi") or text.get("rotary", True)
    spec = attention(
        context, heads, text.whole("hidden_size") // total_heads(text), cache="auto" if plain else None
    )
    return layout_of([spec] * context.num_layers)


def dbrx(context: Context) -> Layout:
    """DBRX keeps its attention's fields in a part of their own."""
    text = context.text
    part = text.get("attn_config") or {}
    heads = int(part.get("kv_n_heads") or 1)
    size = int(text.first("d_model", "hidden_size")) // int(text.first("n_heads", "num_attention_heads"))
    return layout_of([attention(context, heads, size)] * int(text.first("n_layers", "num_hidden_layers")))


def chatglm(context: Context) -> Layout:
    """ChatGLM: grouped attention where ``multi_query_attention`` says so."""
    text = context.text
    heads = total_heads(text)
    size = text.whole("hidden_size") // heads
    if text.get("multi_query_attention"):
        heads = text.whole("multi_query_group_num")
    return layout_of([attention(context, heads, size)] * context.num_layers)


def gpt_bigcode(context: Context) -> Layout:
    """One KV head, unless ``multi_query`` is off."""
    text = context.text
    heads = 1 if text.get("multi_query") else total_heads(text)
    return layout_of([attention(context, heads, head_size(text))] * context.num_layers)


def every_head_by_its_parts(context: Context) -> Layout:
    """Latent projections that are expanded before caching: every head's K and V at full width."""
    text = context.text
    size = text.whole("qk_nope_head_dim") + text.whole("qk_rope_head_dim")
    return layout_of([attention(context, total_heads(text), size)] * context.num_layers)


def one_kv_head(context: Context) -> Layout:
    """A single KV head, which every rank holds."""
    return layout_of([attention(context, 1, head_size(context.text))] * context.num_layers)


def two_shapes(context: Context) -> Layout:
    """MiMo V2: window layers with heads of their own shape and sinks, by ``hybrid_layer_pattern``."""
    text = context.text
    sliding = attention(
        context,
        text.whole("swa_num_key_value_heads"),
        text.whole("swa_head_dim"),
        size_v=text.get("swa_v_head_dim"),
        window=int(text.first("sliding_window_size", "sliding_window")),
    )
    full = attention(context, kv_heads(text), head_size(text), size_v=text.get("v_head_dim"))
    pattern = values(text, "hybrid_layer_pattern")
    if pattern is None:
        types = layertypes.layer_types(text) or [layertypes.FULL] * context.num_layers
        pattern = [int(name == layertypes.SLIDING) for name in types]
    return layout_of([sliding if slides else full for slides in pattern[: context.num_layers]])


def step(context: Context) -> Layout:
    """Step 3.5: layers of one type can have heads of their own; without types every second layer slides."""
    text, count = context.text, context.num_layers
    window = None if context.disable_window else layertypes.window(text)
    types = values(text, "layer_types")
    other = text.get("attention_other_setting") or {}

    @cache
    def spec(kind: str) -> LayerSpec:
        apart = other if types and kind == other.get("attention_type") else {}
        heads = apart.get("num_attention_groups") or text.whole("num_attention_groups")
        size = apart.get("head_dim") or head_size(text)
        return attention(context, heads, size, window=window if kind == layertypes.SLIDING else None)

    default = [layertypes.FULL if index % 2 else layertypes.SLIDING for index in range(count)]
    return layout_of([spec(kind) for kind in types or default][:count])


def chunks_as_windows(context: Context) -> Layout:
    """Rnj: layers called chunked see a sliding window."""
    text = context.text
    heads, size = kv_heads(text), head_size(text)
    sliding, full = attention(context, heads, size, window=_window(context)), attention(context, heads, size)
    types = values(text, "layer_types") or []
    return layout_of([sliding if name == layertypes.CHUNKED else full for name in types])


def loops(context: Context) -> Layout:
    """Layers that run several times; from the second time on they see a window. A stated head size is not
    read.
    """
    text = context.text
    heads, size = kv_heads(text), text.whole("hidden_size") // total_heads(text)
    first = attention(context, heads, size)
    again = attention(context, heads, size, window=text.whole("loop_window_size", 64))
    repeats = text.whole("loop_num", 2) - 1
    return layout_of([(first, *[again] * repeats)] * context.num_layers)


def hrm(context: Context) -> Layout:
    """Stacks of layers that run several times, each pass with a cache of its own."""
    text = context.text
    passes = context.num_layers
    if text.get("num_layers_per_stack") is None:
        passes *= text.whole("H_cycles") * (text.whole("L_cycles") + 1)
    return layout_of([attention(context, total_heads(text), head_size(text))] * passes)
