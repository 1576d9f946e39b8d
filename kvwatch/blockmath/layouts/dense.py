"""Decoders whose layers are all full attention."""

from __future__ import annotations

from kvwatch.blockmath.layouts.base import Context, Layout, attention, head_size, kv_heads, uniform


def layers(context: Context) -> Layout:
    """Every layer keeps K and V of every token."""
    text = context.text
    return uniform(context, attention(context.settings, kv_heads(text), head_size(text)), "full")
