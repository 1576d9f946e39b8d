"""Bytes of recurrent states on one rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvwatch.blockmath.errors import Refused, Unsupported
from kvwatch.blockmath.layouts.base import SHARED, Context
from kvwatch.blockmath.settings import DTYPE_BYTES
from kvwatch.blockmath.specs import Kind, LayerSpec

Shape = tuple[int, ...]


def split(number: int, ranks: int, what: str) -> int:
    """A rank's share.

    Raises:
        Refused: it does not divide.
    """
    if number % ranks:
        raise Refused("indivisible_heads", f"{what}: {number} is not divisible by {ranks}")
    return number // ranks


def state(
    context: Context, shapes: Sequence[Shape], dtypes: Sequence[str] | None = None, *, checkpoints: int = 0
) -> LayerSpec:
    """The spec of one state layer.

    Args:
        context: what there is to read.
        shapes: elements of each state tensor on one rank.
        dtypes: their element types; by default the convolution states' own, then the recurrent ones'.
        checkpoints: extra blocks that hold a checkpoint during prefill.
    """
    settings = context.settings
    names = dtypes or (
        settings.conv_state_dtype,
        settings.ssm_state_dtype or settings.conv_state_dtype,
    )
    size = sum(
        math.prod(shape) * _item(name) for shape, name in zip(shapes, names[: len(shapes)], strict=True)
    )
    return LayerSpec(
        kind=Kind.MAMBA,
        block_size=SHARED,
        state_bytes=size,
        dcp_sharded=False,
        speculative_blocks=settings.speculative_tokens,
        checkpoint_blocks=checkpoints,
        shape=(False, *shapes, *names),
    )


def _item(name: str) -> int:
    size = DTYPE_BYTES.get(name)
    if size is None:
        raise Unsupported("mamba_cache_dtype", f"states of type {name!r} are not known here")
    return size


def mamba1(context: Context, *, intermediate: int, state_size: int, kernel: int) -> LayerSpec:
    """Mamba 1: a convolution state and a state per channel."""
    channels = split(intermediate, context.settings.tp, "mamba channels")
    return state(context, [(kernel - 1, channels), (channels, state_size)])


def mamba2(
    context: Context,
    *,
    intermediate: int,
    groups: int,
    heads: int,
    head_size: int,
    state_size: int,
    kernel: int,
) -> LayerSpec:
    """Mamba 2: a convolution state and a state per head; groups are replicated where they do not divide."""
    tp = context.settings.tp
    spread = groups if groups % tp == 0 else tp
    channels = split(intermediate + 2 * spread * state_size, tp, "mamba channels")
    window = kernel - 1 + context.settings.speculative_tokens
    shapes = [(window, channels), (split(heads, tp, "mamba heads"), head_size, state_size)]
    return state(context, shapes, checkpoints=1)


def gated_delta(
    context: Context, *, key_heads: int, value_heads: int, key_size: int, value_size: int, kernel: int
) -> LayerSpec:
    """Gated delta net: a convolution state and a key-by-value state per head."""
    tp = context.settings.tp
    channels = split(2 * key_size * key_heads + value_size * value_heads, tp, "linear-attention channels")
    window = kernel - 1 + context.settings.speculative_tokens
    heads = split(value_heads, tp, "linear-attention heads")
    return state(context, [(window, channels), (heads, value_size, key_size)])


def kimi_delta(
    context: Context, *, heads: int, head_size: int, kernel: int, checkpoints: int = 0
) -> LayerSpec:
    """Kimi delta attention: as the gated delta net, with a float32 state unless told otherwise."""
    settings = context.settings
    channels = split(3 * heads * head_size, settings.tp, "linear-attention channels")
    window = kernel - 1 + settings.speculative_tokens
    shapes = [(window, channels), (split(heads, settings.tp, "linear-attention heads"), head_size, head_size)]
    dtypes = (settings.conv_state_dtype, settings.ssm_state_dtype or "float32")
    return state(context, shapes, dtypes, checkpoints=checkpoints)


def short_convolution(context: Context, *, channels: int, kernel: int) -> LayerSpec:
    """A short convolution's last inputs."""
    return state(context, [(kernel - 1, split(channels, context.settings.tp, "convolution channels"))])


def linear_attention(context: Context, *, heads: int, head_size: int) -> LayerSpec:
    """Plain linear attention: one square state per head."""
    return state(context, [(split(heads, context.settings.tp, "heads"), head_size, head_size)])
