"""Models with recurrent states: beside attention, or alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from kvwatch.blockmath.errors import Unsupported
from kvwatch.blockmath.layouts import layertypes, mla, states
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
from kvwatch.blockmath.modelconfig import ModelConfig, Section
from kvwatch.blockmath.settings import Traits
from kvwatch.blockmath.specs import LayerSpec

ATTENTION_NAMES: Final = frozenset({"attention", layertypes.FULL})
ZAMBA2_KINDS: Final = [
    *["mamba"] * 6,
    *["hybrid", *["mamba"] * 5] * 6,
    *["hybrid", *["mamba"] * 4],
    *["hybrid", *["mamba"] * 3],
    *["hybrid", *["mamba"] * 2],
]
NEMOTRON_LETTERS: Final = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


SINCE: Final = (0, 10, 2)
"""Before, states lived outside the block pool (V0) or were not padded to attention pages as they are now."""


def traits(_: ModelConfig) -> Traits:
    """States and attention side by side."""
    return Traits(hybrid=True, known_since=SINCE)


def latent_traits(_: ModelConfig) -> Traits:
    """States and latent attention side by side."""
    return Traits(hybrid=True, mla=True, known_since=SINCE)


def free_traits(_: ModelConfig) -> Traits:
    """States only."""
    return Traits(attention_free=True, known_since=SINCE)


def traits_by_layer_types(config: ModelConfig) -> Traits:
    """Hybrid only where some layer is not attention."""
    types = values(config.root, "layer_types")
    hybrid = types is None or not ATTENTION_NAMES.issuperset(types)
    return Traits(hybrid=True, known_since=SINCE) if hybrid else Traits()


def full_attention(context: Context) -> LayerSpec:
    """The attention layer of a hybrid model."""
    return attention(context, kv_heads(context.text), head_size(context.text))


def _interleave(kinds: Sequence[str], specs: dict[str, Registered], attention_spec: LayerSpec) -> Layout:
    return layout_of([specs.get(name) for name in kinds], token_bytes=attention_spec.state_bytes)


def jamba(context: Context) -> Layout:
    """Mamba 1, with attention once in a period."""
    text = context.text
    period, offset = text.whole("attn_layer_period"), text.whole("attn_layer_offset")
    memory = states.mamba1(
        context,
        intermediate=text.whole("mamba_expand") * text.whole("hidden_size"),
        state_size=text.whole("mamba_d_state"),
        kernel=text.whole("mamba_d_conv"),
    )
    full = full_attention(context)
    return layout_of(
        [full if index % period == offset else memory for index in range(context.num_layers)],
        token_bytes=full.state_bytes,
    )


def _granite_state(context: Context, intermediate: int) -> LayerSpec:
    text = context.text
    heads = text.whole("mamba_n_heads")
    stated = text.get("mamba_d_head")
    return states.mamba2(
        context,
        intermediate=intermediate,
        groups=text.whole("mamba_n_groups"),
        heads=heads,
        head_size=stated if isinstance(stated, int) else intermediate // heads,
        state_size=text.whole("mamba_d_state"),
        kernel=text.whole("mamba_d_conv"),
    )


def granite(context: Context) -> Layout:
    """Mamba 2, with attention in the layers that are named."""
    text = context.text
    memory = _granite_state(context, text.whole("mamba_expand") * text.whole("hidden_size"))
    full = full_attention(context)
    types = values(text, "layer_types") or ["mamba"] * context.num_layers
    return layout_of(
        [full if name in ATTENTION_NAMES else memory for name in types[: context.num_layers]],
        token_bytes=full.state_bytes,
    )


def falcon_h1(context: Context) -> Layout:
    """Attention and Mamba 2 in every layer."""
    text = context.text
    stated = text.get("mamba_d_ssm")
    intermediate = int(stated or text.whole("mamba_expand") * text.whole("hidden_size"))
    full = full_attention(context)
    both = (full, _granite_state(context, intermediate))
    return layout_of([both] * context.num_layers, token_bytes=full.state_bytes)


def lfm2(context: Context) -> Layout:
    """Short convolutions, with attention in the layers that are named."""
    text = context.text
    types = values(text, "layer_types")
    if types is None:
        chosen = values(text, "full_attn_idxs")
        attending = set(range(context.num_layers) if chosen is None else chosen)
        types = [layertypes.FULL if index in attending else "conv" for index in range(context.num_layers)]
    memory = states.short_convolution(
        context,
        channels=int(text.first("conv_dim", "hidden_size")),
        kernel=text.whole("conv_L_cache"),
    )
    full = full_attention(context)
    return layout_of(
        [full if name in ATTENTION_NAMES else memory for name in types], token_bytes=full.state_bytes
    )


def mamba(context: Context) -> Layout:
    """Mamba 1 alone."""
    text = context.text
    stated = text.get("intermediate_size")
    memory = states.mamba1(
        context,
        intermediate=int(stated or int(text["expand"] * text.whole("hidden_size"))),
        state_size=text.whole("state_size"),
        kernel=text.whole("conv_kernel"),
    )
    return layout_of([memory] * context.num_layers)


def mamba2(context: Context) -> Layout:
    """Mamba 2 alone."""
    text = context.text
    memory = states.mamba2(
        context,
        intermediate=int(text["expand"] * text.whole("hidden_size")),
        groups=text.whole("n_groups"),
        heads=text.whole("num_heads"),
        head_size=text.whole("head_dim"),
        state_size=text.whole("state_size"),
        kernel=text.whole("conv_kernel"),
    )
    return layout_of([memory] * context.num_layers)


def nemotron_kinds(text: Section) -> list[str]:
    """What each layer of a Nemotron-H model is."""
    stated = values(text, "layers_block_type") or values(text, "layer_types")
    if stated is not None:
        names = {"linear_attention": "mamba", layertypes.FULL: "attention"}
        return [names.get(str(name), str(name)) for name in stated]
    pattern = text.get("hybrid_override_pattern")
    if not isinstance(pattern, str):
        raise Unsupported(
            "incomplete_config", "config.json: neither layers_block_type nor hybrid_override_pattern"
        )
    return [NEMOTRON_LETTERS.get(letter, letter) for letter in pattern]


def nemotron(context: Context) -> Layout:
    """Mamba 2, attention and layers without cache, by a pattern."""
    text = context.text
    heads, size = text.whole("mamba_num_heads"), text.whole("mamba_head_dim")
    memory = states.mamba2(
        _with_default_state(context, str(text.get("mamba_ssm_cache_dtype") or "float32")),
        intermediate=heads * size,
        groups=text.whole("n_groups"),
        heads=heads,
        head_size=size,
        state_size=text.whole("ssm_state_size"),
        kernel=text.whole("conv_kernel"),
    )
    window = None if context.disable_window else layertypes.window(text)
    full = attention(context, kv_heads(text), head_size(text), window=window)
    return _interleave(nemotron_kinds(text), {"mamba": memory, "attention": full}, full)


def _with_default_state(context: Context, dtype: str | None) -> Context:
    """The same context where recurrent states have a type of their own unless told otherwise."""
    if dtype is None or context.settings.ssm_state_dtype is not None:
        return context
    return context.with_settings(ssm_state_dtype=dtype)


def gated_delta(context: Context) -> Layout:
    """Gated delta nets, with full attention once in a period."""
    text = context.text
    types = values(text, "layer_types")
    if types is None:
        interval = text.whole("full_attention_interval", 4)
        types = [
            layertypes.FULL if (index + 1) % interval == 0 else layertypes.LINEAR
            for index in range(context.num_layers)
        ]
    return _delta_layout(context, types, text.get("mamba_ssm_dtype"))


def olmo(context: Context) -> Layout:
    """OLMo's hybrid: gated delta nets, with full attention in every fourth layer."""
    text, count = context.text, context.num_layers
    types = values(text, "layer_types")
    if types is None:
        types = [layertypes.FULL if index % 4 == 3 else layertypes.LINEAR for index in range(count)]
        if layertypes.FULL not in types:
            types[-1] = layertypes.FULL
    return _delta_layout(context, types, None)


