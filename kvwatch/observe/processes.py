"""All processes of the node, from ``/proc``.

One look at a busy node must cost little, so what seldom changes is kept between looks. The directory listing
alone tells births and deaths, because a process directory's inode is new for each process. Programs that can
be vLLM (Python, and titles like ``VLLM::EngineCore``) are looked at every time, young processes too; others
in turn, once in ``REFRESH_CYCLES`` looks, as a program rarely changes its name, user or cgroup once it runs.
"""

from __future__ import annotations

import os
import pwd
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvwatch.observe.cgroups import Cgroup, parse_cgroup
from kvwatch.observe.procfs import PROC, basename, error_reason, namespace_inode, read_bytes, split_arguments
from kvwatch.observe.records import Failure, Process, ProcessRecord

REFRESH_CYCLES = 16
"""Looks between two full reads of a process that is neither young nor Python."""
YOUNG_SECONDS = 30.0
"""A process this young may still exec, change user or be moved to its cgroup."""

NAME_LENGTH = 64
_COMM_LENGTH = 15
_STAT_LIMIT = 1024
_CMDLINE_LIMIT = 256 * 1024
_CGROUP_LIMIT = 64 * 1024
_KERNEL_THREAD = 0x00200000
_DEAD_STATES = frozenset("ZX")
_PYTHON = re.compile(r"^(?:python|pypy)\d*(?:\.\d+)*t?$")
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_PYTHON_OPTIONS_WITH_VALUE = frozenset({"-W", "-X", "--check-hash-based-pycs"})
SPAWNED = "--multiprocessing-fork"
"""Last argument of a process that Python's multiprocessing starts by its method spawn."""


# --- names ----------------------------------------------------------------------------------------------


def python_arguments(argv: Sequence[str]) -> tuple[str, str, tuple[str, ...]] | None:
    """Take a Python command line apart.

    Returns:
        ``(kind, program, arguments)`` with kind ``module`` (after ``-m``), ``script`` (a path),
        ``code`` (after ``-c``, the program is empty) or ``interpreter`` (no program given); None where this
        is no Python.
    """
    if not argv or not _PYTHON.match(basename(argv[0])):
        return None
    position = 1
    while position < len(argv) and argv[position].startswith("-") and len(argv[position]) > 1:
        option = argv[position]
        position += 1
        if option in _PYTHON_OPTIONS_WITH_VALUE:
            position += 1
        elif not option.startswith("--") and (found := re.search(r"^-[A-VY-Za-z]*?([cm])(.*)$", option)):
            return _program_option(found[1], found[2], argv[position:])
    if position >= len(argv) or argv[position] == "-":
        return "interpreter", "", ()
    return "script", argv[position], tuple(argv[position + 1 :])


def _program_option(letter: str, attached: str, rest: Sequence[str]) -> tuple[str, str, tuple[str, ...]]:
    value, arguments = (attached, rest) if attached else ("".join(rest[:1]), rest[1:])
    return ("module", value, tuple(arguments)) if letter == "m" else ("code", "", tuple(arguments))


def program_name(comm: str, argv: Sequence[str]) -> str:
    """The full name of a program or process title, without arguments, at most 64 characters.

    The kernel cuts ``comm`` at 15 bytes; the whole name is then the argument that it begins. A Python program
    goes by its script or module.
    """
    python = python_arguments(argv)
    if python is not None and python[0] in ("module", "script") and python[1]:
        name = basename(python[1])
    else:
        name = _whole_name(comm, argv)
    return _UNPRINTABLE.sub("", name)[:NAME_LENGTH]


def _whole_name(comm: str, argv: Sequence[str]) -> str:
    if len(comm.encode()) < _COMM_LENGTH:
        return comm
    for argument in argv[:3]:
        for candidate in (argument, basename(argument)):
            if candidate.startswith(comm):
                return comm + candidate[len(comm) :].split(" ", 1)[0]
    return comm


