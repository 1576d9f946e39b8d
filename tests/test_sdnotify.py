from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from kvwatch.sdnotify import Notifier
from tests.systemd import Manager


def test_each_state_is_one_message(tmp_path: Path) -> None:
    with Manager(tmp_path / "notify") as manager:
        notifier = Notifier({"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "5000000"})
        before = time.monotonic()
        notifier.ready()
        notifier.reloading()
        notifier.alive()
        notifier.stopping()
        assert manager.next() == "READY=1"
        reloading, _, since = (manager.next() or "").partition("\nMONOTONIC_USEC=")
        assert reloading == "RELOADING=1"
        assert before * 1e6 - 1 <= int(since) <= time.monotonic() * 1e6
        assert manager.next() == "WATCHDOG=1"
        assert manager.next() == "STOPPING=1"


def test_an_at_sign_stands_for_the_abstract_namespace() -> None:
    with Manager(f"@kvwatch-test-{os.getpid()}") as manager:
        Notifier({"NOTIFY_SOCKET": manager.address}).ready()
        assert manager.next() == "READY=1"


def test_without_a_watchdog_it_is_not_fed(tmp_path: Path) -> None:
    with Manager(tmp_path / "notify") as manager:
        notifier = Notifier({"NOTIFY_SOCKET": manager.address})
        notifier.alive()
        notifier.stopping()
        assert manager.next() == "STOPPING=1"


def test_a_manager_that_is_gone_or_was_never_there_changes_nothing(tmp_path: Path) -> None:
    Notifier({}).ready()
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}).ready()
    with Manager(tmp_path / "full") as manager:
        notifier = Notifier({"NOTIFY_SOCKET": manager.address})
        for _ in range(5_000):
            notifier.ready()
        assert manager.next() == "READY=1"


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_the_watchdog_interval(environment: dict[str, str], seconds: float | None) -> None:
    assert Notifier(environment).watchdog_seconds == seconds
