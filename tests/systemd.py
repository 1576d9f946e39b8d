"""systemd's end of sd_notify: a datagram socket that collects what a service says."""

from __future__ import annotations

import socket
import time
from pathlib import Path


class Manager:
    """Listens at a path, or in the abstract namespace where the address begins with ``@``."""

    def __init__(self, address: Path | str) -> None:
        self.address = str(address)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(
            self.address.replace("@", "\0", 1) if self.address.startswith("@") else self.address
        )

    def __enter__(self) -> Manager:
        return self

    def __exit__(self, *_error: object) -> None:
        self._socket.close()

    def next(self, timeout: float = 10.0) -> str | None:
        """The next message, None where none comes in time."""
        self._socket.settimeout(timeout)
        try:
            return self._socket.recv(4096).decode()
        except TimeoutError:
            return None

    def wait_for(self, start: str, timeout: float = 10.0) -> str:
        """The next message that begins so; others before it are dropped."""
        deadline = time.monotonic() + timeout
        while (message := self.next(max(0.01, deadline - time.monotonic()))) is not None:
            if message.startswith(start):
                return message
        raise AssertionError(f"{start} did not come within {timeout:g} s")
