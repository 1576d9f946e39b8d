"""What the next start of each server would gain if a process let go of its memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvwatch.blockmath.errors import Unsupported
from kvwatch.blockmath.startup import Verdict
from kvwatch.forecast.restart import RestartForecast
from kvwatch.node import NodeSnapshot


@dataclass(frozen=True, slots=True)
class Gain:
    """One server's restart with a process on its cards, and without it.

    Attributes:
        before, after: None where there is no verdict.
        unknown: why there is none, fit for a label; empty where there is one.
    """

    server: str
    before: Verdict | None
    after: Verdict | None
    unknown: str = ""

    @property
    def turns(self) -> bool:
        """Whether the end of the process makes an infeasible start feasible."""
        return (
            self.before is not None
            and self.before.feasible is False
            and self.after is not None
            and self.after.feasible is True
        )


def gains(pid: int, snapshot: NodeSnapshot, restart: Mapping[str, RestartForecast]) -> tuple[Gain, ...]:
    """For each server that has a card in common with a process and is not the one it is a part of."""
    parts = [
        holder
        for state in snapshot.gpus
        for holder in state.holders
        if holder.pid == pid and holder.used_bytes
    ]
    freed = {holder.gpu: holder.used_bytes or 0 for holder in parts}
    own = {holder.ownership.server for holder in parts}
    return tuple(
        _gain(restart[server.name], freed)
        for server in snapshot.servers
        if server.name not in own and not freed.keys().isdisjoint(server.gpus)
    )


def _gain(forecast: RestartForecast, freed: Mapping[str, int]) -> Gain:
    if forecast.situation is None or forecast.verdict is None:
        reason = forecast.unknown.reason if forecast.unknown else ""
        return Gain(forecast.server, forecast.verdict, forecast.verdict, reason)
    try:
        return Gain(forecast.server, forecast.verdict, forecast.situation.judge(freed=freed))
    except Unsupported as unsupported:
        return Gain(forecast.server, forecast.verdict, None, unsupported.reason)
