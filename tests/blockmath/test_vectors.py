"""Every number of vLLM's own planner, exactly."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest

from kvwatch.blockmath.batch import plan_row
from tests.blockmath.vectors import Row, config_of, rows
from tests.support import shared_dir

ELSEWHERE = "its cache type is in hf_quant_config.json, which is not at hand"
EXCLUDED = {
    "aic__nvidia__Llama-3.1-70B-Instruct-FP8": ELSEWHERE,
    "aic__nvidia__NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4": ELSEWHERE,
}
"""Rows whose input does not hold what vLLM read. Rows without cases are compared as refusals instead."""

TOTALS = ("bytes_per_block", "needed_bytes_for_max_model_len", "blocks_per_max_len_request_by_group")
PER_CASE = (
    "num_blocks",
    "kv_cache_size_tokens",
    "max_concurrency",
    "estimated_max_model_len",
    "autofit_max_model_len",
)
RAISES = {
    "no_available_memory_for_blocks": "No available memory for the cache blocks",
    "kv_needed_gt_available": "To serve at least one request",
    "auto_fit_failed": "Cannot auto-fit max_model_len",
}
REFUSALS = {
    "Total number of attention heads": {"indivisible_heads"},
    "User-specified max_model_len": {"max_model_len_gt_derived"},
    "No valid attention backend found": {"block_size"},
    "is not divisible by": {"indivisible_heads"},
    "Pipeline parallelism is not supported": {"pipeline_unsupported"},
    "Failed to promote": {"hybrid_manager_off"},
    "does not support float16": {"dtype"},
}
"""What vLLM says, and how the refusal is called here."""


def differences(row: Row, result: Row) -> list[str]:
    """Where a result departs from the planner's row."""
    error = row.get("config_error") or row.get("planning_error")
    if error:
        return _refusal_differences(error, result)
    if "unsupported" in result or "refused" in result:
        return [f"{result.get('refused') or result['unsupported']}: {result['message']}"]
    found = [f"{name}: {result[name]}, not {row[name]}" for name in TOTALS if row[name] != result[name]]
    for want, have in zip(row["cases"], result["cases"], strict=True):
        found += [
            f"{want['available_bytes']} bytes: {name} is {have.get(name)}, not {want.get(name)}"
            for name in PER_CASE
            if want.get(name) != have.get(name)
        ]
        found += _raise_differences(want, have)
    return found


def _raise_differences(want: Row, have: Row) -> list[str]:
    text, kind = want.get("raises") or "", have.get("raises")
    if (kind is None) != (not text) or (kind is not None and RAISES[kind] not in text):
        return [f"{want['available_bytes']} bytes: raises {kind}, not {text!r}"]
    return []


def _refusal_differences(error: str, result: Row) -> list[str]:
    kind = result.get("refused")
    if kind is None:
        return [f"not refused, although vLLM says {error!r}"]
    known = next((kinds for text, kinds in REFUSALS.items() if text in error), None)
    if known is not None and kind not in known:
        return [f"refused as {kind}, although vLLM says {error!r}"]
    return []


@pytest.fixture(scope="module")
def scored() -> dict[str, list[tuple[Row, list[str]]]]:
    """Each compared row with its differences, by layout."""
    found: dict[str, list[tuple[Row, list[str]]]] = defaultdict(list)
    for row in rows():
        if row["name"] in EXCLUDED or "note" in row:
            continue
        result = plan_row(row, config_of(row))
        found[result.get("layout") or "refused"].append((row, differences(row, result)))
    return found


def test_every_row_agrees(scored: dict[str, list[tuple[Row, list[str]]]]) -> None:
    lines: list[str] = []
    wrong: list[str] = []
    for layout, entries in sorted(scored.items()):
        agreeing = sum(not departing for _, departing in entries)
        lines.append(f"{layout}: {agreeing} of {len(entries)}")
        wrong += [
            f"{row['name']} {row['gpu']} {row['flags']}: {departing[0]}"
            for row, departing in entries
            if departing
        ]
    where = "" if shared_dir() else " (the repository's rows only: no shared vectors next to it)"
    print(f"score per layout{where}:", *lines, sep="\n  ")
    assert not wrong, "\n".join([*lines, *wrong[:20]])


def test_nothing_is_left_out_silently(scored: dict[str, list[tuple[Row, list[str]]]]) -> None:
    compared = sum(map(len, scored.values()))
    every = rows()
    notes = [row for row in every if "note" in row]
    excluded = Counter(row["name"] for row in every if row["name"] in EXCLUDED)
    assert compared + len(notes) + sum(excluded.values()) == len(every)
    assert all(row["note"].startswith("attention-free") for row in notes)
    assert sum(excluded.values()) <= 4


def test_encoders_have_no_cache() -> None:
    notes = [row for row in rows() if "note" in row]
    assert notes
    for row in notes:
        result = plan_row(row, config_of(row))
        assert result["layout"] == "no-cache"
        assert result["blocks_per_max_len_request_by_group"] == []
