from __future__ import annotations

import errno
import gzip
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from kvwatch.export.http1 import MAX_BODY_BYTES, MAX_HEAD_BYTES
from kvwatch.export.server import ExporterServer, Limits
from tests.export.webclient import CONTENT, connect, eventually, exchange, fetch, read_all, running
from tests.support import NewThreads

QUICK = Limits(request=0.3, idle=0.3, response=0.5, scrape_wait=0.05, tick=0.02)
HEAD = b"Host: x\r\n\r\n"


@pytest.fixture
def server() -> Iterator[ExporterServer]:
    with running() as server:
        yield server


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


# --- resources --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "content_type"),
    [
        ("/metrics", CONTENT.metrics, "text/plain; version=0.0.4; charset=utf-8"),
        ("/metrics?name[]=x", CONTENT.metrics, "text/plain; version=0.0.4; charset=utf-8"),
        ("/api/v1/snapshot", CONTENT.snapshot(), "application/json"),
        ("/", CONTENT.status(), "text/html; charset=utf-8"),
        ("/-/healthy", b"healthy\n", "text/plain; charset=utf-8"),
        ("/-/ready", b"ready\n", "text/plain; charset=utf-8"),
    ],
)
def test_resources(server: ExporterServer, path: str, body: bytes, content_type: str) -> None:
    answer = fetch(server, path)
    assert (answer.status, answer.body, answer.headers["Content-Type"]) == (200, body, content_type)
    head = fetch(server, path, method="HEAD")
    assert (head.status, head.body, head.headers["Content-Length"]) == (200, b"", str(len(body)))


