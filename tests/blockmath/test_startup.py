"""Every check of a start: when it passes, what it misses, and vLLM's words for it."""

from __future__ import annotations

from typing import Any

import pytest

from kvwatch.blockmath.device import Device
from kvwatch.blockmath.flags import Flags
from kvwatch.blockmath.pool import plan_pool
from kvwatch.blockmath.releases import Release
from kvwatch.blockmath.startup import CHECKS, FAILURE_KINDS, RankMemory, Verdict, judge
from tests.blockmath.test_dense import LLAMA_8B

GIB = 1 << 30
H100 = Device("NVIDIA H100 80GB HBM3", 80 * GIB, (9, 0))
V032 = Release.parse("0.32.0")
MAMBA: dict[str, Any] = {
    "architectures": ["MambaForCausalLM"],
    "model_type": "mamba",
    "hidden_size": 4096,
    "intermediate_size": 8192,
    "state_size": 16,
    "conv_kernel": 4,
    "time_step_rank": 256,
    "num_hidden_layers": 64,
    "vocab_size": 65024,
    "torch_dtype": "bfloat16",
}


def card(**changes: Any) -> RankMemory:
    figures: dict[str, Any] = {
        "gpu": "gpu0",
        "stage": 0,
        "total_bytes": 80 * GIB,
        "free_bytes": 79 * GIB,
        "non_kv_bytes": 17 * GIB,
    }
    return RankMemory(**figures | changes)


def verdict(
    *ranks: RankMemory, config: dict[str, Any] = LLAMA_8B, release: Release = V032, **flags: Any
) -> Verdict:
    given = Flags(**flags)
    pool = plan_pool(config, given, device=H100, release=release)
    return judge(pool, given, ranks or (card(),), release=release)


def of(result: Verdict, check: str) -> list[bool | None]:
    return [each.passed for each in result.checks if each.check == check]


def test_checks_come_in_the_order_of_vllm() -> None:
    names = [result.check for result in verdict(card(graph_bytes=GIB)).checks]
    assert names == [name for name in CHECKS if name in names]
    assert set(FAILURE_KINDS) == set(CHECKS)


def test_first_failing_check_blocks_although_later_ones_fail_too() -> None:
    result = verdict(card(free_bytes=20 * GIB, non_kv_bytes=75 * GIB))
    assert of(result, "kv_memory") == of(result, "one_request") == [False]
    assert result.failure_kind == "free_lt_desired"
    assert result.longest_length == 0


def test_blocking_gpu_is_the_one_that_misses_most() -> None:
    result = verdict(
        card(),
        card(gpu="gpu1", free_bytes=70 * GIB),
        card(gpu="gpu2", free_bytes=60 * GIB),
        card(gpu="gpu3"),
        tensor_parallel_size=4,
    )
    assert result.blocking is not None
    assert result.blocking.gpu == "gpu2"
    assert result.message is not None
    assert "device cuda:2 (60.0/80.0 GiB)" in result.message


def test_margin_within_the_uncertainty_decides_nothing() -> None:
    # 73.6 GiB of budget; one request needs 16 GiB and a block of 2 MiB is kept back.
    spare = 73.6 - 16 - 2 / 1024
    close = verdict(card(non_kv_bytes=int((spare - 0.5) * GIB), uncertainty_bytes=GIB))
    assert close.feasible is None
    assert close.unknown_reason == "within_uncertainty"
    assert verdict(card(non_kv_bytes=int((spare - 0.5) * GIB))).feasible is True
    assert verdict(card(non_kv_bytes=int((spare + 0.5) * GIB))).failure_kind == "kv_needed_gt_available"


def test_unknown_free_memory_leaves_the_verdict_open_unless_a_check_fails() -> None:
    assert verdict(card(free_bytes=None)).unknown_reason == "free_memory_unknown"
    failed = verdict(card(free_bytes=None, non_kv_bytes=60 * GIB))
    assert failed.feasible is False
    assert failed.failure_kind == "kv_needed_gt_available"


def test_memory_told_outright_needs_no_profile() -> None:
    enough = verdict(card(non_kv_bytes=None), kv_cache_memory_bytes=17 * GIB)
    assert of(enough, "kv_memory") == of(enough, "one_request") == [True]
    short = verdict(card(non_kv_bytes=None), kv_cache_memory_bytes=8 * GIB)
    assert short.failure_kind == "kv_needed_gt_available"
    assert short.message is not None
    assert "maximum model length is 65520" in short.message


def test_blocks_told_outright_are_what_one_request_must_fit() -> None:
    assert of(verdict(num_gpu_blocks_override=8193), "one_request") == [True]
    assert verdict(num_gpu_blocks_override=8192).failure_kind == "kv_needed_gt_available"
    before = Release.parse("0.20.0")
    assert of(verdict(release=before, num_gpu_blocks_override=10), "one_request") == [True]


def test_blocks_that_are_told_must_fit_in_the_card() -> None:
    """62 GiB are left beside the weights, 2 MiB go into a block."""
    assert verdict(num_gpu_blocks_override=31 * 1024 - 512).feasible is True
    assert verdict(num_gpu_blocks_override=40_000).failure_kind == "cuda_oom_sampler_warmup"


