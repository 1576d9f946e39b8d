"""Block sizes: the backend's default, and how pages of states and of attention are brought to one size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from kvwatch.blockmath.backends import Backend, common_block_size
from kvwatch.blockmath.errors import Refused
from kvwatch.blockmath.layouts.base import SHARED, Layout
from kvwatch.blockmath.releases import Release
from kvwatch.blockmath.settings import Settings
from kvwatch.blockmath.specs import Kind, LayerSpec, ceil_div

MLA_ALIGNMENT: Final = 128
"""Blocks of latent attention beside states are a multiple of this, for the decode kernels."""


def settle(
    layout: Layout, settings: Settings, *, release: Release, effective: int | None = None
) -> tuple[Layout, Settings]:
    """Give every layer its block size.

    Args:
        layout: the layers, without block sizes.
        settings: what vLLM runs with.
        release: the vLLM release.
        effective: the block size that a running server reports.

    Returns:
        Layers and settings with final block sizes.

    Raises:
        Refused: a backend does not take the size that was asked for.
    """
    state_bytes = max((spec.state_bytes for spec in _specs(layout) if spec.kind is Kind.MAMBA), default=0)
    size = effective or _chosen(layout, settings, release)
    if effective is None:
        if state_bytes and layout.token_bytes and layout.backends:
            size = _covering_states(layout, size, state_bytes)
        if layout.skipped_token_bytes and layout.token_bytes:
            size = _covering_skipped(layout, size)
    beside_attention = bool(state_bytes and layout.token_bytes and layout.backends)
    padded = size * (layout.token_bytes or 0) if beside_attention else None
    aligned = settings.mamba_cache_mode == "align" and beside_attention
    mamba_block = size if aligned else settings.mamba_block_size
    settled = replace(settings, block_size=size, mamba_block_size=mamba_block)

    def place(spec: LayerSpec) -> LayerSpec:
        if spec.block_size != SHARED:
            return spec
        if spec.kind is Kind.MAMBA:
            return replace(spec, block_size=mamba_block, padded_bytes=_padding(spec, padded))
        if spec.kind is Kind.SLIDING and layout.backends:
            return spec.with_block_size(_backend_of(spec, layout.backends).largest_within(size))
        return spec.with_block_size(size)

    templates = tuple(tuple(place(spec) for spec in specs) for specs in layout.templates)
    return replace(layout, templates=templates, draft=tuple(map(place, layout.draft))), settled


def _specs(layout: Layout) -> list[LayerSpec]:
    return [spec for specs in layout.templates for spec in specs]


def _padding(spec: LayerSpec, padded: int | None) -> int | None:
    return padded if padded is not None and padded != spec.state_bytes else None


def _backend_of(spec: LayerSpec, backends: Sequence[Backend]) -> Backend:
    return backends[0] if spec.backend is None else spec.backend


def _chosen(layout: Layout, settings: Settings, release: Release) -> int:
    backends = layout.backends
    if settings.block_size_given or not backends or not release.backend_block_size:
        for backend in backends:
            if not backend.supports(settings.block_size):
                raise Refused(
                    "block_size",
                    f"No common block size for {settings.block_size} ({backend.name}: {list(backend.sizes)})",
                )
        return settings.block_size
    return common_block_size(backends)


def _covering_states(layout: Layout, size: int, state_bytes: int) -> int:
    """The smallest aligned attention block whose page covers a state."""
    assert layout.token_bytes is not None
    backends = layout.backends
    alignment = max(min(backends[0].sizes, default=size), size)
    if any(spec.kind is Kind.MLA for spec in _specs(layout)):
        alignment = max(alignment, MLA_ALIGNMENT)
    aligned = alignment * ceil_div(state_bytes, alignment * layout.token_bytes)
    step = math.lcm(*(min(backend.sizes) for backend in backends))
    aligned = step * ceil_div(aligned, step)
    return max(size, aligned)


def _covering_skipped(layout: Layout, size: int) -> int:
    """The smallest block whose quantized page covers the smallest kernel block of an unquantized layer."""
    assert layout.token_bytes is not None
    assert layout.skipped_token_bytes is not None
    if layout.skipped_token_bytes == layout.token_bytes:
        return size
    smallest = min(layout.backends[0].sizes)
    alignment = max(smallest, size)
    return alignment * ceil_div(layout.skipped_token_bytes * smallest, alignment * layout.token_bytes)
