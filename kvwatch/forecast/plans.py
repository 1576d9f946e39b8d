"""Plans: changes named in kvwatch.yaml, judged each cycle without being made."""

from __future__ import annotations

from dataclasses import dataclass

from kvwatch.blockmath.errors import Unsupported
from kvwatch.blockmath.startup import Verdict
from kvwatch.config import Plan
from kvwatch.forecast.modelled import judge_modelled
from kvwatch.forecast.restart import RestartForecast, Unknown
from kvwatch.forecast.situation import Situation
from kvwatch.node import NodeSnapshot
from kvwatch.observe.records import ModelConfig


@dataclass(frozen=True, slots=True)
class PlanForecast:
    """The verdict on one planned change of one server, or why there is none.

    Attributes:
        basis: ``measured`` where the plan leaves all but the KV cache as it is, ``modelled`` where an
            estimate stands in; None where there is no verdict.
        assumptions: what was taken for granted, in words.
    """

    plan: Plan
    server: str
    verdict: Verdict | None
    unknown: Unknown | None
    basis: str | None = None
    assumptions: tuple[str, ...] = ()

    @property
    def feasible(self) -> bool | None:
        """True, False, or None where unknown."""
        return self.verdict.feasible if self.verdict else None


def forecast_plans(
    plans: tuple[Plan, ...], restart: RestartForecast, snapshot: NodeSnapshot
) -> tuple[PlanForecast, ...]:
    """Judge the plans that concern one server."""
    return tuple(
        _forecast(plan, restart, snapshot) for plan in plans if plan.server in (None, restart.server)
    )


def _forecast(plan: Plan, restart: RestartForecast, snapshot: NodeSnapshot) -> PlanForecast:
    found = restart.situation
    if found is None:
        unknown = restart.unknown or Unknown("refused", "vLLM refuses the flags that the plan starts from")
        return PlanForecast(plan, restart.server, None, unknown)
    try:
        verdict, basis, assumptions = _judge(plan, found, snapshot)
    except Unsupported as unsupported:
        unknown = Unknown(unsupported.reason, str(unsupported))
        return PlanForecast(plan, restart.server, None, unknown)
    if verdict.feasible is None:
        unknown = Unknown(verdict.unknown_reason or "input_missing", "a margin is smaller than its doubt")
        return PlanForecast(plan, restart.server, None, unknown, basis, assumptions)
    return PlanForecast(plan, restart.server, verdict, None, basis, assumptions)


def _judge(plan: Plan, found: Situation, snapshot: NodeSnapshot) -> tuple[Verdict, str, tuple[str, ...]]:
    if not found.moved_by(plan.flags):
        return found.judge(plan.flags), found.basis, found.assumptions
    config = None
    if plan.flags.model is not None:
        model = snapshot.plan_models.get(plan.name)
        if not isinstance(model, ModelConfig):
            detail = model.detail if model else "its config.json was not looked for"
            raise Unsupported("model_config_unreadable", f"model {plan.flags.model}: {detail}")
        config = model.config
    modelled = judge_modelled(found, plan.flags, snapshot, config)
    return modelled.verdict, "modelled", modelled.assumptions