def test_openmetrics(server: ExporterServer) -> None:
    answer = fetch(server, Accept="application/openmetrics-text;version=1.0.0,text/plain;q=0.5")
    assert answer.body == CONTENT.openmetrics
    assert answer.headers["Content-Type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert answer.headers["Vary"] == "Accept, Accept-Encoding"


@pytest.mark.parametrize(
    ("path", "body"),
    [("/metrics", CONTENT.metrics), ("/api/v1/snapshot", CONTENT.snapshot()), ("/", CONTENT.status())],
)
def test_gzip(server: ExporterServer, path: str, body: bytes) -> None:
    answer = fetch(server, path, Accept_Encoding="gzip")
    assert answer.headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(answer.body) == body


def test_a_page_is_compressed_once_and_only_if_asked_for(
    server: ExporterServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compressed: list[bytes] = []

    def compress(body: bytes, *_: int, **__: int) -> bytes:
        compressed.append(body)
        return b"small"

    monkeypatch.setattr(gzip, "compress", compress)
    server.publish(CONTENT)
    assert fetch(server).body == CONTENT.metrics
    assert compressed == []
    assert {fetch(server, Accept_Encoding="gzip").body for _ in range(3)} == {b"small"}
    assert compressed == [CONTENT.metrics]


def test_headers_say_nothing_about_the_program(server: ExporterServer) -> None:
    assert fetch(server).headers.keys() == {
        "Date",
        "Content-Type",
        "Content-Length",
        "Cache-Control",
        "X-Content-Type-Options",
        "Connection",
        "Vary",
    }


def test_the_status_page_may_use_its_own_style_and_nothing_else(server: ExporterServer) -> None:
    policy = fetch(server, "/").headers["Content-Security-Policy"]
    assert policy == (
        "default-src 'none'; style-src 'sha256-FcQqt3aNlV7AZnGV4zkQRVeCeJOxbMPnQSx258L803E='; "
        "script-src 'none'; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def test_a_newer_page_replaces_the_older(server: ExporterServer) -> None:
    server.publish(replace(CONTENT, metrics=b"kvwatch_up 0.0\n"))
    assert fetch(server).body == b"kvwatch_up 0.0\n"


def test_before_the_first_cycle() -> None:
    with running(content=None) as server:
        for path in ("/metrics", "/", "/api/v1/snapshot", "/-/ready"):
            answer = fetch(server, path)
            assert (answer.status, answer.headers["Retry-After"]) == (503, "1"), path
        assert fetch(server, "/-/healthy").status == 200
        server.publish(CONTENT)
        assert fetch(server, "/-/ready").status == 200


@pytest.mark.parametrize("path", ["/metric", "/metrics/", "//metrics", "/-/", "/-/reload", "/../etc/passwd"])
def test_not_found(server: ExporterServer, path: str) -> None:
    assert fetch(server, path).status == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE"])
def test_method_not_allowed(server: ExporterServer, method: str) -> None:
    answer = fetch(server, method=method)
    assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")


def test_reload_where_it_is_enabled() -> None:
    reloaded = threading.Event()
    with running(reload=reloaded.set) as server:
        get = fetch(server, "/-/reload")
        assert (get.status, get.headers["Allow"], reloaded.is_set()) == (405, "POST", False)
        assert fetch(server, "/-/reload", method="POST", body=b"x" * 100).status == 202
        assert reloaded.is_set()


# --- HTTP -------------------------------------------------------------------------------------------------


def test_connections_are_kept_and_requests_may_be_pipelined(server: ExporterServer) -> None:
    get = b"GET /-/ready HTTP/1.1\r\nHost: x\r\n"
    with connect(server) as client:
        client.sendall((get + b"\r\n") * 2 + get + b"Connection: close\r\n\r\n")
        received = read_all(client)
    assert received.count(b"HTTP/1.1 200 OK\r\n") == 3
    assert received.count(b"Connection: keep-alive") == 2


def test_http_1_0_closes_unless_asked_not_to(server: ExporterServer) -> None:
    get = b"GET /-/ready HTTP/1.0\r\n"
    assert exchange(server, get + b"\r\n").count(b"Connection: close") == 1
    kept = exchange(server, get + b"Connection: Keep-Alive\r\n\r\n" + get + b"\r\n")
    assert kept.count(b"HTTP/1.1 200 OK") == 2


def test_a_body_is_read_and_dropped(server: ExporterServer) -> None:
    post = b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 18\r\n\r\nGET / HTTP/1.1\r\n\r\n"
    received = exchange(server, post + b"GET /-/ready HTTP/1.0\r\n\r\n")
    assert received.count(b"HTTP/1.1 ") == 2
    assert received.endswith(b"ready\n")


def test_an_absolute_target(server: ExporterServer) -> None:
    assert b" 200 OK" in exchange(server, b"GET http://x:1/-/ready?a=1 HTTP/1.0\r\n\r\n")


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"hello\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET /metrics\r\n\r\n", 400),
        (b"get /metrics HTTP/1.1\r\n" + HEAD, 400),
        (b"GET /met rics HTTP/1.1\r\n" + HEAD, 400),
        (b"GET /\xc3\xa9 HTTP/1.1\r\n" + HEAD, 400),
        (b"GET /metrics HTTP/1.1\r\n\r\n", 400),
        (b"GET /metrics HTTP/2.0\r\n" + HEAD, 505),
        (b"GET /metrics HTTP/1.1\r\nno colon\r\n" + HEAD, 400),
        (b"GET /metrics HTTP/1.1\r\nA : b\r\n" + HEAD, 400),
        (b"GET /metrics HTTP/1.1\r\nA: b\r\n folded\r\n" + HEAD, 400),
        (b"GET /metrics HTTP/1.1\r\nA: b\nC: d\r\n" + HEAD, 400),
        (b"GET /metrics HTTP/1.1\r\nA: \x00\r\n" + HEAD, 400),
        (b"GET /metrics HTTP/1.1\r\n" + b"A: b\r\n" * 101 + HEAD, 400),
        (b"GET /metrics HTTP/1.1\r\nA: " + b"x" * (2 * MAX_HEAD_BYTES), 431),
        (b"GET /" + b"x" * (2 * MAX_HEAD_BYTES), 431),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + HEAD, 501),
        (b"POST / HTTP/1.1\r\nContent-Length: -1\r\n" + HEAD, 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n" + HEAD, 400),
        (b"POST / HTTP/1.1\r\nContent-Length: %d\r\n" % (MAX_BODY_BYTES + 1) + HEAD + b"x" * 100_000, 413),
    ],
)
def test_refused_request(request_bytes: bytes, status: int) -> None:
    with running(limits=QUICK) as server:
        received = exchange(server, request_bytes)
        assert received.startswith(b"HTTP/1.1 %d " % status)
        assert b"\r\nConnection: close\r\n" in received
        assert fetch(server).status == 200


def test_hundreds_of_pieces_of_garbage() -> None:
    pieces = (b"\x00" * 40 + b"\r\n\r\n", b"GET\r\n\r\n", b"A" * 30, b"", b"GET / HTTP/9.9\r\n\r\n")
    with running() as server:
        assert fetch(server).status == 200
        assert eventually(lambda: server.connections == 0)
        before = descriptors()

        def throw(number: int) -> None:
            with connect(server) as client:
                client.sendall(pieces[number % len(pieces)])

        with ThreadPoolExecutor(8) as pool:
            for _ in pool.map(throw, range(400)):
                pass
        assert fetch(server).status == 200
        assert eventually(lambda: server.connections == 0)
        assert eventually(lambda: descriptors() <= before)


