"""Files that say how a server is started, read as its own process sees them, with a memory of which."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kvwatch.blockmath.errors import Unsupported
from kvwatch.filestamp import Stamp, stamp
from kvwatch.observe.procfs import error_reason, read_regular_file, resolve_in_root

LIMIT = 256 * 1024
"""Bytes of one file. Real unit files, scripts and manifests have a few thousand."""


class TrackedFiles:
    """Reads below one root directory.

    Attributes:
        seen: every path asked for, None for one that does not exist.
        texts: paths of the files read, as asked for.
    """

    def __init__(self, root: str = "/") -> None:
        self.root = root
        self.seen: dict[str, Stamp | None] = {}
        self.texts: list[str] = []

    def text(self, path: str) -> str:
        """The contents of a text file.

        Raises:
            OSError: it cannot be read.
            Unsupported: it is not UTF-8 text.
        """
        try:
            text = read_regular_file(self._place(path), limit=LIMIT).decode()
        except UnicodeDecodeError:
            raise Unsupported("not_text", f"{path} is not UTF-8 text") from None
        if "\0" in text:
            raise Unsupported("not_text", f"{path} is a binary file")
        self.texts.append(path)
        return text

    def required(self, path: str) -> str:
        """As `text`, for a file without which there is no answer.

        Raises:
            Unsupported: it cannot be read, or is not text.
        """
        try:
            return self.text(path)
        except OSError as error:
            raise Unsupported(error_reason(error), f"{path} cannot be read: {error.strerror}") from None

    def names(self, directory: str) -> list[str]:
        """Names in a directory, sorted; none where it does not exist or may not be read."""
        try:
            return sorted(entry.name for entry in Path(self._place(directory)).iterdir())
        except OSError:
            return []

    def target(self, path: str) -> str | None:
        """Where a symbolic link points, as written; None for anything else."""
        folder, _, name = path.rpartition("/")
        try:
            return str(Path(self._place(folder), name).readlink())
        except OSError:
            return None

    def exists(self, path: str) -> bool:
        """Whether something of that name can be seen."""
        place = self._place(path)
        return self.seen[place] is not None

    def _place(self, path: str) -> str:
        place = resolve_in_root(self.root, path)
        self.seen[place] = stamp(place)
        return place


def unchanged(seen: Mapping[str, Stamp | None]) -> bool:
    """Whether all files are as they were."""
    return all(stamp(path) == before for path, before in seen.items())
