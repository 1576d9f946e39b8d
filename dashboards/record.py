"""Hours of three embedded nodes as a Prometheus database: python -m dashboards.record DIRECTORY

The dashboards' tests and pictures ask it instead of a fleet. What kvwatch publishes of a node is computed
here as on a real one, cycle by cycle, only with the clock turned by hand.
"""

from __future__ import annotations

import argparse
import math
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from kvwatch.blockmath.flags import Flags
from kvwatch.config import Config, Plan, ServerConfig
from kvwatch.demo.node import DemoNode
from kvwatch.demo.scenario import Scenario, load_scenario
from kvwatch.export.page import build_page
from kvwatch.monitor import Monitor
from kvwatch.observe.cycle import Observer
from kvwatch.observe.records import Failure, Launch, ModelConfig, NextStart, Process

HOURS = 4.0
STEP_SECONDS = 120.0
CONFIG = Config(
    plans=(
        Plan("ctx-64k", None, Flags(max_model_len=65536)),
        Plan("fp8-kv", None, Flags(kv_cache_dtype="fp8")),
    )
)


@dataclass(frozen=True, slots=True)
class Script:
    """One recorded node.

    Attributes:
        ahead_minutes: how far into the demo's round it starts.
        pending: what its next start is told otherwise.
        asleep: whether its server sleeps in the last quarter of each hour.
    unreadable: whether its model's files cannot be read for half an hour.
    """

    instance: str
    scenario: Scenario
    ahead_minutes: float = 0
    pending: Flags | None = None
    asleep: bool = False
    unreadable: bool = False


def scripts() -> tuple[Script, ...]:
    """One with a changed unit; one whose server naps; one that leaks and fills up."""
    demo = load_scenario()
    slower = replace(demo, round_minutes=100)
    filling = replace(demo.server, usage=((0, 0.3), (300, 0.95)))
    leak = replace(
        demo.holders[0],
        name="python3",
        user="batch",
        unit="batch.service",
        end=1000,
        gib=((0, 0.2), (600, 5.2)),
    )
    leaking = replace(demo, round_minutes=1000, holders=(leak,), server=filling)
    return (
        Script("gpu-node-1:9744", slower, ahead_minutes=10, pending=Flags(max_model_len=40960)),
        Script("gpu-node-2:9744", slower, 65, asleep=True),
        Script("gpu-node-3:9744", leaking, unreadable=True),
    )


class RecordedNode(DemoNode):
    """An embedded node whose clock stands where it is put.

    Args:
        begun: Unix time of the recording's begin.
    """

    def __init__(self, script: Script, begun: float) -> None:
        super().__init__(script.scenario, speed=1)
        self._started = begun - 60 * script.ahead_minutes
        self.script = script
        self.begun = self.clock = begun

    def now(self) -> float:
        return self.clock

    def read_model(
        self,
        launch: Launch,
        process: Process | None,
        served_root: str | None,
        settings: ServerConfig | None,
    ) -> ModelConfig | Failure:
        if self.script.unreadable and 1800 < self.clock - self.begun < 3600:
            return Failure("models", "permission_denied", "config.json: permission denied")
        return super().read_model(launch, process, served_root, settings)

    def read_next_start(
        self,
        launch: Launch,
        process: Process | None,
        served_root: str | None,
        settings: ServerConfig | None,
    ) -> NextStart | Failure:
        found = super().read_next_start(launch, process, served_root, settings)
        if self.script.pending is None or isinstance(found, Failure):
            return found
        changed = self.script.pending.given()
        return replace(found, source="systemd", flags=replace(found.flags, **changed))

    def answer(self, path: str) -> tuple[str, bytes] | None:
        answer = super().answer(path)
        if answer is None or path != "/metrics":
            return answer
        kind, body = answer
        page = _with_requests(body.decode(), (self.clock - self.begun) / 60 + 120)
        if self.script.asleep and self.clock % 3600 > 2700:
            page = re.sub(r'(sleep_state="awake"\}) 1.0', r"\1 0.0", page)
            page = re.sub(r'(sleep_state="weights_offloaded"\}) 0.0', r"\1 1.0", page)
        return kind, page.encode()


