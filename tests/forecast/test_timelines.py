"""Hours of a node's life, each cycle over the C library: what is foretold, and when.

The clock of the stories runs as fast as the cycles do; one cycle is a minute.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvwatch.config import GIB, MIB
from tests.fakenvml import environment
from tests.forecast import stories
from tests.forecast.stories import ALONE, LEAK_BEGINS, LEAK_PER_MINUTE, STORIES, leaked
from tests.support import ROOT

LLAMA = {"server": "llama"}
SAMPLER = 1024 * 128256 * 4
"""What the sampler's warm-up takes beside the budget: requests, vocabulary, bytes of a logit."""

LEAK_BLOCKS_AT = (ALONE - SAMPLER - LEAK_BEGINS) / LEAK_PER_MINUTE
"""Minute in which the leak makes the restart fail: the sampler's room is the first to go."""

TOLERANCE = 3.0
"""Minutes by which a foretold time may be off."""


@dataclass(frozen=True, slots=True)
class Told:
    """What one cycle's page says of the server."""

    minute: int
    samples: Sequence[tuple[str, Mapping[str, str], float]]

    def values(self, name: str, /, **labels: str) -> list[float]:
        return [
            value
            for sample, found, value in self.samples
            if sample == f"kvwatch_{name}" and labels.items() <= found.items()
        ]

    def value(self, name: str, /, **labels: str) -> float | None:
        found = self.values(name, **labels)
        assert len(found) <= 1, found
        return found[0] if found else None

    def chosen(self, name: str, label: str, /, **labels: str) -> list[str]:
        """The values of a label where the sample is not zero."""
        return [
            found[label]
            for sample, found, value in self.samples
            if sample == f"kvwatch_{name}" and value and labels.items() <= found.items()
        ]

    @property
    def feasible(self) -> float | None:
        return self.value("restart_feasible", **LLAMA)

    @property
    def blocking(self) -> str | None:
        return next(iter(self.chosen("restart_blocked", "check", **LLAMA)), None)

    @property
    def unknown(self) -> list[str]:
        return self.chosen("forecast_unknown", "reason", forecast="restart", **LLAMA)

    @property
    def verdict(self) -> tuple[float | None, str | None]:
        return self.feasible, self.blocking

    def margin(self, check: str = "free_memory") -> float | None:
        return self.value("restart_margin_bytes", check=check, **LLAMA)

    @property
    def eta(self) -> float | None:
        """Minutes from now until the restart is infeasible, as foretold."""
        at, now = (
            self.value("restart_infeasible_timestamp_seconds", **LLAMA),
            self.value("cycle_timestamp_seconds"),
        )
        assert now is not None
        return None if at is None else (at - now) / 60

    @property
    def rules(self) -> set[str]:
        return set(self.chosen("advice", "rule", **LLAMA)) - {"utilization_not_pinned"}


