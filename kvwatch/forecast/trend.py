"""When a falling quantity reaches zero, with guards against seeing a trend where there is none."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass

MIN_SPAN = 30 * 60.0
"""Seconds that must be covered before anything is said."""
MIN_SAMPLES = 20
HORIZON = 7 * 86400.0
"""A crossing further away than this is not foretold."""
KEEP = 24 * 3600.0
RESOLUTION = 30.0
"""One sample is kept per so many seconds."""
MAX_GAP = MIN_SPAN
"""After so many seconds without a sample, what was before says nothing of the present fall."""

_CAPACITY = int(KEEP / RESOLUTION) + 1


@dataclass(frozen=True, slots=True)
class Trend:
    """A steady fall.

    Attributes:
        slope: units per second, negative.
        zero_at: Unix time at which the fall reaches zero; now, where it is below already.
    """

    slope: float
    zero_at: float


class Series:
    """The last day of one quantity. A clock that jumps back, or nobody watching for long, starts it anew."""

    def __init__(self) -> None:
        # Rings, sixteen bytes a sample, of full size from the first: memory must not grow with the day.
        self._times = array("d", bytes(8 * _CAPACITY))
        self._values = array("d", bytes(8 * _CAPACITY))
        self._begin = self._count = 0
        self._trend: Trend | None = None
        self._judged = True

    def add(self, time: float, value: float) -> None:
        """One sample; more than one per `RESOLUTION` seconds are not kept."""
        if self._count and not 0 <= time - self._times[self._newest] <= MAX_GAP:
            self._count = 0
        if self._count and time - self._times[self._newest] < RESOLUTION:
            return
        while self._count and time - self._times[self._begin] > KEEP:
            self._begin = (self._begin + 1) % _CAPACITY
            self._count -= 1
        self._count += 1
        self._times[self._newest] = time
        self._values[self._newest] = value
        self._judged = False

    def __len__(self) -> int:
        return self._count

    @property
    def _newest(self) -> int:
        return (self._begin + self._count - 1) % _CAPACITY

    @property
    def last(self) -> float:
        """The newest value; there must be one."""
        return self._values[self._newest]

    def _in_order(self, ring: array[float]) -> array[float]:
        """The samples in a ring, oldest first."""
        end = self._begin + self._count
        return ring[self._begin : end] + ring[: max(0, end - _CAPACITY)]

    def lows(self, points: int) -> tuple[tuple[float, float], ...]:
        """Times and values, oldest first: the lowest sample of each of at most so many spans, two or more.

        The newest sample is always among them; there must be one.
        """
        times, values = self._in_order(self._times), self._in_order(self._values)
        newest = len(self) - 1
        size = max(1, math.ceil(newest / (points - 1)))
        spans = (range(start, min(start + size, newest)) for start in range(0, newest, size))
        chosen = (min(span, key=values.__getitem__) for span in spans)
        return tuple((times[index], values[index]) for index in (*chosen, newest))

    def trend(self) -> Trend | None:
        """The steady fall that the series is in; None where there is none.

        None as well where it has been watched for less than a day and not as long as it would still take.
        """
        if not self._judged:
            self._trend, self._judged = self._judge(), True
        return self._trend

    def _judge(self) -> Trend | None:
        if self._count < MIN_SAMPLES:
            return None
        now = self._times[self._newest]
        if now - self._times[self._begin] < MIN_SPAN:
            return None
        # Brings numpy, which a command that looks once would wait for in vain: see daemon.LATE_MODULES.
        from kvwatch.forecast.slope import steady_fall

        times, values = self._in_order(self._times), self._in_order(self._values)
        fall = steady_fall(times, values)
        if fall is None:
            return None
        remaining = max(0.0, fall.level / -fall.slope)
        if remaining > (HORIZON if fall.span >= KEEP - MAX_GAP else fall.span):
            return None
        return Trend(fall.slope, now + remaining)
