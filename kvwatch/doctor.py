"""`kvwatch doctor`: what works here, what each missing thing costs, and how to grant it.

Judges what was looked at; looks at nothing itself. A check that passes says what it found, one that does not
names the families and forecasts that are lost and a command or setting that brings them back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvwatch.config import Config
from kvwatch.observe.cycle import Observation, ObservedServer
from kvwatch.observe.host import DAC_READ_SEARCH, SYS_PTRACE, Access, Host
from kvwatch.observe.records import Failure, NvmlRecord, ProcessRecord, VllmRecord
from kvwatch.units import counted

EXIT_WELL, EXIT_MISSING, EXIT_CANNOT_WORK = 0, 1, 2
MIN_OPEN_FILES = 1024
"""Twice the connections that the server admits, and as many again."""


class State(StrEnum):
    """How a check went. A note costs nothing; with one fatal check `kvwatch run` does not start."""

    OK = "ok"
    NOTE = "note"
    MISSING = "missing"
    FATAL = "fatal"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that kvwatch needs.

    Attributes:
        subject: what it is about, such as ``nvml`` or ``vllm chat``.
        found: one sentence.
        costs: what is lost; empty where nothing is.
        grant: what to do; empty where nothing is to be done.
    """

    subject: str
    state: State
    found: str
    costs: str = ""
    grant: str = ""


@dataclass(frozen=True, slots=True)
class Seen:
    """What the doctor judges.

    Attributes:
        observation: of one cycle; None where the configuration cannot be used.
        access: to the processes of servers, by pid.
        setup: checks of the start: configuration, files, addresses.
    """

    config: Config
    host: Host
    observation: Observation | None
    access: Mapping[int, Access] = field(default_factory=dict)
    setup: tuple[Check, ...] = ()


FORECASTS = "restart, plan, pending and wake forecasts"
_ALL_OF_NVML = f"kvwatch_gpu_memory_*, kvwatch_holder_*, and with them the free-memory check of {FORECASTS}"
_ALL_OF_PROCESSES = (
    "finding servers by themselves, kvwatch_holder_*, owners in kvwatch_gpu_memory_held_bytes, flags, and"
    f" with them {FORECASTS} of servers that kvwatch.yaml does not describe"
)
_CAPABILITIES = (
    "systemd: AmbientCapabilities=CAP_SYS_PTRACE CAP_DAC_READ_SEARCH; Docker: --cap-add SYS_PTRACE --cap-add"
    " DAC_READ_SEARCH; Kubernetes: securityContext.capabilities.add: [SYS_PTRACE, DAC_READ_SEARCH]; or run"
    " kvwatch as the user of the servers"
)
_HOST_PID = "Docker: --pid host; Kubernetes: hostPID: true; Compose: pid: host"

_NVML_GRANTS: Mapping[str, str] = {
    "library_not_found": "install the driver's libnvidia-ml.so.1 (nvidia-smi -L must work); in a container:"
    " docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=utility, or runtimeClassName: nvidia",
    "driver_not_loaded": "sudo modprobe nvidia",
    "driver_mismatch": "reboot, or restart the container, so that library and module are of one version",
    "no_permission": "ls -l /dev/nvidia*; sudo usermod -aG $(stat -c %G /dev/nvidiactl) kvwatch",
    "unknown": "restart the container; if nvidia-smi fails too: sudo dmesg | grep -i nvrm",
    "gpu_lost": "sudo dmesg | grep -i xid; the GPU needs a reset or the machine a reboot",
    "timeout": "where nvidia-smi hangs too: sudo dmesg | grep -i -e xid -e nvrm; else raise"
    " poll.nvml_timeout",
}
_NVML_GRANT = "see whether nvidia-smi answers for the same user"

_VLLM_GRANTS: Mapping[str, str] = {
    "connection_refused": "start the server, or correct servers[].url in kvwatch.yaml",
    "timeout": "the server is starting or overloaded; raise poll.vllm_timeout if it is always so slow",
    "tls": "servers[].ca_file in kvwatch.yaml: the certificate of the authority that signed the server's",
    "http_401": "servers[].token_file in kvwatch.yaml: a file with the key of --api-key",
    "http_403": "servers[].token_file in kvwatch.yaml: a file with the key of --api-key",
    "not_vllm": "correct servers[].url in kvwatch.yaml: what answers there is no vLLM server",
    "not_opened": "make the named file readable for kvwatch's user: chgrp kvwatch FILE; chmod g+r FILE",
    "token_unreadable": "make that file readable for kvwatch's user, or correct servers[].token_file",
    "no_address": "name the server's address as servers[].url in kvwatch.yaml",
}
_VLLM_GRANT = "curl the server's /metrics from here and compare"


