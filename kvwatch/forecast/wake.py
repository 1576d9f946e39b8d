"""Sleeping servers: would they wake, and what they will want back."""

from __future__ import annotations

from dataclasses import dataclass

from kvwatch.blockmath.startup import requested_bytes
from kvwatch.node import NodeSnapshot, ServerState
from kvwatch.observe.records import VllmRecord


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
    """Bytes by (server, card) that sleeping servers will take when they wake, up to their budgets."""
    wanted: dict[tuple[str, str], int] = {}
    for server in snapshot.servers:
        if not is_asleep(server) or not isinstance(server.page, VllmRecord):
            continue
        utilization = server.page.engines[0].gpu_memory_utilization
        for index in server.gpus:
            state = snapshot.gpu(index)
            own = state.held_by_server(server.name) if state else None
            if state is None or state.gpu.memory is None or own is None:
                continue
            if utilization is None or server.release is None:
                continue
            total = state.gpu.memory.total - (state.gpu.memory.reserved or 0)
            budget = requested_bytes(total, utilization, server.release)
            wanted[server.name, index] = max(0, budget - own)
    return wanted


def forecast_wake(server: ServerState, snapshot: NodeSnapshot) -> WakeForecast | None:
    """The verdict on one server; None for a server that is awake.

    What it will take is bounded by its budget less what it still holds: weights come back and the pool is
    allocated anew, neither beyond the budget that both came from.
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
