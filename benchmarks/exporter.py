"""How fast and how steadily the page is served, beside node_exporter and prometheus_client's own server.

    python -m benchmarks.exporter [--write docs/performance.md]

Three servers hand out the same families at 500 and at 5,000 series; one client asks them in turn over kept
connections, as Prometheus does. Then hostile clients by the hundred come to kvwatch's server, while a good
one goes on asking. benchmarks.endurance adds the cost of cycles and the memory after ten thousand of them.
Then how long the program takes to be loaded.
Exit status 1 where a target is missed. node_exporter is Debian's prometheus-node-exporter.
"""

from __future__ import annotations

import argparse
import datetime
import http.client
import operator
import os
import platform
import shutil
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.endurance import Cycles
from kvwatch.cli.common import complain
from tests.e2e.waiting import free_port, wait_until
from tests.support import ROOT

SERIES = (500, 5_000)
SCRAPES = 400
FAMILY_SIZE = 50
NODE_EXPORTER = "prometheus-node-exporter"
ACCEPT = {
    "Accept": "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3",
    "Accept-Encoding": "gzip",
}
SILENT, SLOW, PARALLEL, GARBAGE = 50, 50, 200, 10_000
CPU_TARGET_MS = 30.0
IMPORT_TARGET_MS = 250.0
RESIDENT_TARGET_MIB = 64.0
GROWTH_TARGET_MIB = 1.0
MIB = 1 << 20


# --- the page -------------------------------------------------------------------------------------------


