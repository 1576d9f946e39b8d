from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest

from kvwatch.config import GIB, Config
from kvwatch.forecast.history import MAX_POINTS, History, Outlook
from kvwatch.forecast.restart import forecast_restart
from kvwatch.forecast.trend import Series
from kvwatch.node import join
from kvwatch.observe.records import VllmRecord
from kvwatch.observe.vllm_page import MAX_ENGINES
from tests.nodes import NOW, process, serving_node

NOTEBOOK = process(900, "ipykernel_launcher", user="dana")


class Watched:
    """A history fed with a node on which a notebook holds so much at each minute."""

    def __init__(self) -> None:
        self.history = History()
        self.minute = 0

    def play(self, *held: int, **node: Any) -> None:
        for size in held:
            seen = replace(serving_node((NOTEBOOK, size), own=70 * GIB, **node), time=NOW + self.minute * 60)
            self.snapshot = join(seen, Config())
            restart = {
                one.name: forecast_restart(one, self.snapshot, Config()) for one in self.snapshot.servers
            }
            self.history.add(self.snapshot, restart)
            self.minute += 1

    @property
    def outlook(self) -> Outlook:
        return self.history.outlook(self.snapshot.servers[0])


def test_engines_with_other_names_each_time_fill_no_memory() -> None:
    history = History()

    def kept() -> int:
        return sum(isinstance(thing, Series) for thing in gc.get_objects())

    before = kept()
    for minute in range(4):
        seen = serving_node(own=70 * GIB, engines=200)
        (server,) = seen.servers
        assert isinstance(server.vllm, VllmRecord)
        renamed = tuple(replace(engine, engine=f"{minute}{engine.engine}") for engine in server.vllm.engines)
        server = replace(server, vllm=replace(server.vllm, engines=renamed))
        snapshot = join(replace(seen, servers=(server,), time=NOW + minute * 60), Config())
        history.add(
            snapshot, {one.name: forecast_restart(one, snapshot, Config()) for one in snapshot.servers}
        )
    assert 200 <= kept() - before <= MAX_ENGINES


def test_a_leaking_notebook_gives_a_time() -> None:
    watched = Watched()
    watched.play(*(GIB + minute * GIB // 20 for minute in range(70)))
    trend = watched.outlook.margin
    assert trend is not None
    assert trend.slope == pytest.approx(-GIB / 20 / 60, rel=0.01)
    assert NOW + 70 * 60 <= trend.zero_at <= NOW + 140 * 60


def test_a_notebook_at_rest_gives_none() -> None:
    watched = Watched()
    watched.play(*[2 * GIB] * 60)
    assert watched.outlook.margin is None
    assert watched.outlook.unstable_gpus == ()


def test_a_filling_cache_gives_a_time() -> None:
    watched = Watched()
    for minute in range(50):
        watched.play(GIB, usage=0.3 + minute * 0.01)
    assert watched.outlook.kv_full_at["0"] == pytest.approx(NOW + 70 * 60, abs=300)


def test_memory_that_moves_is_unstable_until_it_rests() -> None:
    watched = Watched()
    watched.play(GIB, 2 * GIB)
    assert list(watched.outlook.unstable_gpus) == ["0"]
    watched.play(*[2 * GIB] * 8)
    assert list(watched.outlook.unstable_gpus) == []


def test_a_server_that_is_gone_is_forgotten() -> None:
    watched = Watched()
    watched.play(*(GIB + minute * GIB // 20 for minute in range(70)))
    gone = join(serving_node(), Config())
    empty = type(gone)(time=NOW + 71 * 60, gpus=gone.gpus, servers=(), sources=())
    watched.history.add(empty, {})
    assert watched.outlook.margin is None


def test_what_this_cycle_could_not_tell_is_not_handed_out() -> None:
    watched = Watched()
    leak = [GIB + minute * GIB // 20 for minute in range(72)]
    watched.play(*leak[:70])
    before = watched.outlook.margin
    assert before is not None
    watched.play(leak[70], version=None)
    assert watched.outlook.margin is None
    assert watched.outlook.margins == ()
    watched.play(leak[71])
    after = watched.outlook.margin
    assert after is not None
    assert after.zero_at == pytest.approx(before.zero_at, abs=1)


def test_the_course_is_thinned_and_keeps_lows_and_the_newest() -> None:
    watched = Watched()
    assert watched.history.outlook(join(serving_node(), Config()).servers[0]).margins == ()
    watched.play(*[5 * GIB if minute == 90 else GIB for minute in range(200)], 2 * GIB)
    outlook = watched.outlook
    times, margins = zip(*outlook.margins, strict=True)
    assert outlook.margins_gpu == "0"
    assert len(margins) <= MAX_POINTS
    assert list(times) == sorted(times)
    assert times[-1] == NOW + 200 * 60
    assert min(margins) == margins[0] - 4 * GIB
    assert margins[-1] == margins[0] - GIB
