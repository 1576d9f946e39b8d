"""What cycles over a busy node cost, and what they leave in memory after ten thousand of them.

    python -m benchmarks.endurance

8 GPUs, 64 processes on them, 8 vLLM servers with pages of real size (the node of benchmarks.cycle). First
whole cycles as `kvwatch run` does them, HTTP, NVML and /proc included; then what the last of them saw, over
and over, 15 s apart by its clock: joined, judged, remembered, rendered and published. Prints JSON.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.cycle import SERVERS, cpu_ms, large_node
from kvwatch.config import Config
from kvwatch.daemon import load_late_modules
from kvwatch.export.content import render
from kvwatch.export.server import ExporterServer
from kvwatch.monitor import Monitor
from kvwatch.observe.cycle import Observation, Observer
from kvwatch.observe.local import LocalSources
from kvwatch.observe.processes import YOUNG_SECONDS
from tests.fakenvml import Scenario, environment

PROCESSES = 64
CYCLES = 10_000
DAY = 5_760
"""Cycles after which the trends' memory is full."""
INTERVAL = 15.0
MIB = 1 << 20


class Again:
    """Sees the same each time, later by one interval."""

    def __init__(self, seen: Observation) -> None:
        self._seen = seen

    def observe(self) -> Observation:
        self._seen = replace(self._seen, time=self._seen.time + INTERVAL)
        return self._seen

    def reconfigure(self, config: Config) -> None:
        """Nothing changes."""

    def close(self) -> None:
        """Nothing is open."""


class Remembered:
    """An observer whose last observation can be had."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self.last: Observation | None = None

    def observe(self) -> Observation:
        self.last = self._observer.observe()
        return self.last

    def reconfigure(self, config: Config) -> None:
        self._observer.reconfigure(config)

    def close(self) -> None:
        self._observer.close()


def resident_mib() -> float:
    """Memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / MIB


@dataclass(frozen=True, slots=True)
class Cycles:
    """What was measured. CPU in milliseconds, memory in MiB by the number of replayed cycles before."""

    cpu_ms: float
    least_cpu_ms: float
    plain_loop_ms: float
    resident_mib: dict[int, float]

    @classmethod
    def from_json(cls, text: str) -> Cycles:
        """Out of what this program prints."""
        told = json.loads(text)
        return cls(
            **{**told, "resident_mib": {int(key): value for key, value in told["resident_mib"].items()}}
        )


def measure() -> Cycles:
    """All figures."""
    load_late_modules()
    config = Config()
    server = ExporterServer(("127.0.0.1:0",))
    remembered = Remembered(Observer(LocalSources(config.poll), config))

    def look(monitor: Monitor) -> None:
        server.publish(render(monitor.cycle(), config))

    real = Monitor(remembered, config)
    look(real)
    time.sleep(YOUNG_SECONDS)
    plain = statistics.median(cpu_ms(lambda: sum(range(1_000_000))))
    costs = cpu_ms(lambda: look(real))
    assert remembered.last is not None
    assert len(remembered.last.servers) >= SERVERS, "the node's servers were not found"
    replayed = Monitor(Again(remembered.last), config)
    resident = {0: resident_mib()}
    for number in range(1, CYCLES + 1):
        look(replayed)
        if number in (1_000, DAY, CYCLES):
            resident[number] = resident_mib()
    real.close()
    return Cycles(statistics.median(costs), min(costs), plain, resident)


def main() -> int:
    """Measure on a node of its own and print."""
    if "KVWATCH_FAKENVML" not in os.environ:
        scenario = Path(tempfile.mkdtemp(prefix="kvwatch-bench-")) / "node.scenario"
        Scenario().write(scenario)
        command = [sys.executable, "-m", "benchmarks.endurance"]
        # As `kvwatch run` does it.
        os.execve(sys.executable, command, {**environment(scenario), "OPENBLAS_NUM_THREADS": "1"})
    with tempfile.TemporaryDirectory() as folder, large_node(Path(folder), PROCESSES):
        print(json.dumps(asdict(measure())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
