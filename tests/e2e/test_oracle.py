"""The live oracle: what the installed vLLM says today of random layers, and of servers at the edge."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvwatch.blockmath.flags import Flags
from kvwatch.blockmath.pool import Pool, partition
from kvwatch.blockmath.startup import RankMemory, judge
from tests.blockmath.test_planner_small import plan
from tests.e2e.prediction import RAM, RELEASE, flags_of, pool_of, predict, refused, seed, served
from tests.e2e.vllm_server import BASE_FLAGS, VllmServer, server_environment
from tests.support import ROOT
from tools.make_tiny_model import PRESETS, model_config

pytestmark = pytest.mark.vllm

CASES_PER_LAYOUT = 5
SECONDS = 900
EDGES = (-1, 0, 1, 1, 2, 50)
"""Blocks above what one request takes: with 1 a server starts, with 0 it does not."""

ELEMENT_BYTES = {"torch.bfloat16": 2, "torch.float32": 4, "torch.uint8": 1}

Case = dict[str, Any]
Layers = list[Case]


def attention(chance: random.Random, kind: str = "FullAttentionSpec", **limits: int) -> Case:
    """A layer with keys and values."""
    heads, head_size = chance.choice((1, 2, 4, 8, 16)), chance.choice((64, 128, 256))
    dtype = chance.choice(sorted(ELEMENT_BYTES))
    block_size = chance.choice((16, 32, 64, 128))
    return {
        "kind": kind,
        "block_size": block_size,
        "heads": heads,
        "head_size": head_size,
        "dtype": dtype,
        "page": block_size * 2 * heads * head_size * ELEMENT_BYTES[dtype],
        "window": None,
        "chunk": None,
        "n": chance.randint(1, 60),
        **limits,
    }


def like(layer: Case, chance: random.Random, kind: str, **changes: Any) -> Case:
    """Another kind with the same keys and values."""
    return layer | {"kind": kind, "n": chance.randint(1, 60), **changes}


def full(chance: random.Random) -> Layers:
    return [attention(chance)]


def two_head_sizes(chance: random.Random) -> Layers:
    wide = attention(chance)
    narrow = wide | {
        "head_size": wide["head_size"] // 2,
        "page": wide["page"] // 2,
        "n": chance.randint(1, 60),
    }
    return [wide, narrow]


def sliding(chance: random.Random) -> Layers:
    return [attention(chance, "SlidingWindowSpec", window=chance.randint(2, 4096))]


def sliding_and_full(chance: random.Random) -> Layers:
    layer = attention(chance)
    return [layer, like(layer, chance, "SlidingWindowSpec", window=chance.randint(2, 4096))]


def wide_sliding_and_full(chance: random.Random) -> Layers:
    """Twice the heads in the sliding layers: pages of two sizes."""
    layer, local = sliding_and_full(chance)
    return [layer, local | {"heads": 2 * local["heads"], "page": 2 * local["page"]}]


def chunked_and_full(chance: random.Random) -> Layers:
    layer = attention(chance)
    return [layer, like(layer, chance, "ChunkedLocalAttentionSpec", chunk=chance.choice((1000, 2048, 8192)))]


def latent(chance: random.Random) -> Layers:
    size, block_size = chance.choice((320, 576)), chance.choice((16, 64, 128))
    main = attention(chance, "MLAAttentionSpec") | {
        "heads": 1,
        "head_size": size,
        "block_size": block_size,
        "dtype": "torch.bfloat16",
        "page": block_size * size * 2,
    }
    indexer = main | {"head_size": 132, "dtype": "torch.uint8", "page": block_size * 132}
    return [main, indexer] if chance.random() < 0.5 else [main]


def states_and_full(chance: random.Random) -> Layers:
    """States whose page equals the attention's, as vLLM pads them."""
    layer = attention(chance)
    mamba = {"heads": None, "head_size": None, "dtype": "torch.float32", "kind": "MambaSpec"}
    return [layer, layer | mamba | {"n": chance.randint(1, 60)}]


def cross(chance: random.Random) -> Layers:
    layer = attention(chance)
    return [layer, layer | {"kind": "CrossAttentionSpec"}]


