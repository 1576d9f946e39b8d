from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from kvwatch.observe.deadline import Guarded, Lane
from kvwatch.observe.records import Failure
from tests.e2e.waiting import wait_until
from tests.support import NewThreads


@pytest.fixture
def lane() -> Iterator[Lane]:
    new_threads = NewThreads()
    lane = Lane()
    yield lane
    lane.close()
    wait_until(lambda: new_threads() == 0, 10)


def test_an_answer_comes_through_with_its_duration(lane: Lane) -> None:
    guarded: Guarded[int] = Guarded("nvml", lane)
    guarded.start(lambda: 7)
    assert guarded.result(5) == 7
    assert guarded.seconds is not None
    assert 0 <= guarded.seconds < 5


def test_an_exception_is_a_failure_of_the_source(lane: Lane) -> None:
    guarded: Guarded[int] = Guarded("nvml", lane)
    guarded.start(lambda: 1 // 0)
    failure = guarded.result(5)
    assert isinstance(failure, Failure)
    assert (failure.source, failure.reason) == ("nvml", "error")
    assert "ZeroDivisionError" in failure.detail


def test_a_hanging_call_costs_one_thread_however_often_it_is_asked() -> None:
    release = threading.Event()
    calls = []

    def hang() -> str:
        calls.append(1)
        release.wait(30)
        return "stale"

    guarded: Guarded[str] = Guarded("nvml", Lane(idle_seconds=0.05))
    new_threads = NewThreads()
    guarded.start(hang)
    outcome = guarded.result(0.05)
    assert isinstance(outcome, Failure)
    assert outcome.reason == "timeout"
    for _ in range(20):
        guarded.start(hang)
        outcome = guarded.result(0.05)
        assert isinstance(outcome, Failure)
        assert outcome.reason == "stuck"
    assert len(calls) == 1
    assert new_threads() == 1
    assert guarded.seconds is None

    release.set()
    wait_until(lambda: new_threads() == 0, 10)
    guarded.start(lambda: "fresh")
    assert guarded.result(5) == "fresh"


def test_waiting_counts_from_the_start_of_the_call(lane: Lane) -> None:
    release = threading.Event()
    guarded: Guarded[bool] = Guarded("vllm", lane)
    guarded.start(lambda: release.wait(30))
    guarded.result(0.05)
    begun = time.monotonic()
    guarded.result(0.05)
    assert time.monotonic() - begun < 0.05
    release.set()


def test_calls_that_follow_each_other_share_a_thread(lane: Lane) -> None:
    guarded: Guarded[int] = Guarded("vllm", lane)
    threads = set()
    for _ in range(20):
        guarded.start(threading.get_ident)
        threads.add(guarded.result(5))
    assert len(threads) == 1


def test_no_call_is_lost_when_threads_end() -> None:
    guarded: Guarded[int] = Guarded("vllm", Lane(idle_seconds=0.001))
    for number in range(300):
        guarded.start(lambda number=number: number)  # type: ignore[misc]
        assert guarded.result(5) == number
        time.sleep(0.0005 * (number % 4))


def test_calls_of_several_sources_share_a_thread(lane: Lane) -> None:
    guards: list[Guarded[int]] = [Guarded(f"source {number}", lane) for number in range(20)]
    for guard in guards:
        guard.start(threading.get_ident)
    assert len({guard.result(5) for guard in reversed(guards)}) == 1


@pytest.mark.parametrize("first_asked", [0, -1], ids=["asked for what hangs", "asked for the last"])
def test_a_hanging_call_holds_up_no_other(first_asked: int) -> None:
    release = threading.Event()
    new_threads = NewThreads()
    lane = Lane(idle_seconds=0.05)
    guards: list[Guarded[object]] = [Guarded("vllm", lane) for _ in range(6)]
    for number, guard in enumerate(guards):
        guard.start((lambda: release.wait(30)) if number < 3 else (lambda number=number: number))  # type: ignore[misc]
    guards[first_asked].result(0.1)
    outcomes = [guard.result(0.1) for guard in guards]
    assert outcomes[3:] == [3, 4, 5]
    assert [isinstance(outcome, Failure) and outcome.reason for outcome in outcomes[:3]] == ["timeout"] * 3
    wait_until(lambda: new_threads() == 3, 10)
    release.set()
    wait_until(lambda: new_threads() == 0, 10)


def test_a_call_that_waits_for_its_turn_has_all_its_time() -> None:
    def take_long() -> str:
        time.sleep(0.3)
        return "slow"

    lane = Lane(patience=10)
    slow: Guarded[str] = Guarded("vllm", lane)
    quick: Guarded[str] = Guarded("vllm", lane)
    slow.start(take_long)
    quick.start(lambda: "quick")
    assert quick.result(0.1) == "quick"
    assert slow.result(5) == "slow"
    assert slow.seconds is not None
    assert quick.seconds is not None
    assert quick.seconds < slow.seconds
    lane.close()


def test_calls_survive_a_moment_without_threads(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    first: Guarded[int] = Guarded("nvml", lane)
    second: Guarded[int] = Guarded("vllm", lane)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            first.start(lambda: 1)
    second.start(lambda: 2)
    assert [second.result(5), first.result(5)] == [2, 1]


def test_a_closed_lane_gives_its_thread_back_when_the_call_returns() -> None:
    release = threading.Event()
    new_threads = NewThreads()
    lane = Lane()
    guarded: Guarded[bool] = Guarded("vllm", lane)
    guarded.start(lambda: release.wait(30))
    assert isinstance(guarded.result(0.05), Failure)
    lane.close()
    assert new_threads() == 1
    release.set()
    wait_until(lambda: new_threads() == 0, 10)
    guarded.start(lambda: True)
    assert guarded.result(5) is True
    lane.close()
    lane.close()
    wait_until(lambda: new_threads() == 0, 10)
