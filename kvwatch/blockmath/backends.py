"""Attention backends, as far as they decide about block sizes: which one a layer gets, and what it accepts.

Facts: vLLM 0.32's platform and backend sources. Backends that differ in nothing that matters here share an
    entry.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvwatch.blockmath.device import Device
from kvwatch.blockmath.errors import Refused

DEFAULT_BLOCK_SIZE: Final = 16
HALF: Final = frozenset({"float16", "bfloat16"})
UNQUANTIZED: Final = frozenset({"auto", "float16", "bfloat16"})
FP8: Final = frozenset({"fp8", "fp8_e4m3"})


@dataclass(frozen=True, slots=True)
class Backend:
    """One attention backend.

    Attributes:
        name: as vLLM logs it.
        sizes: block sizes in tokens that its kernels take, or whose multiples they take.
        multiples: the kernels themselves take multiples of ``sizes``.
        preferred: the size it asks for where none is given; by default 16 if accepted, else the smallest.
    """

    name: str
    sizes: tuple[int, ...]
    multiples: bool = True
    preferred: int | None = None

    def supports(self, block_size: int) -> bool:
        """Whether blocks of this size can be split into what the kernels take."""
        return any(block_size % size == 0 for size in self.sizes)

    @property
    def preference(self) -> int:
        """The block size where none is given."""
        if self.preferred is not None:
            return self.preferred
        return DEFAULT_BLOCK_SIZE if self.supports(DEFAULT_BLOCK_SIZE) else min(self.sizes)

    def largest_within(self, tokens: int) -> int:
        """The largest kernel block of at most this many tokens, for layers that choose their own; else the
        smallest.
        """
        if self.multiples:
            candidates = [max(size, tokens // size * size) for size in self.sizes]
        else:
            candidates = list(self.sizes)
        return max((size for size in candidates if size <= tokens), default=min(candidates))


FLASH_ATTN: Final = Backend("FLASH_ATTN", (16,))
FLASH_ATTN_WIDE_FP8: Final = Backend("FLASH_ATTN", (64,), multiples=False, preferred=64)
FLASHINFER: Final = Backend("FLASHINFER", (16, 32, 64), multiples=False)
TRITON_ATTN: Final = Backend("TRITON_ATTN", (16,))
TRITON_FLASH_ATTN: Final = Backend("TRITON_FLASH_ATTN", (16,))
TURBOQUANT: Final = Backend("TURBOQUANT", (16, 32, 64, 128), multiples=False)
CPU_ATTN: Final = Backend("CPU_ATTN", (32,), preferred=128)
CPU_MLA: Final = Backend("CPU_MLA", (16,), multiples=False)

FLASH_ATTN_MLA: Final = Backend("FLASH_ATTN_MLA", (16,))
FLASHMLA: Final = Backend("FLASHMLA", (64,), multiples=False)
FLASHINFER_MLA: Final = Backend("FLASHINFER_MLA", (32, 64), multiples=False)
CUTLASS_MLA: Final = Backend("CUTLASS_MLA", (128,), multiples=False)
TRITON_MLA: Final = Backend("TRITON_MLA", (16,))
FLASH_ATTN_MLA_SPARSE: Final = Backend("FLASH_ATTN_MLA_SPARSE", (64,))
FLASHMLA_SPARSE: Final = Backend("FLASHMLA_SPARSE", (64,))
FLASHINFER_MLA_SPARSE: Final = Backend("FLASHINFER_MLA_SPARSE", (32,))
FLASHINFER_MLA_SPARSE_SM90: Final = Backend("FLASHINFER_MLA_SPARSE_SM90", (64,))
FLASHINFER_MLA_SPARSE_SM120: Final = Backend("FLASHINFER_MLA_SPARSE_SM120", (64,))
DEEPSEEK_V32_INDEXER: Final = Backend("DEEPSEEK_V32_INDEXER", (64,), multiples=False)


def generation(device: Device) -> int:
    """Major compute capability; that of current data-centre cards where it is not known."""
    return device.capability[0] if device.capability else 9


def dense_backend(
    device: Device,
    *,
    head_size: int,
    dtype: str,
    cache: str,
    sinks: bool = False,
    image_prefix: bool = False,
    block_size: int | None = None,
) -> Backend:
    """The backend of standard attention layers.

    Args:
        device: the card.
        head_size: head size of K.
        dtype: the model's element type.
        cache: the KV cache's, ``auto`` for the model's own.
        sinks: the layer has attention sinks.
        image_prefix: tokens of one image see each other.
        block_size: the size that was asked for.
    """
    if device.kind == "cpu":
        return CPU_ATTN
    if cache.startswith("turboquant_"):
        return TURBOQUANT
    major = generation(device)
    quantized = cache not in UNQUANTIZED
    wide = FLASH_ATTN_WIDE_FP8
    if quantized and head_size == 512 and block_size is not None and not wide.supports(block_size):
        return TRITON_ATTN
    if dtype not in HALF or (quantized and cache not in FP8):
        return TRITON_ATTN
    if image_prefix:
        if major == 9 and head_size in (256, 512):
            return wide if quantized and head_size == 512 else TRITON_FLASH_ATTN
        return TRITON_ATTN
    if major == 9 and head_size % 8 == 0 and head_size <= 512:
        return wide if quantized and head_size == 512 else FLASH_ATTN
    if major == 10 and head_size in (64, 128, 256):
        return FLASHINFER
    if head_size % 8 == 0 and head_size <= 256 and not quantized and not sinks:
        return FLASH_ATTN
    return TRITON_ATTN


def mla_backend(
    device: Device,
    *,
    head_size: int,
    nope_size: int,
    cache: str,
    sparse: bool = False,
    sinks: bool = False,
    block_size: int | None = None,
    dcp: int = 1,
) -> Backend:
    """The backend of multi-head latent attention.

    Args:
        device: the card.
        head_size: elements of the latent and its rotary part.
        nope_size: head size without the rotary part.
        cache: the KV cache's element type, ``auto`` for the model's own.
        sparse: an indexer picks the tokens.
        sinks: learnt attention sinks, which one sparse backend has.
        block_size: the size that was asked for.
        dcp: decode-context-parallel size.

    Raises:
        Refused: no backend takes this block size or cache type.
    """
    if device.kind == "cpu":
        return CPU_MLA
    if sinks:
        candidates = [FLASHMLA_SPARSE]
    elif sparse:
        candidates = _sparse_candidates(generation(device), head_size, cache, dcp)
    else:
        candidates = _latent_candidates(generation(device), nope_size, cache)
    for backend in candidates:
        if block_size is None or backend.supports(block_size):
            return backend
    kind = "block_size" if candidates else "cache_dtype"
    raise Refused(
        kind,
        f"No valid attention backend found for MLA with kv_cache_dtype={cache}, block_size={block_size}, "
        f"use_sparse={sparse}.",
    )


def _latent_candidates(major: int, nope_size: int, cache: str) -> list[Backend]:
    plain = cache in UNQUANTIZED
    if not plain and cache not in FP8:
        return []
    if major == 9:
        return [FLASH_ATTN_MLA, FLASHMLA, TRITON_MLA] if plain else [FLASHMLA, TRITON_MLA]
    if major == 10:
        first = [FLASHINFER_MLA] if nope_size in (64, 128, 192) else []
        return [*first, CUTLASS_MLA, TRITON_MLA]
    return [TRITON_MLA]


def _sparse_candidates(major: int, head_size: int, cache: str, dcp: int) -> list[Backend]:
    plain = cache in UNQUANTIZED
    if major == 12:
        return [FLASHINFER_MLA_SPARSE_SM120]
    if major == 10:
        if cache in ("fp8_ds_mla", "nvfp4_ds_mla"):
            return [FLASHMLA_SPARSE]
        return (
            [FLASHINFER_MLA_SPARSE, FLASHMLA_SPARSE]
            if not plain
            else [FLASHMLA_SPARSE, FLASHINFER_MLA_SPARSE]
        )
    if major != 9:
        return []
    found: list[Backend] = []
    if head_size == 512 and cache != "fp8_ds_mla":
        found.append(FLASHINFER_MLA_SPARSE_SM90)
    if plain and dcp == 1:
        found.append(FLASH_ATTN_MLA_SPARSE)
    if cache in ("auto", "bfloat16", "fp8", "fp8_ds_mla"):
        found.append(FLASHMLA_SPARSE)
    if cache in ("auto", "bfloat16", *FP8):
        found.append(FLASHINFER_MLA_SPARSE_SM90)
    return found


def common_block_size(backends: Sequence[Backend]) -> int:
    """The block size where none is given.

    Raises:
        Refused: the backends share none.
    """
    if len(backends) == 1:
        return backends[0].preference
    if all(backend.supports(DEFAULT_BLOCK_SIZE) for backend in backends):
        return DEFAULT_BLOCK_SIZE
    products = itertools.product(*(backend.sizes for backend in backends))
    for size in sorted({math.lcm(*sizes) for sizes in products}):
        if all(backend.supports(size) for backend in backends):
            return size
    raise Refused("block_size", "The attention backends share no supported KV cache block size.")
