"""A source behind a deadline: what hangs costs one thread and its own families, nothing else."""

from __future__ import annotations

import queue
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


class _Worker:
    """A daemon thread that makes one call after the other, and ends when none has come for a while."""

    def __init__(self, name: str, idle_seconds: float, first: Callable[[], None]) -> None:
        self._idle_seconds = idle_seconds
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._calls.put(first)
        self._ending = threading.Lock()
        self._ended = False
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def take(self, call: Callable[[], None]) -> bool:
        """Have a call made; False where the thread has ended."""
        with self._ending:
            if not self._ended:
                self._calls.put(call)
            return not self._ended

    def end(self) -> None:
        """Take no more calls, and let the thread go when the last one has returned."""
        with self._ending:
            self._ended = True
            self._calls.put(None)

    def _work(self) -> None:
        while True:
            try:
                call = self._calls.get(timeout=self._idle_seconds)
            except queue.Empty:
                with self._ending:
                    if self._calls.empty():
                        self._ended = True
                        return
            else:
                if call is None:
                    return
                call()


class Guarded(Generic[T]):
    """Runs one call at a time on a daemon thread and waits for it no longer than it is told.

    A call that does not return keeps its thread, is reported as ``stuck`` from then on, and no second thread
    is started beside it. Once it does return its answer is thrown away: it describes a moment long gone.
    """

    def __init__(self, source: str, *, idle_seconds: float = 60.0) -> None:
        """The thread is kept for the next call, which comes within ``idle_seconds`` as a rule."""
        self._source = source
        self._idle_seconds = idle_seconds
        self._worker: _Worker | None = None
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

        if self._worker is None or not self._worker.take(run):
            self._worker = _Worker(f"kvwatch-{self._source}", self._idle_seconds, run)

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

    def close(self) -> None:
        """Give the thread back when the call under way returns; a later call starts another."""
        if self._worker is not None:
            self._worker.end()

    @property
    def seconds(self) -> float | None:
        """How long the last finished call took, None while one is under way."""
        return self._call.seconds if self._call and self._call.done.is_set() else None
