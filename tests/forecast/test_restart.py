from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwatch.blockmath.flags import Flags
from kvwatch.blockmath.releases import Release
from kvwatch.config import GIB, Config, Restart
from kvwatch.forecast.restart import RestartForecast, forecast_restart
from kvwatch.node import ServerState, join
from kvwatch.observe.cycle import Observation
from kvwatch.observe.records import Failure, ModelConfig, NvmlRecord, VllmRecord
from tests.nodes import (
    LLAMA_8B_BLOCK,
    PARENT,
    RESERVED,
    TOTAL,
    gpu,
    observation,
    process,
    server,
    serving_node,
    vllm_page,
)

CUDA_TOTAL = TOTAL - RESERVED
BUDGET = -(-CUDA_TOTAL * 92 // 100)
CONTEXT = Restart().cuda_context


def judge(seen: Observation, config: Config | None = None) -> RestartForecast:
    snapshot = join(seen, config or Config())
    return forecast_restart(snapshot.servers[0], snapshot, config or Config())


def margins(forecast: RestartForecast) -> dict[str, int]:
    assert forecast.verdict is not None
    return {
        check.check: check.margin_bytes
        for check in forecast.verdict.checks
        if check.gpu is not None and check.margin_bytes is not None
    }


def test_a_quiet_node_is_feasible_with_margins_in_vllms_terms() -> None:
    forecast = judge(serving_node(own=73 * GIB, num_blocks=26_000))
    assert forecast.feasible is True
    assert forecast.situation is not None
    assert forecast.situation.basis == "measured"
    non_kv = BUDGET - 26_000 * LLAMA_8B_BLOCK
    assert [site.non_kv for site in forecast.situation.sites] == [non_kv]
    found = margins(forecast)
    assert found["free_memory"] == CUDA_TOTAL - CONTEXT - BUDGET
    assert found["kv_memory"] == (26_000 - 1) * LLAMA_8B_BLOCK - 1
    assert found["one_request"] == (26_000 - 1 - 32768 // 16) * LLAMA_8B_BLOCK
    assert forecast.verdict is not None
    assert forecast.verdict.longest_length == 131072


def test_a_foreign_holder_turns_the_free_memory_check() -> None:
    missing = 3 * GIB
    held = CUDA_TOTAL - CONTEXT - BUDGET + missing
    notebook = process(900, "ipykernel_launcher", user="dana")
    forecast = judge(serving_node((notebook, held), own=70 * GIB))
    assert forecast.feasible is False
    assert forecast.verdict is not None
    assert forecast.verdict.blocking is not None
    assert forecast.verdict.blocking.check == "free_memory"
    assert margins(forecast)["free_memory"] == -missing
    assert "Free memory on device" in (forecast.verdict.message or "")
    first = forecast.remedies[0]
    assert (first.action, first.pids) == ("stop_holder", (900,))
    assert "ipykernel_launcher of dana" in first.text
    utilization = next(remedy for remedy in forecast.remedies if remedy.action == "gpu_memory_utilization")
    assert utilization.flags == "--gpu-memory-utilization 0.87"
    assert "max_model_len" not in {remedy.action for remedy in forecast.remedies}


def test_orphans_go_first_and_only_as_many_as_needed() -> None:
    orphan = process(901, "VLLM::Worker_TP0")
    notebook = process(902, "ipykernel_launcher", user="dana")
    small = process(903, "python", user="eve")
    forecast = judge(serving_node((notebook, 6 * GIB), (orphan, 4 * GIB), (small, GIB), own=60 * GIB))
    assert forecast.feasible is False
    assert forecast.remedies[0].pids == (902,)


def test_a_length_that_no_longer_fits() -> None:
    blocks = 3000
    seen = serving_node(num_blocks=blocks, max_concurrency=None, size_tokens=None)
    long = replace(seen.servers[0], launch=replace(seen.servers[0].launch, flags=Flags(max_model_len=65536)))
    forecast = judge(replace(seen, servers=(long,)))
    assert forecast.feasible is False
    assert forecast.verdict is not None
    assert forecast.verdict.blocking is not None
    assert forecast.verdict.blocking.check == "one_request"
    assert forecast.verdict.longest_length == (blocks - 1) * 16
    assert margins(forecast)["one_request"] == (blocks - 1 - 4096) * LLAMA_8B_BLOCK
    by_action = {remedy.action: remedy.flags for remedy in forecast.remedies}
    assert by_action["max_model_len"] == f"--max-model-len {(blocks - 1) * 16}"
    assert by_action["gpu_memory_utilization"] == "--gpu-memory-utilization 0.95"
    assert "To serve at least one request" in (forecast.verdict.message or "")


def test_a_card_without_8_bit_numbers_is_offered_none() -> None:
    seen = serving_node(num_blocks=1500, max_concurrency=None, size_tokens=None)
    assert isinstance(seen.nvml, NvmlRecord)
    for capability, offered in (((8, 0), False), ((8, 9), True)):
        card = replace(seen.nvml.gpus[0], capability=capability)
        snapshot = join(replace(seen, nvml=NvmlRecord((card,))), Config())
        found = forecast_restart(snapshot.servers[0], snapshot, Config())
        assert ("kv_cache_dtype" in {remedy.action for remedy in found.remedies}) is offered


def test_every_remedy_turns_the_verdict() -> None:
    notebook = process(900, "ipykernel_launcher", user="dana")
    forecast = judge(serving_node((notebook, 8 * GIB), own=70 * GIB))
    assert forecast.situation is not None
    for remedy in forecast.remedies:
        if remedy.flags:
            name, value = remedy.flags.removeprefix("--").split()
            changed = Flags.from_mapping({name: value})
            assert forecast.situation.judge(changed).feasible is True
        else:
            assert forecast.situation.judge(freed={"0": 8 * GIB}).feasible is True


def with_page(page: Any) -> Observation:
    seen = serving_node()
    return replace(seen, servers=(replace(seen.servers[0], vllm=page),))


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        (with_page(Failure("vllm", "timeout", "no answer")), "server_down"),
        (with_page(vllm_page(version=None)), "version_unknown"),
        (with_page(vllm_page(engines=0)), "no_cache_info"),
        (with_page(vllm_page(max_concurrency=99.0)), "layout_mismatch"),
        (
            replace(
                serving_node(),
                servers=(server(model=Failure("models", "not_found", "nothing there")),),
            ),
            "model_config_unreadable",
        ),
        (observation(Failure("nvml", "driver_mismatch", "18"), (), (server(),)), "gpu_unknown"),
        (
            observation((gpu({PARENT + 1: 1}, memory=False),), (process(PARENT, "vllm"),), (server(),)),
            "gpu_memory_unknown",
        ),
        (observation((gpu({PARENT + 1: None}),), (), (server(),)), "own_memory_unknown"),
        (
            observation(
                (gpu({PARENT + 1: GIB}),),
                (),
                (server(flags=Flags(tensor_parallel_size=2, max_model_len=32768), max_concurrency=None),),
            ),
            "ranks_mismatch",
        ),
        (
            observation((gpu({PARENT + 1: GIB}),), (), (server(model={"model_type": "nobody-knows"}),)),
            "incomplete_config",
        ),
    ],
)
def test_what_is_missing_makes_it_unknown_with_a_reason(seen: Observation, reason: str) -> None:
    forecast = judge(seen)
    assert forecast.feasible is None
    assert forecast.verdict is None
    assert forecast.unknown is not None
    assert forecast.unknown.reason == reason
    assert forecast.unknown.detail


