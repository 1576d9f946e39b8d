"""What systemd is told of a service: ready, reloading, stopping, alive (sd_notify(3), systemd.service(5))."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress

_MICROSECONDS = 1_000_000


class Notifier:
    """Sends state to the service manager that started this process; without one nothing is sent.

    Attributes:
        watchdog_seconds: the manager restarts the service after so long without `alive`; None if it does not.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        self.watchdog_seconds = _watchdog_seconds(environment)

    def ready(self) -> None:
        """Started, or done with a reload."""
        self._send("READY=1")

    def reloading(self) -> None:
        """A reload begins; `ready` ends it."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={int(time.monotonic() * _MICROSECONDS)}")

    def stopping(self) -> None:
        """The end begins."""
        self._send("STOPPING=1")

    def alive(self) -> None:
        """Feed the watchdog."""
        if self.watchdog_seconds is not None:
            self._send("WATCHDOG=1")

    def _send(self, state: str) -> None:
        if not self._address:
            return
        # A leading @ stands for the NUL byte of the abstract namespace.
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        # A manager that is gone or busy is no reason to stop watching GPUs.
        with (
            suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender,
        ):
            sender.setblocking(False)  # noqa: FBT003 - that is its signature
            sender.sendto(state.encode(), address)


def _watchdog_seconds(environment: Mapping[str, str]) -> float | None:
    """None where there is no watchdog, or it is another process's."""
    if environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    microseconds = environment.get("WATCHDOG_USEC", "")
    return int(microseconds) / _MICROSECONDS if microseconds.isdecimal() and int(microseconds) else None
