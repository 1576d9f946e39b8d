"""Hand-picked cases of vLLM's planner that start from layer specs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Final

import pytest

from kvwatch.blockmath.grouping import Stage
from kvwatch.blockmath.pool import Pool, shape_of
from kvwatch.blockmath.releases import Release
from kvwatch.blockmath.settings import Settings
from kvwatch.blockmath.specs import Kind, LayerSpec
from tests.blockmath.vectors import FOLDER

Case = dict[str, Any]

CASES: Final[list[Case]] = json.loads((FOLDER / "planner_small.json").read_text(encoding="utf-8"))
KINDS: Final = {
    "FullAttentionSpec": Kind.FULL,
    "SlidingWindowSpec": Kind.SLIDING,
    "ChunkedLocalAttentionSpec": Kind.CHUNKED,
    "MLAAttentionSpec": Kind.MLA,
    "CrossAttentionSpec": Kind.CROSS,
    "MambaSpec": Kind.MAMBA,
}


def layer_spec(layer: Case) -> LayerSpec:
    """One layer as the planner got it."""
    kind = KINDS[layer["kind"]]
    state = layer["page"] if kind is Kind.MAMBA else layer["page"] // layer["block_size"]
    return LayerSpec(
        kind=kind,
        block_size=layer["block_size"],
        state_bytes=state,
        window=layer["window"],
        chunk=layer["chunk"],
        shape=(layer["heads"], layer["head_size"], layer["dtype"]),
    )


def stages_of(case: Case) -> list[Stage]:
    """Workers with the same layers are ranks of one stage, unless together they make up the model."""
    workers = [[(layer_spec(layer), layer["n"]) for layer in worker] for worker in case["layers"]]
    total = sum(group["n"] for group in case["groups"])
    if sum(count for worker in workers for _, count in worker) == total:
        return list(workers)
    return [workers[0]]


def plan(case: Case) -> Pool:
    """The case's pool."""
    settings = Settings(
        dtype="bfloat16",
        cache_dtype="auto",
        block_size=16,
        block_size_given=False,
        mamba_block_size=16,
        max_model_len=case["max_model_len"],
        derived_max_model_len=case["max_model_len"],
        auto_length=case["orig"] == -1,
        max_num_batched_tokens=8192,
        max_num_seqs=256,
        max_in_flight_tokens=case["max_in_flight_tokens"],
        max_num_encoder_input_tokens=case["enc"],
        async_scheduling=True,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        mamba_cache_mode=case["mamba_mode"],
        hybrid_manager=not case["hybrid_off"],
        tp=1,
        pp=len(stages_of(case)),
        dcp=case["dcp"],
        speculative_tokens=0,
        skip_layers=(),
        conv_state_dtype="bfloat16",
        ssm_state_dtype=None,
    )
    shape = shape_of(stages_of(case), settings, label="given")
    return shape.pool(settings, release=Release.parse("0.32.0"), blocks_override=case["override"])


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_case(case: Case) -> None:
    pool = plan(case)
    available = case["avail"] if len(pool.stages) > 1 else min(case["avail"])
    # These two were worked out for the whole model.
    assert sum(pool.bytes_per_block) == case["bytes_per_block"]
    assert sum(pool.need_bytes(case["max_model_len"])) == case["needed_bytes"]
    assert list(pool.blocks_per_request(case["max_model_len"])) == [
        group["blocks_per_max_req"] for group in case["groups"]
    ]
    longest = pool.longest_length(available)
    if "error" in case:
        assert longest < (1 if pool.settings.auto_length else case["max_model_len"])
        assert pool.settings.auto_length or f"maximum model length is {longest}." in case["error"]
        return
    if pool.settings.auto_length:
        pool = replace(pool, settings=replace(pool.settings, max_model_len=longest))
    blocks = pool.num_blocks(available)
    assert pool.settings.max_model_len == case["final_max_model_len"]
    assert (blocks, pool.capacity_tokens(blocks), pool.max_concurrency(blocks)) == (
        case["num_blocks"],
        case["kv_cache_size_tokens"],
        case["max_concurrency"],
    )


def test_all_cases_are_here() -> None:
    assert len(CASES) == 26
