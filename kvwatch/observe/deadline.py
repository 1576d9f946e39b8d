"""A source behind a deadline: what hangs costs one thread and its own families, nothing else."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from kvwatch.observe.records import Failure

T = TypeVar("T")


class Lane:
    """Makes calls one after the other on a daemon thread, which leaves the rest to another when one is slow.

    Python runs one thread at a time; a thread for each call would spend more on taking turns than on most of
    the calls. A call that takes longer than ``patience`` seconds keeps its thread to itself.
    """

    def __init__(self, *, patience: float = 0.05, idle_seconds: float = 60.0) -> None:
        """The thread is kept for the next call, which comes within ``idle_seconds`` as a rule."""
        self.patience = patience
        self._idle_seconds = idle_seconds
        self._calls: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._busy_since: float | None = None

    def submit(self, call: Callable[[], None]) -> None:
        """Have a call made, which must not raise."""
        with self._changed:
            self._calls.append(call)
            if self._thread is None:
                self._start()
            elif self._busy_since is None:
                self._changed.notify()

    def relieve(self) -> None:
        """Give the calls that wait to another thread, if this one has been at the same call for long."""
        with self._changed:
            slow = self._busy_since is not None and time.monotonic() - self._busy_since >= self.patience
            if self._calls and (slow or self._thread is None):
                self._start()

    def close(self) -> None:
        """Let the thread go, at the latest when the call under way returns. A later call starts another."""
        with self._changed:
            self._thread = None
            self._busy_since = None
            self._changed.notify()

    def _start(self) -> None:
        thread = threading.Thread(target=self._work, name="kvwatch-sources", daemon=True)
        # Raises where there are no more threads; the calls then wait for the next one that asks.
        thread.start()
        self._busy_since = None
        self._thread = thread

    def _work(self) -> None:
        while (call := self._next()) is not None:
            call()

    def _next(self) -> Callable[[], None] | None:
        """The next call; None where another thread has taken over, or nothing has come for long."""
        this = threading.current_thread()
        with self._changed:
            if self._thread is this:
                self._busy_since = None
                self._changed.wait_for(lambda: self._calls or self._thread is not this, self._idle_seconds)
            if self._thread is not this:
                return None
            if not self._calls:
                self._thread = None
                return None
            self._busy_since = time.monotonic()
            return self._calls.popleft()


class _Call(Generic[T]):
    """One call; the thread that makes it sets `begun`, then `seconds` and `outcome`, then it is done."""

    __slots__ = ("_lock", "begun", "outcome", "seconds")

    def __init__(self) -> None:
        self.begun: float | None = None
        self.seconds: float | None = None
        self.outcome: T | Failure | None = None
        # Held until the call is done. It costs a third of an event, two dozen times a cycle.
        self._lock = threading.Lock()
        self._lock.acquire()

    @property
    def done(self) -> bool:
        return not self._lock.locked()

    def end(self) -> None:
        """Say that it is done."""
        self._lock.release()

    def wait(self, seconds: float) -> bool:
        """Whether it is done within so many seconds."""
        done = self._lock.acquire(timeout=seconds)
        if done:
            self._lock.release()
        return done


class Guarded(Generic[T]):
    """Makes one call at a time on a lane and waits for it no longer than it is told.

    A call that does not return keeps its thread, is reported as ``stuck`` from then on, and no second one
    is made beside it. Once it does return its answer is thrown away: it describes a moment long gone.
    For use by one thread.
    """

    def __init__(self, source: str, lane: Lane) -> None:
        self._source = source
        self._lane = lane
        self._call: _Call[T] | None = None
        self._stuck = False

    def start(self, function: Callable[[], T]) -> None:
        """Begin a call, unless the last one is still under way."""
        if self._call is not None and not self._call.done:
            self._stuck = True
            return
        self._stuck = False
        call: _Call[T] = _Call()
        self._call = call

        def run() -> None:
            call.begun = time.monotonic()
            try:
                call.outcome = function()
            except Exception as error:  # noqa: BLE001 - whatever a source meets, the others must go on
                call.outcome = Failure(self._source, "error", f"{type(error).__name__}: {error}")
            call.seconds = time.monotonic() - call.begun
            call.end()

        self._lane.submit(run)

    def result(self, timeout: float) -> T | Failure:
        """The answer of the call begun by `start`, ``timeout`` seconds after its turn at the latest.

        Its turn comes when those before it on the lane have returned, or have been at it for long.

        Raises:
            RuntimeError: nothing was started.
        """
        call = self._call
        if call is None:
            raise RuntimeError("result() before start()")
        if self._stuck:
            age = -_left(call, 0.0)
            return Failure(self._source, "stuck", f"a call from {age:.0f} s ago has not returned")
        if not self._answered(call, timeout):
            return Failure(self._source, "timeout", f"no answer within {timeout:g} s")
        if call.outcome is None:
            raise RuntimeError("a source returned None")
        return call.outcome

    def _answered(self, call: _Call[T], timeout: float) -> bool:
        while not call.wait(min(self._lane.patience, max(0.0, _left(call, timeout)))):
            self._lane.relieve()
            if _left(call, timeout) <= 0:
                return False
        return True

    @property
    def seconds(self) -> float | None:
        """How long the last finished call took, None while one is under way."""
        return self._call.seconds if self._call and self._call.done else None


def _left(call: _Call[T], timeout: float) -> float:
    """Seconds until a call has had its time; all of them before its turn."""
    return timeout if call.begun is None else call.begun + timeout - time.monotonic()
