"""Ports and waiting for what other processes do."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def free_port() -> int:
    """A loopback port that nothing listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert isinstance(port, int)
    return port


def wait_until(
    condition: Callable[[], T],
    timeout: float,
    *,
    every: float = 0.05,
    otherwise: str | Callable[[], str] = "it did not happen in time",
) -> T:
    """Ask ``condition`` until it gives something true, and return that.

    Raises:
        AssertionError: ``timeout`` seconds went by; the text is ``otherwise``.
    """
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, otherwise() if callable(otherwise) else otherwise
        time.sleep(every)
    return value