@pytest.fixture
def play(tmp_path: Path) -> Callable[[str], list[Told]]:
    """What kvwatch told in each minute of a story."""

    def played(name: str) -> list[Told]:
        ended = subprocess.run(
            [sys.executable, "-m", "tests.forecast.timeline", name],
            env=environment(tmp_path / "scenario"),
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        told = [Told(minute, json.loads(line)) for minute, line in enumerate(ended.stdout.splitlines())]
        assert len(told) == STORIES[name].minutes
        return told

    return played


def verdicts(told: Sequence[Told]) -> set[tuple[float | None, str | None]]:
    return {one.verdict for one in told}


def etas(told: Sequence[Told]) -> dict[int, float]:
    return {one.minute: one.eta for one in told if one.eta is not None}


def assert_margins(told: Sequence[Told], held: Callable[[int], int]) -> None:
    """To the byte: what the server finds free, less its budget; and the sampler's room in what is left."""
    for one in told:
        assert one.margin() == ALONE - held(one.minute), one.minute
        assert one.margin("sampler_warmup") == ALONE - SAMPLER - held(one.minute), one.minute


def assert_right(found: Mapping[int, float], *, at: float = LEAK_BLOCKS_AT) -> None:
    """Each time foretold is that at which the restart fails indeed."""
    for minute, eta in found.items():
        assert minute + eta == pytest.approx(max(at, minute), abs=TOLERANCE), minute


def first_infeasible(told: Sequence[Told]) -> int:
    return next(one.minute for one in told if one.feasible == 0)


def test_a_slow_leak_is_foretold(play: Callable[[str], list[Told]]) -> None:
    told = play("slow_leak")
    assert_margins(told, leaked)
    end = first_infeasible(told)
    assert end == pytest.approx(LEAK_BLOCKS_AT, abs=1)
    assert verdicts(told[:end]) == {(1, None)}
    assert verdicts(told[end:-1]) == {(0, "sampler_warmup"), (0, "free_memory")}
    assert told[-1].verdict == (0, "free_memory")
    found = etas(told)
    assert_right(found)
    assert min(found) <= end - 15, "an alert on the time comes a quarter of an hour ahead"
    assert min(found) <= end / 2 + TOLERANCE, (
        "what has been watched for as long as it still takes is foretold"
    )
    assert set(range(min(found), end)) <= found.keys(), "and stays foretold"


def test_a_notebook_at_noon_is_a_fact_and_no_trend(play: Callable[[str], list[Told]]) -> None:
    told = play("notebook_at_noon")
    noon, afternoon = stories.NOON, stories.AFTERNOON
    assert_margins(told, lambda minute: stories.NOTEBOOK_BYTES if noon <= minute < afternoon else 0)
    assert verdicts(told[:noon]) == {(1, None)}
    assert verdicts(told[noon:afternoon]) == {(0, "free_memory")}
    assert verdicts(told[afternoon:]) == {(1, None)}
    assert etas(told) == {}
    held = {one.value("gpu_memory_held_bytes", owner="foreign") for one in told[noon:afternoon]}
    assert held == {stories.NOTEBOOK_BYTES}
    assert told[noon].rules == {"unstable_neighbour"}
    assert told[noon + 30].rules == set()


def test_an_orphan_after_sigkill_blocks_the_way_back(play: Callable[[str], list[Told]]) -> None:
    told = play("orphan_after_sigkill")
    killed, rescued, cleared = stories.KILLED, stories.RESCUED, stories.CLEARED
    room = stories.CUDA_TOTAL - stories.CUDA_CONTEXT
    before, down, beside, after = told[:killed], told[killed:rescued], told[rescued:cleared], told[cleared:]

    def plan(one: Told) -> tuple[float | None, list[str], float | None]:
        margin = one.value("plan_margin_bytes", check="free_memory", **LLAMA)
        return one.value("plan_feasible", **LLAMA), one.chosen("plan_blocked", "check", **LLAMA), margin

    part, makeshift = stories.budget(stories.PART), stories.budget(stories.MAKESHIFT)
    for one in before:
        assert (one.verdict, one.margin()) == ((1, None), room - part)
        assert plan(one) == (1, [], room - part)
    for one in down:
        assert one.value("server_up", **LLAMA) == 0
        assert (one.verdict, one.unknown, one.margin()) == ((None, None), ["server_down"], None)
        assert plan(one) == (None, [], None)
        assert one.value("gpu_memory_held_bytes", owner="orphan") == stories.PART_BYTES
    for one in beside:
        assert (one.verdict, one.margin()) == ((1, None), room - stories.PART_BYTES - makeshift)
        assert plan(one) == (0, ["free_memory"], room - stories.PART_BYTES - part)
        assert one.value("gpu_memory_held_bytes", owner="orphan") == stories.PART_BYTES
    for one in after:
        assert (one.verdict, one.margin()) == ((1, None), room - makeshift)
        assert plan(one) == (1, [], room - part)
        assert not one.values("gpu_memory_held_bytes", owner="orphan")
    assert etas(told) == {}


def test_a_neighbour_that_comes_back_larger(play: Callable[[str], list[Told]]) -> None:
    told = play("neighbour_restart")
    stops, serves = stories.NEIGHBOUR_STOPS, stories.NEIGHBOUR_SERVES
    assert_margins(told, stories.neighbour_holds)
    assert verdicts(told[:serves]) == {(1, None)}
    assert verdicts(told[serves:]) == {(0, "free_memory")}
    assert told[-1].margin() == ALONE - stories.NEIGHBOUR_AFTER
    assert told[-1].value("gpu_memory_held_bytes", owner="neighbour") == stories.NEIGHBOUR_AFTER
    assert etas(told) == {}, "six minutes of loading are no trend"
    assert {one.minute for one in told if one.rules} == set(range(stops, serves + 7))
    assert told[serves].rules == {"unstable_neighbour"}


def test_a_sawtooth_gives_no_false_time_in_a_day(play: Callable[[str], list[Told]]) -> None:
    told = play("sawtooth")
    assert len(told) == 24 * 60
    assert_margins(told, stories.tooth)
    assert verdicts(told) == {(1, None)}
    assert etas(told) == {}


def test_one_step_gives_no_false_time(play: Callable[[str], list[Told]]) -> None:
    told = play("one_step")
    assert_margins(told, lambda minute: GIB + (stories.STEP_BYTES if minute >= stories.STEP_AT else 0))
    assert verdicts(told) == {(1, None)}
    assert etas(told) == {}


def test_a_lost_gpu_leaves_no_verdict_and_takes_none_along(play: Callable[[str], list[Told]]) -> None:
    told = play("gpu_lost")
    lost, back = stories.LOST, stories.BACK
    assert_margins([*told[:lost], *told[back:]], leaked)
    for one in told[lost:back]:
        assert (one.verdict, one.unknown) == ((None, None), ["gpu_unknown"])
        assert not one.values("restart_margin_bytes")
        assert one.eta is None, "nothing stale"
    assert told[back].verdict == (1, None), "right at once"
    found = etas(told)
    assert_right(found)
    assert {lost - 1, back} <= found.keys(), "twelve minutes do not make forget"
    assert verdicts(told[first_infeasible(told) :]) == {(0, "sampler_warmup"), (0, "free_memory")}


def test_a_new_kvwatch_is_right_at_once_and_foretells_nothing_before_it_has_watched(
    play: Callable[[str], list[Told]],
) -> None:
    told = play("kvwatch_restarts")
    again = stories.KVWATCH_RESTARTS
    assert_margins(told, leaked)
    assert told[again].verdict == (1, None)
    found = etas(told)
    assert again - 1 in found
    assert not found.keys() & set(range(again, again + 30))
    assert set(range(again + 31, first_infeasible(told))) <= found.keys()
    assert_right(found)


def test_a_clock_that_jumps_gives_no_false_time(play: Callable[[str], list[Told]]) -> None:
    told = play("clock_jumps")
    forward, back = stories.JUMPS_FORWARD, stories.JUMPS_BACK
    assert_margins(told, leaked)
    end = first_infeasible(told)
    assert verdicts(told[:end]) == {(1, None)}
    assert verdicts(told[end:]) == {(0, "sampler_warmup"), (0, "free_memory")}
    found = etas(told)
    for jump in (forward, back):
        assert not found.keys() & set(range(jump, jump + 30))
    assert any(forward < minute < back for minute in found)
    assert any(minute >= back for minute in found)
    assert_right(found)


def test_a_clock_that_jumps_while_nothing_happens(play: Callable[[str], list[Told]]) -> None:
    told = play("clock_jumps_while_nothing_happens")
    assert_margins(told, lambda _: GIB)
    assert verdicts(told) == {(1, None)}
    assert etas(told) == {}


def test_the_stories_fit_the_card() -> None:
    """The numbers that the stories rest on, once more and by hand."""
    assert (stories.CUDA_TOTAL, ALONE) == (85169143808, 85169143808 - 78355612304 - 512 * MIB)
    assert round(LEAK_BLOCKS_AT, 1) == 165.8
