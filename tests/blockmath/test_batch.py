"""Rows in, numbers out."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvwatch.blockmath.batch import device_named, plan_row
from kvwatch.blockmath.errors import Unsupported
from tests.blockmath.test_dense import LLAMA_8B
from tests.blockmath.vectors import config_of, rows

GIB = 1 << 30


def row(*available: int | list[int], **flags: Any) -> dict[str, Any]:
    return {
        "name": "a",
        "gpu": "H100-80GB",
        "vllm_version": "0.32.0",
        "flags": flags,
        "cases": [{"available_bytes": each} for each in available],
    }


def test_a_row_of_three_cases() -> None:
    assert plan_row(row(32 * GIB, 8 * GIB, GIB // 1024), LLAMA_8B) == {
        "name": "a",
        "layout": "full",
        "basis": "exact",
        "bytes_per_block": 2 << 20,
        "needed_bytes_for_max_model_len": 16 * GIB,
        "blocks_per_max_len_request_by_group": [8192],
        "cases": [
            {
                "available_bytes": 32 * GIB,
                "estimated_max_model_len": 131072,
                "num_blocks": 16384,
                "kv_cache_size_tokens": 262144,
                "max_concurrency": 2.0,
            },
            {
                "available_bytes": 8 * GIB,
                "estimated_max_model_len": 65520,
                "raises": "kv_needed_gt_available",
            },
            {
                "available_bytes": 1 << 20,
                "estimated_max_model_len": 0,
                "raises": "no_available_memory_for_blocks",
            },
        ],
    }


def test_stages_have_lists() -> None:
    result = plan_row(row([16 * GIB, 16 * GIB], pipeline_parallel_size=2), LLAMA_8B)
    assert result["bytes_per_block"] == [1 << 20, 1 << 20]
    assert result["cases"][0]["num_blocks"] == 16384


def test_automatic_length_is_told() -> None:
    result = plan_row(row(8 * GIB, 1, max_model_len="auto"), LLAMA_8B)
    assert result["cases"][0]["autofit_max_model_len"] == 65520
    assert result["cases"][1]["raises"] == "auto_fit_failed"


def test_flags_that_say_auto_were_not_given() -> None:
    assert plan_row(row(GIB, dtype="auto", kv_cache_dtype="auto"), LLAMA_8B) == plan_row(row(GIB), LLAMA_8B)


def test_refusals_and_unknowns_are_results() -> None:
    refused = plan_row(row(GIB, tensor_parallel_size=3), LLAMA_8B)
    assert refused["refused"] == "indivisible_heads"
    unknown = plan_row(row(GIB), LLAMA_8B | {"architectures": ["NoSuchModel"], "model_type": "no_such"})
    assert unknown.get("unsupported") or unknown["basis"] == "inferred"
    assert plan_row(row(GIB) | {"gpu": "abacus"}, LLAMA_8B)["unsupported"] == "unknown_gpu"


@pytest.mark.parametrize(
    ("label", "gib", "capability"),
    [
        ("H100-80GB", 80, (9, 0)),
        ("A100-40GB", 40, (8, 0)),
        ("NVIDIA L4 24GB", 24, (8, 9)),
        ("A10G-24", 24, (8, 6)),
    ],
)
def test_cards_by_label(label: str, gib: int, capability: tuple[int, int]) -> None:
    device = device_named(label)
    assert (device.total_bytes, device.capability) == (gib * GIB, capability)


def test_a_label_without_a_size_is_unknown() -> None:
    with pytest.raises(Unsupported):
        device_named("H100")


def test_a_table_is_planned_in_seconds() -> None:
    table = rows()
    start = time.process_time()
    for each in table:
        plan_row(each, config_of(each))
    assert time.process_time() - start < 30 * len(table) / 2000
