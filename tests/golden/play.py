"""Plays situations in this process, over the NVML library that LD_LIBRARY_PATH names.

    python -m tests.golden.play NAME...

Prints one JSON object: the pages by situation. The scenario file is the one that KVWATCH_FAKENVML names.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import psutil

from kvwatch.config import Config, Poll, ServerConfig
from kvwatch.export.page import build_page
from kvwatch.monitor import Monitor
from kvwatch.observe.cycle import ObservedServer, Observer
from kvwatch.observe.nvml import NvmlSource
from kvwatch.observe.records import (
    Failure,
    Launch,
    ModelConfig,
    NextStart,
    NvmlRecord,
    Process,
    ProcessRecord,
    VllmRecord,
)
from tests.golden.situations import SITUATIONS, Situation
from tests.nodes import NOW

SECONDS_BETWEEN_CYCLES = 15.0
MACHINE_MEMORY = 128 << 30
MACHINE_AVAILABLE = 100 << 30


class Page:
    """A server's page as scripted."""

    def __init__(self, record: VllmRecord | Failure) -> None:
        self._record = record

    def read(self) -> VllmRecord | Failure:
        return self._record

    def close(self) -> None:
        """There is no connection."""


class Sources:
    """The real NVML source; processes, servers and models as the situation has them."""

    def __init__(self, situation: Situation) -> None:
        self.cycle = 0
        self._situation = situation
        self._nvml = NvmlSource(clock=self.now)

    def now(self) -> float:
        return NOW + self.cycle * SECONDS_BETWEEN_CYCLES

    def read_nvml(self) -> NvmlRecord | Failure:
        return self._nvml.read()

    def read_processes(self) -> ProcessRecord | Failure:
        return ProcessRecord({process.pid: process for process in self._situation.processes})

    def find_servers(self, processes: ProcessRecord) -> tuple[Launch, ...]:
        return tuple(server.launch for server in self._situation.servers)

    def server_members(
        self, launches: tuple[Launch, ...], processes: ProcessRecord
    ) -> tuple[frozenset[int], ...]:
        return tuple(self._server(launch.base_url).members for launch in launches)

    def open_vllm(self, base_url: str, settings: ServerConfig | None) -> Page:
        return Page(self._server(base_url).vllm)

    def read_model(
        self,
        launch: Launch,
        process: Process | None,
        served_root: str | None,
        settings: ServerConfig | None,
    ) -> ModelConfig | Failure:
        return self._server(launch.base_url).model

    def read_next_start(
        self,
        launch: Launch,
        process: Process | None,
        served_root: str | None,
        settings: ServerConfig | None,
    ) -> NextStart | Failure:
        return NextStart("command_line", (), launch.flags)

    def close(self) -> None:
        self._nvml.close()

    def _server(self, base_url: str | None) -> ObservedServer:
        return next(one for one in self._situation.servers if one.launch.base_url == base_url)


def play(situation: Situation, scenario: Path) -> list[str]:
    """The page after each cycle."""
    sources = Sources(situation)
    config = Config(poll=Poll(nvml_timeout=situation.nvml_timeout))
    monitor = Monitor(Observer(sources, config, now=sources.now), config, now=sources.now)
    pages = []
    for cycle in situation.cycles:
        cycle.nvml.write(scenario)
        pages.append(build_page(monitor.cycle(), top=config.holders.top).text().decode())
        sources.cycle += 1
    monitor.close()
    if not situation.alone:
        sources.close()
    return pages


def main() -> None:
    real = psutil.virtual_memory()
    machine = real._replace(total=MACHINE_MEMORY, available=MACHINE_AVAILABLE)
    psutil.virtual_memory = lambda: machine
    scenario = Path(os.environ["KVWATCH_FAKENVML"])
    print(json.dumps({name: play(SITUATIONS[name], scenario) for name in sys.argv[1:]}))


if __name__ == "__main__":
    main()