def test_automatic_length_fails_only_without_room_for_one_token() -> None:
    fitting = verdict(card(non_kv_bytes=72 * GIB), max_model_len=-1)
    assert fitting.feasible is True
    assert fitting.longest_length == (int(1.6 * GIB) // (2 << 20) - 1) * 16
    empty = verdict(card(non_kv_bytes=int(73.6 * GIB)), max_model_len=-1)
    assert empty.feasible is False
    assert empty.message is not None
    assert empty.message.startswith("Cannot auto-fit max_model_len")


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (
            "0.32.0",
            (
                "To serve at least one request with the model's max seq len (131072), (16.0 GiB KV cache "
                "is needed, which is larger than the available KV cache memory (3.6 GiB). Based on the "
                "available memory, the estimated maximum model length is 29472. Try increasing "
                "`gpu_memory_utilization` (which also controls CPU memory on the CPU backend) or decreasing "
                "`max_model_len` when initializing the engine. See https://docs.vllm.ai/en/latest/configuration/"
                "conserving_memory/ for more details."
            ),
        ),
        (
            "0.11.0",
            (
                "To serve at least one request with the models's max seq len (131072), (16.00 GiB KV cache "
                "is needed, which is larger than the available KV cache memory (2.00 GiB). Based on the "
                "available memory, the estimated maximum model length is 16384. Try increasing "
                "`gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine."
            ),
        ),
        (
            "0.6.0",
            (
                "The model's max seq len (131072) is larger than the maximum number of tokens that can be "
                "stored in KV cache (16384). Try increasing `gpu_memory_utilization` or decreasing "
                "`max_model_len` when initializing the engine."
            ),
        ),
    ],
)
def test_a_length_that_does_not_fit_in_the_words_of_its_release(version: str, words: str) -> None:
    result = verdict(card(non_kv_bytes=70 * GIB), release=Release.parse(version))
    assert result.failure_kind == "kv_needed_gt_available"
    assert result.message == words


def test_pipeline_stages_are_checked_on_their_own_gpus() -> None:
    ranks = card(), card(gpu="gpu1", stage=1, non_kv_bytes=70 * GIB)
    result = verdict(*ranks, pipeline_parallel_size=2)
    assert of(result, "one_request") == [True, False]
    assert result.blocking is not None
    assert result.blocking.gpu == "gpu1"


def test_gpus_must_serve_every_stage() -> None:
    with pytest.raises(ValueError, match="stages"):
        verdict(card(), pipeline_parallel_size=2)


def test_state_slots_bound_the_batch_that_graphs_are_captured_for() -> None:
    # One block is one request's state: 64 layers of 8192 x (3 + 16) two-byte elements.
    slots = 100 * 64 * 8192 * (3 + 16) * 2
    few = card(non_kv_bytes=int(80 * GIB * 0.92) - slots)
    result = verdict(few, config=MAMBA, max_num_seqs=256)
    assert result.failure_kind == "mamba_blocks_lt_max_num_seqs"
    assert result.message is not None
    assert result.message.startswith("max_num_seqs (256) exceeds available Mamba cache blocks (100).")
    assert result.blocking is not None
    assert result.blocking.margin_count == 100 - 256
    assert verdict(few, config=MAMBA, max_num_seqs=100).feasible is True
    assert of(verdict(few, config=MAMBA, max_num_seqs=256, enforce_eager=True), "state_slots") == [True]


def test_logits_of_a_full_batch_must_fit_beside_the_budget() -> None:
    tight = card(free_bytes=int(79.9 * GIB))
    result = verdict(tight, gpu_memory_utilization=0.998, max_num_seqs=1024)
    assert result.failure_kind == "cuda_oom_sampler_warmup"
    assert result.message is not None
    assert "with 1024 dummy requests" in result.message
    assert verdict(tight, gpu_memory_utilization=0.998, max_num_seqs=64).feasible is True


def test_graphs_must_fit_above_the_budget() -> None:
    result = verdict(card(graph_bytes=10 * GIB), max_num_seqs=8)
    assert of(result, "graph_capture") == [False]
    assert of(verdict(card(graph_bytes=10 * GIB), enforce_eager=True), "graph_capture") == []
    assert of(verdict(card()), "graph_capture") == []


def test_a_pool_without_cache_needs_none() -> None:
    encoder = {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 512,
        "vocab_size": 30522,
    }
    result = verdict(card(), config=encoder)
    assert of(result, "kv_memory") == of(result, "one_request") == []
    assert result.feasible is True


def test_the_first_worker_that_fails_is_worded_and_the_worst_one_is_named() -> None:
    flags: dict[str, Any] = {"pipeline_parallel_size": 2, "max_model_len": 131072}
    first, worst = card(non_kv_bytes=67 * GIB), card(gpu="gpu1", stage=1, non_kv_bytes=70 * GIB)
    both = verdict(first, worst, **flags)
    alone = verdict(first, card(gpu="gpu1", stage=1), **flags)
    assert both.blocking is not None
    assert (both.blocking.check, both.blocking.gpu) == ("one_request", "gpu1")
    assert both.message == alone.message
    assert both.longest_length is not None
    assert alone.longest_length is not None
    assert both.longest_length < alone.longest_length
