"""Where a server can be reached from here, given what it was told to listen on."""

from __future__ import annotations

import ipaddress
from pathlib import Path

_LOOPBACK = {4: "127.0.0.1", 6: "::1"}
_GLOBAL_SCOPE = 0x00
_WILDCARDS = {None: 4, "": 4, "0.0.0.0": 4, "::": 6}  # noqa: S104


def namespace_addresses(proc_root: Path, pid: int) -> tuple[str, ...]:
    """Addresses of the network namespace of a process that others can reach: IPv4 first, then global IPv6.

    Empty where there are none, or where they may not be read.
    """
    net = proc_root / str(pid) / "net"
    return (*parse_fib_trie(_text(net / "fib_trie")), *parse_if_inet6(_text(net / "if_inet6")))


def parse_fib_trie(text: str) -> tuple[str, ...]:
    """Local IPv4 addresses out of ``/proc/PID/net/fib_trie``, loopback left out, each once."""
    found: dict[str, None] = {}
    leaf = ""
    for line in text.splitlines():
        words = line.split()
        if words[:1] == ["|--"]:
            leaf = words[1]
        elif words == ["/32", "host", "LOCAL"] and not leaf.startswith("127."):
            found[leaf] = None
    return tuple(found)


def parse_if_inet6(text: str) -> tuple[str, ...]:
    """Global IPv6 addresses out of ``/proc/PID/net/if_inet6``."""
    found = []
    for line in text.splitlines():
        words = line.split()
        if len(words) == 6 and int(words[3], 16) == _GLOBAL_SCOPE:
            found.append(str(ipaddress.IPv6Address(int(words[0], 16))))
    return tuple(found)


def connect_address(host: str | None, *, other_namespace: tuple[str, ...] | None = None) -> str | None:
    """The address to connect to for a server that was told to listen on ``host``.

    Args:
        host: as written; None, ``0.0.0.0`` and ``::`` mean all interfaces.
        other_namespace: addresses of the server's network namespace where that is not kvwatch's; else None.

    Returns:
        None where the server listens on the loopback interface of another namespace, or where that has no
        address.
    """
    bare = host.strip("[]") if host else host
    if other_namespace is None:
        return _LOOPBACK[_WILDCARDS[bare]] if bare in _WILDCARDS else bare
    if bare in _WILDCARDS:
        return next(iter(sorted(other_namespace, key=lambda a: _version(a) != _WILDCARDS[bare])), None)
    return None if _is_loopback(bare) else bare


def url(host: str, port: int, *, tls: bool) -> str:
    """``http://host:port``, IPv6 addresses in brackets."""
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def _version(address: str) -> int:
    return 6 if ":" in address else 4


def _is_loopback(host: str | None) -> bool:
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return host == "localhost"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
