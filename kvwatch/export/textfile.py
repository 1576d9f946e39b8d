"""The page as a file for node_exporter's textfile collector."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path


def check_replaceable(path: Path) -> None:
    """Let nobody replace a device, a pipe, a socket or a folder by a file: root could, even /dev/null.

    Raises:
        OSError: there is one of that name.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file, so it is not replaced", str(path))


def write_textfile(path: Path, page: bytes) -> None:
    """Replace the file in one step: a reader sees the old page or the new one, never a part.

    Raises:
        OSError: the folder is not writable, the disk is full, or what is there is no regular file; it is left
            as it was.
    """
    check_replaceable(path)
    # Always the same name, so that a writer killed in between leaves one scrap at most, until the next write.
    draft = path.with_name(f".{path.name}.new")
    draft.unlink(missing_ok=True)
    try:
        # Made anew: what somebody else put there, a link perhaps, is not written to.
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        with os.fdopen(handle, "wb") as file:
            file.write(page)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise
