from __future__ import annotations

import threading
import time

from kvwatch.observe.deadline import Guarded
from kvwatch.observe.records import Failure
from tests.e2e.waiting import wait_until


def test_an_answer_comes_through_with_its_duration() -> None:
    guarded: Guarded[int] = Guarded("nvml")
    guarded.start(lambda: 7)
    assert guarded.result(5) == 7
    assert guarded.seconds is not None
    assert 0 <= guarded.seconds < 5


def test_an_exception_is_a_failure_of_the_source() -> None:
    guarded: Guarded[int] = Guarded("nvml")
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

    guarded: Guarded[str] = Guarded("nvml", idle_seconds=0.05)
    before = threading.active_count()
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
    assert threading.active_count() == before + 1
    assert guarded.seconds is None

    release.set()
    wait_until(lambda: threading.active_count() == before, 10)
    guarded.start(lambda: "fresh")
    assert guarded.result(5) == "fresh"


def test_waiting_counts_from_the_start_of_the_call() -> None:
    release = threading.Event()
    guarded: Guarded[bool] = Guarded("vllm")
    guarded.start(lambda: release.wait(30))
    guarded.result(0.05)
    begun = time.monotonic()
    guarded.result(0.05)
    assert time.monotonic() - begun < 0.05
    release.set()


def test_calls_that_follow_each_other_share_a_thread() -> None:
    guarded: Guarded[int] = Guarded("vllm")
    threads = set()
    for _ in range(20):
        guarded.start(threading.get_ident)
        threads.add(guarded.result(5))
    assert len(threads) == 1


def test_no_call_is_lost_when_threads_end() -> None:
    guarded: Guarded[int] = Guarded("vllm", idle_seconds=0.001)
    for number in range(300):
        guarded.start(lambda number=number: number)  # type: ignore[misc]
        assert guarded.result(5) == number
        time.sleep(0.0005 * (number % 4))


def test_a_closed_guard_gives_its_thread_back_when_the_call_returns() -> None:
    release = threading.Event()
    before = threading.active_count()
    guarded: Guarded[bool] = Guarded("vllm")
    guarded.start(lambda: release.wait(30))
    guarded.close()
    assert threading.active_count() == before + 1
    assert isinstance(guarded.result(0.05), Failure)
    release.set()
    wait_until(lambda: threading.active_count() == before, 10)
    guarded.start(lambda: True)
    assert guarded.result(5) is True
    guarded.close()
    guarded.close()
    wait_until(lambda: threading.active_count() == before, 10)