def families(series: int) -> Iterator[tuple[str, list[tuple[dict[str, str], float]]]]:
    """Gauges of 50 series each, with labels like those of a GPU's process."""
    for number in range(series // FAMILY_SIZE):
        yield (
            f"bench_memory_{number}_bytes",
            [
                (
                    {"gpu": str(row % 8), "pid": str(10_000 + row), "process": "python3", "owner": "foreign"},
                    float(number * 1_048_576 + row * 4096),
                )
                for row in range(FAMILY_SIZE)
            ],
        )


def page(series: int) -> str:
    """The families as text."""
    lines = []
    for name, samples in families(series):
        lines += [f"# HELP {name} Memory.", f"# TYPE {name} gauge"]
        for labels, value in samples:
            pairs = ",".join(f'{label}="{text}"' for label, text in labels.items())
            lines.append(f"{name}{{{pairs}}} {value}")
    return "\n".join(lines) + "\n"


# --- the servers, each a process of its own -------------------------------------------------------------


def serve_kvwatch(series: int, web_config: str = "") -> None:
    """kvwatch's server with a page that a cycle published."""
    from kvwatch.export.server import Content, ExporterServer
    from kvwatch.export.webconfig import WebConfig

    server = ExporterServer(("127.0.0.1:0",), web_config=WebConfig(Path(web_config)) if web_config else None)
    text = page(series).encode()
    server.publish(Content(text, text + b"# EOF\n", lambda: b"{}", lambda: b""))
    server.start()
    print(server.addresses[0].rpartition(":")[2], flush=True)
    sys.stdin.read()


def serve_prometheus_client(series: int) -> None:
    """prometheus_client's server over a registry that holds the same."""
    from prometheus_client import CollectorRegistry, Gauge, start_http_server

    registry = CollectorRegistry()
    for name, samples in families(series):
        gauge = Gauge(name, "Memory.", tuple(samples[0][0]), registry=registry)
        for labels, value in samples:
            gauge.labels(**labels).set(value)
    server, _ = start_http_server(0, "127.0.0.1", registry=registry)
    print(server.server_port, flush=True)
    sys.stdin.read()


SERVE: dict[str, Callable[..., None]] = {
    "serve-kvwatch": serve_kvwatch,
    "serve-prometheus-client": serve_prometheus_client,
}


@dataclass(frozen=True, slots=True)
class Server:
    """A running server."""

    name: str
    port: int
    pid: int

    def resident_mib(self) -> float:
        """Its memory."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGESIZE") / MIB

    def usage(self) -> tuple[int, int]:
        """Threads and descriptors."""
        proc = Path(f"/proc/{self.pid}")
        return len(list((proc / "task").iterdir())), len(list((proc / "fd").iterdir()))


@contextmanager
def own_server(name: str, *arguments: str) -> Iterator[Server]:
    """One of `SERVE`, as long as the block lasts."""
    command = [sys.executable, "-m", "benchmarks.exporter", f"serve-{name}", *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as process:
        assert process.stdout
        assert process.stdin
        yield Server(name, int(process.stdout.readline()), process.pid)
        process.stdin.close()


@contextmanager
def node_exporter(series: int) -> Iterator[Server]:
    """node_exporter with its textfile collector only, which reads the same page."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "bench.prom").write_text(page(series), encoding="utf-8")
        options = ["--collector.disable-defaults", "--collector.textfile", "--web.disable-exporter-metrics"]
        options += [f"--collector.textfile.directory={folder}", f"--web.listen-address=127.0.0.1:{port}"]
        process = subprocess.Popen([NODE_EXPORTER, *options], stderr=subprocess.DEVNULL)
        try:
            wait_until(lambda: _listens(port), 20)
            yield Server("node_exporter", port, process.pid)
        finally:
            process.terminate()
            process.wait()


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


# --- latency --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds of one server's scrapes, and its memory after them."""

    p50: float
    p99: float
    resident_mib: float


def latencies(series: int) -> dict[str, Latency]:
    """Of the three servers, asked in turn."""
    with ExitStack() as stack:
        servers = [
            stack.enter_context(own_server("kvwatch", str(series))),
            stack.enter_context(own_server("prometheus-client", str(series))),
        ]
        if shutil.which(NODE_EXPORTER):
            servers.append(stack.enter_context(node_exporter(series)))
        clients = [http.client.HTTPConnection("127.0.0.1", server.port, timeout=10) for server in servers]
        taken: list[list[float]] = [[] for _ in servers]
        for _ in range(SCRAPES):
            for client, times in zip(clients, taken, strict=True):
                begun = time.perf_counter()
                client.request("GET", "/metrics", headers=ACCEPT)
                answer = client.getresponse()
                answer.read()
                times.append(1000 * (time.perf_counter() - begun))
                assert answer.status == 200
        for client in clients:
            client.close()
        return {
            server.name: Latency(*_quantiles(times), server.resident_mib())
            for server, times in zip(servers, taken, strict=True)
        }


def _quantiles(times: Sequence[float]) -> tuple[float, float]:
    cuts = statistics.quantiles(times[20:], n=100)
    return cuts[49], cuts[98]


# --- hostile clients ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Siege:
    """What good scrapes met while others misbehaved. Threads and descriptors are (before, after)."""

    name: str
    scrapes: int
    failed: int
    slowest_ms: float
    threads: tuple[int, int]
    descriptors: tuple[int, int]

    @property
    def stood(self) -> bool:
        """No good scrape failed, and nothing was left behind."""
        return (
            not self.failed
            and self.threads[1] <= self.threads[0]
            and self.descriptors[1] <= self.descriptors[0]
        )


def besiege(name: str, server: Server, attack: Callable[[Server], None], tls: ssl.SSLContext | None) -> Siege:
    """Let the attack run, with a good scrape every 20 ms beside it."""
    times, failed = [], 0
    over = threading.Event()

    def attacker() -> None:
        try:
            attack(server)
        finally:
            over.set()

    before = server.usage()
    thread = threading.Thread(target=attacker)
    thread.start()
    while not over.wait(0.02):
        begun = time.perf_counter()
        if not scrape(server.port, tls):
            failed += 1
        times.append(1000 * (time.perf_counter() - begun))
    thread.join()
    with suppress(AssertionError):
        wait_until(lambda: all(map(operator.le, server.usage(), before)), 20)
    after = server.usage()
    return Siege(name, len(times), failed, max(times), (before[0], after[0]), (before[1], after[1]))


def scrape(port: int, tls: ssl.SSLContext | None) -> bool:
    """One good scrape over a new connection."""
    client: http.client.HTTPConnection
    if tls is None:
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    else:
        client = http.client.HTTPSConnection("127.0.0.1", port, timeout=5, context=tls)
    try:
        client.request("GET", "/metrics", headers=ACCEPT)
        answer = client.getresponse()
        answer.read()
    except OSError:
        return False
    finally:
        client.close()
    return answer.status == 200


def silent_and_slow(tls: ssl.SSLContext) -> Callable[[Server], None]:
    """50 clients that never say a word, and 50 that speak TLS and send a byte now and then."""

    def attack(server: Server) -> None:
        address = ("127.0.0.1", server.port)
        with ExitStack() as stack:
            silent = [stack.enter_context(socket.create_connection(address)) for _ in range(SILENT)]
            slow = [
                stack.enter_context(tls.wrap_socket(socket.create_connection(address))) for _ in range(SLOW)
            ]
            for byte in b"GET /metrics HTTP/1.1\r\nHost: a":
                for client in slow:
                    with suppress(OSError):
                        client.send(bytes((byte,)))
                time.sleep(0.2)
            assert len(silent) == SILENT

    return attack


def parallel(server: Server) -> None:
    """200 scrapes at once, again and again for a while."""
    with ThreadPoolExecutor(PARALLEL) as pool:
        for _ in range(5):
            assert all(pool.map(lambda _: scrape(server.port, None), range(PARALLEL)))


def garbage(server: Server) -> None:
    """10,000 connections with nonsense."""
    texts = (b"\0\xff\xfe" * 50, b"GET\r\n\r\n", b"X" * 20_000, b"GET / HTTP/9.9\r\n\r\n", b"\r\n\r\n")

    def one(number: int) -> None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", server.port), timeout=5) as client:
            client.sendall(texts[number % len(texts)])
            client.shutdown(socket.SHUT_WR)
            while client.recv(4096):
                pass

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(GARBAGE)))


