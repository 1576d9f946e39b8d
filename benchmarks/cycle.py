"""What one look at a large node costs: 8 GPUs, 200 processes on them, 8 vLLM servers.

    python -m benchmarks.cycle

NVML is the C library of tests/fakenvml, /proc is this machine's with 200 more processes, the servers' pages
are the demo's over HTTP; one server could not start again, so remedies are looked for. CPU time of the whole
process counts, all threads: observe, join, forecast, render. The plain loop tells how fast this machine is.

Beside it nvitop's API lists the same GPUs and processes, where it is installed:

    python -m venv .cache/bench-venv && .cache/bench-venv/bin/pip install nvitop

or KVWATCH_NVITOP_PYTHON names a Python that has it. Exit status 1 where the target
is missed, which is meant for a node whose processes have run for a while.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from kvwatch.config import GIB, MIB, Config
from kvwatch.demo.scenario import data
from kvwatch.export.page import build_page
from kvwatch.monitor import Monitor
from kvwatch.observe.cycle import Observer
from kvwatch.observe.local import LocalSources
from kvwatch.observe.processes import YOUNG_SECONDS
from tests.fakenvml import Gpu, Process, Scenario, environment
from tests.support import ROOT

TARGET_MS = 60.0
GPUS = 8
PROCESSES = 200
SERVERS = 8
ROUNDS = 20
WARM_UP = 3
ENGINE = "VLLM::EngineCore"
VERSION = "0.32.0"
"""Of the demo's server."""

_SLEEP = "import time; time.sleep(3600)"
_RETITLED = f"import ctypes; ctypes.CDLL(None).prctl(15, b'{ENGINE}'[:15], 0, 0, 0); {_SLEEP}"
_PARENT = f"""
import subprocess, sys
engine = subprocess.Popen([{ENGINE!r}, "-c", {_RETITLED!r}], executable=sys.executable)
print(engine.pid, flush=True)
try:
    sys.stdin.read()
finally:
    engine.kill()
"""
_NVITOP = f"""
import json, time
from nvitop import Device
def look():
    listed = 0
    for device in Device.all():
        device.as_snapshot()
        listed += len([process.as_snapshot() for process in device.processes().values()])
    return listed
for _ in range({WARM_UP}):
    listed = look()
costs = []
for _ in range({ROUNDS}):
    begun = time.process_time()
    look()
    costs.append(1000 * (time.process_time() - begun))
print(json.dumps([listed, costs]))
"""


# --- the node -------------------------------------------------------------------------------------------


def serve_pages() -> None:
    """Another process's work: the demo's answers at the ports of all servers, until standard input ends.

    Connections stay open between two looks, as vLLM's do and the demo's do not.
    """
    # Imported here, since the process that is measured must hold no more than `kvwatch run` does.
    import requests

    from kvwatch.demo.node import DemoNode
    from kvwatch.demo.scenario import load_scenario

    with DemoNode(load_scenario(), speed=1) as node:
        answers = {
            path: requests.get(f"http://127.0.0.1:{node.port}{path}", timeout=10)
            for path in ("/metrics", "/version", "/v1/models")
        }

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            answer = answers[self.path]
            self.send_response(answer.status_code)
            self.send_header("Content-Type", answer.headers["Content-Type"])
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        def log_message(self, *args: object) -> None:
            """Nothing."""

    servers = [ThreadingHTTPServer(("127.0.0.1", 0), Handler) for _ in range(SERVERS)]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    print(json.dumps([server.server_port for server in servers]), flush=True)
    sys.stdin.read()


def environment_with_vllm(folder: Path) -> Path:
    """What kvwatch looks at of the servers' virtual environment; returns the script in it."""
    program = folder / "venv" / "bin" / "vllm"
    program.parent.mkdir(parents=True)
    program.write_text(_PARENT, encoding="utf-8")
    package = folder / "venv" / "lib" / "python3.11" / "site-packages" / "vllm"
    package.mkdir(parents=True)
    package.joinpath("_version.py").write_text(f"__version__ = version = '{VERSION}'\n", encoding="utf-8")
    return program


