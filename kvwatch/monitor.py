"""Observe, join, forecast: one cycle after another, with nothing carried over but counters and series."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from kvwatch.config import Config
from kvwatch.export.cycle import Cycle, SelfState
from kvwatch.forecast.bundle import Forecasts, forecast
from kvwatch.forecast.history import History
from kvwatch.ledger import EMPTY
from kvwatch.logs import log_event
from kvwatch.node import NodeSnapshot, join
from kvwatch.observe.cycle import NodeObserver, SourceStatus
from kvwatch.observe.records import Failure


class Monitor:
    """Runs cycles over one observer, which has the same configuration."""

    def __init__(
        self,
        observer: NodeObserver,
        config: Config,
        *,
        now: Callable[[], float] = time.time,
        simulated: bool = False,
    ) -> None:
        self._observer = observer
        self._now = now
        self._simulated = simulated
        self._cycles = 0
        self._history = History()
        self._ledger = EMPTY
        self._inconsistent: frozenset[str] = frozenset()
        self._errors: Counter[tuple[str, str]] = Counter()
        self._reload_successful = True
        self._reload_time = now()
        self.config = config

    def cycle(self) -> Cycle:
        """Look once and judge what was seen."""
        begun = time.monotonic()
        observation = self._observer.observe()
        snapshot = join(observation, self.config, self._ledger)
        self._ledger = snapshot.ledger
        forecasts = forecast(snapshot, self.config, self._history)
        self._cycles += 1
        self._errors.update((failure.source, failure.reason) for failure in snapshot.failures)
        self._check_sums(snapshot)
        return Cycle(snapshot, forecasts, self._own(time.monotonic() - begun))

    def failed_cycle(self, error: Exception) -> Cycle:
        """What to publish for a cycle that ended in an unforeseen error: kvwatch itself and nothing else."""
        failure = Failure("cycle", type(error).__name__, f"{type(error).__name__}: {error}")
        self.count_error(failure.source, failure.reason)
        status = SourceStatus("cycle", up=False, last_success=None, seconds=None, failure=failure)
        snapshot = NodeSnapshot(self._now(), gpus=(), servers=(), sources=(status,), failures=(failure,))
        return Cycle(snapshot, Forecasts(restart={}, plans={}, outlook={}, advice={}), self._own(None))

    def count_error(self, source: str, reason: str) -> None:
        """One more failure that no source has met, such as a file that could not be written."""
        self._errors[source, reason] += 1

    def clock_jumped(self) -> None:
        """The wall clock was set: what was remembered with the old time says nothing about the new."""
        self._history = History()
        self.count_error("clock", "jump")

    def _own(self, seconds: float | None) -> SelfState:
        return SelfState(
            cycles=self._cycles,
            cycle_seconds=seconds,
            errors=dict(self._errors),
            reload_successful=self._reload_successful,
            reload_time=self._reload_time,
            simulated=self._simulated,
        )

    def _check_sums(self, snapshot: NodeSnapshot) -> None:
        """Count each card whose processes hold more than is in use; say so once until it holds again."""
        found = frozenset(state.gpu.index for state in snapshot.gpus if state.inconsistent)
        self._errors.update([("node", "sum_exceeds_used")] * len(found))
        for index in sorted(found - self._inconsistent):
            log_event(logging.WARNING, "sum_exceeds_used", gpu=index)
        self._inconsistent = found

    def reconfigure(self, config: Config | None) -> None:
        """Use another configuration from the next cycle on; None says that a reload was refused."""
        self._reload_successful = config is not None
        if config is not None:
            self.config = config
            self._reload_time = self._now()
            self._observer.reconfigure(config)

    def close(self) -> None:
        """Let go of connections."""
        self._observer.close()
