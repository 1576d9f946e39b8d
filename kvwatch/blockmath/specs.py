"""The KV cache of one layer: bytes of a block, and blocks that one request takes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum

from kvwatch.blockmath.backends import Backend


class Kind(StrEnum):
    """How a layer's cache grows with the length of a request."""

    FULL = "full_attention"
    MLA = "mla_attention"
    SLIDING = "sliding_window"
    SLIDING_MLA = "sliding_window_mla"
    CHUNKED = "chunked_local_attention"
    CROSS = "cross_attention"
    MAMBA = "mamba"
    RING = "ring"


FULL_KINDS = frozenset({Kind.FULL, Kind.MLA})
WINDOW_KINDS = frozenset({Kind.SLIDING, Kind.SLIDING_MLA})


def ceil_div(number: int, divisor: int) -> int:
    """``ceil(number / divisor)`` in whole numbers."""
    return -(-number // divisor)


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple that is not below the number."""
    return ceil_div(number, multiple) * multiple


@dataclass(frozen=True, slots=True)
class Load:
    """What one request and the scheduler bring along, beside the request's length.

    Attributes:
        max_in_flight_tokens: tokens scheduled and not yet settled, over all batches under way.
        max_encoder_tokens: encoder input tokens in one batch, which size cross-attention caches.
        dcp: decode-context-parallel size.
        mamba_cache_mode: ``none``, ``align`` or ``all``.
    """

    max_in_flight_tokens: int
    max_encoder_tokens: int = 0
    dcp: int = 1
    mamba_cache_mode: str = "none"


@dataclass(frozen=True, slots=True)
class Growth:
    """Blocks that one request needs at a length: ``constant + ceil(min(ceil(length / shards), limit) /
    block_size)``.

    Attributes:
        block_size: tokens in a block.
        limit: tokens held at most; None where all are.
        shards: ranks that share the tokens.
        constant: blocks needed at any length.
    """

    block_size: int
    limit: int | None = None
    shards: int = 1
    constant: int = 0

    @classmethod
    def fixed(cls, blocks: int) -> Growth:
        """The same number of blocks at every length."""
        return cls(block_size=1, limit=0, constant=blocks)

    def blocks(self, length: int) -> int:
        """Blocks at a length in tokens."""
        held = -(-length // self.shards)
        if self.limit is not None and held > self.limit:
            held = self.limit
        return self.constant - (-held // self.block_size)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The cache of one layer on one rank. Equal specs share blocks; ``shape`` holds what else tells layers
    apart.

    Attributes:
        kind: how it grows.
        block_size: tokens in a block.
        state_bytes: bytes of one stored state over the rank's heads; of the whole state for ``MAMBA``.
        tokens_per_state: tokens that one stored state stands for.
        window: tokens that a sliding window sees.
        chunk: tokens of a local-attention chunk.
        retained_tokens: tokens kept below the window for multi-step drafting.
        padded_bytes: bytes that a block is padded to, where padding was asked for.
        alignment: a block is padded to a multiple of this many bytes.
        stride_alignment: blocks lie a multiple of this many bytes apart (layer-outermost and packed layouts).
        kernel_block: a kernel takes blocks of at most this many tokens, whole ones, so strides align to them.
        dcp_sharded: decode context parallelism splits the tokens over ranks.
        speculative_blocks: extra state blocks for draft tokens (``MAMBA``).
        checkpoint_blocks: extra state blocks for prefill checkpoints (``MAMBA``).
        shape: whatever else makes two layers different, in any comparable form.
        backend: the attention backend, which does not make two layers different.
    """

    kind: Kind
    block_size: int
    state_bytes: int
    tokens_per_state: int = 1
    window: int | None = None
    chunk: int | None = None
    retained_tokens: int = 0
    padded_bytes: int | None = None
    alignment: int | None = None
    stride_alignment: int = 1
    kernel_block: int | None = None
    dcp_sharded: bool = True
    speculative_blocks: int = 0
    checkpoint_blocks: int = 0
    shape: tuple[object, ...] = ()
    backend: Backend | None = field(default=None, compare=False)

    @property
    def unpadded_bytes(self) -> int:
        """Bytes of a block without padding."""
        if self.kind is Kind.MAMBA:
            return self.state_bytes
        return self.state_bytes * (self.block_size // self.tokens_per_state)

    @property
    def page_bytes(self) -> int:
        """Bytes of a block."""
        if self.padded_bytes is not None:
            return self.padded_bytes
        if self.alignment is not None:
            return round_up(self.unpadded_bytes, self.alignment)
        return self.unpadded_bytes

    @property
    def stride(self) -> int:
        """Alignment in bytes of the distance between two blocks."""
        if self.kernel_block is None:
            return self.stride_alignment
        kernel = math.gcd(self.kernel_block, self.block_size)
        return 1 if kernel == self.block_size else self.with_block_size(kernel).page_bytes

    def with_block_size(self, block_size: int) -> LayerSpec:
        """The same layer with blocks of another size."""
        return replace(self, block_size=block_size)

    def growth(self, load: Load) -> Growth:
        """How many blocks one request needs as it gets longer.

        Raises:
            ValueError: the mamba cache mode is unknown.
        """
        match self.kind:
            case Kind.FULL | Kind.MLA:
                return Growth(self.block_size, shards=load.dcp if self.dcp_sharded else 1)
            case Kind.SLIDING | Kind.SLIDING_MLA:
                assert self.window is not None
                held = self.window - 1 + self.retained_tokens + load.max_in_flight_tokens
                return Growth(self.block_size, limit=held, constant=1)
            case Kind.CHUNKED:
                assert self.chunk is not None
                return Growth(self.block_size, limit=self.chunk + load.max_in_flight_tokens)
            case Kind.CROSS:
                return Growth.fixed(ceil_div(load.max_encoder_tokens, self.block_size))
            case Kind.RING:
                return Growth.fixed(1)
            case Kind.MAMBA:
                return self._state_growth(load.mamba_cache_mode)

    def _state_growth(self, mode: str) -> Growth:
        if mode == "align":
            return Growth.fixed(2 + self.speculative_blocks + self.checkpoint_blocks)
        if mode == "none":
            return Growth.fixed(1 + self.speculative_blocks)
        if mode == "all":
            return Growth(self.block_size, constant=self.speculative_blocks)
        raise ValueError(f"mamba cache mode {mode!r} is not none, align or all")
