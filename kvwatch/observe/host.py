"""What this machine grants to kvwatch: user, capabilities, descriptors, the clock, other users' processes."""

from __future__ import annotations

import ctypes
import os
import pwd
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvwatch.observe.procfs import PROC, error_reason, namespace_inode, read_bytes

DAC_READ_SEARCH = 2
SYS_PTRACE = 19

_STATUS_LIMIT = 64 * 1024
_TIMEX_BYTES = 256
_TIMEX_STATUS = 40
_STA_UNSYNC = 0x0040
_TIME_ERROR = 5
_INITIAL_PID_NAMESPACE = 0xEFFFFFFC


@dataclass(frozen=True, slots=True)
class Host:
    """What the process may do here.

    Attributes:
        user: by name where it has one.
        capabilities: effective ones, by number (capabilities(7)).
        open_files: descriptors that it may have.
        clock_synchronized: whether the kernel says that the clock follows a reference; None where it does not
            say.
        own_pid_namespace: kvwatch sees the processes of its container only; None where that is not known.
    """

    user: str
    capabilities: frozenset[int]
    open_files: int
    clock_synchronized: bool | None
    own_pid_namespace: bool | None

    @property
    def is_root(self) -> bool:
        """Whether it runs as root."""
        return self.user == "root"


@dataclass(frozen=True, slots=True)
class Access:
    """What may be read of another process; None where it could be, else the errno's short name.

    Attributes:
        environment: its variables, and its working directory.
        files: its root directory, as it sees it.
    """

    environment: str | None
    files: str | None


def read_host(proc_root: Path = PROC) -> Host:
    """Look at the process itself and at the machine."""
    namespace = namespace_inode(proc_root, "self", "pid")
    return Host(
        user=_user_name(os.geteuid()),
        capabilities=_capabilities(proc_root),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        clock_synchronized=_clock_synchronized(),
        own_pid_namespace=None if namespace is None else namespace != _INITIAL_PID_NAMESPACE,
    )


def read_access(pid: int, proc_root: Path = PROC) -> Access:
    """Try what kvwatch reads of a vLLM server's process."""
    return Access(
        environment=_refusal(lambda: read_bytes(f"{proc_root}/{pid}/environ", limit=1)),
        files=_refusal(lambda: Path(f"{proc_root}/{pid}/root/").stat()),
    )


def _refusal(read: Callable[[], object]) -> str | None:
    try:
        read()
    except OSError as error:
        return error_reason(error)
    return None


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _capabilities(proc_root: Path) -> frozenset[int]:
    try:
        status = read_bytes(f"{proc_root}/self/status", limit=_STATUS_LIMIT)
    except OSError:
        return frozenset()
    words = [line.split()[1] for line in status.splitlines() if line.startswith(b"CapEff:")]
    mask = int(words[0], 16) if words else 0
    return frozenset(number for number in range(mask.bit_length()) if mask >> number & 1)


def _clock_synchronized() -> bool | None:
    """Asks adjtimex(2) without changing anything."""
    timex = ctypes.create_string_buffer(_TIMEX_BYTES)
    state = ctypes.CDLL(None, use_errno=True).adjtimex(timex)
    if state < 0:
        return None
    status = ctypes.c_int.from_buffer(timex, _TIMEX_STATUS).value
    return state != _TIME_ERROR and not status & _STA_UNSYNC
