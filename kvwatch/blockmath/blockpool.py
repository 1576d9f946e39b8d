"""The pool of KV blocks: bytes per block, blocks, tokens, and what a request of some length needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvwatch.blockmath.demand import Demand
from kvwatch.blockmath.errors import Refused
from kvwatch.blockmath.grouping import Group
from kvwatch.blockmath.layouts.base import Basis
from kvwatch.blockmath.releases import Release
from kvwatch.blockmath.settings import Settings
from kvwatch.blockmath.specs import Growth


@dataclass(frozen=True, slots=True)
class PoolStage:
    """One pipeline stage's share of the pool.

    Attributes:
        bytes_per_block: bytes that one block takes on each of the stage's GPUs.
        num_layers: layers with cache, per group.
    """

    bytes_per_block: int
    num_layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pool:
    """How a server's KV memory is cut into blocks.

    Attributes:
        settings: what vLLM runs with.
        layout: short label of the kinds of layers, for example ``sliding+full``.
        basis: ``exact``, or ``inferred`` for an architecture that was read by its structure.
        stages: the pipeline stages.
        groups: layers that share a block table.
        growths: how each group's blocks grow with the length of a request.
        demand: what the check for one request adds up.
        release: the release whose rules hold.
        blocks_override: ``--num-gpu-blocks-override``.
        vocabulary: tokens of the vocabulary, which size the sampler's logits; None where not known.
    """

    settings: Settings
    layout: str
    basis: Basis
    stages: tuple[PoolStage, ...]
    groups: tuple[Group, ...]
    growths: tuple[Growth, ...]
    demand: Demand
    release: Release
    blocks_override: int | None = None
    vocabulary: int | None = None

    @property
    def bytes_per_block(self) -> tuple[int, ...]:
        """Bytes of one block on a GPU, per stage."""
        return tuple(stage.bytes_per_block for stage in self.stages)

    @property
    def kept_back_bytes(self) -> tuple[int, ...]:
        """Bytes that the check for one request leaves out, per stage: one block where the release reserves
        it.
        """
        if not self.release.reserves_null_block:
            return (0,) * len(self.stages)
        return self.bytes_per_block

    @property
    def kv_bytes_per_token(self) -> float | None:
        """Bytes that one more token of a long request takes on a GPU, over all stages; None where it takes
        none.
        """
        unbounded = [growth.block_size * growth.shards for growth in self.growths if growth.limit is None]
        if not unbounded:
            return None
        return sum(self.bytes_per_block) * sum(1 / tokens for tokens in unbounded)

    def blocks_per_request(self, length: int) -> tuple[int, ...]:
        """Blocks that one request of ``length`` tokens takes, per group."""
        return tuple(growth.blocks(length) for growth in self.growths)

    def need_bytes(self, length: int) -> tuple[int, ...]:
        """Bytes that the check for one request of ``length`` tokens asks for, per stage."""
        return self.demand.bytes(length)

    def num_blocks(self, available: int | Sequence[int]) -> int:
        """Blocks of the pool, the least over stages.

        Args:
            available: bytes for KV on each GPU; one figure, or one per stage.
        """
        if self.blocks_override is not None:
            return self.blocks_override
        if not self.groups:
            return 1
        return min(
            given // stage.bytes_per_block
            for given, stage in zip(self._per_stage(available), self.stages, strict=True)
        )

    def capacity_tokens(self, num_blocks: int) -> int:
        """Tokens that the release's log calls the KV cache size."""
        match self.release.capacity:
            case "concurrency":
                return int(self.max_concurrency(num_blocks) * self.settings.max_model_len)
            case "blocks_per_group":
                size = min((group.spec.block_size for group in self.groups), default=self.settings.block_size)
                return num_blocks // max(len(self.groups), 1) * size * self.settings.dcp
            case "blocks_times_size":
                return num_blocks * self.settings.block_size

    def max_concurrency(self, num_blocks: int) -> float:
        """Requests of the maximum length that the blocks hold at once.

        Raises:
            Refused: the model has no KV cache.
        """
        blocks = sum(self.blocks_per_request(self.settings.max_model_len))
        if not blocks:
            raise Refused("no_kv_cache", "a model without KV cache has no concurrency limit of this kind")
        return num_blocks / blocks

    def fits(self, length: int, available: int | Sequence[int]) -> bool:
        """Whether one request of ``length`` tokens passes the check."""
        return self.demand.fits(length, self.check_bytes(available))

    def longest_length(self, available: int | Sequence[int], limit: int | None = None) -> int:
        """The largest length up to ``limit`` that passes the check; 0 where not one token does.

        Args:
            available: bytes for KV on each GPU; one figure, or one per stage.
            limit: the longest length tried, by default the maximum length in effect.
        """
        top = self.settings.max_model_len if limit is None else limit
        return self.demand.longest(self.check_bytes(available), top)

    def check_bytes(self, available: int | Sequence[int]) -> tuple[int, ...]:
        """Bytes that the check for one request compares with, per stage."""
        if self.blocks_override is not None and self.release.override_in_check:
            given = tuple(self.blocks_override * size for size in self.bytes_per_block)
        else:
            given = self._per_stage(available)
        if self.release.admission == "whole_model_groups":
            given = (min(given),) * len(given)
        return tuple(have - kept for have, kept in zip(given, self.kept_back_bytes, strict=True))

    def _per_stage(self, available: int | Sequence[int]) -> tuple[int, ...]:
        if isinstance(available, int):
            return (available,) * len(self.stages)
        if len(available) != len(self.stages):
            raise ValueError(f"{len(available)} figures given for {len(self.stages)} pipeline stages")
        return tuple(available)