def test_bytes_told_outright_replace_the_budget() -> None:
    told = 4 * GIB
    blocks = told // LLAMA_8B_BLOCK
    seen = serving_node(own=20 * GIB, num_blocks=blocks, kv_cache_memory_bytes=told, size_tokens=None)
    launch = replace(seen.servers[0].launch, flags=Flags(max_model_len=16384, kv_cache_memory_bytes=told))
    page = vllm_page(num_blocks=blocks, kv_cache_memory_bytes=told, max_model_len=16384)
    forecast = judge(replace(seen, servers=(replace(seen.servers[0], launch=launch, vllm=page),)))
    assert forecast.feasible is True
    assert forecast.situation is not None
    assert forecast.situation.sites[0].non_kv == 20 * GIB - blocks * LLAMA_8B_BLOCK
    assert margins(forecast)["one_request"] == told - LLAMA_8B_BLOCK - 1024 * LLAMA_8B_BLOCK


@pytest.mark.parametrize("allowed", [True, False])
def test_a_length_beyond_the_models_own_needs_leave(allowed: bool) -> None:
    length = 200_000
    seen = serving_node()
    launch = replace(
        seen.servers[0].launch,
        flags=Flags(max_model_len=length),
        environment={"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"} if allowed else {},
    )
    page = vllm_page(max_model_len=length)
    forecast = judge(replace(seen, servers=(replace(seen.servers[0], launch=launch, vllm=page),)))
    assert forecast.feasible is allowed
    assert forecast.blocking_check == (None if allowed else "derived_length")


@given(st.integers(0, 70 * GIB), st.integers(0, 70 * GIB))
def test_more_foreign_memory_never_helps(less: int, more: int) -> None:
    low, high = sorted((less, more))
    notebook = process(900, "python")
    few, many = (judge(serving_node((notebook, held), own=GIB)) for held in (low, high))
    assert margins(many)["free_memory"] == margins(few)["free_memory"] - (high - low)
    assert not (many.feasible and not few.feasible)


# --- from one cycle to the next -------------------------------------------------------------------------


def test_a_pool_is_planned_once_while_its_inputs_stay() -> None:
    snapshot = join(serving_node(), Config())
    first = forecast_restart(snapshot.servers[0], snapshot, Config())
    again = forecast_restart(snapshot.servers[0], snapshot, Config(), first)
    assert again == first
    assert first.situation is not None
    assert again.situation is not None
    assert again.situation.pool is first.situation.pool


def _other_flags(server: ServerState) -> ServerState:
    flags = server.launch.flags.with_changes(kv_cache_dtype="fp8")
    return replace(server, launch=replace(server.launch, flags=flags))


def _other_release(server: ServerState) -> ServerState:
    return replace(server, release=Release.parse("0.11.0"))


def _other_model(server: ServerState) -> ServerState:
    assert isinstance(server.model_config, ModelConfig)
    config = {**server.model_config.config, "num_hidden_layers": 16}
    return replace(server, model_config=replace(server.model_config, config=config))


def _other_block_size(server: ServerState) -> ServerState:
    assert isinstance(server.page, VllmRecord)
    engines = tuple(replace(engine, block_size=64) for engine in server.page.engines)
    return replace(server, page=replace(server.page, engines=engines))


@pytest.mark.parametrize("change", [_other_flags, _other_release, _other_model, _other_block_size])
def test_a_pool_is_planned_anew_once_an_input_changes(change: Callable[[ServerState], ServerState]) -> None:
    snapshot = join(serving_node(), Config())
    first = forecast_restart(snapshot.servers[0], snapshot, Config())
    changed = change(snapshot.servers[0])
    then = forecast_restart(changed, snapshot, Config(), first)
    assert then == forecast_restart(changed, snapshot, Config())
    assert then != first
