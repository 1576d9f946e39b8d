from __future__ import annotations

from dataclasses import replace

import pytest

from kvwatch.config import GIB, Config
from kvwatch.forecast.restart import forecast_restart
from kvwatch.forecast.wake import forecast_wake, is_asleep, reserved_for_sleepers
from kvwatch.node import NodeSnapshot, join
from kvwatch.observe.records import ModelConfig
from tests.nodes import PARENT, RESERVED, TOTAL, gpu, observation, process, server, serving_node

CUDA_TOTAL = TOTAL - RESERVED
BUDGET = -(-CUDA_TOTAL * 92 // 100)


def asleep(*, others: int, own: int = 2 * GIB) -> NodeSnapshot:
    notebook = process(900, "python")
    return join(serving_node((notebook, others), own=own, sleep_state="weights_offloaded"), Config())


def test_a_server_that_is_awake_has_no_wake_verdict() -> None:
    snapshot = join(serving_node(sleep_state="awake"), Config())
    assert not is_asleep(snapshot.servers[0])
    assert forecast_wake(snapshot.servers[0], snapshot) is None
    assert reserved_for_sleepers(snapshot) == {}


@pytest.mark.parametrize("others", [0, GIB, 7 * GIB, 20 * GIB])
def test_waking_needs_the_budget_less_what_is_still_held(others: int) -> None:
    snapshot = asleep(others=others)
    wake = forecast_wake(snapshot.servers[0], snapshot)
    assert wake is not None
    margin = CUDA_TOTAL - 2 * GIB - others - (BUDGET - 2 * GIB)
    assert (wake.margin_bytes, wake.feasible, wake.gpu) == (margin, margin >= 0, "0")


def test_a_cache_of_a_given_size_is_all_that_comes_back_beside_the_weights() -> None:
    """The budget of such a server is far larger than what it takes."""
    seen = serving_node(own=2 * GIB, sleep_state="weights_offloaded", kv_cache_memory_bytes=4 * GIB)
    one = seen.servers[0]
    assert isinstance(one.model, ModelConfig)
    sized = replace(one, model=replace(one.model, weight_bytes=16 * GIB))
    snapshot = join(replace(seen, servers=(sized,)), Config())
    assert reserved_for_sleepers(snapshot) == {("llama", "0"): 20 * GIB}
    wake = forecast_wake(snapshot.servers[0], snapshot)
    assert wake is not None
    assert wake.margin_bytes == CUDA_TOTAL - 22 * GIB


def test_without_its_own_memory_the_wake_verdict_is_unknown() -> None:
    seen = observation((gpu({PARENT + 1: None}),), (), (server(sleep_state="discard_all"),))
    snapshot = join(seen, Config())
    wake = forecast_wake(snapshot.servers[0], snapshot)
    assert wake is not None
    assert wake.feasible is None
    assert wake.margin_bytes is None


def test_a_sleepers_budget_is_kept_from_the_others() -> None:
    sleeper = server(sleep_state="weights_offloaded", gpu_memory_utilization=0.4)
    other = replace(
        server(port=8001, name="other", pid=300, gpu_memory_utilization=0.5, num_blocks=5000),
        members=frozenset({301}),
    )
    held = {PARENT + 1: 2 * GIB, 301: 39 * GIB}
    processes = (process(PARENT + 1, "VLLM::EngineCore"), process(301, "VLLM::EngineCore"))
    snapshot = join(observation((gpu(held),), processes, (sleeper, other)), Config())
    forecast = forecast_restart(snapshot.servers[1], snapshot, Config())
    assert forecast.situation is not None
    wanted = -(-CUDA_TOTAL * 4 // 10) - 2 * GIB
    assert forecast.situation.sites[0].free_next == CUDA_TOTAL - 2 * GIB - wanted
    assert any("kept free for llama, which sleeps" in text for text in forecast.situation.assumptions)
