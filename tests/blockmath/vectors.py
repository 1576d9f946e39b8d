"""The planner's rows, from the repository and from the shared folder next to it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tests.support import ROOT, shared_dir

FOLDER = ROOT / "tests" / "vectors"

Row = dict[str, Any]


def lines(path: Path) -> Iterator[Row]:
    """The objects of a compressed file of JSON lines."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


@cache
def config_named(name: str) -> Row:
    """A config.json by its file name."""
    shared = shared_dir()
    folders = [FOLDER / "configs", *([shared / "vectors" / "configs"] if shared else [])]
    path = next(folder / name for folder in folders if (folder / name).is_file())
    content: Row = json.loads(path.read_text(encoding="utf-8"))
    return content


def config_of(row: Row) -> Row:
    """The config.json of a row."""
    return config_named(row["config"])


def rows() -> list[Row]:
    """All rows at hand."""
    found = list(lines(FOLDER / "startup_planning.jsonl.gz"))
    shared = shared_dir()
    if shared is not None:
        found += [
            row
            for row in lines(shared / "vectors" / "startup_planning.jsonl.gz")
            if row["name"].startswith("aic__")
        ]
    return found
