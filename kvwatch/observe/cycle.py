"""One look at the whole node: every source once, each behind its deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeVar

from kvwatch.blockmath.flags import Flags
from kvwatch.config import Config, ServerConfig
from kvwatch.observe.deadline import Guarded, Lane
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

T = TypeVar("T")


class VllmReader(Protocol):
    """Reads one server's pages."""

    def read(self) -> VllmRecord | Failure:
        """One round of requests."""

    def close(self) -> None:
        """Let go of connections."""


class Sources(Protocol):
    """Where an `Observer` looks: the real node, the demo's, or a capture file's."""

    def read_nvml(self) -> NvmlRecord | Failure:
        """All GPUs and the processes on them."""

    def read_processes(self) -> ProcessRecord | Failure:
        """All processes of the node."""

    def find_servers(self, processes: ProcessRecord) -> tuple[Launch, ...]:
        """The vLLM servers among them."""

    def server_members(
        self, launches: tuple[Launch, ...], processes: ProcessRecord
    ) -> tuple[frozenset[int], ...]:
        """The pids that belong to each of the servers."""

    def open_vllm(self, base_url: str, settings: ServerConfig | None) -> VllmReader:
        """A reader for one server's pages, kept between cycles."""

    def read_model(
        self,
        launch: Launch,
        process: Process | None,
        served_root: str | None,
        settings: ServerConfig | None,
    ) -> ModelConfig | Failure:
        """The config.json of a server's model; may be called for several servers at once."""

    def read_next_start(
        self,
        launch: Launch,
        process: Process | None,
        served_root: str | None,
        settings: ServerConfig | None,
    ) -> NextStart | Failure:
        """What the server would be told if it started again now; as `read_model`."""


@dataclass(frozen=True, slots=True)
class ObservedServer:
    """What one cycle saw of one vLLM server.

    Attributes:
        settings: its entry under ``servers`` in kvwatch.yaml, None where there is none.
        members: pids of its process tree, empty where its processes cannot be seen.
        next_start: None where it was not looked for.
    """

    launch: Launch
    settings: ServerConfig | None
    members: frozenset[int]
    vllm: VllmRecord | Failure
    model: ModelConfig | Failure
    next_start: NextStart | Failure | None = None

    def with_address(self, failure: Failure) -> Failure:
        """The same for where it stands apart from its server: the detail begins with the address."""
        name = self.launch.base_url or f"pid {self.launch.pid}"
        if failure.detail.startswith(name):
            return failure
        return replace(failure, detail=f"{name}: {failure.detail}")


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """How one source did.

    Attributes:
        last_success: Unix time of its last answer, None before the first.
        seconds: how long this cycle's answer took, None where there was none.
    """

    name: str
    up: bool
    last_success: float | None
    seconds: float | None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Observation:
    """Everything one cycle saw, and nothing from an earlier one.

    Attributes:
        time: Unix time at which the cycle began.
        plan_models: config.json of the models that plans name, by plan.
    """

    time: float
    nvml: NvmlRecord | Failure
    processes: ProcessRecord | Failure
    servers: tuple[ObservedServer, ...] = ()
    sources: tuple[SourceStatus, ...] = ()
    plan_models: Mapping[str, ModelConfig | Failure] = field(default_factory=dict)


class NodeObserver(Protocol):
    """What a monitor asks once per cycle: the sources of a node, or captures of one."""

    def observe(self) -> Observation:
        """One cycle."""

    def reconfigure(self, config: Config) -> None:
        """Use another configuration from the next cycle on."""

    def close(self) -> None:
        """Let go of what is held between cycles."""


class _Server:
    """A server's reader and guards, kept from cycle to cycle. One that cannot be opened has no reader."""

    def __init__(self, lane: Lane) -> None:
        self.reader: VllmReader | None = None
        self.vllm: Guarded[VllmRecord | Failure] = Guarded("vllm", lane)
        self.model: Guarded[ModelConfig | Failure] = Guarded("models", lane)
        self.next_start: Guarded[NextStart | Failure] = Guarded("launch", lane)

    def close(self) -> None:
        if self.reader is not None:
            self.reader.close()
            self.reader = None


