"""When a falling quantity reaches zero, with guards against seeing a trend where there is none."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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

_MAX_POINTS = 120
_THIRD_SHARE = 0.25
"""Each third of the window must fall at least at this share of the whole's slope: a step does not."""
_FALLING_PAIRS = 0.8
"""Share of the pairs of samples that must fall: noise around a level has half of them."""
_LEVEL_SAMPLES = 5
"""How many of the newest samples tell where the fall has come to: a curve's earlier ones point past it."""
_DEEPER_SHARE = 0.1
"""A fall that goes no deeper than this beyond one that recovered may recover as well."""
_RESET_SHARE = 0.5
"""A rise by this share of the fall before it ends a tooth."""

Array = NDArray[np.float64]


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
        values = _array(self._values)
        newest = len(values) - 1
        size = max(1, math.ceil(newest / (points - 1)))
        chosen = [
            start + int(values[start : min(start + size, newest)].argmin())
            for start in range(0, newest, size)
        ]
        return tuple((self._times[index], self._values[index]) for index in (*chosen, newest))

    def trend(self) -> Trend | None:
        """The steady fall that the series is in; None where there is none.

        The slope is Theil and Sen's median over pairs, of the time since the last recovery. None as well
        where the fall has been watched for less than a day and not as long as it would still take, and where
        earlier falls of the same size recovered by themselves: a sawtooth.
        """
        if not self._judged:
            self._trend, self._judged = self._judge(), True
        return self._trend

    def _judge(self) -> Trend | None:
        times, values = _array(self._times), _array(self._values)
        if len(times) < MIN_SAMPLES or times[-1] - times[0] < MIN_SPAN:
            return None
        start, deepest_before = _last_tooth(values)
        times, values = _thinned(times[start:], values[start:])
        span = times[-1] - times[0] if len(times) else 0.0
        if len(times) < MIN_SAMPLES or span < MIN_SPAN:
            return None
        slope = _steady_slope(times, values)
        if slope is None:
            return None
        level = float(np.median((values - slope * (times - times[-1]))[-_LEVEL_SAMPLES:]))
        if deepest_before is not None and level > deepest_before - _DEEPER_SHARE * (
            values[0] - deepest_before
        ):
            return None
        remaining = max(0.0, level / -slope)
        if remaining > (HORIZON if span >= KEEP - MAX_GAP else span):
            return None
        return Trend(slope, float(times[-1]) + remaining)


def _array(numbers: array[float]) -> Array:
    return np.array(numbers, np.float64)


def _last_tooth(values: Array) -> tuple[int, float | None]:
    """Where the present fall began, and the lowest value of the falls before that recovered."""
    start, lowest_before = 0, None
    real_fall = _real_fall(values)
    # Plain floats: a loop over an array makes an object of each value anew.
    course: list[float] = values.tolist()
    peak = trough = course[0]
    trough_at = 0
    for index, value in enumerate(course):
        if value < trough:
            trough, trough_at = value, index
        elif peak - trough > real_fall and value - trough >= _RESET_SHARE * (peak - trough):
            lowest_before = trough if lowest_before is None else min(lowest_before, trough)
            start = trough_at + int(np.argmax(values[trough_at : index + 1]))
            peak = trough = value
            trough_at = index
        if value > peak and trough_at <= start:
            peak = trough = value
            start = trough_at = index
    return start, lowest_before


def _real_fall(values: Array) -> float:
    """How much a fall must exceed to be more than the jitter between neighbouring samples."""
    return 10 * float(np.median(np.abs(np.diff(values)))) if len(values) > 1 else 0.0


def _thinned(times: Array, values: Array) -> tuple[Array, Array]:
    """At most `_MAX_POINTS` samples, evenly spread, the last one among them."""
    if len(times) <= _MAX_POINTS:
        return times, values
    chosen = np.unique(np.linspace(0, len(times) - 1, _MAX_POINTS).astype(int))
    return times[chosen], values[chosen]


def _steady_slope(times: Array, values: Array) -> float | None:
    """The slope, where the whole window and each third of it fall."""
    slope, falling = _theil_sen(times, values)
    if slope >= 0 or falling < _FALLING_PAIRS:
        return None
    for part in np.array_split(np.arange(len(times)), 3):
        third, _ = _theil_sen(times[part], values[part])
        if third > _THIRD_SHARE * slope:
            return None
    return slope


def _theil_sen(times: Array, values: Array) -> tuple[float, float]:
    """Median slope over all pairs of samples, and the share of the pairs that fall."""
    first, second = np.triu_indices(len(times), k=1)
    rises = values[second] - values[first]
    return float(np.median(rises / (times[second] - times[first]))), float(np.mean(rises < 0))
