"""The steady fall that a series of samples ends with, told from steps, noise and sawteeth."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvwatch.forecast.trend import MIN_SAMPLES, MIN_SPAN

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
class Fall:
    """A steady fall to the newest sample.

    Attributes:
        span: seconds that it has been watched for.
        slope: units per second, negative.
        level: where it has come to, without the noise of the newest sample.
    """

    span: float
    slope: float
    level: float


def steady_fall(sample_times: array[float], sample_values: array[float]) -> Fall | None:
    """The fall since the last recovery.

    None where it is not steady, has fewer than `MIN_SAMPLES` samples or spans less than `MIN_SPAN`, and where
    earlier falls of the same size recovered by themselves: a sawtooth. The slope is Theil and Sen's median
    over pairs.

    Args:
        sample_times: Unix seconds, rising; at least two.
        sample_values: as many, in the series' unit.
    """
    times, values = np.array(sample_times), np.array(sample_values)
    start, deepest_before = _last_tooth(values)
    times, values = _thinned(times[start:], values[start:])
    span = float(times[-1] - times[0])
    if len(times) < MIN_SAMPLES or span < MIN_SPAN:
        return None
    slope = _steady_slope(times, values)
    if slope is None:
        return None
    level = float(np.median((values - slope * (times - times[-1]))[-_LEVEL_SAMPLES:]))
    if deepest_before is not None and level > deepest_before - _DEEPER_SHARE * (values[0] - deepest_before):
        return None
    return Fall(span, slope, level)


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
    return 10 * float(np.median(np.abs(np.diff(values))))


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