class Observer:
    """Looks at the node once per `observe()`. Not for use from two threads at once."""

    def __init__(self, sources: Sources, config: Config, *, now: Callable[[], float] = time.time) -> None:
        self._sources = sources
        self._config = config
        self._now = now
        self._lane = Lane()
        self._nvml: Guarded[NvmlRecord | Failure] = Guarded("nvml", self._lane)
        self._processes: Guarded[tuple[ProcessRecord, tuple[_Found, ...]] | Failure] = Guarded(
            "processes", self._lane
        )
        self._servers: dict[str, _Server] = {}
        self._plan_models: dict[str, Guarded[ModelConfig | Failure]] = {}
        self._last_success: dict[str, float] = {}

    def reconfigure(self, config: Config) -> None:
        """Use another configuration from the next cycle on; readers are opened anew.

        The guards stay: a source that hangs costs one thread, however often the configuration changes.
        """
        self._config = config
        for server in self._servers.values():
            server.close()
        for gone in self._plan_models.keys() - {plan.name for plan in config.plans}:
            del self._plan_models[gone]

    def close(self) -> None:
        """Let go of connections and threads."""
        for server in self._servers.values():
            server.close()
        self._servers.clear()
        self._plan_models.clear()
        self._lane.close()

    def observe(self) -> Observation:
        """One cycle. Sources that are quick take turns; one that is slow holds the others up a moment.

        Takes at most the sum of the configured deadlines, and that moment for each source that hangs.
        """
        poll = self._config.poll
        begun = self._now()
        self._processes.start(self._read_processes)
        self._nvml.start(self._sources.read_nvml)
        listed = self._processes.result(poll.processes_timeout)
        processes, found = (listed, ()) if isinstance(listed, Failure) else listed
        plan_models = self._start_plan_models()
        servers = self._read_servers(self._with_configured(found))
        nvml = self._nvml.result(poll.nvml_timeout)
        statuses = [
            self._status("nvml", begun, nvml, self._nvml.seconds),
            self._status("processes", begun, processes, self._processes.seconds),
        ]
        if servers:
            statuses.append(self._joint_status("vllm", begun, servers, lambda server: server.vllm))
            statuses.append(self._joint_status("models", begun, servers, lambda server: server.model))
        return Observation(
            begun,
            nvml,
            processes,
            servers,
            tuple(statuses),
            {name: result() for name, result in plan_models.items()},
        )

    def _start_plan_models(self) -> dict[str, Callable[[], ModelConfig | Failure]]:
        """Begin to read the models that plans name."""
        return {
            plan.name: self._begun(
                self._plan_models.setdefault(plan.name, Guarded("models", self._lane)),
                partial(self._sources.read_model, _launch_of(plan.flags, None), None, None, None),
            )
            for plan in self._config.plans
            if plan.flags.model is not None
        }

    def _read_processes(self) -> tuple[ProcessRecord, tuple[_Found, ...]] | Failure:
        record = self._sources.read_processes()
        if isinstance(record, Failure):
            return record
        launches = self._sources.find_servers(record)
        members = self._sources.server_members(launches, record)
        return record, tuple(
            _Found(launch, None, own, record.processes.get(launch.pid or 0))
            for launch, own in zip(launches, members, strict=True)
        )

    def _with_configured(self, found: tuple[_Found, ...]) -> tuple[_Found, ...]:
        """Discovered servers with the configuration laid over them, then those only configured."""
        by_url = {same_address(settings.url): settings for settings in self._config.servers}
        if not self._config.discovery:
            found = tuple(one for one in found if same_address(one.launch.base_url or "") in by_url)
        merged = [_overlay(one, by_url.pop(same_address(one.launch.base_url or ""), None)) for one in found]
        merged.extend(_overlay(_configured_only(settings), settings) for settings in by_url.values())
        return tuple(merged)

    def _read_servers(self, found: tuple[_Found, ...]) -> tuple[ObservedServer, ...]:
        poll = self._config.poll
        keys = {_key(one): one for one in found}
        for gone in self._servers.keys() - keys.keys():
            self._servers.pop(gone).close()
        unopened = {key: failure for key, one in keys.items() if (failure := self._open(key, one))}
        for server in self._servers.values():
            if server.reader is not None:
                server.vllm.start(server.reader.read)
        pages = {
            key: unopened[key] if key in unopened else server.vllm.result(poll.vllm_timeout)
            for key, server in reversed(self._servers.items())
        }
        started_models = {key: self._start_model(key, one, pages[key]) for key, one in keys.items()}
        started = {key: self._start_next_start(key, one, pages[key]) for key, one in keys.items()}
        # The last one comes when the others have come: whoever waits for it first is woken once.
        next_starts = {key: result() for key, result in reversed(started.items())}
        models = {key: result() for key, result in reversed(started_models.items())}
        return tuple(
            ObservedServer(one.launch, one.settings, one.members, pages[key], models[key], next_starts[key])
            for key, one in keys.items()
        )

    def _open(self, key: str, one: _Found) -> Failure | None:
        """Have a reader for a server's pages, or say why there is none; the next cycle tries again."""
        server = self._servers.setdefault(key, _Server(self._lane))
        if server.reader is not None:
            return None
        if not one.launch.base_url:
            return Failure("vllm", "no_address", "the command line names no address that kvwatch can reach")
        try:
            server.reader = self._sources.open_vllm(one.launch.base_url, one.settings)
        except (OSError, ValueError) as error:
            return Failure("vllm", "not_opened", f"{one.launch.base_url}: {error}")
        return None

    def _start_model(
        self, key: str, one: _Found, page: VllmRecord | Failure
    ) -> Callable[[], ModelConfig | Failure]:
        read = partial(self._sources.read_model, one.launch, one.process, _served_root(page), one.settings)
        return self._begun(self._servers[key].model, read)

    def _start_next_start(
        self, key: str, one: _Found, page: VllmRecord | Failure
    ) -> Callable[[], NextStart | Failure]:
        root = _served_root(page)
        read = partial(self._sources.read_next_start, one.launch, one.process, root, one.settings)
        return self._begun(self._servers[key].next_start, read)

    def _begun(
        self, guard: Guarded[T | Failure], read: Callable[[], T | Failure]
    ) -> Callable[[], T | Failure]:
        """Begin a reading of files; what is returned waits for it."""
        guard.start(read)
        return lambda: guard.result(self._config.poll.processes_timeout)

    def _joint_status(
        self,
        name: str,
        begun: float,
        servers: tuple[ObservedServer, ...],
        result: Callable[[ObservedServer], object],
    ) -> SourceStatus:
        """Up where every server answered; else what the first one met that did not."""
        answers = [(server, result(server)) for server in servers]
        failed = [server.with_address(one) for server, one in answers if isinstance(one, Failure)]
        return self._status(name, begun, failed[0] if failed else None, None)

    def _status(self, name: str, begun: float, result: object, seconds: float | None) -> SourceStatus:
        failure = result if isinstance(result, Failure) else None
        if failure is None:
            self._last_success[name] = begun
        return SourceStatus(name, failure is None, self._last_success.get(name), seconds, failure)


