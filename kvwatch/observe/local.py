"""The sources of the node that kvwatch itself runs on."""

from __future__ import annotations

from kvwatch.config import Poll, ServerConfig
from kvwatch.observe.cycle import VllmReader
from kvwatch.observe.launch import LaunchSource, server_members
from kvwatch.observe.models import ModelSource, placed
from kvwatch.observe.nextstart import NextStartSource
from kvwatch.observe.nvml import NvmlSource
from kvwatch.observe.processes import ProcessSource
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
from kvwatch.observe.vllm import VllmSource


class LocalSources:
    """NVML, /proc, loopback HTTP and the local disk. Implements `kvwatch.observe.cycle.Sources`."""

    def __init__(self, poll: Poll) -> None:
        self._poll = poll
        self._nvml = NvmlSource()
        self._processes = ProcessSource()
        self._launches = LaunchSource()
        self._models: dict[str | None, ModelSource] = {}
        self._next_starts: dict[str, NextStartSource] = {}

    def read_nvml(self) -> NvmlRecord | Failure:
        """All GPUs and the processes on them."""
        return self._nvml.read()

    def read_processes(self) -> ProcessRecord | Failure:
        """All processes of the node."""
        return self._processes.read()

    def find_servers(self, processes: ProcessRecord) -> tuple[Launch, ...]:
        """The vLLM servers among them."""
        return self._launches.read(processes)

    def server_members(
        self, launches: tuple[Launch, ...], processes: ProcessRecord
    ) -> tuple[frozenset[int], ...]:
        """The pids that belong to each of the servers."""
        return server_members(launches, processes)

    def open_vllm(self, base_url: str, settings: ServerConfig | None) -> VllmReader:
        """A reader for one server's pages."""
        try:
            token = _token(settings)
        except OSError as error:
            detail = f"token_file {error.filename}: {error.strerror}"
            return _NoAccess(Failure("vllm", "token_unreadable", detail))
        verify: bool | str = True
        if settings is not None:
            verify = str(settings.ca_file) if settings.ca_file else not settings.insecure_skip_verify
        return VllmSource(
            base_url,
            token=token,
            verify=verify,
            connect_timeout=self._poll.vllm_connect_timeout,
            deadline=self._poll.vllm_timeout,
        )

    def read_model(
        self,
        launch: Launch,
        process: Process | None,
        served_root: str | None,
        settings: ServerConfig | None,
    ) -> ModelConfig | Failure:
        """The config.json of a server's model: as configured, else as the server was told."""
        # One source per server: a source serves one thread, and one model on a dead NFS mount may hang.
        source = self._models.setdefault(launch.base_url or launch.model, ModelSource())
        told = placed(launch, settings)
        return source.read(told, served_root if told is launch else None, process if told is launch else None)

    def read_next_start(
        self,
        launch: Launch,
        process: Process | None,
        served_root: str | None,
        settings: ServerConfig | None,
    ) -> NextStart | Failure:
        """What the server would be told if it started again now."""
        source = self._next_starts.setdefault(launch.base_url or f"pid {launch.pid}", NextStartSource())
        return source.read(launch, process, served_root, settings)


class _NoAccess:
    """A server that cannot be asked, for the same reason each time."""

    def __init__(self, failure: Failure) -> None:
        self._failure = failure

    def read(self) -> VllmRecord | Failure:
        """The reason."""
        return self._failure

    def close(self) -> None:
        """Nothing is held."""


def _token(settings: ServerConfig | None) -> str | None:
    if settings is None or settings.token_file is None:
        return None
    return settings.token_file.read_text(encoding="utf-8").strip()
