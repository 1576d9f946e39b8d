"""Full attention by hand-checked numbers."""

from __future__ import annotations

from typing import Any

import pytest

from kvwatch.blockmath.device import Device
from kvwatch.blockmath.errors import Refused
from kvwatch.blockmath.flags import Flags
from kvwatch.blockmath.pool import Pool, plan_pool
from kvwatch.blockmath.releases import Release
from kvwatch.blockmath.startup import RankMemory, judge

GIB = 1 << 30
H100 = Device("NVIDIA H100 80GB HBM3", 80 * GIB, (9, 0))
V032 = Release.parse("0.32.0")
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}


def plan(config: dict[str, Any] = LLAMA_8B, release: Release = V032, **flags: Any) -> Pool:
    """The pool of one model on an H100."""
    return plan_pool(config, Flags(**flags), device=H100, release=release)


def test_one_block_holds_k_and_v_of_all_layers() -> None:
    pool = plan()
    assert pool.bytes_per_block == (32 * 16 * 2 * 8 * 128 * 2,)
    assert pool.blocks_per_request(131072) == (8192,)
    assert pool.need_bytes(131072) == (16 * GIB,)
    assert pool.kv_bytes_per_token == 131072.0


def test_null_block_is_kept_back() -> None:
    pool = plan()
    assert not pool.fits(131072, 16 * GIB)
    assert pool.longest_length(16 * GIB) == 131072 - 16
    assert pool.fits(131072, 16 * GIB + pool.bytes_per_block[0])
    older = plan(release=Release.parse("0.28.0"))
    assert older.fits(131072, 16 * GIB)
    assert older.kept_back_bytes == (0,)


@pytest.mark.parametrize(("tp", "heads"), [(1, 8), (2, 4), (8, 1), (32, 1)])
def test_heads_split_then_replicate(tp: int, heads: int) -> None:
    assert plan(tensor_parallel_size=tp).bytes_per_block == (32 * 16 * 2 * heads * 128 * 2,)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(Refused) as refusal:
        plan(tensor_parallel_size=3)
    assert refusal.value.kind == "indivisible_heads"


@pytest.mark.parametrize(
    ("tp", "dcp", "kind"),
    [
        (1, 2, "indivisible_ranks"),
        (16, 3, "indivisible_ranks"),
        (8, 2, "decode_context_too_large"),
        (16, 4, "decode_context_too_large"),
        (16, 2, None),
        (32, 4, None),
    ],
)
def test_decode_contexts_are_split_among_ranks_that_share_a_head(tp: int, dcp: int, kind: str | None) -> None:
    sizes: dict[str, Any] = {"tensor_parallel_size": tp, "decode_context_parallel_size": dcp}
    if kind is None:
        assert plan(**sizes).bytes_per_block == plan(tensor_parallel_size=tp).bytes_per_block
        return
    with pytest.raises(Refused) as refusal:
        plan(**sizes)
    assert refusal.value.kind == kind


def test_length_beyond_the_derived_one_is_refused() -> None:
    with pytest.raises(Refused) as refusal:
        plan(max_model_len=131073)
    assert refusal.value.kind == "max_model_len_gt_derived"


def test_fp8_halves_a_block() -> None:
    assert plan(kv_cache_dtype="fp8").bytes_per_block[0] * 2 == plan().bytes_per_block[0]


def test_pipeline_stages_have_pools_of_their_own() -> None:
    pool = plan({**LLAMA_8B, "num_hidden_layers": 33}, pipeline_parallel_size=4)
    assert [stage.num_layers for stage in pool.stages] == [(8,), (8,), (9,), (8,)]
    assert pool.num_blocks(GIB) == GIB // pool.bytes_per_block[2]


def test_reported_block_size_replaces_the_default() -> None:
    pool = plan_pool(LLAMA_8B, Flags(), device=H100, release=V032, effective_block_size=128)
    assert pool.blocks_per_request(131072) == (1024,)


def rank(free: int, non_kv: int | None = 20 * GIB) -> RankMemory:
    """An 80 GiB card."""
    return RankMemory("cuda:0", 0, 80 * GIB, free, non_kv)


def test_verdict_of_a_server_that_starts() -> None:
    verdict = judge(plan(), Flags(), [rank(79 * GIB)], release=V032)
    assert verdict.feasible is True
    assert verdict.blocking is None
    assert verdict.longest_length == 131072


def test_verdict_names_the_first_failing_check() -> None:
    verdict = judge(plan(), Flags(), [rank(60 * GIB, 70 * GIB)], release=V032)
    assert verdict.feasible is False
    assert verdict.failure_kind == "free_lt_desired"
    assert verdict.message == (
        "Free memory on device cuda:0 (60.0/80.0 GiB) on startup is less than desired GPU memory utilization "
        "(0.92, 73.6 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
    )
    assert verdict.longest_length == 0


def test_verdict_of_a_length_that_does_not_fit() -> None:
    verdict = judge(plan(), Flags(), [rank(79 * GIB, 65 * GIB)], release=V032)
    assert verdict.failure_kind == "kv_needed_gt_available"
    assert verdict.blocking is not None
    assert verdict.blocking.margin_bytes is not None
    assert verdict.blocking.margin_bytes < 0
    assert verdict.longest_length == 70432
    assert verdict.message is not None
    assert "the estimated maximum model length is 70432. " in verdict.message


def test_verdict_without_the_non_kv_part_is_unknown() -> None:
    verdict = judge(plan(), Flags(), [rank(79 * GIB, None)], release=V032)
    assert verdict.feasible is None
    assert verdict.longest_length is None
    assert verdict.unknown_reason == "non_kv_memory_unknown"


def test_foreign_memory_shrank_the_cache_before_the_free_check() -> None:
    old = Release.parse("0.8.5")
    pool = plan(release=old)
    verdict = judge(pool, Flags(), [rank(60 * GIB, 40 * GIB)], release=old)
    assert verdict.failure_kind == "kv_needed_gt_available"
    assert [result.check for result in verdict.checks if result.check == "free_memory"] == []
