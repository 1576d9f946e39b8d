"""All forecasts of one cycle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvwatch.config import Config
from kvwatch.forecast.advice import Advice, Facts, advise
from kvwatch.forecast.context import RequestLengths, request_lengths
from kvwatch.forecast.history import History, Outlook
from kvwatch.forecast.pending import PendingForecast, forecast_pending
from kvwatch.forecast.plans import PlanForecast, forecast_plans
from kvwatch.forecast.restart import RestartForecast, forecast_restart
from kvwatch.forecast.together import TogetherForecast, forecast_together
from kvwatch.forecast.wake import WakeForecast, forecast_wake
from kvwatch.node import NodeSnapshot


@dataclass(frozen=True, slots=True)
class Forecasts:
    """What is foretold, by server name.

    Every server has an entry under `restart`, `plans`, `outlook` and `advice`; elsewhere a server without one
    has nothing pending, is awake, shares no card, or has finished no request.
    """

    restart: Mapping[str, RestartForecast]
    plans: Mapping[str, tuple[PlanForecast, ...]]
    outlook: Mapping[str, Outlook]
    advice: Mapping[str, tuple[Advice, ...]]
    pending: Mapping[str, PendingForecast] = field(default_factory=dict)
    wake: Mapping[str, WakeForecast] = field(default_factory=dict)
    together: Mapping[str, TogetherForecast] = field(default_factory=dict)
    lengths: Mapping[str, RequestLengths] = field(default_factory=dict)


def forecast(snapshot: NodeSnapshot, config: Config, history: History | None = None) -> Forecasts:
    """Judge every server of the node.

    Args:
        history: what earlier cycles left; this cycle is added to it. None judges this cycle by itself.
    """
    history = history or History()
    servers = {server.name: server for server in snapshot.servers}
    restart = {
        name: forecast_restart(server, snapshot, config, history.verdicts.get(name))
        for name, server in servers.items()
    }
    history.add(snapshot, restart)
    outlook = {name: _ahead(history.outlook(server), restart[name]) for name, server in servers.items()}
    together = {name: forecast_together(name, restart) for name in servers}
    lengths = {name: request_lengths(server) for name, server in servers.items()}
    return Forecasts(
        restart=restart,
        plans={name: forecast_plans(config.plans, verdict, snapshot) for name, verdict in restart.items()},
        outlook=outlook,
        advice={
            name: advise(Facts(server, restart[name], together[name], lengths[name], outlook[name]))
            for name, server in servers.items()
        },
        pending={
            name: found
            for name, server in servers.items()
            if (found := forecast_pending(server, restart[name], snapshot, config)) is not None
        },
        wake={
            name: wake
            for name, server in servers.items()
            if (wake := forecast_wake(server, snapshot)) is not None
        },
        together={name: found for name, found in together.items() if found is not None},
        lengths={name: found for name, found in lengths.items() if found is not None},
    )


def _ahead(outlook: Outlook, restart: RestartForecast) -> Outlook:
    """What fails already is not foretold to fail."""
    return replace(outlook, margin=None) if restart.feasible is False else outlook