def sieges() -> Iterator[Siege]:
    """All attacks."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = certificate(folder)
        tls = ssl.create_default_context(cafile=str(folder / "cert.pem"))
        tls.check_hostname = False
        with own_server("kvwatch", "500", str(config)) as server:
            scrape(server.port, tls)
            yield besiege(f"{SILENT} silent and {SLOW} slow clients, TLS", server, silent_and_slow(tls), tls)
    with own_server("kvwatch", "500") as server:
        scrape(server.port, None)
        yield besiege(f"{PARALLEL} scrapes at once, five times", server, parallel, None)
        yield besiege(f"{GARBAGE:,} requests of garbage", server, garbage, None)


def certificate(folder: Path) -> Path:
    """A web configuration with a fresh certificate."""
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    command += ["-days", "1", "-subj", "/CN=localhost", "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    path = folder / "web.yml"
    path.write_text("tls_server_config: {cert_file: cert.pem, key_file: key.pem}\n", encoding="utf-8")
    return path


# --- start ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """How long one way to start takes, in milliseconds."""

    median_ms: float
    least_ms: float


IMPORTS = ("kvwatch", "kvwatch.cli.main", "kvwatch.cli.run")
IMPORT_ROUNDS = 15


def starts() -> dict[str, Start]:
    """The imports, each in new processes that find compiled modules."""
    with tempfile.TemporaryDirectory(prefix="kvwatch-bench-") as cache:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": cache}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        return {module: import_time(module, environment) for module in IMPORTS}


def import_time(module: str, environment: dict[str, str]) -> Start:
    """One module and all that it needs, as the importing process sees it."""
    program = f"import time; begun = time.perf_counter(); import {module}; print(time.perf_counter() - begun)"
    command = [sys.executable, "-c", program]

    def once() -> float:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        return 1000 * float(done.stdout)

    once()
    found = [once() for _ in range(IMPORT_ROUNDS)]
    return Start(statistics.median(found), min(found))


# --- report ---------------------------------------------------------------------------------------------


def machine() -> str:
    """The machine in words."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    model = next(line.partition(": ")[2] for line in text.splitlines() if line.startswith("model name"))
    memory = os.sysconf("SC_PAGESIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    kernel = ".".join(platform.release().split(".")[:2])
    load = os.getloadavg()[0]
    python = platform.python_version() + (" (the distribution's)" if sys.base_prefix == "/usr" else "")
    hardware = f"{os.cpu_count()} cores of {model}, {memory:.0f} GiB"
    return f"{hardware}, Linux {kernel}, Python {python}; load {load:.1f} before the run"


def report(
    before: str,
    found: dict[int, dict[str, Latency]],
    stood: Sequence[Siege],
    cycles: Cycles,
    begun: dict[str, Start],
) -> str:
    """The page for docs/."""
    scrapes = "".join(
        f"| {series:,} | {name} | {one.p50:.2f} ms | {one.p99:.2f} ms | {one.resident_mib:.0f} MiB |\n"
        for series, servers in found.items()
        for name, one in servers.items()
    )
    attacks = "".join(
        f"| {one.name} | {one.scrapes} | {one.failed} | {one.slowest_ms:.0f} ms |"
        f" {one.threads[0]}, {one.threads[1]} | {one.descriptors[0]}, {one.descriptors[1]} |\n"
        for one in stood
    )
    memory = "".join(
        f"| memory {MOMENTS.get(number, f'after {number:,} cycles')} | {size:.1f} MiB |\n"
        for number, size in cycles.resident_mib.items()
    )
    return TEMPLATE.format(
        date=datetime.datetime.now(datetime.UTC).date(),
        machine=before,
        rounds=SCRAPES,
        scrapes=scrapes,
        attacks=attacks,
        cycles=cycles,
        memory=memory,
        starts="".join(
            f"| `import {module}` | {one.median_ms:.0f} ms | {one.least_ms:.0f} ms |\n"
            for module, one in begun.items()
        ),
    )


MOMENTS = {0: "at first", 5_760: "after a day's cycles (5,760)"}
TEMPLATE = """\
## What one daemon costs

Generated by `python -m benchmarks.exporter --write docs/performance.md`, all in one run, over loopback:
{date}, {machine}.

### Scrapes

{rounds} scrapes of each server over a kept connection, compressed, in turn. kvwatch renders its page once per
cycle and sends bytes; the others collect at each scrape. Memory is that of the bare server with the page.

| series | server | p50 | p99 | memory |
|---|---|---|---|---|
{scrapes}
### Hostile clients

A good client scrapes all the while, over a new connection each time.

| attack | good scrapes | failed | slowest | threads before, after | descriptors before, after |
|---|---|---|---|---|---|
{attacks}
### Cycles

8 GPUs, 64 processes on them, 8 vLLM servers with pages of real size (`python -m benchmarks.endurance`).
Memory is that of the whole daemon. The series of a day, of which trends are made, have their full size from the
first cycle.

| | |
|---|---|
| CPU of a whole cycle, all threads | {cycles.cpu_ms:.0f} ms median, {cycles.least_cpu_ms:.0f} ms least |
| CPU of `sum(range(1_000_000))` there, which tells how fast the machine is | {cycles.plain_loop_ms:.0f} ms |
{memory}
### Start

Imports in new processes that find compiled modules. `kvwatch --version` and `--help` need `kvwatch.cli.main`,
a command that looks at the node once all of `kvwatch.cli.run`. What only a daemon needs (numpy, the status page, the
catalogue of weights …) is loaded by `kvwatch run` once it listens.

| | median | least |
|---|---|---|
{starts}"""
MARKS = "<!-- benchmarks.exporter -->\n", "<!-- end of benchmarks.exporter -->\n"


def write_section(path: Path, text: str) -> None:
    """Replace what stands between the marks, or add it at the end."""
    begin, end = MARKS
    before, _, rest = path.read_text(encoding="utf-8").partition(begin)
    after = rest.partition(end)[2]
    path.write_text(f"{before.rstrip()}\n\n{begin}{text}{end}{after}", encoding="utf-8")


def missed(
    found: dict[int, dict[str, Latency]], stood: Sequence[Siege], cycles: Cycles, begun: dict[str, Start]
) -> Iterator[str]:
    """The targets that were not reached."""
    for series, servers in found.items():
        if "node_exporter" not in servers:
            yield f"{NODE_EXPORTER} is not installed"
        elif servers["kvwatch"].p50 > servers["node_exporter"].p50:
            yield f"{series} series: p50 above node_exporter's"
    for siege in stood:
        if not siege.stood:
            yield f"{siege.name}: a good scrape failed, or something was left behind"
    *_, full, last = cycles.resident_mib.values()
    if last > RESIDENT_TARGET_MIB:
        yield f"memory is {last:.1f} MiB"
    if last - full >= GROWTH_TARGET_MIB:
        yield f"memory grew by {last - full:.1f} MiB once the trends' memory was full"
    if cycles.cpu_ms > CPU_TARGET_MS:
        yield f"a cycle takes {cycles.cpu_ms:.0f} ms of CPU"
    for module in ("kvwatch", "kvwatch.cli.main"):
        if begun[module].median_ms > IMPORT_TARGET_MS:
            yield f"import {module} takes {begun[module].median_ms:.0f} ms"


def endurance() -> Cycles:
    """benchmarks.endurance, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.endurance"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return Cycles.from_json(done.stdout.splitlines()[-1])


def main() -> int:
    """Measure, print, and write where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", metavar="FILE", type=Path)
    args = parser.parse_args()
    before = machine()
    found = {series: latencies(series) for series in SERIES}
    stood = list(sieges())
    cycles = endurance()
    begun = starts()
    text = report(before, found, stood, cycles, begun)
    print(text)
    if args.write:
        write_section(args.write, text)
    problems = list(missed(found, stood, cycles, begun))
    for problem in problems:
        complain(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in SERVE:
        serve, *rest = sys.argv[1:]
        SERVE[serve](int(rest[0]), *rest[1:])
    else:
        sys.exit(main())
