"""The open connections of the server: how many, how long, and which one goes when there are too many."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress


class Connection:
    """One accepted connection. Its worker says what it is doing, another thread may cut it.

    Attributes:
        sock: the accepted socket, or the TLS socket that took its place.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._since = time.monotonic()
        self._deadline = self._since
        self._waiting = True

    def await_client(self, seconds: float) -> None:
        """From now on the client is to speak, for so many seconds; until then it may be cut to make room."""
        self._begin(seconds, waiting=True)

    def serve(self, seconds: float) -> None:
        """From now on an answer is made and sent, for so many seconds."""
        self._begin(seconds, waiting=False)

    def _begin(self, seconds: float, *, waiting: bool) -> None:
        self._since = time.monotonic()
        self._deadline = self._since + seconds
        self._waiting = waiting

    def waiting_since(self) -> float | None:
        """When the server began to wait for the client; None while it serves."""
        return self._since if self._waiting else None

    def is_overdue(self, now: float) -> bool:
        """Whether what it is doing has taken too long."""
        return now > self._deadline

    def cut(self) -> None:
        """Ends the connection from any thread: the worker's read or write returns at once."""
        # Of the plain socket, since an SSLSocket would also drop the state that its worker uses.
        with suppress(OSError):
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)


class Connections:
    """A bounded set of connections.

    When ``limit`` is reached, the client that has kept the server waiting longest is cut, so that a crowd of
    silent clients cannot shut others out. Those cut leave a moment later; at twice the limit nobody gets in.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._open: set[Connection] = set()
        self._all_closed = threading.Condition(self._lock)

    def __len__(self) -> int:
        with self._lock:
            return len(self._open)

    def admit(self, connection: Connection) -> bool:
        """Takes the connection in; False when there is no room even so."""
        with self._lock:
            if len(self._open) >= self._limit and (len(self._open) >= 2 * self._limit or not self._cut_one()):
                return False
            self._open.add(connection)
            return True

    def leave(self, connection: Connection) -> None:
        """Forgets a connection that its worker has closed."""
        with self._lock:
            self._open.discard(connection)
            if not self._open:
                self._all_closed.notify_all()

    def make_room(self) -> None:
        """Cuts the client that has kept the server waiting longest, if one does."""
        with self._lock:
            self._cut_one()

    def cut_overdue(self) -> None:
        """Cuts every connection whose time is over."""
        now = time.monotonic()
        with self._lock:
            for connection in self._open:
                if connection.is_overdue(now):
                    connection.cut()

    def cut_all(self, timeout: float) -> None:
        """Cuts every connection and waits until their workers have left, so long at most."""
        with self._lock:
            for connection in self._open:
                connection.cut()
            self._all_closed.wait_for(lambda: not self._open, timeout)

    def _cut_one(self) -> bool:
        waiting = [(since, id(c), c) for c in self._open if (since := c.waiting_since()) is not None]
        if not waiting:
            return False
        *_, victim = min(waiting)
        victim.serve(0.0)
        victim.cut()
        return True
