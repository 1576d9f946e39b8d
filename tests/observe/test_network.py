from __future__ import annotations

from pathlib import Path

import pytest

from kvwatch.observe.network import (
    connect_address,
    namespace_addresses,
    parse_fib_trie,
    parse_if_inet6,
    url,
)

FIB_TRIE = """\
Main:
  +-- 0.0.0.0/0 3 0 5
     |-- 0.0.0.0
        /0 universe UNICAST
     +-- 127.0.0.0/8 2 0 2
        +-- 127.0.0.0/31 1 0 0
           |-- 127.0.0.0
              /8 host LOCAL
           |-- 127.0.0.1
              /32 host LOCAL
        |-- 127.255.255.255
           /32 link BROADCAST
     +-- 172.17.0.0/16 2 0 2
        +-- 172.17.0.0/30 2 0 2
           |-- 172.17.0.0
              /16 link UNICAST
           |-- 172.17.0.2
              /32 host LOCAL
        |-- 172.17.255.255
           /32 link BROADCAST
Local:
  +-- 172.17.0.0/30 2 0 2
     |-- 172.17.0.2
        /32 host LOCAL
     |-- 10.1.2.3
        /32 host LOCAL
"""
IF_INET6 = """\
00000000000000000000000000000001 01 80 10 80       lo
fe80000000000000004211fffeac1102 0a 40 20 80     eth0
fd000000000000000000000000000002 0a 40 00 80     eth0
"""


def test_ipv4_addresses_of_a_namespace() -> None:
    assert parse_fib_trie(FIB_TRIE) == ("172.17.0.2", "10.1.2.3")


def test_ipv6_addresses_of_a_namespace() -> None:
    assert parse_if_inet6(IF_INET6) == ("fd00::2",)


def test_addresses_from_proc(tmp_path: Path) -> None:
    net = tmp_path / "7" / "net"
    net.mkdir(parents=True)
    assert namespace_addresses(tmp_path, 7) == ()
    (net / "fib_trie").write_text(FIB_TRIE)
    (net / "if_inet6").write_text(IF_INET6)
    assert namespace_addresses(tmp_path, 7) == ("172.17.0.2", "10.1.2.3", "fd00::2")


def test_this_machine_can_be_read() -> None:
    assert all("." in address or ":" in address for address in namespace_addresses(Path("/proc"), 1))


@pytest.mark.parametrize(
    ("host", "address"),
    [
        (None, "127.0.0.1"),
        ("", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.1"),
        ("::", "::1"),
        ("[::]", "::1"),
        ("127.0.0.1", "127.0.0.1"),
        ("10.0.0.5", "10.0.0.5"),
        ("gpu-node-3", "gpu-node-3"),
    ],
)
def test_address_in_the_same_namespace(host: str | None, address: str) -> None:
    assert connect_address(host) == address


@pytest.mark.parametrize(
    ("host", "address"),
    [
        (None, "172.17.0.2"),
        ("0.0.0.0", "172.17.0.2"),
        ("::", "fd00::2"),
        ("172.17.0.9", "172.17.0.9"),
        ("127.0.0.1", None),
        ("::1", None),
        ("localhost", None),
    ],
)
def test_address_in_another_namespace(host: str | None, address: str | None) -> None:
    assert connect_address(host, other_namespace=("172.17.0.2", "fd00::2")) == address


def test_all_ipv6_interfaces_take_ipv4_too() -> None:
    assert connect_address("::", other_namespace=("172.17.0.2",)) == "172.17.0.2"


def test_namespace_without_an_address_cannot_be_reached() -> None:
    assert connect_address(None, other_namespace=()) is None


def test_urls() -> None:
    assert url("127.0.0.1", 8000, tls=False) == "http://127.0.0.1:8000"
    assert url("::1", 443, tls=True) == "https://[::1]:443"
