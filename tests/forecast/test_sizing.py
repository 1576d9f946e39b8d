"""Sizing against logged start-ups, and against the arithmetic it is made of."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from kvwatch.blockmath.errors import Refused, Unsupported
from kvwatch.blockmath.flags import AUTO_LENGTH, Flags
from kvwatch.blockmath.gpus import find_gpu
from kvwatch.blockmath.releases import Release
from kvwatch.forecast.sizing import GIVEN_DOUBT, Scenario, Sizing, size_up, try_size_up
from tests.forecast.startups import MODELS, STARTS, Start

GIB = 1 << 30
H100 = find_gpu("H100").device()


def scenario(model: str = "Llama-3.1-8B", gpu: str = "H100", **flags: Any) -> Scenario:
    return Scenario(MODELS[model], Flags(**flags), find_gpu(gpu).device(), Release.LATEST)


def logged(start: Start) -> Sizing:
    given = int(start.weights * GIB) if start.other_weights else None
    return size_up(
        Scenario(MODELS[start.model], start.flags, H100, Release.parse(start.release), weight_bytes=given)
    )


def named(start: Start) -> str:
    return f"{start.model}-{start.release}-tp{start.flags.tp}-pp{start.flags.pp}-{start.flags.dtype}"


@pytest.mark.parametrize("start", STARTS, ids=named)
def test_every_part_is_within_its_bound(start: Start) -> None:
    stage = logged(start).stages[0]
    beside = stage.allowance
    assert beside is not None
    assert stage.weights is not None
    error = (beside.activation + beside.non_torch) / GIB - start.activation - start.non_torch
    assert abs(error) <= stage.uncertainty / GIB
    quantized = "quantization_config" in MODELS[start.model]
    held = stage.weights if start.other_weights else stage.weights + beside.rotary
    assert held / GIB == pytest.approx(start.weights, abs=0.25 if quantized else 0.06)
    if start.graphs is not None:
        assert beside.graphs / GIB == pytest.approx(start.graphs, rel=0.5)
    if start.available is not None:
        assert abs(stage.available / GIB - start.available) <= stage.uncertainty / GIB


def test_errors_are_as_small_as_the_documentation_says() -> None:
    errors, kv_errors, graph_errors = [], [], []
    for start in STARTS:
        stage = logged(start).stages[0]
        beside = stage.allowance
        assert beside is not None
        errors.append(abs((beside.activation + beside.non_torch) / GIB - start.activation - start.non_torch))
        if start.graphs is not None:
            graph_errors.append(abs(beside.graphs / GIB - start.graphs))
        if start.available is not None:
            kv_errors.append(abs(stage.available / GIB - start.available))
    assert len(errors) == 25
    assert statistics.median(errors) <= 0.03
    assert max(errors) <= 0.26
    assert max(graph_errors) <= 0.23
    assert max(kv_errors) <= 0.27
    assert statistics.median(kv_errors) <= 0.03


def test_parts_add_up() -> None:
    stage = size_up(scenario()).stages[0]
    assert stage.weights is not None
    assert stage.allowance is not None
    assert stage.non_kv == stage.weights + stage.allowance.in_budget
    assert stage.available == stage.budget - stage.non_kv


def test_graphs_count_against_the_budget_since_0_20() -> None:
    before = size_up(replace(scenario(), release=Release.parse("0.19.0")))
    after = size_up(replace(scenario(), release=Release.parse("0.20.0")))
    for sizing, counted in ((before, False), (after, True)):
        beside = sizing.stages[0].allowance
        assert beside is not None
        assert beside.graphs > 0
        assert beside.in_budget - beside.rotary - beside.activation - beside.non_torch == (
            beside.graphs if counted else 0
        )


def test_fewer_requests_and_no_graphs_leave_more() -> None:
    plain = size_up(scenario()).stages[0].available
    assert size_up(scenario(max_num_seqs=256)).stages[0].available > plain
    assert size_up(scenario(enforce_eager=True)).stages[0].available > plain


def test_verdict_turns_from_yes_over_unknown_to_no_as_length_grows() -> None:
    model = scenario(gpu="RTX-4090")
    sizing = size_up(model)
    doubtful = replace(model, flags=Flags(max_model_len=sizing.longest_length))
    sure = replace(model, flags=Flags(max_model_len=sizing.safe_length))
    hopeless = replace(model, device=find_gpu("V100-16GB").device())
    assert size_up(sure).feasible is True
    assert size_up(doubtful).feasible is None
    assert size_up(hopeless).feasible is False
    assert size_up(hopeless).verdict.failure_kind == "no_available_memory_for_blocks"


def test_safe_length_is_the_longest_that_is_sure() -> None:
    model = scenario(gpu="RTX-4090")
    sizing = size_up(model)
    assert 0 < sizing.safe_length < sizing.longest_length
    at = size_up(replace(model, flags=Flags(max_model_len=sizing.safe_length)))
    past = size_up(replace(model, flags=Flags(max_model_len=sizing.safe_length + 16)))
    assert at.feasible is True
    assert past.feasible is None


def test_auto_length_reports_the_length_it_settles_on() -> None:
    sizing = size_up(scenario(gpu="RTX-4090", max_model_len=AUTO_LENGTH))
    assert sizing.length == sizing.longest_length
    assert sizing.max_concurrency == pytest.approx(1, abs=0.01)


def test_given_kv_memory_leaves_no_doubt() -> None:
    sizing = size_up(scenario(kv_cache_memory_bytes=4 * GIB))
    assert sizing.stages[0].available == 4 * GIB
    assert sizing.stages[0].uncertainty == 0
    assert sizing.feasible is False
    assert sizing.longest_length == (4 * GIB // sizing.pool.bytes_per_block[0] - 1) * 16


def test_given_non_kv_memory_replaces_every_estimate() -> None:
    sizing = size_up(replace(scenario(gpu="L4"), non_kv_bytes=17 * GIB))
    stage = sizing.stages[0]
    assert (stage.weights, stage.allowance) == (None, None)
    assert stage.available == stage.budget - 17 * GIB
    assert stage.uncertainty == GIVEN_DOUBT


def test_checkpoint_size_stands_in_for_unknown_weights() -> None:
    unknown: Mapping[str, Any] = {**MODELS["Llama-3.1-8B"], "quantization_config": {"quant_method": "new"}}
    asked = replace(scenario(tensor_parallel_size=2), config=unknown)
    with pytest.raises(Unsupported):
        size_up(asked)
    sizing = size_up(replace(asked, checkpoint_bytes=8 * GIB))
    assert sizing.stages[0].weights == 4 * GIB
    assert any("checkpoint" in assumption for assumption in sizing.assumptions)


def test_v0_engine_needs_a_log() -> None:
    old = replace(scenario(), release=Release.parse("0.6.5"))
    with pytest.raises(Unsupported, match="V0"):
        size_up(old)
    assert size_up(replace(old, non_kv_bytes=18 * GIB)).num_blocks > 0


def test_what_vllm_refuses() -> None:
    with pytest.raises(Refused):
        size_up(scenario(tensor_parallel_size=3))
    assert "divisible" in str(try_size_up(scenario(tensor_parallel_size=3)))


def test_stages_differ_and_the_tightest_counts() -> None:
    sizing = size_up(scenario(pipeline_parallel_size=2))
    first, last = sizing.stages
    assert first.allowance is not None
    assert last.allowance is not None
    assert last.allowance.activation > first.allowance.activation
    assert sizing.tightest is last
    assert sizing.world_size == 2


def test_hypothetical_checkpoint_is_an_assumption() -> None:
    sizing = size_up(scenario(quantization="awq"))
    assert any("awq" in assumption for assumption in sizing.assumptions)
    assert sizing.stages[0].weights is not None
    assert sizing.stages[0].weights < size_up(scenario()).stages[0].available
    assert not any("checkpoint" in each for each in size_up(scenario(quantization="fp8")).assumptions)


def test_more_doubt_where_nothing_was_measured() -> None:
    plain = size_up(scenario()).stages[0]
    towered = size_up(replace(scenario(), config={**MODELS["Llama-3.1-8B"], "vision_config": {}})).stages[0]
    assert towered.uncertainty > plain.uncertainty


def test_sampler_has_what_graphs_leave_of_the_card() -> None:
    """As logged: gpt-oss-20b on two cards starts at 0.90 and fails in the sampler's warm-up at 0.95."""
    low, high = (
        size_up(
            Scenario(
                MODELS["gpt-oss-20b"],
                Flags(gpu_memory_utilization=utilization, tensor_parallel_size=2, max_model_len=8192),
                H100,
                Release.parse("0.19.0"),
            )
        )
        for utilization in (0.90, 0.95)
    )
    assert low.feasible is True
    assert high.feasible is not True
    assert {check.check for check in high.verdict.checks if not check.passed} == {"sampler_warmup"}


def test_tables_for_ten_million_positions_are_not_forgotten() -> None:
    """Llama 4 Scout logs 53.12 GiB on each of four cards, 2.5 GiB of it for 10,485,760 positions."""
    config = {**MODELS["Llama-3.1-8B"], "max_position_embeddings": 10485760}
    beside = size_up(replace(scenario(gpu="H200"), config=config)).stages[0].allowance
    assert beside is not None
    assert beside.rotary == 10485760 * 128 * 2
