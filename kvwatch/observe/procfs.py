"""Small reads of ``/proc``. Functions take the root of the file system, so that a test can lay one out."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection
from pathlib import Path

PROC = Path("/proc")
_CHUNK = 4096
_MAX_LINKS = 40


def read_bytes(path: str, *, limit: int, directory: int | None = None) -> bytes:
    """The first ``limit`` bytes of a file; a relative path starts from the open ``directory``.

    Raises:
        OSError: as the kernel says; ESRCH and ENOENT for a process that is gone.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    try:
        data = os.read(descriptor, min(_CHUNK, limit))
        if len(data) < _CHUNK:
            return data
        parts = [data]
        size = len(data)
        while size < limit and (data := os.read(descriptor, limit - size)):
            parts.append(data)
            size += len(data)
        return b"".join(parts)
    finally:
        os.close(descriptor)


def read_regular_file(path: str | Path, *, limit: int) -> bytes:
    """The contents of a file that somebody else named: a pipe or device is refused rather than waited for.

    Raises:
        OSError: EINVAL for what is no regular file, EFBIG for more than ``limit`` bytes, else as the kernel
        says.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        data = stream.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"more than {limit} bytes", str(path))
    return data


def basename(path: str) -> str:
    """What follows the last slash."""
    return path.rpartition("/")[2]


def split_arguments(data: bytes) -> tuple[str, ...]:
    """Arguments of ``/proc/PID/cmdline``; the empty ones at the end of a retitled process are dropped."""
    return tuple(data.rstrip(b"\0").decode(errors="replace").split("\0")) if data.strip(b"\0") else ()


def namespace_inode(proc_root: Path, pid: int | str, kind: str) -> int | None:
    """Inode of a namespace (``pid``, ``net``, ``mnt``) of a process; None where it may not be read."""
    try:
        target = os.readlink(f"{proc_root}/{pid}/ns/{kind}")
    except OSError:
        return None
    number = target.partition("[")[2].rstrip("]")
    return int(number) if number.isdigit() else None


def read_environment(proc_root: Path, pid: int, names: Collection[str]) -> dict[str, str]:
    """The named variables of a process as it started; others are never kept.

    Raises:
        OSError: the environment may not be read, or the process is gone.
    """
    data = read_bytes(f"{proc_root}/{pid}/environ", limit=1 << 20)
    found: dict[str, str] = {}
    for entry in data.split(b"\0"):
        name, equals, value = entry.partition(b"=")
        if equals and (text := name.decode(errors="replace")) in names:
            found.setdefault(text, value.decode(errors="replace"))
    return found


def working_directory(proc_root: Path, pid: int) -> str | None:
    """Working directory as the process itself names it; None where it may not be read."""
    try:
        return os.readlink(f"{proc_root}/{pid}/cwd")
    except OSError:
        return None


def error_reason(error: OSError) -> str:
    """An errno as a short label: ``eacces``, ``enoent``."""
    return errno.errorcode.get(error.errno or 0, "oserror").lower()


# --- a process's own view of the file system ------------------------------------------------------------


def process_root(proc_root: Path, pid: int | None, *, contained: bool = False) -> str:
    """Where the root directory of a process is for kvwatch.

    Args:
        pid: None stands for kvwatch itself.
        contained: the process is known to run in a container.

    Returns:
        ``/`` where both share a mount namespace and a root, else ``/proc/PID/root``. Where the kernel does
        not tell, a process outside of containers is taken to share it.
    """
    if pid is None:
        return "/"
    own = namespace_inode(proc_root, "self", "mnt")
    other = namespace_inode(proc_root, pid, "mnt")
    within = f"{proc_root}/{pid}/root"
    if own is None or other is None:
        return within if contained else "/"
    return "/" if own == other and _points_to_top(within) else within


def _points_to_top(link: str) -> bool:
    try:
        return os.readlink(link) == "/"
    except OSError:
        return False


def resolve_in_root(root: str, path: str) -> str:
    """The file that an absolute path names for a process whose root directory is ``root``.

    Symbolic links are followed here rather than by the kernel, which would take an absolute target from
    kvwatch's own root. Parts that cannot be read stay as they are, for the error of the later open to tell.

    Raises:
        OSError: ELOOP for too many links.
    """
    if root == "/":
        return "/" + "/".join(part for part in path.split("/") if part not in ("", "."))
    pending = path.split("/")[::-1]
    done: list[str] = []
    links = 0
    while pending:
        part = pending.pop()
        if part == "..":
            done = done[:-1]
        elif part not in ("", "."):
            try:
                target = os.readlink("/".join((root, *done, part)))
            except OSError:
                done.append(part)
                continue
            links += 1
            if links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            if target.startswith("/"):
                done = []
            pending.extend(target.split("/")[::-1])
    return "/".join((root, *done))
