"""Has a file changed? Told without reading it."""

from __future__ import annotations

import os
import time
from pathlib import Path

Stamp = tuple[int, int, int]
"""Modification time in ns, inode, size."""

SETTLE_SECONDS = 1.0


def stamp(path: str | Path) -> Stamp | None:
    """What changes when the file is written or replaced; None where it cannot be looked at."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size


class WatchedFile:
    """A file that is read again when it has changed.

    A change is told once, and not in the second after it was made: whoever writes in place, or removes the
    file before writing it anew, may not be done.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = self._seen = stamp(path)
        self._seen_at = time.monotonic()

    def changed(self) -> bool:
        """Whether it differs from what was there at the last change, or is gone, and has come to rest."""
        now = stamp(self._path)
        if now != self._seen:
            self._seen, self._seen_at = now, time.monotonic()
        if now == self._read or not self._at_rest():
            return False
        self._read = now
        return True

    def _at_rest(self) -> bool:
        if time.monotonic() - self._seen_at >= SETTLE_SECONDS:
            return True
        return self._seen is not None and time.time() - self._seen[0] / 1e9 >= SETTLE_SECONDS
