"""``kvwatch plan --batch``: JSON lines in, JSON lines out; a bad line costs only itself."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from kvwatch.blockmath.batch import plan_row
from kvwatch.blockmath.errors import Refused, Unsupported
from kvwatch.blockmath.flags import Flags
from kvwatch.blockmath.weights import weight_bytes
from kvwatch.cli.common import EXIT_USAGE

_GZIP_MAGIC = b"\x1f\x8b"
_WEIGHT_FLAGS = ("dtype", "tensor_parallel_size", "pipeline_parallel_size")

Answer = Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]


def run(source: str, configs: Path | None, *, weights: bool) -> int:
    """Answer each line of a file; 2 where one of them was bad, else 0.

    Raises:
        OSError: the file cannot be read.
    """
    answer: Answer = weights_row if weights else plan_row
    library = _Library(configs)
    bad = False
    with _opened(source) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = _row(line)
                result = answer(row, library.config(row))
            except (ValueError, KeyError, TypeError, IndexError, AttributeError, OSError) as error:
                bad = True
                result = {"line": number, "error": f"line {number}: {_reason(error)}"}
            sys.stdout.write(json.dumps(result) + "\n")
    return EXIT_USAGE if bad else 0


def _reason(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def _row(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise TypeError("not a JSON object")
    return row


@contextmanager
def _opened(source: str) -> Iterator[Iterable[bytes]]:
    """Lines of a file or of standard input, compressed or not."""
    with contextlib.ExitStack() as stack:
        file = sys.stdin.buffer if source == "-" else stack.enter_context(Path(source).open("rb"))
        lines = io.BufferedReader(cast("io.RawIOBase", file))
        packed = lines.peek(2)[:2] == _GZIP_MAGIC
        yield stack.enter_context(gzip.GzipFile(fileobj=lines)) if packed else lines


class _Library:
    """config.json files by name; each is read once."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._read: dict[str, Mapping[str, Any]] = {}

    def config(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """The configuration that a row names under ``config`` or ``name``, or carries itself."""
        stated = row.get("config")
        if isinstance(stated, Mapping):
            return stated
        name = str(stated) if stated else f"{row['name']}.json"
        if name not in self._read:
            self._read[name] = self._load(name)
        return self._read[name]

    def _load(self, name: str) -> Mapping[str, Any]:
        if self._folder is None:
            raise ValueError(f"config {name}: --configs DIR is needed to find it")
        if Path(name).name != name:
            raise ValueError(f"config {name}: not a plain file name")
        config = json.loads((self._folder / name).read_bytes())
        if not isinstance(config, dict):
            raise TypeError(f"config {name}: not a JSON object")
        return config


def weights_row(row: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Parameter bytes of one row.

    Args:
        row: ``tensor_parallel_size``, ``pipeline_parallel_size``, ``dtype`` and further ``flags``; with
            ``pp_stage`` the answer is one stage's.
        config: the parsed config.json.
    """
    result = {key: row.get(key) for key in ("name", *_WEIGHT_FLAGS, "pp_stage") if key in row}
    given = {name: row.get(name) for name in _WEIGHT_FLAGS} | dict(row.get("flags") or {})
    try:
        weights = weight_bytes(config, Flags.from_mapping(given))
    except Refused as refusal:
        return result | {"refused": refusal.kind, "message": str(refusal)}
    except Unsupported as unknown:
        return result | {"unsupported": unknown.reason, "message": str(unknown)}
    stage = row.get("pp_stage", 0 if len(weights.bytes_per_rank) == 1 else None)

    def of_stage(figures: tuple[int, ...]) -> list[int] | int:
        return list(figures) if stage is None else figures[stage]

    return result | {
        "weight_bytes": of_stage(weights.bytes_per_rank),
        "basis": weights.basis,
        "quantization": weights.quantization,
        "mla_absorbed_bytes": of_stage(weights.mla_absorbed_bytes),
    }
