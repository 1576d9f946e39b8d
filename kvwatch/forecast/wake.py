"""Sleeping servers: would they wake, and what they will want back."""

from __future__ import annotations

from dataclasses import dataclass

from kvwatch.blockmath.startup import requested_bytes
from kvwatch.node import NodeSnapshot, ServerState
from kvwatch.observe.records import Failure, VllmRecord


@dataclass(frozen=True, slots=True)
class WakeForecast:
    """Whether one sleeping server finds its memory again.

    Attributes:
        feasible: None where its memory cannot be seen.
        margin_bytes: on the tightest card; negative is how much is missing.
        gpu: that card.
    """

    server: str
    feasible: bool | None
    margin_bytes: int | None
    gpu: str | None


def is_asleep(server: ServerState) -> bool:
    """Whether an engine of the server sleeps."""
    if not isinstance(server.page, VllmRecord):
        return False
    return any(engine.sleep_state not in (None, "awake") for engine in server.page.engines)


def reserved_for_sleepers(snapshot: NodeSnapshot) -> dict[tuple[str, str], int]:
    """Bytes by (server, card) that sleeping servers will take when they wake.

    At most what their budgets leave; where the cache's size was told outright, that and the weights.
    """
    wanted: dict[tuple[str, str], int] = {}
    for server in snapshot.servers:
        if not is_asleep(server) or not isinstance(server.page, VllmRecord):
            continue
        utilization = server.page.engines[0].gpu_memory_utilization
        told = _told_outright(server, server.page)
        for index in server.gpus:
            state = snapshot.gpu(index)
            own = state.held_by_server(server.name) if state else None
            if state is None or state.gpu.memory is None or own is None:
                continue
            if utilization is None or server.release is None:
                continue
            total = state.gpu.memory.total - (state.gpu.memory.reserved or 0)
            budget = requested_bytes(total, utilization, server.release)
            wanted[server.name, index] = max(0, budget - own) if told is None else told
    return wanted


def _told_outright(server: ServerState, page: VllmRecord) -> int | None:
    """Bytes of one card's cache and weights, None where the budget decides or the weights are not known."""
    cache, model, flags = page.engines[0].kv_cache_memory_bytes, server.model_config, server.launch.flags
    if not cache or isinstance(model, Failure) or model.weight_bytes is None:
        return None
    return cache + model.weight_bytes // (flags.tp * flags.pp)


def forecast_wake(server: ServerState, snapshot: NodeSnapshot) -> WakeForecast | None:
    """The verdict on one server; None for a server that is awake.

    Weights come back and the pool is allocated anew, neither beyond the budget that both came from.
    """
    if not is_asleep(server):
        return None
    wanted = reserved_for_sleepers(snapshot)
    margins: list[tuple[int, str]] = []
    for index in server.gpus:
        state = snapshot.gpu(index)
        if state is None or state.gpu.memory is None or (server.name, index) not in wanted:
            return WakeForecast(server.name, None, None, None)
        margins.append((state.gpu.memory.free - wanted[server.name, index], index))
    if not margins:
        return WakeForecast(server.name, None, None, None)
    margin, gpu = min(margins)
    return WakeForecast(server.name, margin >= 0, margin, gpu)
