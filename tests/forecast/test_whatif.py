"""What changes buy, remedies that were tried, the fewest cards, and tables."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from kvwatch.blockmath.flags import Flags
from kvwatch.blockmath.gpus import GPUS, find_gpu
from kvwatch.blockmath.releases import Release
from kvwatch.forecast.sizing import Scenario, Sizing, size_up
from kvwatch.forecast.whatif import TENSOR_PARALLEL_SIZES, changes, fits, remedies, sweep
from tests.forecast.startups import MODELS
from tests.support import ROOT


def scenario(model: str = "Llama-3.1-8B", gpu: str = "H100", **flags: Any) -> Scenario:
    return Scenario(MODELS[model], Flags(**flags), find_gpu(gpu).device(), Release.LATEST)


def bought(asked: Scenario, gpu: str = "H100") -> dict[str, Sizing]:
    return {
        change.text: change.result
        for change in changes(size_up(asked), find_gpu(gpu))
        if isinstance(change.result, Sizing)
    }


def test_changes_are_numbers_of_their_own_plans() -> None:
    asked = scenario()
    found = bought(asked)
    assert list(found) == [
        "--gpu-memory-utilization 0.95",
        "--max-model-len 65536",
        "--max-num-seqs 256",
        "--enforce-eager",
        "--kv-cache-dtype fp8",
        "--quantization fp8",
        "a 4-bit checkpoint (AWQ)",
        "--tensor-parallel-size 2",
    ]
    plain = size_up(asked)
    eight, four = found["--quantization fp8"], found["a 4-bit checkpoint (AWQ)"]
    assert found["--kv-cache-dtype fp8"].capacity_tokens == 2 * plain.capacity_tokens
    assert plain.capacity_tokens < eight.capacity_tokens < four.capacity_tokens
    assert found["--tensor-parallel-size 2"] == size_up(scenario(tensor_parallel_size=2))


def test_cards_without_8_bit_numbers_are_not_offered_them() -> None:
    assert "--kv-cache-dtype fp8" not in bought(scenario(gpu="A100-80GB"), "A100-80GB")
    assert "--quantization fp8" not in bought(scenario(gpu="T4"), "T4")


def test_cards_are_added_until_it_starts() -> None:
    found = bought(scenario("Llama-3.3-70B"))
    assert found["--tensor-parallel-size 2"].feasible is False
    assert found["--tensor-parallel-size 4"].feasible is True
    assert "--tensor-parallel-size 8" not in found


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (scenario("Qwen3-32B", "A100-80GB"), {"--max-model-len", "--gpu-memory-utilization"}),
        (scenario(gpu_memory_utilization=0.999), {"--gpu-memory-utilization"}),
        (scenario(gpu_memory_utilization=0.992), {"--gpu-memory-utilization"}),
        (scenario("Llama-3.3-70B"), set()),
        (scenario(), set()),
    ],
    ids=["length", "free memory", "sampler", "weights", "starts"],
)
def test_remedies_start(asked: Scenario, expected: set[str]) -> None:
    typed = remedies(size_up(asked))
    assert {text.split()[0] for text in typed} == expected
    for text in typed:
        name, value = text.removeprefix("--").split()
        changed = Flags.from_mapping({**asked.flags.given(), name.replace("-", "_"): value})
        assert size_up(replace(asked, flags=changed)).feasible is True


def test_state_slots_are_met_by_fewer_requests() -> None:
    path = ROOT / "tests/vectors/configs/known__granite-4.0-h-small.json"
    asked = replace(scenario(), config=json.loads(path.read_text()))
    (typed,) = remedies(size_up(asked))
    name, value = typed.split()
    assert name == "--max-num-seqs"
    assert size_up(replace(asked, flags=Flags(max_num_seqs=int(value)))).feasible is True


def test_fit_is_the_fewest() -> None:
    found = {fit.gpu.label: fit for fit in fits(scenario("Qwen3-32B"), GPUS)}
    assert len(found) == len(GPUS)
    for label, fit in found.items():
        assert fit.sizing is not None
        assert fit.sizing.feasible is True
        fewer = [size for size in TENSOR_PARALLEL_SIZES if size < fit.sizing.world_size]
        assert not any(
            size_up(scenario("Qwen3-32B", label, tensor_parallel_size=size)).feasible for size in fewer
        )
    sizing = found["H200"].sizing
    assert sizing is not None
    assert sizing.world_size == 1


def test_fit_says_why_not() -> None:
    (fit,) = fits(scenario("Llama-3.3-70B", max_model_len=131072), [find_gpu("T4")])
    assert fit.sizing is None
    assert fit.reason == "no_available_memory_for_blocks"


def test_sweep_is_every_combination_in_order() -> None:
    asked = scenario("Qwen2.5-7B")
    rows = sweep(asked, {"max_model_len": [8192, 32768], "tensor_parallel_size": [1, 2, 3]})
    assert [tuple(row.values.values()) for row in rows] == [
        (8192, 1),
        (8192, 2),
        (8192, 3),
        (32768, 1),
        (32768, 2),
        (32768, 3),
    ]
    assert isinstance(rows[2].result, str)
    assert rows[1].result == size_up(scenario("Qwen2.5-7B", max_model_len=8192, tensor_parallel_size=2))