# --- one process ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stat:
    """The fields of ``/proc/PID/stat`` that kvwatch reads. ``start_ticks`` counts from boot."""

    comm: str
    state: str
    ppid: int
    session: int
    kernel_thread: bool
    start_ticks: int


def parse_stat(data: bytes) -> Stat:
    """Read ``/proc/PID/stat``; the name in parentheses may hold blanks and parentheses itself.

    Raises:
        ValueError: not such a line.
    """
    opening, closing = data.find(b"("), data.rfind(b")")
    fields = data[closing + 2 :].split(b" ", 20)
    if opening < 0 or closing < opening or len(fields) < 20:
        raise ValueError("not a /proc/PID/stat line")
    return Stat(
        comm=data[opening + 1 : closing].decode(errors="replace"),
        state=fields[0].decode(),
        ppid=int(fields[1]),
        session=int(fields[3]),
        kernel_thread=bool(int(fields[6]) & _KERNEL_THREAD),
        start_ticks=int(fields[19]),
    )


@dataclass(frozen=True, slots=True)
class _Known:
    """A process as last read. ``inode`` is that of its directory."""

    inode: int
    stat: Stat
    process: Process
    watched: bool

    def holds(self, stat: Stat, uid: int, argv: tuple[str, ...], cgroup: Cgroup | None) -> bool:
        """Whether this is what was read again; container and unit follow from the cgroup's path."""
        process, path = self.process, cgroup.path if cgroup else None
        return (self.stat, process.uid, process.argv, process.cgroup) == (stat, uid, argv, path)