def examine(seen: Seen) -> tuple[Check, ...]:
    """All checks, in the order in which things depend on each other."""
    checks = [*seen.setup, *_host(seen.host)]
    if seen.observation is not None:
        checks += _nvml(seen.observation)
        checks += _processes(seen.observation, seen.host)
        checks += _servers(seen.observation, seen.access, seen.host)
    return tuple(checks)


def exit_code(checks: tuple[Check, ...]) -> int:
    """0 where nothing is missing; 2 where kvwatch would not start, or would see nothing; else 1."""
    states = {check.subject: check.state for check in checks}
    blind = all(states.get(subject) == State.MISSING for subject in ("nvml", "processes"))
    if blind or State.FATAL in states.values():
        return EXIT_CANNOT_WORK
    return EXIT_MISSING if any(check.state is State.MISSING for check in checks) else EXIT_WELL


# --- the machine ----------------------------------------------------------------------------------------


def _host(host: Host) -> Iterator[Check]:
    if host.is_root:
        yield Check(
            "user",
            State.NOTE,
            "root; kvwatch run keeps two of its capabilities, but a plain user would do",
            grant="useradd --system kvwatch, and " + _CAPABILITIES.partition(";")[0],
        )
    else:
        yield Check("user", State.OK, host.user)
    yield _clock(host)
    if host.open_files < MIN_OPEN_FILES:
        yield Check(
            "descriptors",
            State.MISSING,
            f"{host.open_files} open files at most",
            "scrapes under a crowd of clients",
            f"systemd: LimitNOFILE={MIN_OPEN_FILES}; a shell: ulimit -n {MIN_OPEN_FILES}",
        )
    else:
        yield Check("descriptors", State.OK, f"{host.open_files} open files at most")


def _clock(host: Host) -> Check:
    if host.clock_synchronized:
        return Check("clock", State.OK, "follows a reference")
    if host.clock_synchronized is None:
        return Check("clock", State.NOTE, "the kernel does not tell whether it follows a reference")
    return Check(
        "clock",
        State.MISSING,
        "follows no reference",
        "kvwatch_*_timestamp_seconds are as wrong as the clock, and alerts that compare them with time() err",
        "sudo timedatectl set-ntp true",
    )


def _nvml(observation: Observation) -> Iterator[Check]:
    nvml = observation.nvml
    if isinstance(nvml, Failure):
        grant = _NVML_GRANTS.get(nvml.reason, _NVML_GRANT)
        yield Check("nvml", State.MISSING, nvml.detail, _ALL_OF_NVML, grant)
        return
    yield Check(
        "nvml", State.OK, f"driver {nvml.driver_version or 'of unknown version'}, {len(nvml.gpus)} GPUs"
    )
    for failure in nvml.failures:
        yield _gpu_failure("nvml calls", failure)
    for gpu in nvml.gpus:
        for failure in gpu.failures:
            yield _gpu_failure(f"GPU {gpu.index}", failure)


def _gpu_failure(subject: str, failure: Failure) -> Check:
    if failure.reason == "unified_memory":
        return Check(subject, State.NOTE, failure.detail)
    grant = _NVML_GRANTS.get(failure.reason, _NVML_GRANT)
    return Check(subject, State.MISSING, failure.detail, "what this call tells of this GPU", grant)


# --- processes ------------------------------------------------------------------------------------------


def _processes(observation: Observation, host: Host) -> Iterator[Check]:
    processes = observation.processes
    if isinstance(processes, Failure):
        grant = "mount -t proc proc /proc; raise poll.processes_timeout if it is slow only"
        yield Check("processes", State.MISSING, processes.detail, _ALL_OF_PROCESSES, grant)
        return
    yield Check("processes", State.OK, f"{len(processes.processes)} processes")
    for failure in processes.failures:
        yield Check(
            "hidden processes",
            State.MISSING,
            failure.detail,
            _ALL_OF_PROCESSES,
            "mount -o remount,gid=$(id -g kvwatch) /proc; or systemd: SupplementaryGroups= with the group"
            " that the gid= option of /proc names",
        )
    if isinstance(observation.nvml, NvmlRecord):
        yield from _visibility(observation.nvml, processes, host)


