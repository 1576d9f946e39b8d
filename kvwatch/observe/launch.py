"""vLLM servers among the processes, and what they were told when they started.

Of a server's environment only the variables in ``ENVIRONMENT`` are read, of its command line only the flags
that kvwatch has a use for; secrets (``--api-key``, ``HF_TOKEN``) are never kept.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvwatch.observe.command_line import CommandLine, parse_command_line, server_arguments
from kvwatch.observe.network import connect_address, namespace_addresses, url
from kvwatch.observe.procfs import (
    PROC,
    error_reason,
    namespace_inode,
    process_root,
    read_environment,
    read_regular_file,
    resolve_in_root,
    working_directory,
)
from kvwatch.observe.records import Failure, Launch, Process, ProcessRecord

__all__ = ["LaunchSource", "find_servers", "parse_command_line", "server_arguments", "server_members"]

ENVIRONMENT = frozenset(
    {
        "CUDA_DEVICE_ORDER",
        "CUDA_VISIBLE_DEVICES",
        "HF_HOME",
        "HF_HUB_CACHE",
        "HOME",
        "HUGGINGFACE_HUB_CACHE",
        "MODELSCOPE_CACHE",
        "NVIDIA_VISIBLE_DEVICES",
        "TRANSFORMERS_CACHE",
        "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE",
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN",
        "VLLM_ATTENTION_BACKEND",
        "VLLM_CPU_KVCACHE_SPACE",
        "VLLM_ENABLE_STARTUP_PLAN",
        "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS",
        "VLLM_PORT",
        "VLLM_PP_LAYER_PARTITION",
        "VLLM_PROCESS_NAME_PREFIX",
        "VLLM_SERVER_DEV_MODE",
        "VLLM_USE_MODELSCOPE",
        "VLLM_USE_RUST_FRONTEND",
        "VLLM_USE_V1",
        "XDG_CACHE_HOME",
    }
)
"""Variables that bear on start-up, on the GPUs a server sees or on where its files are. No other is read."""

RETRY_CYCLES = 10
"""Looks between two attempts to read a server that could not be read completely."""

TITLE_PREFIX = "VLLM"
_TITLE = re.compile(r"^(?P<prefix>.+)::(?:DP)?(?:EngineCore|Worker|APIServer|Coordinator)(?:_|$)")
_DEAD_STATES = frozenset("ZX")
_CONFIG_LIMIT = 64 * 1024
_ALL_OR_NONE = frozenset({"", "all", "none", "void"})


class LaunchSource:
    """Finds servers, and keeps what was read of each while it runs: a file edited later told it nothing.

    A server that could not be read completely is read again, once in ``RETRY_CYCLES`` times.
    """

    def __init__(self, proc_root: Path = PROC) -> None:
        self._root = proc_root
        self._read: dict[tuple[int, float, tuple[str, ...]], Launch] = {}
        self._cycle = 0

    def read(self, processes: ProcessRecord) -> tuple[Launch, ...]:
        """All servers, by pid."""
        self._cycle += 1
        retry = self._cycle % RETRY_CYCLES == 0
        found: dict[tuple[int, float, tuple[str, ...]], Launch] = {}
        for process, arguments in _server_processes(processes):
            key = (process.pid, process.start_time, process.argv)
            known = self._read.get(key)
            if known is None or (known.failures and retry):
                known = read_launch(process, arguments, proc_root=self._root)
            found[key] = known
        self._read = found
        return tuple(found.values())


def find_servers(processes: ProcessRecord, *, proc_root: Path = PROC) -> tuple[Launch, ...]:
    """All servers among the processes, by pid.

    A child that still shows its parent's command line (forked, not yet renamed) is no server of its own.
    """
    return tuple(
        read_launch(process, arguments, proc_root=proc_root)
        for process, arguments in _server_processes(processes)
    )


def _server_processes(record: ProcessRecord) -> list[tuple[Process, tuple[str, ...]]]:
    candidates = {
        pid: (process, arguments)
        for pid, process in sorted(record.processes.items())
        if process.state not in _DEAD_STATES and (arguments := server_arguments(process.argv)) is not None
    }
    return [
        (process, arguments)
        for process, arguments in candidates.values()
        if not any(
            ancestor.pid in candidates and ancestor.argv == process.argv
            for ancestor in ancestors(process, record.processes)
        )
    ]


def ancestors(process: Process, processes: Mapping[int, Process]) -> list[Process]:
    """Parent, its parent and so on, as far as they are visible."""
    chain: list[Process] = []
    seen = {process.pid}
    while (parent := processes.get(process.ppid)) is not None and parent.pid not in seen:
        chain.append(parent)
        seen.add(parent.pid)
        process = parent
    return chain


def server_members(launches: Sequence[Launch], processes: ProcessRecord) -> tuple[frozenset[int], ...]:
    """Pids of each server's parent, engine cores, workers, API servers and other descendants.

    A worker whose engine core died is no descendant any more. It still counts where the server leads the
    session, which no other server then shares.
    """
    children: defaultdict[int, list[int]] = defaultdict(list)
    by_session: defaultdict[int | None, list[Process]] = defaultdict(list)
    for process in processes.processes.values():
        children[process.ppid].append(process.pid)
        by_session[process.session].append(process)

    def members(launch: Launch) -> frozenset[int]:
        if launch.pid is None or launch.pid not in processes.processes:
            return frozenset()
        found: set[int] = set()
        pending = [launch.pid]
        while pending:
            pid = pending.pop()
            if pid not in found:
                found.add(pid)
                pending.extend(children[pid])
        prefix = launch.environment.get("VLLM_PROCESS_NAME_PREFIX", TITLE_PREFIX)
        titled = (process.pid for process in by_session[launch.pid] if title_prefix(process) == prefix)
        return frozenset(found).union(titled)

    return tuple(map(members, launches))


def title_prefix(process: Process) -> str | None:
    """``VLLM`` of the title ``VLLM::Worker_TP0``; None for a process without a title of vLLM's form."""
    match = _TITLE.match(process.argv[0]) if process.argv else None
    return match["prefix"] if match else None


