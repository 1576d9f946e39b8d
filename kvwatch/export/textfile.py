"""The page as a file for node_exporter's textfile collector."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def write_textfile(path: Path, page: bytes) -> None:
    """Replace the file in one step: a reader sees the old page or the new one, never a part.

    Raises:
        OSError: the folder is not writable or the disk is full; the old file is left as it was.
    """
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
