"""A source behind a deadline: what hangs costs one thread and its own families, nothing else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from kvwatch.observe.records import Failure

T = TypeVar("T")


class _Call(Generic[T]):
    """One call under way; `outcome` is set by the thread, then `done`."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.seconds: float | None = None
        self.done = threading.Event()
        self.outcome: T | Failure | None = None


class Guarded(Generic[T]):
    """Runs one call at a time on a daemon thread and waits for it no longer than it is told.

    A call that does not return keeps its thread, is reported as ``stuck`` from then on, and no second thread
    is started beside it. Once it does return its answer is thrown away: it describes a moment long gone.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._call: _Call[T] | None = None
        self._stuck = False

    def start(self, function: Callable[[], T]) -> None:
        """Begin a call, unless the last one is still under way."""
        if self._call is not None and not self._call.done.is_set():
            self._stuck = True
            return
        self._stuck = False
        call = self._call = _Call[T]()

        def run() -> None:
            try:
                call.outcome = function()
            except Exception as error:  # noqa: BLE001 - whatever a source meets, the others must go on
                call.outcome = Failure(self._source, "error", f"{type(error).__name__}: {error}")
            call.seconds = time.monotonic() - call.started
            call.done.set()

        threading.Thread(target=run, name=f"kvwatch-{self._source}", daemon=True).start()

    def result(self, timeout: float) -> T | Failure:
        """The answer of the call begun by `start`, `timeout` seconds after its beginning at the latest.

        Raises:
            RuntimeError: nothing was started.
        """
        call = self._call
        if call is None:
            raise RuntimeError("result() before start()")
        age = time.monotonic() - call.started
        if self._stuck:
            return Failure(self._source, "stuck", f"a call from {age:.0f} s ago has not returned")
        if not call.done.wait(max(0.0, timeout - age)):
            return Failure(self._source, "timeout", f"no answer within {timeout:g} s")
        if call.outcome is None:
            raise RuntimeError("a source returned None")
        return call.outcome

    @property
    def seconds(self) -> float | None:
        """How long the last finished call took, None while one is under way."""
        return self._call.seconds if self._call and self._call.done.is_set() else None
