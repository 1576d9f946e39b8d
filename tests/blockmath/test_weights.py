"""Parameter bytes against those that vLLM's own model classes allocate."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvwatch.blockmath.errors import Unsupported
from kvwatch.blockmath.flags import Flags
from kvwatch.blockmath.weights import Weights, weight_bytes
from tests.support import ROOT, shared_dir

VECTORS = ROOT / "tests" / "vectors"


@cache
def config(name: str) -> Mapping[str, Any]:
    for folder in _folders():
        path = folder / "configs" / f"{name}.json"
        if path.exists():
            loaded: dict[str, Any] = json.loads(path.read_text())
            return loaded
    raise FileNotFoundError(name)


def _folders() -> Iterator[Path]:
    yield VECTORS
    shared = shared_dir()
    if shared is not None:
        yield shared / "vectors"


@cache
def rows_by_name() -> Mapping[str, list[dict[str, Any]]]:
    rows: dict[str, dict[tuple[int, int, int], dict[str, Any]]] = {}
    for folder in _folders():
        with gzip.open(folder / "weights.jsonl.gz", "rt") as lines:
            for line in lines:
                row = json.loads(line)
                key = (row["tensor_parallel_size"], row["pipeline_parallel_size"], row["pp_stage"])
                rows.setdefault(row["name"], {})[key] = row
    return {name: list(by_key.values()) for name, by_key in rows.items()}


def computed(row: Mapping[str, Any]) -> Weights:
    flags = Flags(
        tensor_parallel_size=row["tensor_parallel_size"],
        pipeline_parallel_size=row["pipeline_parallel_size"],
    )
    return weight_bytes(config(row["name"]), flags)


@pytest.mark.parametrize(
    "name", [name for name, rows in rows_by_name().items() if "quantization" not in rows[0]]
)
def test_unquantized_bytes_are_those_of_vllm(name: str) -> None:
    for row in rows_by_name()[name]:
        with suppress(Unsupported):
            weights = computed(row)
            assert weights.bytes_per_rank[row["pp_stage"]] == pytest.approx(row["weight_bytes"], rel=1e-3)


def test_unknown_architectures_are_refused_not_guessed() -> None:
    with pytest.raises(Unsupported) as caught:
        weight_bytes({"model_type": "llama", "architectures": ["NobodyForCausalLM"]}, Flags())
    assert caught.value.reason == "unknown_architecture"
