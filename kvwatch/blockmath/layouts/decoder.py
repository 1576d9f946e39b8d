"""Decoders of standard attention: full, or full and sliding-window layers side by side."""

from __future__ import annotations

from functools import cache

from kvwatch.blockmath.layouts import layertypes
from kvwatch.blockmath.layouts.base import Context, Layout, attention, head_size, kv_heads, layout_of
from kvwatch.blockmath.settings import DTYPE_BYTES
from kvwatch.blockmath.specs import LayerSpec


def layers(context: Context) -> Layout:
    """Full attention, save for the layers that the configuration calls sliding."""
    return windowed(context)


def one_token_wider(context: Context) -> Layout:
    """Cohere's windows see the token itself beside the stated ones."""
    return windowed(context, wider=1)


def with_sinks(context: Context) -> Layout:
    """The same with attention sinks."""
    return windowed(context, sinks=True)


def full(context: Context) -> Layout:
    """Full attention whatever the configuration says."""
    return _per_layer(context, [None] * context.num_layers)


def no_cache(context: Context) -> Layout:
    """Encoders attend to a whole input at once and keep nothing."""
    return layout_of([None] * context.text.whole("num_hidden_layers", 1))


def windowed(context: Context, *, wider: int = 0, sinks: bool = False) -> Layout:
    """Layers by their types.

    Args:
        context: what there is to read.
        wider: tokens that a window sees beside the stated ones.
        sinks: the layers have attention sinks.
    """
    stated = None if context.disable_window else layertypes.window(context.text)
    types = layertypes.layer_types(context.text)
    if types is None:
        windows = [stated] * context.num_layers
    else:
        local = stated + wider if stated else None
        windows = [local if name == layertypes.SLIDING else None for name in types[: context.num_layers]]
    return _per_layer(context, windows, sinks=sinks)


def _per_layer(context: Context, windows: list[int | None], *, sinks: bool = False) -> Layout:
    heads, size = kv_heads(context.text), head_size(context.text)
    skipped = context.settings.skip_layers

    @cache
    def spec(window: int | None, kept: bool) -> LayerSpec:
        return attention(context, heads, size, window=window, sinks=sinks, cache="auto" if kept else None)

    def kept(index: int, window: int | None) -> bool:
        return str(index) in skipped or (window is not None and "sliding_window" in skipped)

    if not skipped:
        return layout_of([spec(window, kept=False) for window in windows])
    plain = attention(context, heads, size, cache="auto")
    item = DTYPE_BYTES.get(context.settings.cache_dtype, 1)
    return layout_of(
        [spec(window, kept=kept(index, window)) for index, window in enumerate(windows)],
        # Packing is not counted here, as the first layer's backend does not pack.
        token_bytes=plain.state_bytes * item // DTYPE_BYTES[context.settings.dtype],
        skipped_token_bytes=plain.state_bytes,
    )
