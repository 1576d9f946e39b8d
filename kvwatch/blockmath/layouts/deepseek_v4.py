"""DeepSeek V4: a window cache in every layer, and compressed caches of several rates beside it."""

from __future__ import annotations

from typing import Final

from kvwatch.blockmath.backends import Backend, generation
from kvwatch.blockmath.errors import Refused
from kvwatch.blockmath.layouts.base import SHARED, Context, Layout, Registered, layout_of, values
from kvwatch.blockmath.layouts.mla import SCALE_BLOCK
from kvwatch.blockmath.modelconfig import ModelConfig
from kvwatch.blockmath.settings import Traits
from kvwatch.blockmath.specs import Kind, LayerSpec

PACKED_STATE_BYTES: Final = 584
"""448 elements in 8 bit, 64 rotary ones in 16 bit, and 8 bytes of scales."""

PAGE_ALIGNMENT: Final = 576
WINDOW_BLOCK: Final = 64
FINE, COARSE = 4, 128
"""Tokens that one compressed state stands for."""

_FLASHMLA: Final = Backend("FLASHMLA_SPARSE_DSV4", (256,), multiples=False)
_WINDOW: Final = Backend("DEEPSEEK_SPARSE_SWA", (32,), preferred=256)
_INDEXER: Final = Backend("DEEPSEEK_V4_INDEXER", (256,), multiples=False)
_COMPRESSOR: Final = Backend("CompressorBackend", (1,))


def traits(_: ModelConfig) -> Traits:
    """Latent attention, whose groups earlier releases formed in another way."""
    return Traits(mla=True, known_since=(0, 31))


def layers(context: Context) -> Layout:
    """The caches of each layer, by its compression ratio."""
    if context.settings.cache_dtype not in ("auto", "fp8", "fp8_e4m3", "fp8_ds_mla"):
        raise Refused("cache_dtype", "DeepSeek V4's packed layout only supports an fp8 KV cache")
    if generation(context.device) < 9:
        raise Refused("cache_dtype", "DeepSeek V4's sparse attention needs compute capability 9.0")
    if not context.settings.hybrid_manager:
        raise Refused("hybrid_manager_off", "DeepSeek V4 needs the hybrid KV cache manager")
    text = context.text
    size, index_size = text.whole("head_dim"), text.whole("index_head_dim", 128)
    window = LayerSpec(
        kind=Kind.SLIDING_MLA,
        block_size=WINDOW_BLOCK,
        state_bytes=PACKED_STATE_BYTES,
        window=text.whole("sliding_window"),
        alignment=PAGE_ALIGNMENT,
        shape=("window", size),
        backend=_WINDOW,
    )
    kinds: dict[int, Registered] = {
        0: (window,),
        FINE: (
            _compressed(FINE, index_size + index_size // SCALE_BLOCK * 4, _INDEXER, "indexer"),
            _compressor(FINE, index_size),
            window,
            _compressed(FINE, PACKED_STATE_BYTES, _FLASHMLA, "latent"),
            _compressor(FINE, size),
        ),
        COARSE: (
            window,
            _compressed(COARSE, PACKED_STATE_BYTES, _FLASHMLA, "latent"),
            _compressor(COARSE, size),
        ),
    }
    ratios = _ratios(context)
    return layout_of(
        [kinds[ratio if ratio > 1 else 0] for ratio in ratios],
        label="sliding-mla+compressed",
        block_outermost=True,
    )


def _ratios(context: Context) -> list[int]:
    count = context.num_layers
    stated = values(context.text, "compress_ratios")
    if stated is not None:
        return [int(ratio) for ratio in stated[:count]]
    named = {"compressed_sparse_attention": FINE, "heavily_compressed_attention": COARSE}
    types = values(context.text, "layer_types")
    if types is not None:
        return [named.get(str(name), 0) for name in types[:count]]
    return [COARSE if index < 2 or index % 2 == 0 else FINE for index in range(count)]


def _compressed(ratio: int, state_bytes: int, backend: Backend, role: str) -> LayerSpec:
    return LayerSpec(
        kind=Kind.MLA,
        block_size=SHARED,
        state_bytes=state_bytes,
        tokens_per_state=ratio,
        alignment=PAGE_ALIGNMENT,
        kernel_block=256,
        shape=(role,),
        backend=backend,
    )


def _compressor(ratio: int, size: int) -> LayerSpec:
    """The float32 sums of tokens that are not compressed yet: keys and weights, twice as many for
    overlapping windows.
    """
    overlap = 2 if ratio == FINE else 1
    return LayerSpec(
        kind=Kind.SLIDING_MLA,
        block_size=4 if ratio == FINE else 8,
        state_bytes=2 * overlap * size * 4,
        window=overlap * ratio,
        alignment=PAGE_ALIGNMENT,
        shape=("compressor", size),
        backend=_COMPRESSOR,
    )
