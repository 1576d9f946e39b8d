from __future__ import annotations

import logging

import pytest

from kvwatch.failurelog import FailureLog
from kvwatch.observe.records import Failure

TIMEOUT = Failure("nvml", "timeout", "no answer within 5 s")
REFUSED = Failure("vllm", "connection_refused", "nobody listens")


class Story:
    """A failure log that is fed every 15 s, and what it wrote."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.now = 0.0
        self._log = FailureLog(window=600, clock=lambda: self.now)
        self._caplog = caplog
        caplog.set_level(logging.INFO, "kvwatch")

    def cycles(self, count: int, *failures: Failure) -> list[tuple[str, dict[str, object]]]:
        """What these cycles wrote: events and their fields beside source, reason and detail."""
        self._caplog.clear()
        for _ in range(count):
            self.now += 15
            self._log.update(failures)
        dropped = {"source", "reason", "detail"}
        return [
            (r.message, {k: v for k, v in r.__dict__["fields"].items() if k not in dropped})
            for r in self._caplog.records
        ]


def test_a_failure_is_written_when_it_begins_and_when_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    story = Story(caplog)
    assert story.cycles(1, TIMEOUT) == [("source_failed", {})]
    assert story.cycles(10, TIMEOUT) == []
    assert story.cycles(1) == [("source_recovered", {"seconds": 165})]
    assert story.cycles(100) == []


def test_one_that_lasts_is_written_with_its_count_once_per_window(caplog: pytest.LogCaptureFixture) -> None:
    story = Story(caplog)
    assert story.cycles(121, TIMEOUT) == [
        ("source_failed", {}),
        ("source_failed", {"times": 40}),
        ("source_failed", {"times": 40}),
        ("source_failed", {"times": 40}),
    ]


def test_one_that_comes_and_goes_is_counted_not_repeated(caplog: pytest.LogCaptureFixture) -> None:
    story = Story(caplog)
    assert story.cycles(1, TIMEOUT) == [("source_failed", {})]
    assert story.cycles(1) == [("source_recovered", {"seconds": 15})]
    written = [line for _ in range(30) for line in story.cycles(1, TIMEOUT) + story.cycles(1)]
    assert written == [("source_failed", {"times": 20}), ("source_recovered", {"seconds": 15})]


def test_one_that_comes_back_after_a_quiet_window_begins_anew(caplog: pytest.LogCaptureFixture) -> None:
    story = Story(caplog)
    story.cycles(1, TIMEOUT)
    story.cycles(41)
    assert story.cycles(1, TIMEOUT) == [("source_failed", {})]


def test_failures_are_told_apart_by_source_and_reason(caplog: pytest.LogCaptureFixture) -> None:
    story = Story(caplog)
    assert story.cycles(1, TIMEOUT, REFUSED) == [("source_failed", {}), ("source_failed", {})]
    assert story.cycles(1, REFUSED) == [("source_recovered", {"seconds": 15})]
