"""The restart verdict: would this server start if it stopped now and came back with the same flags?"""

from __future__ import annotations

from dataclasses import dataclass

from kvwatch.blockmath.errors import Refused, Unsupported
from kvwatch.blockmath.startup import Verdict
from kvwatch.config import Config
from kvwatch.forecast.remedies import Remedy, remedies
from kvwatch.forecast.situation import Situation, refused, situation
from kvwatch.node import NodeSnapshot, ServerState


@dataclass(frozen=True, slots=True)
class Unknown:
    """Why there is no verdict.

    Attributes:
        reason: short name fit for a label.
        detail: one sentence for people.
    """

    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class RestartForecast:
    """The verdict on one server's restart, or why there is none.

    Attributes:
        situation: what it was judged from; None where an input was missing.
        verdict: None where unknown.
        remedies: changes that make an infeasible start feasible, cheapest first, each one verified.
    """

    server: str
    situation: Situation | None
    verdict: Verdict | None
    unknown: Unknown | None
    remedies: tuple[Remedy, ...] = ()

    @property
    def feasible(self) -> bool | None:
        """True, False, or None where unknown."""
        return self.verdict.feasible if self.verdict else None

    @property
    def blocking_check(self) -> str | None:
        """Name of the check that would fail first, None where none would or nothing is known."""
        return self.verdict.blocking.check if self.verdict and self.verdict.blocking else None


def forecast_restart(
    server: ServerState, snapshot: NodeSnapshot, config: Config, before: RestartForecast | None = None
) -> RestartForecast:
    """Judge one server. Never raises for what the node looks like: what is missing gives `unknown`.

    Args:
        before: the verdict of the last cycle, to spare what would come out the same.
    """
    try:
        found = situation(server, snapshot, config.restart, before.situation if before else None)
        verdict = found.judge()
    except Unsupported as unsupported:
        return RestartForecast(server.name, None, None, Unknown(unsupported.reason, str(unsupported)))
    except Refused as refusal:
        return RestartForecast(server.name, None, refused(refusal), None)
    if verdict.feasible is None:
        reason = verdict.unknown_reason or "input_missing"
        return RestartForecast(server.name, found, None, Unknown(reason, "a check lacks an input"))
    found_remedies = () if verdict.feasible else remedies(found, verdict, snapshot)
    return RestartForecast(server.name, found, verdict, None, found_remedies)
