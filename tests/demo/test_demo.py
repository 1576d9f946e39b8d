from __future__ import annotations

from collections.abc import Iterator

import pytest
import requests

from kvwatch.config import Config
from kvwatch.demo.node import DemoNode
from kvwatch.demo.scenario import Scenario, at, load_scenario
from kvwatch.export.cycle import Cycle
from kvwatch.monitor import Monitor
from kvwatch.observe.cycle import Observer
from kvwatch.ownership import Owner


class ScriptedClock(DemoNode):
    """The demo's node at a minute that the test sets."""

    set_minute = 0.0

    @property
    def minute(self) -> float:
        return self.set_minute


@pytest.fixture(scope="module")
def node() -> Iterator[ScriptedClock]:
    with ScriptedClock(load_scenario(), speed=1) as running:
        yield running


@pytest.fixture(scope="module")
def monitor(node: ScriptedClock) -> Monitor:
    config = Config()
    return Monitor(Observer(node, config, now=node.now), config, now=node.now, simulated=True)


def cycle_at(node: ScriptedClock, monitor: Monitor, minute: float) -> Cycle:
    node.set_minute = minute
    return monitor.cycle()


@pytest.mark.parametrize(
    ("minute", "feasible", "check", "owners"),
    [
        (1, True, None, {Owner.FOREIGN}),
        (40, True, None, {Owner.FOREIGN}),
        (45, False, "free_memory", {Owner.ORPHAN, Owner.FOREIGN}),
        (54, True, None, {Owner.ORPHAN}),
        (58, True, None, set()),
    ],
)
def test_the_script_turns_the_verdict_and_turns_it_back(
    node: ScriptedClock,
    monitor: Monitor,
    minute: float,
    feasible: bool,
    check: str | None,
    owners: set[Owner],
) -> None:
    cycle = cycle_at(node, monitor, minute)
    forecast = cycle.forecasts.restart["llama-3.3-70b"]
    assert (forecast.feasible, forecast.blocking_check) == (feasible, check)
    held = {holder.ownership.owner for state in cycle.snapshot.gpus for holder in state.holders} - {
        Owner.SERVER
    }
    assert held == owners


def test_the_server_is_read_over_http_and_found_by_its_command_line(
    node: ScriptedClock, monitor: Monitor
) -> None:
    server = cycle_at(node, monitor, 0).snapshot.servers[0]
    assert server.up
    assert server.launch.base_url == f"http://127.0.0.1:{node.port}"
    assert server.launch.flags.tp == 2
    assert server.gpus == ("0", "1")
    assert server.max_model_len == 16384


def test_the_numbers_belong_together(node: ScriptedClock, monitor: Monitor) -> None:
    cycle = cycle_at(node, monitor, 0)
    forecast = cycle.forecasts.restart["llama-3.3-70b"]
    assert forecast.situation is not None
    blocks = load_scenario().server.num_blocks
    for site in forecast.situation.sites:
        assert site.non_kv is not None
        assert 65 * 2**30 < site.non_kv < 70 * 2**30
    assert forecast.verdict is not None
    assert forecast.verdict.longest_length == (blocks - 1) * 16


@pytest.mark.parametrize("minute", range(60))
def test_no_card_is_ever_overcommitted(node: ScriptedClock, monitor: Monitor, minute: int) -> None:
    for state in cycle_at(node, monitor, minute).snapshot.gpus:
        assert state.gpu.memory is not None
        assert state.gpu.memory.free > 0


def test_other_paths_are_not_found(node: ScriptedClock) -> None:
    assert requests.get(f"http://127.0.0.1:{node.port}/nothing", timeout=5).status_code == 404


def test_rounds_repeat_and_lines_are_straight() -> None:
    assert at(((0.0, 1.0), (10.0, 2.0)), 5) == 1.5
    assert at(((0.0, 1.0), (10.0, 2.0)), 50) == 2.0
    scenario: Scenario = load_scenario()
    with DemoNode(scenario, speed=1e6) as node:
        assert 0 <= node.minute < scenario.round_minutes
