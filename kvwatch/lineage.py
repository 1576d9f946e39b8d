"""What the process table tells of descent: which processes are vLLM's, and whose starter is gone.

Facts: the titles of vLLM 0.10.1 and later (setproctitle), Python's multiprocessing (spawn), Ray's worker
titles, the kernel's rule for orphans: they go to the nearest subreaper, which may be a shell, or to pid 1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from kvwatch.observe.command_line import server_arguments
from kvwatch.observe.processes import SPAWNED, python_arguments
from kvwatch.observe.procfs import basename
from kvwatch.observe.records import Failure, Process, ProcessRecord

Identity = tuple[int, float]
"""Pid and start time: a pid that is used again is another process."""

DEAD_STATES = frozenset("ZX")

# The kernel cuts a name that only it can tell (hidepid) at 15 characters: "VLLM::EngineCor".
_TITLE = re.compile(r"(?!ray::)\S*::(?:EngineCore?|DPEngineCore|Worker|APIServer|DPCoordinator)(?:[_-].*)?")
_RAY_WORKERS = ("ray::RayWorkerWrapper", "ray::RayWorkerProc")
_TORCH_THREAD = "pt_main_thread"
"""What PyTorch renames the main thread to: the name of a program without a script of its own."""
_RAYLET = "raylet"
_ADOPTERS = frozenset(
    {
        *("ash", "bash", "dash", "fish", "ksh", "sh", "zsh"),
        *("catatonit", "docker-init", "dumb-init", "init", "s6-svscan", "runsvdir", "systemd", "tini"),
        *("circusd", "conmon", "containerd-shim", "containerd-shim-runc-v2", "slurmstepd", "supervisord"),
        *("screen", "sshd", "su", "sudo", "tmux"),
    }
)
"""Shells, inits and managers of processes: they take over orphans, and run no engine of their own."""


def identity(process: Process) -> Identity:
    """What a process is known by from one cycle to the next."""
    return process.pid, process.start_time


def is_dead(process: Process) -> bool:
    """Whether it has ended and only waits for its parent to notice."""
    return process.state in DEAD_STATES


def is_vllm_title(name: str) -> bool:
    """Whether a process title is one that vLLM gives its children (``VLLM::EngineCore``, any prefix)."""
    return "::" in name and _TITLE.fullmatch(name) is not None


def is_ray_worker(process: Process) -> bool:
    """Whether it is one of vLLM's Ray actors that go by Ray's own title."""
    return process.name.startswith(_RAY_WORKERS)


def is_ray(process: Process) -> bool:
    """Whether it is a Ray actor or the raylet that starts them."""
    return process.name == _RAYLET or process.name.startswith("ray::")


def is_spawned(process: Process) -> bool:
    """Whether multiprocessing started it, as it does vLLM's workers before they get a title, or never do.

    Other programs' children look the same.
    """
    return SPAWNED in process.argv


def is_python(process: Process) -> bool:
    """Whether it runs Python, under whatever name."""
    return python_arguments(process.argv) is not None or process.name == _TORCH_THREAD


def is_server(process: Process) -> bool:
    """Whether its command line is a vLLM server's."""
    return server_arguments(process.argv) is not None


@dataclass(frozen=True, slots=True)
class Descent:
    """Where a process comes from.

    Attributes:
        oldest: the process itself, or the first of the vLLM and multiprocessing processes above it.
        parent: of `oldest`, as it is now; None where it cannot be seen.
        abandoned: who started `oldest` is gone; False also where that cannot be told.
    """

    oldest: Process
    parent: Process | None
    abandoned: bool


class Lineage:
    """The process table, asked for descent.

    Attributes:
        known: the table could be read.
    """

    def __init__(self, record: ProcessRecord | Failure) -> None:
        self.known = not isinstance(record, Failure)
        self._processes: Mapping[int, Process] = {} if isinstance(record, Failure) else record.processes
        self._starters: dict[int, bool] = {}
        self._all_visible = isinstance(record, ProcessRecord) and not any(
            failure.reason == "hidden" for failure in record.failures
        )

    def get(self, pid: int) -> Process | None:
        """The process of that pid."""
        return self._processes.get(pid)

    def has(self, who: Identity) -> bool:
        """Whether that very process still exists, dead or alive."""
        process = self._processes.get(who[0])
        return process is not None and identity(process) == who

    def alive(self, who: Identity) -> bool:
        """Whether that very process still runs."""
        process = self._processes.get(who[0])
        return process is not None and identity(process) == who and not is_dead(process)

    def descent(self, process: Process) -> Descent:
        """Climb to the oldest of vLLM's processes, and judge whether it still has its starter."""
        seen = {process.pid}
        while True:
            parent = self._processes.get(process.ppid)
            if parent is None or parent.pid in seen:
                return Descent(process, None, self._starter_is_gone(process))
            if is_dead(parent) or not self._may_have_started(parent, process):
                return Descent(process, parent, abandoned=True)
            if not (is_vllm_title(parent.name) or is_spawned(parent)):
                return Descent(process, parent, abandoned=False)
            seen.add(parent.pid)
            process = parent

    def _starter_is_gone(self, process: Process) -> bool:
        """Without a visible parent: pid 0 is outside of this PID namespace, pid 1 took an orphan over."""
        return process.ppid == 1 or (process.ppid > 1 and self._all_visible)

    def _may_have_started(self, parent: Process, child: Process) -> bool:
        """Whether a parent can be the one that started the child, rather than the one that took it over."""
        if parent.start_time > child.start_time:
            return False
        if None not in (parent.session, child.session) and child.session not in (child.pid, parent.session):
            return False
        if parent.pid not in self._starters:
            self._starters[parent.pid] = not self._adopts(parent)
        return self._starters[parent.pid]

    def _adopts(self, parent: Process) -> bool:
        """Whether it takes over what others started.

        Python need not show: web servers and Triton embed it, others give themselves a title. But orphans go
        to an init, and what a container runs first is one.
        """
        if _program_names(parent) & _ADOPTERS:
            return True
        if _runs_engines(parent):
            return False
        return parent.pid == 1 or (bool(parent.argv) and self._is_containers_first(parent))

    def _is_containers_first(self, process: Process) -> bool:
        outer = self._processes.get(process.ppid)
        return process.container is not None and (outer is None or outer.container != process.container)

    def session_mates(self, process: Process) -> tuple[Process, ...]:
        """The others of a session whose leader is gone; none where the leader lives."""
        if process.session is None or process.session in self._processes:
            return ()
        return tuple(
            other
            for other in self._processes.values()
            if other.session == process.session and other is not process
        )

    def titled(self) -> tuple[Process, ...]:
        """The processes that have a title of vLLM's."""
        return tuple(process for process in self._processes.values() if is_vllm_title(process.name))


def _runs_engines(parent: Process) -> bool:
    """Whether it is a program that starts processes of vLLM's kind."""
    return (
        is_python(parent)
        or is_server(parent)
        or is_vllm_title(parent.name)
        or is_ray(parent)
        or parent.name.startswith("vllm")
    )


def _program_names(process: Process) -> frozenset[str]:
    """Its name without what a title adds (``tmux: server``), and that of what runs it (a script's shell)."""
    runs = basename(process.argv[0]).removeprefix("-") if process.argv else ""
    return frozenset({process.name.partition(":")[0], runs})
