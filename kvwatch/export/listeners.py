"""Listening sockets out of addresses: ``host:port``, ``[v6]:port``, ``:port`` and ``unix:/path``."""

from __future__ import annotations

import socket
import stat
from contextlib import suppress
from pathlib import Path

from kvwatch.config import UNIX, host_and_port

_BACKLOG = 128
_UNIX_MODE = 0o660


class Listener:
    """One listening socket. ``address`` is what it is bound to, the port filled in.

    Raises:
        ValueError: the address is not one.
        OSError: it cannot be bound; the message names it.
    """

    def __init__(self, address: str) -> None:
        self._path: Path | None = None
        try:
            if address.startswith(UNIX):
                self._path = Path(address.removeprefix(UNIX))
                self.socket = _bind_unix(self._path)
                self.address = address
            else:
                self.socket = _bind_tcp(*host_and_port(address))
                self.address = _shown(self.socket.getsockname())
        except OSError as error:
            # create_server adds the address, as a tuple, to the reason.
            reason = (error.strerror or str(error)).partition(" (while ")[0]
            raise OSError(f"cannot listen on {address}: {reason}") from error
        self.socket.settimeout(0.0)

    def close(self) -> None:
        """Stops listening and removes a Unix socket's file."""
        self.socket.close()
        if self._path is not None:
            # Its folder may be writable no more, once privileges were dropped.
            with suppress(OSError):
                self._path.unlink()


def _bind_tcp(host: str, port: int) -> socket.socket:
    if not host:
        host = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"  # noqa: S104 - an empty host means all interfaces
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, name = found[0]
    dualstack = family == socket.AF_INET6 and name[0] == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(
        name[:2], family=family, backlog=_BACKLOG, dualstack_ipv6=dualstack, reuse_port=False
    )


def _bind_unix(path: Path) -> socket.socket:
    _remove_stale(path)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(str(path))
        path.chmod(_UNIX_MODE)
        listening.listen(_BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


def _remove_stale(path: Path) -> None:
    """Removes the socket of a process that is gone; any other file is left for bind() to complain about."""
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.stat().st_mode):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(0.0)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
            except BlockingIOError:
                return


def _shown(name: tuple[str, int]) -> str:
    host, port = name[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