# --- clients that do not behave ---------------------------------------------------------------------------


def test_silent_clients_do_not_keep_others_out() -> None:
    with running(limits=replace(Limits(), connections=20)) as server:
        silent = [connect(server) for _ in range(60)]
        assert [fetch(server).status for _ in range(5)] == [200] * 5
        assert eventually(lambda: server.connections <= 20)
        for client in silent:
            client.close()
        assert eventually(lambda: server.connections == 0)


def test_a_silent_client_is_cut_in_time() -> None:
    with running(limits=QUICK) as server, connect(server) as client:
        assert read_all(client) == b""
        assert eventually(lambda: server.connections == 0)


def test_a_client_that_drips_its_request_is_cut_in_time() -> None:
    with running(limits=QUICK) as server, connect(server) as client:
        over = threading.Event()

        def drip() -> None:
            try:
                while not over.wait(0.01):
                    client.sendall(b"G")
            except OSError:
                over.set()

        thread = threading.Thread(target=drip)
        thread.start()
        assert over.wait(10)
        thread.join()


def test_an_idle_connection_is_cut_in_time() -> None:
    with running(limits=QUICK) as server, connect(server) as client:
        client.sendall(b"GET /-/ready HTTP/1.1\r\nHost: x\r\n\r\n")
        assert read_all(client).endswith(b"ready\n")


def test_a_connection_serves_a_bounded_number_of_requests(server: ExporterServer) -> None:
    with connect(server) as client:
        client.sendall(b"GET /-/ready HTTP/1.1\r\nHost: x\r\n\r\n" * 1_001)
        received = read_all(client)
    assert received.count(b"HTTP/1.1 200 OK") == 1_000


LARGE = replace(CONTENT, metrics=b"x" * 20_000_000)


