"""CPU and memory of cycles over the busy node; a process of its own, which benchmarks.exporter starts."""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from pathlib import Path

from kvwatch.config import load
from kvwatch.export.content import render
from kvwatch.export.server import ExporterServer
from kvwatch.monitor import Monitor
from kvwatch.observe.cycle import Observer
from kvwatch.observe.local import LocalSources

WARM_UP = 20


def resident_bytes() -> int:
    """Memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def main(config_path: str, cycles: int) -> None:
    """Run cycles back to back; print the figures as JSON."""
    config = load(Path(config_path))
    monitor = Monitor(Observer(LocalSources(config.poll), config), config)
    server = ExporterServer(("127.0.0.1:0",))
    used: list[float] = []
    parts: dict[str, float] = {"cycle": 0.0, "render": 0.0, "publish": 0.0}
    resident: list[int] = []
    content = None
    for number in range(cycles + WARM_UP):
        marks = [time.process_time()]
        cycle = monitor.cycle()
        marks.append(time.process_time())
        content = render(cycle, config)
        marks.append(time.process_time())
        server.publish(content)
        marks.append(time.process_time())
        if number >= WARM_UP:
            used.append(marks[3] - marks[0])
            for name, begun, ended in zip(parts, marks, marks[1:], strict=False):
                parts[name] += (ended - begun) / cycles
        if number % 100 == 0:
            resident.append(resident_bytes())
    assert content is not None
    print(
        json.dumps(
            {
                "cpu_ms": 1000 * statistics.median(used),
                "parts_ms": {name: 1000 * seconds for name, seconds in parts.items()},
                "series": sum(not line.startswith(b"#") for line in content.metrics.splitlines()),
                "up": content.metrics.count(b"kvwatch_server_up{"),
                "resident": [*resident, resident_bytes()],
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
