"""The page as a file for node_exporter's textfile collector."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def write_textfile(path: Path, page: bytes) -> None:
    """Replace the file in one step: a reader sees the old page or the new one, never a part.

    Raises:
        OSError: the folder is not writable or the disk is full; the old file is left as it was.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(page)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(temporary).unlink()
        raise
