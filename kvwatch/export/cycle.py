"""One finished cycle: what there is to publish."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvwatch.forecast.bundle import Forecasts
from kvwatch.node import NodeSnapshot


@dataclass(frozen=True, slots=True)
class SelfState:
    """What kvwatch says of itself.

    Attributes:
        cycle_seconds: how long the cycle took, None for one that failed.
        errors: failures since the start by (source, reason).
        reload_time: Unix time at which the configuration in use was read.
    """

    cycles: int
    cycle_seconds: float | None
    errors: Mapping[tuple[str, str], int] = field(default_factory=dict)
    reload_successful: bool = True
    reload_time: float | None = None
    simulated: bool = False


@dataclass(frozen=True, slots=True)
class Cycle:
    """What one cycle saw, what it foretells, and how it went."""

    snapshot: NodeSnapshot
    forecasts: Forecasts
    own: SelfState
