from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwatch.config import GIB
from kvwatch.forecast.trend import HORIZON, MAX_GAP, MIN_SPAN, Series, Trend

START = 1_800_000_000.0
STEP = 60.0


LOOK_EVERY = 20
"""Samples between two looks: a look at a day of samples takes a millisecond or two."""


def play(
    shape: Callable[[float], float], hours: float, *, step: float = STEP
) -> Iterator[tuple[float, Trend | None]]:
    """The trend at every look, with the hours since the start."""
    series = Series()
    for number in range(int(hours * 3600 / step) + 1):
        seconds = number * step
        series.add(START + seconds, shape(seconds / 3600))
        if number % LOOK_EVERY == 0:
            yield seconds / 3600, series.trend()


def trends(shape: Callable[[float], float], hours: float) -> list[tuple[float, Trend]]:
    return [(hour, trend) for hour, trend in play(shape, hours) if trend is not None]


def noise(seed: int, scale: float) -> Callable[[float], float]:
    generator = np.random.default_rng(seed)
    return lambda _hour: float(generator.normal(0, scale))


def test_a_slow_leak_is_foretold_well_before_the_end() -> None:
    found = trends(lambda hour: (4 - hour) * GIB, 4)
    first_hour, first = found[0]
    assert first_hour == pytest.approx(2, abs=0.4)
    assert first.slope == pytest.approx(-GIB / 3600)
    for _, trend in found:
        assert trend.zero_at == pytest.approx(START + 4 * 3600, abs=120)


def test_a_noisy_leak_is_foretold_too() -> None:
    jitter = noise(1, 0.05 * GIB)
    found = trends(lambda hour: (4 - hour) * GIB + jitter(hour), 3.9)
    assert found[0][0] < 3
    assert found[-1][1].zero_at == pytest.approx(START + 4 * 3600, abs=900)


def test_nothing_is_said_before_half_an_hour() -> None:
    assert all(hour * 3600 >= MIN_SPAN for hour, _ in trends(lambda hour: (0.7 - hour) * GIB, 0.7))


@pytest.mark.parametrize("seed", range(5))
def test_noise_around_a_level_is_no_trend(seed: int) -> None:
    jitter = noise(seed, GIB)
    assert trends(lambda hour: 5 * GIB + jitter(hour), 24) == []


@pytest.mark.parametrize("hour_of_step", [0.3, 1.0, 3.0, 12.0])
def test_a_step_is_no_trend(hour_of_step: float) -> None:
    assert trends(lambda hour: (5 if hour < hour_of_step else 1) * GIB, 24) == []


def test_two_steps_are_no_trend() -> None:
    assert trends(lambda hour: (5 - (hour > 2) - 2 * (hour > 5)) * GIB, 24) == []


@pytest.mark.parametrize("period", [3.0, 6.0])
def test_a_wave_is_no_trend_once_it_came_back(period: float) -> None:
    """Its bend points below zero long before it turns."""
    found = trends(lambda hour: (5 + 4 * np.cos(2 * np.pi * hour / period)) * GIB, 24)
    assert [hour for hour, _ in found if hour > period] == []


def test_a_fall_of_days_is_foretold_after_one_day() -> None:
    found = trends(lambda hour: (4 - hour / 24) * GIB, 30)
    assert 23 <= found[0][0] <= 25
    assert found[0][1].zero_at == pytest.approx(START + 96 * 3600, abs=600)


def test_a_fall_that_grows_faster_ends_where_it_crosses_zero() -> None:
    found = trends(lambda hour: (10 - 0.1 * hour**2) * GIB, 10)
    assert found[-1][1].zero_at == pytest.approx(START + 10 * 3600, abs=900)


@pytest.mark.parametrize("period", [0.25, 1.0, 3.0, 6.0])
@pytest.mark.parametrize("amplitude", [0.5, 2.0])
def test_a_sawtooth_is_no_trend_in_a_day(period: float, amplitude: float) -> None:
    assert trends(lambda hour: (5 - amplitude * (hour % period) / period) * GIB, 24) == []


def test_a_deep_tooth_is_believed_only_before_any_has_recovered() -> None:
    """Until memory is given back for the first time, it cannot be told from a leak."""
    found = trends(lambda hour: (5 - 4 * (hour % 3) / 3) * GIB, 24)
    assert found
    assert all(hour < 3 for hour, _ in found)


def test_a_fall_below_every_earlier_tooth_is_a_trend_again() -> None:
    def shape(hour: float) -> float:
        return (5 - 2 * (hour % 2) / 2) * GIB if hour < 8 else (5 - (hour - 8)) * GIB

    found = trends(shape, 13)
    assert found
    assert all(hour > 10 for hour, _ in found)


def test_a_rise_and_a_rest_are_no_trend() -> None:
    assert trends(lambda hour: hour * GIB, 5) == []
    assert trends(lambda _hour: GIB, 5) == []


def test_a_fall_that_has_stopped_is_no_trend() -> None:
    assert [hour for hour, _ in trends(lambda hour: max(1.0, 3 - hour) * GIB, 12) if hour > 4] == []


def test_beyond_the_horizon_nothing_is_foretold() -> None:
    slow = GIB / (HORIZON / 3600)
    assert trends(lambda hour: 30 * GIB - slow * hour, 24) == []


def test_a_clock_that_jumps_back_starts_anew() -> None:
    series = Series()
    for number in range(100):
        series.add(START + number * 60, float(100 - number))
    series.add(START - 3600, 5.0)
    assert len(series) == 1


def test_what_nobody_watched_for_long_starts_anew() -> None:
    leak = [(START + number * 60, float(100 - number)) for number in range(60)]
    watched, gap, jump = Series(), Series(), Series()
    for time, value in leak:
        watched.add(time, value)
        jump.add(time, value)
        if not 40 <= (time - START) / 60 < 50:
            gap.add(time, value)
    expected = watched.trend()
    assert expected is not None
    assert gap.trend() == expected
    jump.add(leak[-1][0] + MAX_GAP + 1, 40.0)
    assert len(jump) == 1


def test_a_day_is_kept_and_no_more() -> None:
    series = Series()
    for number in range(3 * 24 * 60 * 4):
        series.add(START + number * 15, 1.0)
    kept = series.lows(len(series))
    assert kept[-1][0] - kept[0][0] == 24 * 3600
    assert len(series) == 24 * 3600 / 30 + 1


def test_lows_are_the_lowest_of_each_span_and_the_newest() -> None:
    series = Series()
    values = [5.0, 3.0, 4.0, 9.0, 8.0, 8.0, 7.0, 6.0]
    for number, value in enumerate(values):
        series.add(START + number * 60, value)
    assert [value for _, value in series.lows(4)] == [3.0, 8.0, 7.0, 6.0]
    assert [round(time - START) // 60 for time, _ in series.lows(4)] == [1, 4, 6, 7]
    assert [value for _, value in series.lows(9)] == values


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.floats(-1e12, 1e12, allow_nan=False), min_size=20, max_size=200),
    st.floats(30, 600),
)
def test_any_series_gives_a_falling_trend_in_the_horizon_or_none(values: list[float], step: float) -> None:
    series = Series()
    for number, value in enumerate(values):
        series.add(START + number * step, value)
    trend = series.trend()
    if trend is not None:
        last = START + (len(values) - 1) * step
        assert trend.slope < 0
        assert last <= trend.zero_at <= last + HORIZON