_BUCKET = re.compile(
    r'(?m)^(vllm:request_(?P<kind>prompt|generation)_tokens_bucket\{[^}]*le="(?P<le>[^"]+)"[^}]*\}) .*$'
)
_COUNT = re.compile(r"(?m)^(vllm:request_(?:prompt|generation)_tokens_count\{[^}]*\}) .*$")
_PREEMPTIONS = re.compile(r"(?m)^(vllm:num_preemptions_total\{[^}]*\}) .*$")
_MEDIAN = {"prompt": 110.0, "generation": 45.0}


def _with_requests(page: str, minutes: float) -> str:
    """The page of a server that has finished 30 requests a minute, with lengths spread log-normally."""
    count = 30 * minutes

    def bucket(match: re.Match[str]) -> str:
        spread = math.log(float(match["le"]) / _MEDIAN[match["kind"]]) / 1.1
        share = (1 + math.erf(spread / math.sqrt(2))) / 2
        return f"{match[1]} {round(count * share)}"

    page = _COUNT.sub(rf"\g<1> {round(count)}", _BUCKET.sub(bucket, page))
    return _PREEMPTIONS.sub(rf"\g<1> {int(minutes / 7)}", page)


def record(now: float, *, hours: float = HOURS) -> Iterator[str]:
    """Lines of OpenMetrics with timestamps that end at `now`, and one line that ends the text."""
    for script in scripts():
        begun = now - hours * 3600
        with RecordedNode(script, begun) as node:
            monitor = Monitor(Observer(node, CONFIG, now=node.now), CONFIG, now=node.now, simulated=True)
            for step in range(int(hours * 3600 / STEP_SECONDS) + 1):
                node.clock = begun + step * STEP_SECONDS
                page = build_page(monitor.cycle(), top=20).text().decode()
                yield from _lines(page, script.instance, node.clock)
            monitor.close()
    yield "# EOF\n"


def _lines(page: str, instance: str, clock: float) -> Iterator[str]:
    target = f'job="kvwatch",instance="{instance}"'
    # Two servers on one card are more than the embedded node has; its server is always the last to start.
    page += "".join(
        line.replace("kvwatch_restart_feasible", "kvwatch_restart_together_feasible")
        for line in page.splitlines(keepends=True)
        if line.startswith("kvwatch_restart_feasible{")
    )
    for series, value in _SAMPLE.findall(page):
        name, _, labels = series.rstrip("}").partition("{")
        yield f"{name}{{{target}{',' if labels else ''}{labels}}} {value} {clock:.3f}\n"
    yield f"up{{{target}}} 1 {clock:.3f}\n"


_SAMPLE = re.compile(r"(?m)^([^#\s].*) (\S+)$")


def write_blocks(directory: Path, now: float) -> None:
    """Write the recording as blocks of a Prometheus database.

    Raises:
        FileNotFoundError: promtool is not installed.
        subprocess.CalledProcessError: promtool refuses the recording.
    """
    promtool = shutil.which("promtool")
    if promtool is None:
        raise FileNotFoundError("promtool is not installed")
    with tempfile.NamedTemporaryFile("w", suffix=".om", encoding="utf-8") as file:
        file.writelines(record(now))
        file.flush()
        command = [promtool, "tsdb", "create-blocks-from", "openmetrics", file.name, str(directory)]
        subprocess.run(command, check=True, capture_output=True)


def main() -> None:
    """Write the database and say at which Unix time it ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    now = time.time()
    write_blocks(parser.parse_args().directory, now)
    print(f"ends at {now:.3f}")


if __name__ == "__main__":
    main()
