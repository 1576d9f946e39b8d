"""Predict, then do it: kvwatch's verdict on a start, and the real start after, near the edge."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.prediction import Outcome, flags_of, pool_of, predict, seed, start_engines
from tests.e2e.vllm_server import BASE_FLAGS
from tools.make_tiny_model import PRESETS, model_config

pytestmark = pytest.mark.vllm

COMBINATIONS = 24
LARGEST_POOL = 128 << 20
"""Bytes of the largest pool drawn: the engines really allocate it."""

EDGES = (-1, 0, 0, 1, 1, 2)
"""Blocks above what one request takes: with 1 a server starts, with 0 it does not."""

CONFIGS: Mapping[str, Mapping[str, Any]] = {name: model_config(preset) for name, preset in PRESETS.items()}
OWN_CHECK = "kv_allocation_gt_free"
"""Kind of the CPU build's own check of RAM, which no GPU has."""


@dataclass(frozen=True, slots=True)
class Combination:
    """One start: a model of tools/make_tiny_model.py and what is typed after it."""

    preset: str
    typed: tuple[str, ...]

    def words(self, models: Path) -> tuple[str, ...]:
        return (str(models / self.preset), *BASE_FLAGS, *self.typed)

    def predicted(self) -> Outcome:
        return predict(CONFIGS[self.preset], (self.preset, *BASE_FLAGS, *self.typed))


GREEDY = Combination("llama", ("--max-model-len", "2048", "--kv-cache-memory-bytes", "1T"))


def draw(chance: random.Random) -> Combination:
    """A length, and a pool about as large as one request of that length, in bytes or in blocks."""
    preset = chance.choice(sorted(PRESETS))
    typed = ["--dtype", chance.choice(("bfloat16", "bfloat16", "float32"))]
    typed += ["--kv-cache-dtype", chance.choice(("auto", "auto", "fp8", "fp8_e5m2"))]
    if chance.random() < 0.5:
        typed += ["--block-size", chance.choice(("32", "64", "128", "256"))]
    if chance.random() < 0.5:
        typed += ["--max-num-batched-tokens", chance.choice(("256", "1024"))]
    derived = PRESETS[preset].max_positions
    length = chance.randint(1, min(4096, derived))
    flags = flags_of((preset, *BASE_FLAGS, *typed, "--max-model-len", str(length)))
    pool = pool_of(CONFIGS[preset], flags)
    [size] = pool.bytes_per_block
    blocks = min(max(1, sum(pool.blocks_per_request(length)) + chance.choice(EDGES)), LARGEST_POOL // size)
    match chance.choice(("bytes", "bytes", "bytes", "override", "less than two blocks")):
        case "bytes":
            given = blocks * size + chance.randrange(size)
        case "override":
            typed += ["--num-gpu-blocks-override", str(blocks)]
            given = chance.randint(1, 32) * size
        case _:
            # Not zero, which a GPU takes for "not given" and the CPU for nothing at all.
            given = chance.randrange(1, 2 * size)
    asked = chance.choice([str(length)] * 4 + ["auto", str(derived + chance.randint(1, 200))])
    return Combination(preset, (*typed, "--kv-cache-memory-bytes", str(given), "--max-model-len", asked))


def combinations(number: int) -> Iterator[Combination]:
    chance = random.Random(number)
    for _ in range(COMBINATIONS):
        yield draw(chance)


@dataclass(frozen=True, slots=True)
class Played:
    """All starts of one draw, as foretold and as they ended.

    Attributes:
        greedy: how the start ended that asks for more memory than the machine has.
    """

    number: int
    drawn: tuple[Combination, ...]
    predicted: tuple[Outcome, ...]
    happened: tuple[Outcome, ...]
    greedy: Outcome

    def table(self) -> str:
        rows = []
        for one, ours, theirs in zip(self.drawn, self.predicted, self.happened, strict=True):
            agrees = ours == theirs
            rows.append(f"{'agrees' if agrees else 'DIFFERS':8}{one.preset:8}{' '.join(one.typed)}")
            rows.append(f"{'':8}{theirs}" if agrees else f"{'':8}kvwatch {ours!r}\n{'':8}vLLM    {theirs!r}")
        return "\n".join(rows)


@pytest.fixture(scope="module")
def played(vllm_venv: Path, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Played:
    number = seed()
    drawn = tuple(combinations(number))
    predicted = tuple(one.predicted() for one in drawn)
    log = tmp_path_factory.mktemp("engines") / "engines.log"
    *happened, greedy = start_engines(vllm_venv, [one.words(models) for one in (*drawn, GREEDY)], log)
    return Played(number, drawn, predicted, tuple(happened), greedy)


def test_every_start_ends_as_predicted(played: Played, capsys: pytest.CaptureFixture[str]) -> None:
    passed = sum(outcome.kind is None for outcome in played.happened)
    with capsys.disabled():
        print(f"\n{passed} of {len(played.drawn)} passed all checks; again: KVWATCH_SEED={played.number}")
        print(played.table())
    assert played.happened == played.predicted
    assert 0 < passed < len(played.drawn)


def test_the_cpu_builds_own_check_of_ram_is_told_apart(played: Played) -> None:
    """By the arithmetic 1 TiB of cache is enough; that the machine lacks it is no KV check's doing."""
    assert GREEDY.predicted().kind is None
    assert played.greedy.kind == OWN_CHECK
