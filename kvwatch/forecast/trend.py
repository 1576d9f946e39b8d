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
        # Sixteen bytes a sample; a busy node has dozens of series with nearly three thousand each.
        self._times = array("d")
        self._values = array("d")
        self._trend: Trend | None = None
        self._judged = True

    def add(self, time: float, value: float) -> None:
        """One sample; more than one per `RESOLUTION` seconds are not kept."""
        if self._times and not 0 <= time - self._times[-1] <= MAX_GAP:
            self._forget(len(self))
        if self._times and time - self._times[-1] < RESOLUTION:
            return
        self._times.append(time)
        self._values.append(value)
        self._judged = False
        self._forget(next(index for index, then in enumerate(self._times) if time - then <= KEEP))

    def _forget(self, count: int) -> None:
        """Let go of so many samples, the oldest."""
        del self._times[:count]
        del self._values[:count]

    def __len__(self) -> int:
        return len(self._times)

    @property
    def last(self) -> float:
        """The newest value; there must be one."""
        return self._values[-1]

    def lows(self, points: int) -> tuple[tuple[float, float], ...]:
        """Times and values, oldest first: the lowest sample of each of at most so many spans, two or more.

        The newest sample is always among them; there must be one.
        """
        newest = len(self) - 1
        size = max(1, math.ceil(newest / (points - 1)))
        spans = (range(start, min(start + size, newest)) for start in range(0, newest, size))
        chosen = (min(span, key=self._values.__getitem__) for span in spans)
        return tuple((self._times[index], self._values[index]) for index in (*chosen, newest))

    def trend(self) -> Trend | None:
        """The steady fall that the series is in; None where there is none.

        None as well where it has been watched for less than a day and not as long as it would still take.
        """
        if not self._judged:
            self._trend, self._judged = self._judge(), True
        return self._trend

    def _judge(self) -> Trend | None:
        if len(self) < MIN_SAMPLES or self._times[-1] - self._times[0] < MIN_SPAN:
            return None
        # Brings numpy, which a command that looks once would wait for in vain.
        from kvwatch.forecast.slope import steady_fall

        fall = steady_fall(self._times, self._values, MIN_SAMPLES, MIN_SPAN)
        if fall is None:
            return None
        remaining = max(0.0, fall.level / -fall.slope)
        if remaining > (HORIZON if fall.span >= KEEP - MAX_GAP else fall.span):
            return None
        return Trend(fall.slope, self._times[-1] + remaining)
