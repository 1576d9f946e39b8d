"""Plans: changes named in kvwatch.yaml, judged each cycle without being made."""

from __future__ import annotations

from dataclasses import dataclass

from kvwatch.blockmath.errors import Unsupported
from kvwatch.blockmath.startup import Verdict
from kvwatch.config import Plan
from kvwatch.forecast.restart import RestartForecast, Unknown


@dataclass(frozen=True, slots=True)
class PlanForecast:
    """The verdict on one planned change of one server, or why there is none."""

    plan: Plan
    server: str
    verdict: Verdict | None
    unknown: Unknown | None

    @property
    def feasible(self) -> bool | None:
        """True, False, or None where unknown."""
        return self.verdict.feasible if self.verdict else None


def forecast_plans(plans: tuple[Plan, ...], restart: RestartForecast) -> tuple[PlanForecast, ...]:
    """Judge the plans that concern one server."""
    return tuple(_forecast(plan, restart) for plan in plans if plan.server in (None, restart.server))


def _forecast(plan: Plan, restart: RestartForecast) -> PlanForecast:
    if restart.situation is None:
        unknown = restart.unknown or Unknown("refused", "vLLM refuses the flags that the plan starts from")
        return PlanForecast(plan, restart.server, None, unknown)
    try:
        verdict = restart.situation.judge(plan.flags)
    except Unsupported as unsupported:
        unknown = Unknown(unsupported.reason, str(unsupported))
        return PlanForecast(plan, restart.server, None, unknown)
    if verdict.feasible is None:
        unknown = Unknown(verdict.unknown_reason or "input_missing", "a check lacks an input")
        return PlanForecast(plan, restart.server, None, unknown)
    return PlanForecast(plan, restart.server, verdict, None)