LAYOUTS: Mapping[str, Callable[[random.Random], Layers]] = {
    function.__name__: function
    for function in (
        full,
        two_head_sizes,
        sliding,
        sliding_and_full,
        wide_sliding_and_full,
        chunked_and_full,
        latent,
        states_and_full,
        cross,
    )
}
CAN_DO_WITHOUT_HYBRID_MANAGER = ("sliding_and_full", "chunked_and_full")


def draw(layout: str, chance: random.Random) -> Case:
    """A case in the form of planner_small.json, without vLLM's answers and without memory."""
    layers = LAYOUTS[layout](chance)
    length = chance.choice((chance.randint(1, 4096), chance.randint(4096, 200_000)))
    pp = chance.choice((1, 1, 2)) if min(layer["n"] for layer in layers) > 1 else 1
    ranks = chance.choice((1, 2)) if pp == 1 else 1
    return {
        "name": layout,
        "max_model_len": length,
        "orig": chance.choice((length, length, length, -1)),
        "layout": "LBNHC",
        "dcp": 2 if layout == "full" and chance.random() < 0.3 else 1,
        "pp": pp,
        "batched": chance.choice((256, 2048, 8192)),
        "override": None,
        "hybrid_off": layout in CAN_DO_WITHOUT_HYBRID_MANAGER and chance.random() < 0.3,
        "mamba_mode": chance.choice(("none", "align")) if layout == "states_and_full" else "none",
        "enc": chance.choice((1500, 3000)) if layout == "cross" else 0,
        "layers": split(layers, pp) if pp > 1 else [layers] * ranks,
    }


def split(layers: Layers, stages: int) -> list[Layers]:
    """The layers of each pipeline stage."""
    counts = [partition(layer["n"], stages) for layer in layers]
    return [
        [layer | {"n": count[stage]} for layer, count in zip(layers, counts, strict=True)]
        for stage in range(stages)
    ]