@contextlib.contextmanager
def large_node(folder: Path, processes: int = PROCESSES) -> Iterator[None]:
    """Start it all, with so many processes on the cards, and tell NVML's stand-in."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(data("config.json"), encoding="utf-8")
    program = environment_with_vllm(folder)
    with contextlib.ExitStack() as stack:

        def start(*command: str | Path) -> subprocess.Popen[str]:
            pipe = subprocess.PIPE
            child = subprocess.Popen(list(command), stdin=pipe, stdout=pipe, text=True, cwd=ROOT)
            stack.callback(child.wait)
            assert child.stdin is not None
            stack.callback(child.stdin.close)
            return child

        def first_line(child: subprocess.Popen[str]) -> str:
            assert child.stdout is not None
            return child.stdout.readline()

        ports = json.loads(first_line(start(sys.executable, "-m", "benchmarks.cycle", "pages")))
        parents = [
            start(
                sys.executable,
                program,
                "serve",
                model,
                "--served-model-name",
                f"chat-{port}",
                "--port",
                str(port),
            )
            for port in ports
        ]
        engines = [int(first_line(parent)) for parent in parents]
        others = [start("cat").pid for _ in range(processes - SERVERS)]
        Scenario(
            tuple(
                Gpu(
                    processes=(
                        Process(engines[index], 60 * GIB),
                        *(Process(pid, 400 * MIB if index == 0 else 40 * MIB) for pid in others[index::GPUS]),
                    )
                )
                for index in range(GPUS)
            )
        ).write(Path(os.environ["KVWATCH_FAKENVML"]))
        yield


# --- what is measured -----------------------------------------------------------------------------------


def cpu_ms(look: Callable[[], object]) -> list[float]:
    """CPU time of each round, in milliseconds."""
    for _ in range(WARM_UP):
        look()
    costs = []
    for _ in range(ROUNDS):
        begun = time.process_time()
        look()
        costs.append(1000 * (time.process_time() - begun))
    return costs


def kvwatch_costs() -> list[float]:
    """Whole cycles, as `kvwatch run` does them."""
    config = Config()
    monitor = Monitor(Observer(LocalSources(config.poll), config), config)

    def look() -> None:
        cycle = monitor.cycle()
        page = build_page(cycle, top=config.holders.top)
        page.text()
        held = [holder.ownership for state in cycle.snapshot.gpus for holder in state.holders]
        servers = {one.server for one in held if one.server}
        assert (len(held), len(servers)) == (PROCESSES, SERVERS), (len(held), servers)
        verdicts = [cycle.forecasts.restart[name].feasible for name in servers]
        assert (verdicts.count(True), verdicts.count(False)) == (SERVERS - 1, 1), verdicts

    costs = cpu_ms(look)
    monitor.close()
    return costs


def nvitop_costs() -> list[float] | None:
    """The same GPUs and processes listed by nvitop; None where it is not installed."""
    python = os.environ.get("KVWATCH_NVITOP_PYTHON", str(ROOT / ".cache" / "bench-venv" / "bin" / "python"))
    if not Path(python).exists():
        return None
    done = subprocess.run([python, "-c", _NVITOP], capture_output=True, text=True, check=True)
    listed, costs = json.loads(done.stdout)
    assert listed == PROCESSES, listed
    return list(costs)


def report(name: str, costs: list[float]) -> float:
    """One line; returns the median."""
    median = statistics.median(costs)
    print(f"{name:<10} {median:6.1f} ms CPU per look (least {min(costs):.1f}, most {max(costs):.1f})")
    return median


def main() -> int:
    """Measure and print."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    if "KVWATCH_FAKENVML" not in os.environ:
        folder = tempfile.mkdtemp(prefix="kvwatch-bench-")
        scenario = Path(folder) / "node.scenario"
        Scenario().write(scenario)
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.cycle"], environment(scenario))
    with tempfile.TemporaryDirectory() as folder, large_node(Path(folder)):
        print(f"{GPUS} GPUs, {PROCESSES} processes on them, {SERVERS} servers")
        report("plain loop", cpu_ms(lambda: sum(range(1_000_000))))
        report("kvwatch", kvwatch_costs())
        print(f"           with all processes younger than {YOUNG_SECONDS:g} s, which are read in full")
        time.sleep(YOUNG_SECONDS)
        own = report("kvwatch", kvwatch_costs())
        others = nvitop_costs()
        if others is None:
            print("nvitop     not installed")
        else:
            print(f"ratio      {own / report('nvitop', others):.2f}")
    return 0 if own <= TARGET_MS else 1


if __name__ == "__main__":
    if sys.argv[1:] == ["pages"]:
        serve_pages()
    else:
        sys.exit(main())
