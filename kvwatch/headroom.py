"""What a running server's KV cache pool still holds."""

from __future__ import annotations

from dataclasses import dataclass

from kvwatch.blockmath.pool import Pool
from kvwatch.node import ServerState
from kvwatch.observe.records import Engine


@dataclass(frozen=True, slots=True)
class Headroom:
    """One engine's pool in bytes, tokens and full-length requests. None where an input is missing.

    Attributes:
        pool_bytes: on each GPU of the engine (the largest pipeline stage).
        capacity_tokens: as the server's own log counts them.
        free_requests: requests of `max_model_len` that still fit, whole ones.
    """

    pool_bytes: int | None = None
    capacity_tokens: int | None = None
    max_concurrency: float | None = None
    free_tokens: int | None = None
    free_requests: int | None = None


def headroom(server: ServerState, engine: Engine, pool: Pool | None) -> Headroom:
    """Work one engine's headroom out. The server's own figures go before the arithmetic's."""
    blocks = engine.num_blocks
    if blocks is None:
        return Headroom()
    capacity, concurrency = engine.size_tokens, engine.max_concurrency
    if pool is not None:
        capacity = pool.capacity_tokens(blocks) if capacity is None else capacity
        concurrency = pool.max_concurrency(blocks) if concurrency is None else concurrency
    free_tokens = free_requests = None
    if engine.usage is not None:
        free_blocks = _free_blocks(engine.usage, blocks, server)
        if capacity is not None:
            free_tokens = int(capacity * free_blocks / blocks)
        per_request = _blocks_per_request(server, blocks, concurrency, pool)
        if per_request:
            free_requests = int(free_blocks / per_request + 1e-9)
    return Headroom(
        pool_bytes=blocks * max(pool.bytes_per_block) if pool is not None else None,
        capacity_tokens=capacity,
        max_concurrency=concurrency,
        free_tokens=free_tokens,
        free_requests=free_requests,
    )


def _free_blocks(usage: float, blocks: int, server: ServerState) -> int:
    """The null block is never free; whether `usage` counts it depends on the release."""
    excluded = server.release is None or server.release.usage_excludes_null_block
    usable = blocks - 1 if excluded else blocks
    return max(0, usable - round(usage * usable))


def _blocks_per_request(
    server: ServerState, blocks: int, concurrency: float | None, pool: Pool | None
) -> float | None:
    length = server.max_model_len
    if pool is not None and length is not None:
        return sum(pool.blocks_per_request(length))
    return blocks / concurrency if concurrency else None
