"""All forecasts of one cycle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvwatch.config import Config
from kvwatch.forecast.pending import PendingForecast, forecast_pending
from kvwatch.forecast.plans import PlanForecast, forecast_plans
from kvwatch.forecast.restart import RestartForecast, forecast_restart
from kvwatch.node import NodeSnapshot


@dataclass(frozen=True, slots=True)
class Forecasts:
    """What is foretold, by server name."""

    restart: Mapping[str, RestartForecast]
    plans: Mapping[str, tuple[PlanForecast, ...]]
    pending: Mapping[str, PendingForecast] = field(default_factory=dict)


def forecast(snapshot: NodeSnapshot, config: Config) -> Forecasts:
    """Judge every server of the node."""
    restart = {server.name: forecast_restart(server, snapshot, config) for server in snapshot.servers}
    plans = {name: forecast_plans(config.plans, verdict) for name, verdict in restart.items()}
    pending = {
        server.name: found
        for server in snapshot.servers
        if (found := forecast_pending(server, restart[server.name], snapshot, config)) is not None
    }
    return Forecasts(restart, plans, pending)