# --- one server -----------------------------------------------------------------------------------------


def read_launch(process: Process, arguments: tuple[str, ...], *, proc_root: Path = PROC) -> Launch:
    """What one server was told. What cannot be read is named in ``failures``."""
    cwd = working_directory(proc_root, process.pid)
    environment, failures = _environment(proc_root, process.pid)
    root = process_root(proc_root, process.pid, contained=process.container is not None)
    reader = _ConfigReader(root, cwd)
    command = parse_command_line(arguments, read_file=reader)
    failures += command.failures
    if reader.modified is not None and reader.modified > process.start_time:
        detail = f"--config {command.config_file} was changed after the server started"
        failures += (Failure("launch", "config_changed", detail),)
    base_url, unreachable = _address(command, process, proc_root)
    return Launch(
        pid=process.pid,
        start_time=process.start_time,
        flags=command.flags,
        model=command.flags.model,
        served_names=command.served_names,
        base_url=base_url,
        cwd=cwd,
        config_file=command.config_file,
        environment=environment,
        visible_devices=visible_devices(command, environment, contained=process.container is not None),
        revision=command.revision,
        download_dir=command.download_dir,
        hf_config_path=command.hf_config_path,
        ray=command.ray,
        beside=command.beside,
        unknown_flags=command.unknown_flags,
        failures=failures + unreachable,
    )


class _ConfigReader:
    """Reads ``--config`` as the server sees it: from its working directory, in its own file system."""

    def __init__(self, root: str, cwd: str | None) -> None:
        self._root = root
        self._cwd = cwd
        self.modified: float | None = None

    def __call__(self, file: str) -> str:
        if not file.startswith("/") and self._cwd is None:
            raise FileNotFoundError(2, "the working directory of the server is unknown")
        path = resolve_in_root(self._root, f"{self._cwd}/{file}" if not file.startswith("/") else file)
        self.modified = Path(path).stat().st_mtime
        return read_regular_file(path, limit=_CONFIG_LIMIT).decode()


def _environment(proc_root: Path, pid: int) -> tuple[dict[str, str], tuple[Failure, ...]]:
    try:
        return read_environment(proc_root, pid, ENVIRONMENT), ()
    except OSError as error:
        detail = f"environment of process {pid} cannot be read ({error_reason(error)})"
        return {}, (Failure("launch", "environment_unreadable", detail),)


def _address(
    command: CommandLine, process: Process, proc_root: Path
) -> tuple[str | None, tuple[Failure, ...]]:
    """The base URL, or the reason why there is none."""
    if command.headless:
        return None, (Failure("launch", "headless", "engines only: the API server runs on another node"),)
    if command.uds:
        return None, (Failure("launch", "unix_socket", f"the server listens on {command.uds} only"),)
    if command.port is None:
        return None, ()
    own, other = (namespace_inode(proc_root, pid, "net") for pid in ("self", process.pid))
    separate = own is not None and other is not None and own != other
    addresses = namespace_addresses(proc_root, process.pid) if separate else None
    address = connect_address(command.host, other_namespace=addresses)
    if address is None:
        return None, (Failure("launch", "other_network_namespace", _elsewhere(command.host)),)
    failures: tuple[Failure, ...] = ()
    if process.container and other is None:
        detail = f"network namespace of process {process.pid} cannot be read; taken to be the host's"
        failures = (Failure("launch", "network_namespace_unreadable", detail),)
    if command.ports_per_rank:
        detail = "each data-parallel rank has a port of its own; only the first is read"
        failures += (Failure("launch", "ports_per_rank", detail),)
    return url(address, command.port, tls=command.tls), failures


def _elsewhere(host: str | None) -> str:
    return (
        f"the server listens on {host or 'all interfaces'} of a network namespace without a reachable address"
    )


def visible_devices(
    command: CommandLine, environment: Mapping[str, str], *, contained: bool
) -> tuple[str, ...] | None:
    """GPUs that the server sees, as the node's indices or UUIDs; each list selects from the one before it.

    A container's list is a set: CUDA counts its cards in the bus's order, whatever order they are listed in.
    """
    container = environment.get("NVIDIA_VISIBLE_DEVICES", "") if contained else ""
    visible = None if container in _ALL_OR_NONE else _split(container)
    if visible is not None and all(device.isdigit() for device in visible):
        visible = tuple(sorted(visible, key=int))
    if (listed := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        visible = _select(visible, _split(listed))
    if command.device_ids is not None:
        visible = _select(visible, command.device_ids)
    return visible


def _split(devices: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in devices.split(",") if part.strip())


def _select(visible: tuple[str, ...] | None, chosen: tuple[str, ...]) -> tuple[str, ...]:
    """CUDA's rule: the list ends before the first entry that names no device."""
    selected: list[str] = []
    for device in chosen:
        if device.startswith("-"):
            break
        if visible is None or not device.isdigit():
            selected.append(device)
        elif int(device) < len(visible):
            selected.append(visible[int(device)])
        else:
            break
    return tuple(selected)
