"""Plays stories minute by minute over the NVML library that LD_LIBRARY_PATH names, on a clock of its own.

    python -m tests.forecast.timeline STORY

Prints one JSON line per cycle: the samples of its page that tell what is foretold, as name, labels and value.
The scenario file is the one that KVWATCH_FAKENVML names.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

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
from tests.fakenvml import Scenario

Sample = tuple[str, Mapping[str, str], float]

PATIENT = Poll(nvml_timeout=10.0)
"""A busy machine is no story of its own."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The node in one minute: what NVML answers, who runs, and what servers say."""

    nvml: Scenario
    processes: tuple[Process, ...]
    servers: tuple[ObservedServer, ...]


@dataclass(frozen=True, slots=True)
class Story:
    """One course of events.

    Attributes:
        minutes: how long it is; one cycle a minute.
        moment: the node by minute.
        clock: what the clock shows, by minute.
        restarts: minutes in which kvwatch begins anew, with nothing remembered.
    """

    minutes: int
    moment: Callable[[int], Moment]
    clock: Callable[[int], float]
    config: Config = field(default_factory=lambda: Config(poll=PATIENT))
    restarts: frozenset[int] = frozenset()


class Reader:
    """A server's pages in the present minute."""

    def __init__(self, sources: Sources, base_url: str) -> None:
        self._sources = sources
        self._base_url = base_url

    def read(self) -> VllmRecord | Failure:
        server = self._sources.server(self._base_url)
        return server.vllm if server else Failure("vllm", "connection_refused", "nobody listens")

    def close(self) -> None:
        """There is no connection."""


class Sources:
    """The real NVML source; processes, servers and models as the story has them."""

    def __init__(self, story: Story) -> None:
        self.minute = 0
        self._story = story
        self._nvml = NvmlSource(clock=self.now)

    @property
    def moment(self) -> Moment:
        return self._story.moment(self.minute)

    def server(self, base_url: str | None) -> ObservedServer | None:
        return next((one for one in self.moment.servers if one.launch.base_url == base_url), None)

    def now(self) -> float:
        return self._story.clock(self.minute)

    def read_nvml(self) -> NvmlRecord | Failure:
        return self._nvml.read()

    def read_processes(self) -> ProcessRecord | Failure:
        return ProcessRecord({process.pid: process for process in self.moment.processes})

    def find_servers(self, processes: ProcessRecord) -> tuple[Launch, ...]:
        return tuple(server.launch for server in self.moment.servers)

    def server_members(
        self, launches: tuple[Launch, ...], processes: ProcessRecord
    ) -> tuple[frozenset[int], ...]:
        servers = (self.server(launch.base_url) for launch in launches)
        return tuple(server.members if server else frozenset() for server in servers)

    def open_vllm(self, base_url: str, settings: ServerConfig | None) -> Reader:
        return Reader(self, base_url)

    def read_model(
        self,
        launch: Launch,
        process: Process | None,
        served_root: str | None,
        settings: ServerConfig | None,
    ) -> ModelConfig | Failure:
        server = self.server(launch.base_url)
        return server.model if server else Failure("models", "not_found", "nothing says which model")

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


def play(story: Story, scenario: Path) -> Iterator[list[Sample]]:
    """What the page tells after each cycle."""
    written = None
    sources = Sources(story)
    monitor = _monitor(story, sources)
    for minute in range(story.minutes):
        if minute in story.restarts:
            monitor.close()
            sources.close()
            sources = Sources(story)
            monitor = _monitor(story, sources)
        sources.minute = minute
        if sources.moment.nvml != written:
            written = sources.moment.nvml
            written.write(scenario)
        yield told(build_page(monitor.cycle(), top=0).text().decode())
    monitor.close()
    sources.close()


def _monitor(story: Story, sources: Sources) -> Monitor:
    return Monitor(Observer(sources, story.config, now=sources.now), story.config, now=sources.now)


_LABEL = re.compile(r'(\w+)="([^"]*)"')
TOLD = (
    "kvwatch_advice",
    "kvwatch_cycle_timestamp",
    "kvwatch_forecast_unknown",
    "kvwatch_gpu_memory_held",
    "kvwatch_plan_",
    "kvwatch_restart_",
    "kvwatch_server_up",
)


def told(page: str) -> list[Sample]:
    """What a page says about the future."""
    lines = (line.rpartition(" ") for line in page.splitlines() if line.startswith(TOLD))
    return [(left.partition("{")[0], dict(_LABEL.findall(left)), float(value)) for left, _, value in lines]


def main() -> None:
    from tests.forecast.stories import STORIES

    for samples in play(STORIES[sys.argv[1]], Path(os.environ["KVWATCH_FAKENVML"])):
        print(json.dumps(samples))


if __name__ == "__main__":
    main()
