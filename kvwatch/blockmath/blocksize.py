"""Block sizes: the backend's default, and the alignment of state and attention pages."""

from __future__ import annotations

from dataclasses import replace

from kvwatch.blockmath.layouts.base import SHARED, Layout
from kvwatch.blockmath.settings import Settings
from kvwatch.blockmath.specs import LayerSpec


def settle(layout: Layout, settings: Settings, *, effective: int | None = None) -> tuple[Layout, Settings]:
    """Give every layer its block size.

    Args:
        layout: the layers, without block sizes.
        settings: what vLLM runs with.
        effective: the block size that a running server reports.

    Returns:
        Layers and settings with final block sizes.
    """
    size = effective or settings.block_size
    settled = replace(settings, block_size=size)

    def place(spec: LayerSpec) -> LayerSpec:
        return spec if spec.block_size != SHARED else spec.with_block_size(size)

    templates = tuple(tuple(place(spec) for spec in specs) for specs in layout.templates)
    return replace(layout, templates=templates, draft=tuple(map(place, layout.draft))), settled