def greedy(server: ExporterServer) -> socket.socket:
    """A client that asks for the page and takes in none of it."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(20)
    host, _, port = server.addresses[0].rpartition(":")
    client.connect((host, int(port)))
    client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    assert client.recv(1) == b"H"
    return client


def test_more_scrapes_at_once_than_allowed_are_told_to_come_back() -> None:
    limits = Limits(scrapes=2, scrape_wait=0.05)
    with running(limits=limits, content=LARGE) as server:
        slow = [greedy(server) for _ in range(2)]
        answer = fetch(server)
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
        assert fetch(server, "/-/healthy").status == 200
        for client in slow:
            client.close()
        assert eventually(lambda: server.connections == 0)
        assert fetch(server, method="HEAD").status == 200


def test_a_client_that_takes_nothing_in_is_cut_in_time() -> None:
    with running(limits=QUICK, content=LARGE) as server:
        client = greedy(server)
        assert eventually(lambda: server.connections == 0)
        client.close()


def test_many_scrapes_at_once_all_succeed(server: ExporterServer) -> None:
    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(lambda _: fetch(server), range(200)))
    assert {answer.status for answer in answers} == {200}
    assert {answer.body for answer in answers} == {CONTENT.metrics}


def test_threads_and_descriptors_are_given_back() -> None:
    before, new_threads = descriptors(), NewThreads()
    with running(limits=QUICK) as server:
        clients = [connect(server) for _ in range(30)]
        for client in clients[:10]:
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        for client in clients[10:20]:
            client.sendall(b"GET /met")
        for client in clients:
            client.close()
    assert eventually(lambda: descriptors() <= before and new_threads() == 0)


FEW_DESCRIPTORS = """
import resource, sys
from kvwatch.export.server import Content, ExporterServer
server = ExporterServer(["127.0.0.1:0"])
resource.setrlimit(resource.RLIMIT_NOFILE, (30, 30))
server.publish(Content(b"up 1\\n", b"up 1\\n# EOF\\n", lambda: b"{}", lambda: b""))
server.start()
print(server.addresses[0], flush=True)
sys.stdin.read()
"""


def test_running_out_of_descriptors_does_not_stop_the_server() -> None:
    command = [sys.executable, "-c", FEW_DESCRIPTORS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        host, _, port = process.stdout.readline().strip().rpartition(":")
        silent = [socket.create_connection((host, int(port)), timeout=10) for _ in range(60)]
        for _ in range(3):
            with socket.create_connection((host, int(port)), timeout=10) as client:
                client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
                assert read_all(client).endswith(b"up 1\n")
        for client in silent:
            client.close()
        process.communicate(timeout=10)


def test_closing_cuts_open_connections() -> None:
    with running() as server:
        client = connect(server)
        client.sendall(b"GET /-/ready HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(4096)
    assert read_all(client) == b""
    client.close()


# --- addresses --------------------------------------------------------------------------------------------


def test_several_addresses_at_once(tmp_path: Path) -> None:
    path = tmp_path / "kvwatch.sock"
    with running("127.0.0.1:0", "[::1]:0", f"unix:{path}") as server:
        first, second, third = server.addresses
        assert first.startswith("127.0.0.1:")
        assert second.startswith("[::1]:")
        assert third == f"unix:{path}"
        assert path.stat().st_mode & 0o777 == 0o660
        with connect(server, 1) as client:
            client.sendall(b"GET /-/ready HTTP/1.0\r\n\r\n")
            assert read_all(client).endswith(b"ready\n")
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            client.sendall(b"GET /-/ready HTTP/1.0\r\n\r\n")
            assert read_all(client).endswith(b"ready\n")
    assert not path.exists()


@pytest.mark.parametrize("address", [":0", "[::]:0"])
def test_all_interfaces_of_both_families(address: str) -> None:
    with running(address) as server:
        port = int(server.addresses[0].rpartition(":")[2])
        for host in ("127.0.0.1", "::1"):
            with socket.create_connection((host, port), timeout=10) as client:
                client.sendall(b"GET /-/ready HTTP/1.0\r\n\r\n")
                assert read_all(client).endswith(b"ready\n")


def test_the_socket_of_a_process_that_is_gone_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "stale.sock"
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(path))
    with running(f"unix:{path}") as server:
        assert server.addresses == (f"unix:{path}",)


def test_a_unix_socket_in_use_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "used.sock"
    with running(f"unix:{path}"), pytest.raises(OSError, match=r"cannot listen on unix:.*in use"):
        ExporterServer([f"unix:{path}"])
    file = tmp_path / "file"
    file.write_text("precious")
    with pytest.raises(OSError, match="cannot listen on unix:"):
        ExporterServer([f"unix:{file}"])
    assert file.read_text() == "precious"


def test_a_port_in_use_is_named_and_the_others_are_given_back(server: ExporterServer) -> None:
    before = descriptors()
    with pytest.raises(OSError, match=f"cannot listen on {server.addresses[0]}"):
        ExporterServer(["127.0.0.1:0", server.addresses[0]])
    assert eventually(lambda: descriptors() <= before)


def test_a_start_without_descriptors_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("selectors.DefaultSelector", refuse)
    before = descriptors()
    with pytest.raises(OSError, match="Too many open files"):
        ExporterServer(["127.0.0.1:0", f"unix:{tmp_path / 'kvwatch.sock'}"])
    assert descriptors() <= before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("address", ["", "9744", "localhost", "::1:9744", "host:99999", "host:port", "[::1]"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ValueError, match="not an address to listen on"):
        ExporterServer([address])


def test_what_is_too_old_is_not_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(content=replace(CONTENT, lifetime=60.0)) as server:
        assert fetch(server, "/metrics").status == 200
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        monkeypatch.setattr("kvwatch.export.server.clock_gettime", lambda _clock: now + 61)
        for path in ("/metrics", "/api/v1/snapshot", "/", "/-/ready", "/-/healthy"):
            answer = fetch(server, path)
            assert (answer.status, answer.body) == (503, b"no cycle has ended for too long\n")
        server.publish(replace(CONTENT, lifetime=60.0))
        assert fetch(server, "/metrics").status == 200


def test_what_people_ask_for_is_made_once_and_only_then() -> None:
    made: list[str] = []
    content = replace(CONTENT, status=lambda: made.append("status") or b"page")  # type: ignore[func-returns-value]
    with running(content=content) as server:
        fetch(server, "/metrics")
        assert made == []
        assert [fetch(server, "/").body for _ in range(3)] == [b"page"] * 3
        assert made == ["status"]


def test_a_page_that_cannot_be_made_costs_itself_only(caplog: pytest.LogCaptureFixture) -> None:
    with running(content=replace(CONTENT, status=lambda: bytes(1 // 0))) as server:
        assert fetch(server, "/").status == 500
        assert fetch(server, "/metrics").status == 200
        assert fetch(server, "/api/v1/snapshot").status == 200
    assert "ZeroDivisionError" in caplog.text