def with_memory(case: Case, chance: random.Random) -> Case:
    """The case with about as much memory per worker as one request takes, or as many blocks."""
    pool = planned(case | {"avail": [0]})
    needed = sum(pool.blocks_per_request(case["max_model_len"]))
    if chance.random() < 0.2:
        return case | {
            "avail": [1 << 30] * len(case["layers"]),
            "override": max(1, needed + chance.choice(EDGES)),
        }
    stages = [
        max(0, needed + chance.choice(EDGES)) * size + chance.randrange(size) for size in pool.bytes_per_block
    ]
    return case | {"avail": stages * (len(case["layers"]) // len(stages))}


def planned(case: Case) -> Pool:
    """kvwatch's pool of a case."""
    groups = case.get("groups") or [{"n": sum(layer["n"] for worker in _stages(case) for layer in worker)}]
    in_flight = case["batched"] * case["pp"]
    return plan(case | {"groups": groups, "max_in_flight_tokens": in_flight})


def _stages(case: Case) -> list[Layers]:
    layers: list[Layers] = case["layers"]
    return layers if case["pp"] > 1 else layers[:1]


def foretold(case: Case) -> Case:
    """kvwatch's answers under the names of vLLM's."""
    pool = planned(case)
    length = case["max_model_len"]
    told: Case = {
        "max_in_flight_tokens": pool.settings.max_in_flight_tokens,
        "blocks_per_max_req": list(pool.blocks_per_request(length)),
        "bytes_per_block": list(pool.bytes_per_block),
        "needed_bytes": list(pool.need_bytes(length)),
    }
    avail = case["avail"][: len(pool.stages)]
    flags = Flags(gpu_memory_utilization=1.0, num_gpu_blocks_override=case["override"], enforce_eager=True)
    ranks = [
        RankMemory(str(stage), stage, RAM, free_bytes=RAM, non_kv_bytes=RAM - given)
        for stage, given in enumerate(avail)
    ]
    verdict = judge(pool, flags, ranks, release=RELEASE)
    if not verdict.feasible:
        return told | {"error": f"ValueError: {verdict.message}"}
    final = min(length, verdict.longest_length or 0) if pool.settings.auto_length else length
    pool = replace(pool, settings=replace(pool.settings, max_model_len=final))
    blocks = pool.num_blocks(avail)
    return told | {
        "num_blocks": blocks,
        "kv_cache_size_tokens": pool.capacity_tokens(blocks),
        "max_concurrency": pool.max_concurrency(blocks),
        "final_max_model_len": final,
    }


def drawn_cases(number: int) -> Iterator[Case]:
    chance = random.Random(number)
    for layout in LAYOUTS:
        for _ in range(CASES_PER_LAYOUT):
            yield with_memory(draw(layout, chance), chance)


def ask(venv: Path, cases: Sequence[Case], log: Path) -> list[Case]:
    """vLLM's answers."""
    with log.open("w", encoding="utf-8") as errors:
        ended = subprocess.run(
            [venv / "bin/python", "-m", "tests.e2e.vllm_planner"],
            input="".join(json.dumps(case) + "\n" for case in cases),
            env=server_environment(),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    assert ended.returncode == 0, log.read_text(encoding="utf-8")[-3000:]
    return [json.loads(line) for line in ended.stdout.splitlines()]


def test_random_layers_are_planned_as_vllm_plans_them(
    vllm_venv: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    number = seed()
    cases = list(drawn_cases(number))
    answers = ask(vllm_venv, cases, tmp_path / "planner.log")
    wrong = []
    for case, answer in zip(cases, answers, strict=True):
        answer["blocks_per_max_req"] = [group["blocks_per_max_req"] for group in answer.pop("groups")]
        if (ours := foretold(case)) != answer:
            wrong.append(f"{case}\n  kvwatch {ours}\n  vLLM    {answer}")
    failed = sum("error" in answer for answer in answers)
    with capsys.disabled():
        print(f"\n{len(cases)} cases, {failed} refused, {len(wrong)} differ; again: KVWATCH_SEED={number}")
    assert not wrong, "\n".join(wrong)
    assert 0 < failed < len(cases)


EDGE_MODEL, EDGE_LENGTH = "big-kv", 1000
EDGE_CONFIG = model_config(PRESETS[EDGE_MODEL])


def edge_flags(
    length: str, *, blocks: int, override: int | None = None, cache: str = "auto"
) -> tuple[str, ...]:
    """A server with so many blocks more than one request of EDGE_LENGTH takes."""
    typed = (*BASE_FLAGS, "--kv-cache-dtype", cache, "--max-model-len")
    pool = pool_of(EDGE_CONFIG, flags_of((EDGE_MODEL, *typed, str(EDGE_LENGTH))))
    needed = sum(pool.blocks_per_request(EDGE_LENGTH))
    memory = (needed + blocks) * pool.bytes_per_block[0]
    more = () if override is None else ("--num-gpu-blocks-override", str(needed + override))
    return (*typed, length, "--kv-cache-memory-bytes", str(memory), *more)


STARTS = {
    "fits exactly": edge_flags(str(EDGE_LENGTH), blocks=1),
    "automatic length": edge_flags("auto", blocks=1),
    "override above memory": edge_flags(str(EDGE_LENGTH), blocks=-4, override=1),
}
FAILS = {
    "one block less": edge_flags(str(EDGE_LENGTH), blocks=0),
    "fp8, one block less": edge_flags(str(EDGE_LENGTH), blocks=0, cache="fp8"),
}


@pytest.mark.parametrize("name", [*STARTS, *FAILS])
def test_served_at_the_edge(
    name: str, vllm_venv: Path, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`vllm serve` itself, with its API server and all."""
    flags = STARTS.get(name) or FAILS[name]
    predicted = predict(EDGE_CONFIG, (EDGE_MODEL, *flags))
    assert (predicted.kind is None) == (name in STARTS)
    with VllmServer(vllm_venv, models / EDGE_MODEL, tmp_path, flags) as server:
        outcome = served(server) if name in STARTS else refused(server)
    with capsys.disabled():
        print(f"\n{name}: {outcome}")
    assert outcome == predicted
