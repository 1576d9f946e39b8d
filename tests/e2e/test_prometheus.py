"""A real Prometheus on the page of the embedded node."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.e2e.kvwatch_daemon import KvwatchDaemon
from tests.e2e.prometheus import Prometheus, check_metrics

pytestmark = pytest.mark.xdist_group("prometheus")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KvwatchDaemon]:
    with KvwatchDaemon(tmp_path_factory.mktemp("demo"), os.environ, "demo") as daemon:
        yield daemon.wait_ready()


def test_scrapes_the_page(demo: KvwatchDaemon, prometheus: Prometheus) -> None:
    prometheus.scrape(demo.address)
    margins = prometheus.query("min by (server) (kvwatch_restart_margin_bytes)")
    servers = {result.labels["server"] for result in prometheus.query("kvwatch_server_up == 1")}
    assert servers
    assert {result.labels["server"] for result in margins} == servers
    assert [result.value for result in prometheus.query("up")] == [1]
    assert prometheus.query('kvwatch_build_info{simulated="true"} == 1')


def test_promtool_finds_nothing_to_object_to(demo: KvwatchDaemon) -> None:
    assert check_metrics(demo.page().text) == ""


def test_promtool_objects_to_a_bad_page() -> None:
    """The check itself works: a counter without _total and without help is two objections."""
    assert "total" in check_metrics("# TYPE kvwatch_cycles counter\nkvwatch_cycles 1\n")
