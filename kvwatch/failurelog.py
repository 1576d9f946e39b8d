"""Failures in the log: a line when one begins and one when it ends, a count for what lies between."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvwatch.logs import log_event
from kvwatch.observe.records import Failure


@dataclass(slots=True)
class _Episode:
    """A failure under way, or one that was seen lately."""

    began: float
    said: float
    unsaid: int = 0
    open: bool = True


class FailureLog:
    """Folds repeated failures: each is written when it begins and ends, and counted in between.

    One that lasts, or that comes and goes, is written once per ``window`` seconds, with how often it was met
    since the last line.
    """

    def __init__(self, *, window: float = 600.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._window = window
        self._clock = clock
        self._episodes: dict[tuple[str, str], _Episode] = {}

    def update(self, failures: Iterable[Failure]) -> None:
        """Take one cycle's failures; those of earlier cycles that are not among them are over."""
        now = self._clock()
        current = {(failure.source, failure.reason): failure.detail for failure in failures}
        for key, detail in current.items():
            self._met(key, detail, now)
        for key in self._episodes.keys() - current.keys():
            self._missed(key, now)

    def _met(self, key: tuple[str, str], detail: str, now: float) -> None:
        episode = self._episodes.get(key)
        if episode is None:
            episode = self._episodes[key] = _Episode(began=now, said=now)
            self._say("source_failed", key, logging.WARNING, detail=detail)
            return
        if not episode.open:
            episode.open, episode.began = True, now
        episode.unsaid += 1
        if now - episode.said >= self._window:
            self._say("source_failed", key, logging.WARNING, detail=detail, times=episode.unsaid)
            episode.said, episode.unsaid = now, 0

    def _missed(self, key: tuple[str, str], now: float) -> None:
        episode = self._episodes[key]
        if episode.open:
            episode.open = False
            if episode.began <= episode.said:
                self._say("source_recovered", key, logging.INFO, seconds=round(now - episode.began))
        if now - episode.said >= self._window:
            del self._episodes[key]

    def _say(self, event: str, key: tuple[str, str], level: int, **fields: object) -> None:
        source, reason = key
        log_event(level, event, source=source, reason=reason, **fields)
