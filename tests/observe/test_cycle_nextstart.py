"""The next start within a cycle: behind its own deadline, and on the record."""

from __future__ import annotations

import threading

from kvwatch.blockmath.flags import Flags
from kvwatch.observe.records import Failure, Launch, NextStart
from tests.observe.test_cycle import FakeSources, observer


def test_the_next_start_is_on_the_record() -> None:
    seen = observer(FakeSources()).observe()
    assert seen.servers[0].next_start == NextStart("command_line", (), Flags(max_model_len=32768))


def test_a_launch_file_on_a_dead_disk_costs_only_itself() -> None:
    released = threading.Event()

    class Hanging(FakeSources):
        def read_next_start(self, launch: Launch, *rest: object) -> NextStart | Failure:
            released.wait(30)
            return NextStart("command_line", (), launch.flags)

    sources = Hanging()
    watch = observer(sources)
    try:
        first, second = (watch.observe().servers[0] for _ in range(2))
    finally:
        released.set()
    assert first.vllm == sources.page
    assert [one.next_start.reason for one in (first, second) if isinstance(one.next_start, Failure)] == [
        "timeout",
        "stuck",
    ]