@dataclass(frozen=True, slots=True)
class _Found:
    """A server before its pages are read."""

    launch: Launch
    settings: ServerConfig | None
    members: frozenset[int]
    process: Process | None = None


def _served_root(page: VllmRecord | Failure) -> str | None:
    return page.models[0].root if isinstance(page, VllmRecord) and page.models else None


def _key(one: _Found) -> str:
    """Identity of a server between cycles: a restart on the same port is another server."""
    return f"{one.launch.base_url} {one.launch.pid} {one.launch.start_time}"


def same_address(url: str) -> str:
    """The address in one form, for comparison."""
    return url.replace("//localhost:", "//127.0.0.1:").rstrip("/")


def _configured_only(settings: ServerConfig) -> _Found:
    return _Found(_launch_of(settings.flags, settings.url), settings, frozenset())


def _launch_of(flags: Flags, url: str | None) -> Launch:
    """What only the configuration tells of a server."""
    return Launch(
        pid=None,
        start_time=None,
        flags=flags,
        model=flags.model,
        served_names=(),
        base_url=url,
    )


def _overlay(one: _Found, settings: ServerConfig | None) -> _Found:
    return replace(one, launch=overlaid(one.launch, settings), settings=settings)


def overlaid(launch: Launch, settings: ServerConfig | None) -> Launch:
    """What a server was told, with the flags of its entry in the configuration in place of its own."""
    if settings is None:
        return launch
    return replace(launch, flags=launch.flags.with_changes(**settings.flags.given()))
