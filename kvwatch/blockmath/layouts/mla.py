"""Multi-head latent attention, alone or with an indexer that picks the tokens to attend to."""

from __future__ import annotations

from typing import Final

from kvwatch.blockmath.backends import (
    DEEPSEEK_V32_INDEXER,
    FLASH_ATTN_MLA_SPARSE,
    FLASHINFER_MLA_SPARSE,
    FLASHINFER_MLA_SPARSE_SM90,
    FLASHINFER_MLA_SPARSE_SM120,
    FLASHMLA_SPARSE,
    Backend,
    generation,
    mla_backend,
)
from kvwatch.blockmath.errors import Unsupported
from kvwatch.blockmath.layouts.base import SHARED, Context, Layout, Registered, layout_of, values
from kvwatch.blockmath.layouts.decoder import full
from kvwatch.blockmath.settings import DTYPE_BYTES
from kvwatch.blockmath.specs import Kind, LayerSpec

PACKED_STATE_BYTES: Final = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
"""Bytes of a latent with its scales and unquantized rotary part, which no head size gives."""

SCALE_BLOCK: Final = 128
"""Elements of an index key that share one float32 scale."""

_ROW_ALIGNED: Final = {
    FLASH_ATTN_MLA_SPARSE.name: 1,
    FLASHMLA_SPARSE.name: 1,
    FLASHINFER_MLA_SPARSE_SM90.name: 1,
    FLASHINFER_MLA_SPARSE.name: 32,
    FLASHINFER_MLA_SPARSE_SM120.name: 64,
}
"""Rows that sparse kernels view as one page, so blocks lie whole pages apart."""


def latent_size(context: Context) -> int:
    """Elements of the latent and its rotary part."""
    return context.text.whole("kv_lora_rank") + context.text.whole("qk_rope_head_dim", 0)


def latent(context: Context, *, sparse: bool = False, sinks: bool = False) -> LayerSpec:
    """The spec of one latent-attention layer, which every rank holds whole.

    Args:
        context: what there is to read.
        sparse: an indexer picks the tokens.
        sinks: the layer has learnt attention sinks.

    Raises:
        Refused: no backend takes the block size or cache type.
        Unsupported: the cache type is not known.
    """
    settings = context.settings
    size = latent_size(context)
    flag = settings.cache_dtype
    backend = mla_backend(
        context.device,
        head_size=size,
        nope_size=context.text.whole("qk_nope_head_dim", 128),
        cache=flag,
        sparse=sparse,
        sinks=sinks,
        block_size=settings.block_size if settings.block_size_given else None,
        dcp=settings.dcp,
    )
    flag = _stored_as(backend, flag)
    element = settings.dtype if flag == "auto" else flag
    state = PACKED_STATE_BYTES.get(flag) or size * _item(element)
    stride, kernel = _strides(context, backend, flag, state)
    return LayerSpec(
        kind=Kind.MLA,
        block_size=SHARED,
        state_bytes=state,
        stride_alignment=stride,
        kernel_block=kernel,
        shape=(1, size, element, flag),
        backend=backend,
    )


def _item(element: str) -> int:
    size = DTYPE_BYTES.get(element)
    if size is None or "per_token_head" in element:
        raise Unsupported(
            "cache_dtype", f"latent attention with a KV cache of type {element!r} is not known here"
        )
    return size


def _stored_as(backend: Backend, flag: str) -> str:
    quantized = flag not in ("auto", "float16", "bfloat16")
    if backend is FLASHMLA_SPARSE and quantized:
        return flag if flag == "nvfp4_ds_mla" else "fp8_ds_mla"
    if backend is FLASHINFER_MLA_SPARSE_SM120 and flag in ("auto", "fp8", "fp8_e4m3"):
        return "fp8_ds_mla"
    return flag


def _strides(context: Context, backend: Backend, flag: str, state: int) -> tuple[int, int | None]:
    rows = _ROW_ALIGNED.get(backend.name)
    if rows is None:
        return 1, None
    if backend is FLASHMLA_SPARSE and flag in PACKED_STATE_BYTES and generation(context.device) != 10:
        return 1, 64
    return rows * state, None


def layers(context: Context) -> Layout:
    """Latent attention in every layer; standard attention where the configuration has no latent."""
    if context.text.get("kv_lora_rank") is None:
        return full(context)
    spec = latent(context)
    return layout_of([spec] * context.num_layers, token_bytes=spec.state_bytes)


def two_per_layer(context: Context) -> Layout:
    """Two latent-attention sublayers in each decoder layer."""
    spec = latent(context)
    count = context.text.whole("num_layers", context.text.get("num_hidden_layers"))
    return layout_of([(spec, spec)] * count, token_bytes=spec.state_bytes)


def index_keys(context: Context) -> LayerSpec:
    """The spec of an indexer's cache: one 8-bit key per token with its scales."""
    size = context.text.whole("index_head_dim")
    return LayerSpec(
        kind=Kind.MLA,
        block_size=SHARED,
        state_bytes=size + size // SCALE_BLOCK * 4,
        shape=(1, size, "uint8", "indexer"),
        backend=DEEPSEEK_V32_INDEXER,
    )


def sparse_layers(context: Context) -> Layout:
    """Latent attention over tokens that an indexer picks; some layers share the indexer of one before."""
    return _sparse(context, [not _shares_index(context, index) for index in range(context.num_layers)])


def sparse_layers_with_sinks(context: Context) -> Layout:
    """The same with learnt sinks, and the configuration naming the layers that index."""
    stated = values(context.text, "indexer_types")
    count = context.num_layers
    indexing = (
        [name == "full" for name in stated]
        if stated is not None
        else [index == 0 or (index - 1) % 4 == 0 for index in range(count)]
    )
    return _sparse(context, indexing[:count], sinks=bool(context.text.get("learnable_sink", True)))


def _sparse(context: Context, indexing: list[bool], *, sinks: bool = False) -> Layout:
    spec, keys = latent(context, sparse=True, sinks=sinks), index_keys(context)
    alone: Registered = spec
    both: Registered = (keys, spec)
    return layout_of(
        [both if indexes else alone for indexes in indexing],
        label="mla+indexer",
        token_bytes=spec.state_bytes,
    )


def _shares_index(context: Context, index: int) -> bool:
    text = context.text
    pattern = text.get("index_topk_pattern")
    if pattern is not None:
        return index < len(pattern) and pattern[index] == "S"
    stated = values(text, "indexer_types")
    frequency = max(text.whole("index_topk_freq", 1), 1)
    if stated is not None and not text.states("index_topk_freq"):
        return bool(stated[index] != "full")
    return max(index - text.whole("index_skip_topk_offset", 2) + 1, 0) % frequency != 0