class ProcessSource:
    """Lists all processes. One instance is read by one thread.

    Args:
        proc_root: where the proc file system is mounted.
    """

    def __init__(self, proc_root: Path = PROC) -> None:
        self._root = proc_root
        self._known: Mapping[int, _Known] = {}
        self._users: dict[int, str] = {}
        self._boot_time: float | None = None
        self._ticks_per_second = os.sysconf("SC_CLK_TCK")
        self._cycle = 0

    def read(self) -> ProcessRecord | Failure:
        """Look at all processes once. One that vanishes meanwhile is left out."""
        try:
            directory = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            return self._unreadable(error)
        try:
            self._boot_time = self._boot_time or _boot_time(directory)
            return self._look(directory)
        except OSError as error:
            return self._unreadable(error)
        except ValueError as error:
            return Failure("processes", "unreadable", f"{self._root}: {error}")
        finally:
            os.close(directory)

    def _unreadable(self, error: OSError) -> Failure:
        return Failure("processes", error_reason(error), f"{self._root} cannot be read: {error.strerror}")

    def _look(self, directory: int) -> ProcessRecord:
        self._cycle += 1
        now = time.time()
        with os.scandir(directory) as entries:
            inodes = {int(entry.name): entry.inode() for entry in entries if entry.name.isdigit()}
        before = self._known
        current: dict[int, _Known] = {}
        for pid, inode in inodes.items():
            known = before.get(pid)
            seen = self._update(directory, pid, inode, known, now)
            if seen is not None:
                current[pid] = seen
        self._follow_reparenting(directory, before, current)
        self._known = current
        return ProcessRecord(
            processes={pid: known.process for pid, known in current.items()},
            pid_namespace=namespace_inode(self._root, "self", "pid"),
            boot_time=self._boot_time,
            failures=_visibility(inodes),
        )

    def _update(
        self, directory: int, pid: int, inode: int, known: _Known | None, now: float
    ) -> _Known | None:
        if known is None or known.inode != inode:
            return self._read_whole(directory, pid, inode, None)
        if known.stat.kernel_thread:
            return known
        young = now - known.process.start_time < YOUNG_SECONDS
        if young or (pid + self._cycle) % REFRESH_CYCLES == 0:
            return self._read_whole(directory, pid, inode, known)
        return self._read_stat(directory, pid, known) if known.watched else known

    def _follow_reparenting(
        self, directory: int, before: Mapping[int, _Known], current: dict[int, _Known]
    ) -> None:
        """A process gets another parent only when its own dies: the children of the dead are read again."""
        dead = {pid for pid, known in before.items() if _has_died(known, current.get(pid))}
        if not dead:
            return
        for pid, known in list(current.items()):
            if known.process.ppid in dead:
                seen = self._read_stat(directory, pid, known)
                if seen is None:
                    del current[pid]
                else:
                    current[pid] = seen

    def _read_stat(self, directory: int, pid: int, known: _Known) -> _Known | None:
        try:
            stat = parse_stat(read_bytes(f"{pid}/stat", limit=_STAT_LIMIT, directory=directory))
        except (OSError, ValueError):
            return None
        if stat == known.stat:
            return known
        if (stat.start_ticks, stat.comm) != (known.stat.start_ticks, known.stat.comm):
            return self._read_whole(directory, pid, known.inode, known)
        moved = replace(known.process, ppid=stat.ppid, session=stat.session, state=stat.state)
        return replace(known, stat=stat, process=moved)

    def _read_whole(self, directory: int, pid: int, inode: int, known: _Known | None) -> _Known | None:
        try:
            stat = parse_stat(read_bytes(f"{pid}/stat", limit=_STAT_LIMIT, directory=directory))
            uid = os.stat(str(pid), dir_fd=directory).st_uid
        except (OSError, ValueError):
            return None
        argv = () if stat.kernel_thread else _arguments(directory, pid)
        cgroup = None if stat.kernel_thread else self._cgroup(directory, pid)
        if known is not None and known.holds(stat, uid, argv, cgroup):
            return known
        if known is not None and known.stat.start_ticks == stat.start_ticks:
            pid_namespace = known.process.pid_namespace
        else:
            pid_namespace = namespace_inode(self._root, pid, "pid")
        process = Process(
            pid=pid,
            ppid=stat.ppid,
            start_time=(self._boot_time or 0.0) + stat.start_ticks / self._ticks_per_second,
            name=program_name(stat.comm, argv),
            user=self._user(uid),
            uid=uid,
            session=stat.session,
            state=stat.state,
            argv=argv,
            cgroup=cgroup.path if cgroup else None,
            container=cgroup.container if cgroup else None,
            unit=cgroup.unit if cgroup else None,
            pid_namespace=pid_namespace,
        )
        return _Known(inode, stat, process, watched=_is_watched(process))

    def _user(self, uid: int) -> str:
        if uid not in self._users:
            try:
                self._users[uid] = pwd.getpwuid(uid).pw_name
            except KeyError:
                self._users[uid] = str(uid)
        return self._users[uid]

    def _cgroup(self, directory: int, pid: int) -> Cgroup | None:
        try:
            data = read_bytes(f"{pid}/cgroup", limit=_CGROUP_LIMIT, directory=directory)
        except OSError:
            return None
        return parse_cgroup(data.decode(errors="replace"))


def _arguments(directory: int, pid: int) -> tuple[str, ...]:
    try:
        return split_arguments(read_bytes(f"{pid}/cmdline", limit=_CMDLINE_LIMIT, directory=directory))
    except OSError:
        return ()


def _is_watched(process: Process) -> bool:
    return "::" in process.name or python_arguments(process.argv) is not None


def _has_died(known: _Known, now: _Known | None) -> bool:
    if now is None or now.stat.start_ticks != known.stat.start_ticks:
        return True
    return now.stat.state in _DEAD_STATES and known.stat.state not in _DEAD_STATES


def _boot_time(directory: int) -> float:
    """Unix time of boot. To be read once: it moves with each step of the clock, and identity must not."""
    for line in read_bytes("stat", limit=1 << 20, directory=directory).splitlines():
        name, _, value = line.partition(b" ")
        if name == b"btime":
            return float(value)
    raise ValueError("stat has no btime line")


def _visibility(pids: Mapping[int, int]) -> tuple[Failure, ...]:
    if 1 in pids:
        return ()
    return (Failure("processes", "hidden", "other users' processes are hidden (hidepid)"),)
