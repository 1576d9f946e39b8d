from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwatch.config import Config
from kvwatch.forecast.context import merged, request_lengths, upper_bound
from kvwatch.node import ServerState, join
from kvwatch.observe.records import Histogram
from tests.nodes import observation, server

BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0, math.inf)


def histogram(values: list[int]) -> Histogram:
    return Histogram(
        tuple((bound, float(sum(value <= bound for value in values))) for bound in BOUNDS),
        float(sum(values)),
        float(len(values)),
    )


def state(prompt: Histogram | None, answer: Histogram | None, limit: int = 32768) -> ServerState:
    one = server(max_model_len=limit, prompt_tokens=prompt, generation_tokens=answer)
    return join(observation((), (), (one,)), Config()).servers[0]


def test_lengths_are_bounds_by_bucket() -> None:
    lengths = request_lengths(state(histogram([90] * 99 + [1500]), histogram([15] * 100)))
    assert lengths is not None
    assert (lengths.count, lengths.p50, lengths.p99, lengths.longest) == (100, 120.0, 2020.0, 2020.0)
    assert lengths.near_limit == 0.0


def test_beyond_the_last_bucket_the_limit_is_the_bound() -> None:
    lengths = request_lengths(state(histogram([30000]), histogram([10])))
    assert lengths is not None
    assert lengths.longest == 32768
    assert lengths.near_limit == 0.0


def test_requests_near_the_limit_are_a_share() -> None:
    lengths = request_lengths(state(histogram([1900] * 30 + [5] * 70), histogram([450] * 100), limit=2048))
    assert lengths is not None
    assert lengths.near_limit == pytest.approx(0.30)


@pytest.mark.parametrize(
    ("prompt", "answer"), [(None, histogram([1])), (histogram([1]), None), (histogram([]), histogram([]))]
)
def test_without_requests_there_are_no_lengths(prompt: Histogram | None, answer: Histogram | None) -> None:
    assert request_lengths(state(prompt, answer)) is None


def test_engines_are_added_up() -> None:
    one = server(prompt_tokens=histogram([5, 50]), generation_tokens=histogram([5, 5]))
    page = one.vllm
    assert not hasattr(page, "reason")
    two = replace(page, engines=(page.engines[0], replace(page.engines[0], engine="1")))
    lengths = request_lengths(join(observation((), (), (replace(one, vllm=two),)), Config()).servers[0])
    assert lengths is not None
    assert lengths.count == 4


def test_histograms_with_other_bounds_are_not_added() -> None:
    assert merged([]) is None
    assert merged([histogram([1]), Histogram(((1.0, 1.0), (math.inf, 1.0)), 1.0, 1.0)]) is None
    assert upper_bound(histogram([7]), 1.0) == 10.0


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 20000), st.integers(1, 5000)), min_size=1, max_size=200))
def test_bounds_hold_for_the_real_sums(requests: list[tuple[int, int]]) -> None:
    limit = 50_000
    lengths = request_lengths(
        state(histogram([one for one, _ in requests]), histogram([two for _, two in requests]), limit)
    )
    assert lengths is not None
    sums = sorted(min(limit, one + two) for one, two in requests)

    def share_within(bound: float) -> float:
        return sum(value <= bound for value in sums) / len(sums)

    assert share_within(lengths.p50) >= 0.5
    assert share_within(lengths.p99) >= 0.99
    assert share_within(lengths.longest) == 1.0
    assert 0.0 <= (lengths.near_limit or 0.0) <= 1.0 + 1e-9