def _delta_layout(context: Context, types: Sequence[Any], state_dtype: str | None) -> Layout:
    text = context.text
    heads = text.whole("num_attention_heads")
    key_heads = text.whole("linear_num_key_heads", heads)
    key_size = text.whole("linear_key_head_dim", int(0.75 * text.whole("hidden_size") / key_heads))
    memory = states.gated_delta(
        _with_default_state(context, state_dtype),
        key_heads=key_heads,
        value_heads=text.whole("linear_num_value_heads", heads),
        key_size=key_size,
        value_size=text.whole("linear_value_head_dim", 2 * key_size),
        kernel=text.whole("linear_conv_kernel_dim", 4),
    )
    full = full_attention(context)
    return _interleave(
        types[: context.num_layers],
        {layertypes.LINEAR: memory, layertypes.FULL: full, "attention": full},
        full,
    )


def zamba2(context: Context) -> Layout:
    """Mamba 2 in every layer; a shared transformer block with a cache of its own before some."""
    text = context.text
    hidden, heads = text.whole("hidden_size"), text.whole("num_attention_heads")
    inner = text.whole("mamba_expand") * hidden
    mamba_heads = text.whole("n_mamba_heads")
    memory = states.mamba2(
        context,
        intermediate=inner,
        groups=text.whole("mamba_ngroups"),
        heads=mamba_heads,
        head_size=inner // mamba_heads,
        state_size=text.whole("mamba_d_state"),
        kernel=text.whole("mamba_d_conv"),
    )
    full = attention(context, heads, text.whole("attention_head_dim", 2 * hidden // heads))
    kinds = values(text, "layers_block_type") or ZAMBA2_KINDS
    # The shared blocks register before any layer, and there is one pipeline stage only.
    return layout_of([full] * kinds.count("hybrid") + [memory] * len(kinds), token_bytes=full.state_bytes)


def kimi_linear(context: Context) -> Layout:
    """Kimi delta attention, with latent attention in the layers that are not listed."""
    text = context.text
    linear = text.get("linear_attn_config")
    if not linear:
        return mla.layers(context)
    memory = states.kimi_delta(
        context,
        heads=int(linear["num_heads"]),
        head_size=int(linear["head_dim"]),
        kernel=int(linear["short_conv_kernel_size"]),
        checkpoints=1 if linear.get("use_full_rank_gate") else 0,
    )
    full = mla.latent(context)
    delta = {int(index) - 1 for index in linear["kda_layers"]}
    return layout_of(
        [memory if index in delta else full for index in range(context.num_layers)],
        token_bytes=full.state_bytes,
    )


def bailing_linear(context: Context) -> Layout:
    """Linear attention, with latent attention at the end of each group of layers."""
    text = context.text
    size = text.get("head_dim") or text.whole("hidden_size") // text.whole("num_attention_heads")
    memory = states.linear_attention(context, heads=text.whole("num_attention_heads"), head_size=int(size))
    full = mla.latent(context)
    group = text.whole("layer_group_size", 1)
    return layout_of(
        [full if (index + 1) % group == 0 else memory for index in range(context.num_layers)],
        token_bytes=full.state_bytes,
    )