def _visibility(nvml: NvmlRecord, processes: ProcessRecord, host: Host) -> Iterator[Check]:
    """Can the processes that NVML names be found?"""
    named = {pid for gpu in nvml.gpus for pid in gpu.processes or ()}
    unseen = named - processes.processes.keys()
    if unseen or (host.own_pid_namespace and not named):
        yield Check(
            "PID namespace",
            State.MISSING,
            f"{len(unseen)} of {len(named)} processes on the GPUs cannot be found in /proc"
            if named
            else "kvwatch sees the processes of its own container only",
            "kvwatch_holder_*, owners in kvwatch_gpu_memory_held_bytes (all of it is unattributed), and"
            f" {FORECASTS}, which cannot tell a server's own memory from others'",
            _HOST_PID,
        )
    else:
        yield Check("PID namespace", State.OK, f"all {len(named)} processes on the GPUs are found in /proc")


# --- servers --------------------------------------------------------------------------------------------


def _servers(observation: Observation, access: Mapping[int, Access], host: Host) -> Iterator[Check]:
    if not observation.servers:
        yield Check("servers", State.NOTE, "no vLLM server runs here now; those that start will be found")
        if not {SYS_PTRACE, DAC_READ_SEARCH} <= host.capabilities:
            yield Check(
                "other users",
                State.NOTE,
                "servers of other users could be seen, but not their environment and model files",
                grant=_CAPABILITIES,
            )
    for server in observation.servers:
        yield from _server(server, access)


def _server(server: ObservedServer, access: Mapping[int, Access]) -> Iterator[Check]:
    name = (server.settings and server.settings.name) or server.launch.base_url or f"pid {server.launch.pid}"
    yield from _page(f"vllm {name}", server.vllm)
    if server.launch.pid is None:
        yield Check(
            f"process {name}",
            State.MISSING,
            "its process cannot be found on this node",
            f"its flags, so that {FORECASTS} need servers[].flags and servers[].gpus in kvwatch.yaml",
            "watch it from the node that it runs on, or " + _HOST_PID,
        )
    elif server.launch.pid in access:
        yield from _access(name, access[server.launch.pid])
    yield from _model(name, server)
    yield from _launch(name, server)


def _page(subject: str, page: VllmRecord | Failure) -> Iterator[Check]:
    if isinstance(page, Failure):
        costs = (
            f"kvwatch_server_up is 0, no kvwatch_kv_* and kvwatch_max_model_len_tokens, and no {FORECASTS}"
        )
        yield Check(subject, State.MISSING, page.detail, costs, _VLLM_GRANTS.get(page.reason, _VLLM_GRANT))
        return
    release, engines = page.version or "unknown", counted(len(page.engines), "engine")
    yield Check(subject, State.OK, f"answers, release {release}, {engines}")
    for failure in page.failures:
        yield Check(
            subject,
            State.MISSING,
            failure.detail,
            "what this part of its answer tells: the length from /v1/models, the release from /version",
            _VLLM_GRANTS.get(failure.reason, _VLLM_GRANT),
        )


def _access(name: str, access: Access) -> Iterator[Check]:
    if access.environment is not None:
        yield Check(
            f"environment {name}",
            State.MISSING,
            f"the environment of its process may not be read ({access.environment})",
            "CUDA_VISIBLE_DEVICES and VLLM_* variables: which GPU is which, and settings that no flag names",
            _CAPABILITIES,
        )
    if access.files is not None:
        yield Check(
            f"files {name}",
            State.MISSING,
            f"its file system may not be entered ({access.files})",
            "its config.json and launch files where it runs in a container",
            _CAPABILITIES,
        )


def _model(name: str, server: ObservedServer) -> Iterator[Check]:
    if isinstance(server.model, Failure):
        yield Check(
            f"model {name}",
            State.MISSING,
            server.model.detail,
            f"bytes per block, so kvwatch_kv_cache_bytes and all its {FORECASTS}",
            "servers[].model_config in kvwatch.yaml: the path of a readable config.json; or " + _CAPABILITIES,
        )
    else:
        yield Check(f"model {name}", State.OK, server.model.path)


def _launch(name: str, server: ObservedServer) -> Iterator[Check]:
    if isinstance(server.next_start, Failure):
        yield Check(
            f"launch file {name}",
            State.MISSING,
            server.next_start.detail,
            "kvwatch_pending_*: changes that wait for its next start",
            "servers[].launch in kvwatch.yaml: the file that starts it, readable for kvwatch's user",
        )
