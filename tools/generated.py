"""Files that are written out of the code, and the command line that writes or checks them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
Files = Mapping[str, Callable[[], str]]
"""What makes each file, by its path below the repository's root."""


def stale(files: Files) -> list[str]:
    """Those that differ from what would be written."""
    return [name for name, build in files.items() if _read(ROOT / name) != build()]


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def main(module: str, description: str, files: Files) -> int:
    """Write the files, or say which are not up to date; returns the exit code.

    Args:
        module: the tool's, for the command that writes them.
    """
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--check", action="store_true", help="write nothing, name the old files")
    if options.parse_args().check:
        old = stale(files)
        for name in old:
            print(f"{name} is not up to date: python -m {module}", file=sys.stderr)
        return 1 if old else 0
    for name, build in files.items():
        path = ROOT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(build(), encoding="utf-8")
    return 0
