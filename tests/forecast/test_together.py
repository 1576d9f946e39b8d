from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvwatch.blockmath.flags import Flags
from kvwatch.config import GIB, Config, Restart
from kvwatch.forecast.restart import forecast_restart
from kvwatch.forecast.together import TogetherForecast, forecast_together
from kvwatch.node import join
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
)


def two_on_one_card(first: float, second: float) -> dict[str, TogetherForecast | None]:
    """Two servers that share a card, each within its utilization."""
    big = server(
        flags=Flags(gpu_memory_utilization=first, max_model_len=32768),
        gpu_memory_utilization=first,
        num_blocks=6000,
    )
    small = replace(
        server(
            port=8001,
            name="small",
            pid=300,
            flags=Flags(gpu_memory_utilization=second, max_model_len=32768),
            gpu_memory_utilization=second,
            num_blocks=6000,
        ),
        members=frozenset({301}),
    )
    held = {PARENT + 1: int(first * 79 * GIB), 301: int(min(second, 1 - first) * 77 * GIB)}
    processes = (process(PARENT + 1, "VLLM::EngineCore"), process(301, "VLLM::EngineCore"))
    snapshot = join(observation((gpu(held),), processes, (big, small)), Config())
    restart = {one.name: forecast_restart(one, snapshot, Config()) for one in snapshot.servers}
    return {name: forecast_together(name, restart) for name in restart}


@pytest.mark.parametrize("asleep", [("llama",), ("small",), ("llama", "small")])
def test_what_is_kept_for_a_sleeper_is_free_once_it_stopped(asleep: tuple[str, ...]) -> None:
    state = {"sleep_state": "weights_offloaded"}
    sleeping: dict[str, dict[str, Any]] = {
        name: state if name in asleep else {} for name in ("llama", "small")
    }
    first = server(gpu_memory_utilization=0.9, num_blocks=6000, **sleeping["llama"])
    second = replace(
        server(
            port=8001, name="small", pid=300, gpu_memory_utilization=0.9, num_blocks=6000, **sleeping["small"]
        ),
        members=frozenset({301}),
    )
    held = {pid: (2 if name in asleep else 60) * GIB for pid, name in ((PARENT + 1, "llama"), (301, "small"))}
    processes = (process(PARENT + 1, "VLLM::EngineCore"), process(301, "VLLM::EngineCore"))
    snapshot = join(observation((gpu(held),), processes, (first, second)), Config())
    restart = {one.name: forecast_restart(one, snapshot, Config()) for one in snapshot.servers}
    for name in restart:
        together = forecast_together(name, restart)
        assert together is not None
        assert (together.first.feasible, together.last.feasible) == (True, False)


def test_both_come_back_where_both_budgets_fit() -> None:
    found = two_on_one_card(0.45, 0.45)
    for name, other in (("llama", "small"), ("small", "llama")):
        together = found[name]
        assert together is not None
        assert together.sharing == (other,)
        assert together.first.feasible is True
        assert together.last.feasible is True
        assert together.overcommitted == {}


def test_the_last_one_does_not_come_back_where_the_budgets_exceed_the_card() -> None:
    found = two_on_one_card(0.6, 0.5)
    for together in found.values():
        assert together is not None
        assert together.first.feasible is True
        assert together.last.feasible is False
        assert together.last.blocking is not None
        assert together.last.blocking.check == "free_memory"
        assert together.overcommitted == {"0": pytest.approx(1.1)}


def test_a_server_alone_on_its_card_has_nobody_to_wait_for() -> None:
    snapshot = join(serving_node(), Config())
    restart = {"llama": forecast_restart(snapshot.servers[0], snapshot, Config())}
    assert forecast_together("llama", restart) is None


def test_at_once_each_is_charged_with_what_the_other_loads() -> None:
    # Two servers that come back one after the other, but whose non-KV memory is most of their budgets.
    found = two_on_one_card(0.45, 0.45)
    for together in found.values():
        assert together is not None
        blocks = 6000 * LLAMA_8B_BLOCK
        budget = -(-(TOTAL - RESERVED) * 45 // 100)
        other = budget - blocks
        left = {check.check: check.margin_bytes for check in together.at_once.checks if check.gpu is not None}
        assert left["kv_memory"] == blocks - other - Restart().cuda_context - LLAMA_8B_BLOCK - 1
        assert together.at_once.feasible is False
        assert together.at_once.blocking is not None
        assert together.at_once.blocking.check == "kv_memory"
