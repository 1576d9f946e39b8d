"""kvwatch beside a real vLLM server, on a node whose NVML names the server's real processes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.kvwatch_daemon import FAST, KvwatchDaemon, Page, run_kvwatch
from tests.e2e.prometheus import Prometheus, check_metrics
from tests.e2e.vllm_server import VllmServer
from tests.fakenvml import Gpu, Process, Scenario, environment

pytestmark = pytest.mark.vllm

GIB = 1 << 30
HELD = 70 * GIB
"""What each worker is said to hold: less than vLLM's default share of the card."""

MISSING_ROOM = "To serve at least one request with the model's max seq len"


@dataclass(frozen=True, slots=True)
class Node:
    """One simulated card per worker of a real server."""

    scenario: Path
    environment: Mapping[str, str]

    @classmethod
    def of(cls, server: VllmServer, directory: Path) -> Node:
        scenario = directory / "node.scenario"
        node = cls(scenario, environment(scenario))
        node.hold(*server.worker_pids)
        return node

    def hold(self, *pids: int) -> None:
        """From now on, each of these processes holds memory on a card of its own."""
        Scenario(tuple(Gpu(processes=(Process(pid, HELD),)) for pid in pids)).write(self.scenario)

    def empty(self) -> None:
        """From now on, nobody holds memory on the only card."""
        Scenario().write(self.scenario)


@dataclass(frozen=True, slots=True)
class View:
    """The shared server, and a daemon that was told nothing of it."""

    server: VllmServer
    node: Node
    daemon: KvwatchDaemon
    page: Page


@pytest.fixture(scope="module")
def view(server: VllmServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[View]:
    directory = tmp_path_factory.mktemp("view")
    node = Node.of(server, directory)
    with KvwatchDaemon.run(directory, node.environment) as daemon:
        yield View(server, node, daemon.wait_ready(), daemon.page())


def assert_pool_as_told(page: Page, server: VllmServer) -> None:
    """The page's KV cache is what the server itself says of it, in its labels and in its log."""
    told = server.cache_config()
    lines = server.pool_lines()
    assert len(lines) == len(told)
    for (engine, labels), line in zip(sorted(told.items()), lines, strict=True):

        def published(family: str, engine: str = engine) -> float | None:
            return page.get(f"kvwatch_kv_cache_{family}", server=server.name, engine=engine)

        # vLLM's label is the sum over all engines.
        assert published("blocks") == int(labels["num_gpu_blocks"]) / len(told)
        assert published("block_size_tokens") == int(labels["block_size"])
        assert published("capacity_tokens") == int(labels["kv_cache_size_tokens"]) == line.tokens
        concurrency = published("max_concurrency")
        assert concurrency == float(labels["kv_cache_max_concurrency"])
        assert concurrency == pytest.approx(line.concurrency, abs=0.005)
        assert published("bytes") == int(labels["kv_cache_memory_bytes"])
    assert page.get("kvwatch_max_model_len_tokens", server=server.name) == server.max_model_len()


def test_finds_the_server_without_being_told(view: View) -> None:
    server = view.server
    assert view.page.get("kvwatch_server_up", server=server.name) == 1
    info = view.page.having("kvwatch_server_info", server=server.name)[0]
    assert info.labels["endpoint"] == server.base_url
    assert info.labels["version"] == server.get_json("/version")["version"]
    assert info.labels["basis"] == "measured"


def test_publishes_the_pool_as_the_server_tells_it(view: View) -> None:
    assert_pool_as_told(view.page, view.server)


def test_counts_the_workers_memory_as_the_servers(view: View) -> None:
    held = {
        (sample.labels["owner"], sample.labels["server"]): sample.value
        for sample in view.page.having("kvwatch_gpu_memory_held_bytes")
        if sample.value
    }
    assert held == {("server", view.server.name): HELD}
    pool = view.page.get("kvwatch_kv_cache_bytes", server=view.server.name)
    assert pool is not None
    assert view.page.get("kvwatch_server_non_kv_bytes", server=view.server.name) == HELD - pool


def test_page_is_clean_for_promtool(view: View) -> None:
    assert check_metrics(view.page.text) == ""


def test_prometheus_gets_the_margins(view: View, prometheus: Prometheus) -> None:
    prometheus.scrape(view.daemon.address)
    published = {
        sample.labels["check"]: sample.value
        for sample in view.page.having("kvwatch_restart_margin_bytes", server=view.server.name)
    }
    assert published
    queried = prometheus.query(f'kvwatch_restart_margin_bytes{{server="{view.server.name}"}}')
    assert {result.labels["check"]: result.value for result in queried} == published
    assert [result.value for result in prometheus.query("up")] == [1]


def test_status_tells_the_verdict(view: View, tmp_path: Path) -> None:
    # Told of the server, and of no other: another one on this machine would take part in the exit code.
    config = tmp_path / "kvwatch.yaml"
    config.write_text(f"discovery: false\nservers: [{{url: {view.server.base_url}, gpus: ['0']}}]\n")
    table = run_kvwatch(view.node.environment, "status", "--config", config, cwd=tmp_path)
    assert table.returncode == 0, table.stdout + table.stderr
    assert view.server.name in table.stdout
    document = run_kvwatch(view.node.environment, "status", "--json", "--config", config, cwd=tmp_path)
    [told] = json.loads(document.stdout)["servers"]
    assert told["server"] == view.server.name
    assert told["restart"]["feasible"] is True


def test_killed_server_leaves_nothing_stale(vllm_venv: Path, models: Path, tmp_path: Path) -> None:
    with VllmServer(vllm_venv, models / "llama", tmp_path, ("--max-model-len", "2048")) as server:
        server.wait_ready()
        node = Node.of(server, tmp_path)
        named = f"{FAST}servers: [{{url: {server.base_url}, name: chat}}]\n"
        with (
            KvwatchDaemon.run(tmp_path / "discovering", node.environment) as discovering,
            KvwatchDaemon.run(tmp_path / "told", node.environment, named) as told,
        ):
            assert discovering.wait_ready().page().get("kvwatch_server_up", server=server.name) == 1
            before = told.wait_ready().page()
            assert before.get("kvwatch_server_up", server="chat") == 1
            assert before.get("kvwatch_restart_feasible", server="chat") == 1

            server.kill()
            node.empty()
            after = told.page_after(cycles=1)
            assert after.get("kvwatch_server_up", server="chat") == 0
            assert {sample.name for sample in after.having(server="chat")} == {
                "kvwatch_server_up",
                "kvwatch_server_info",
                "kvwatch_forecast_unknown",
            }
            # Nothing says that it will come back.
            assert discovering.page_after(cycles=1).having(server=server.name) == []


def test_two_engines_share_the_sum(vllm_venv: Path, models: Path, tmp_path: Path) -> None:
    flags = ("--max-model-len", "2048", "--data-parallel-size", "2")
    with VllmServer(vllm_venv, models / "llama", tmp_path, flags) as server:
        server.wait_ready()
        assert len(server.engine_pids) == 2
        node = Node.of(server, tmp_path)
        with KvwatchDaemon.run(tmp_path, node.environment) as daemon:
            page = daemon.wait_ready().page()
            assert_pool_as_told(page, server)
            assert page.get("kvwatch_restart_feasible", server=server.name) == 1
            free_memory = page.having("kvwatch_restart_margin_bytes", server=server.name, check="free_memory")
            assert {sample.labels["gpu"] for sample in free_memory} == {"0", "1"}


def test_real_restarts_confirm_the_verdict(vllm_venv: Path, models: Path, tmp_path: Path) -> None:
    model = models / "big-kv"

    def flags(length: int) -> tuple[str, ...]:
        return ("--max-model-len", str(length), "--kv-cache-memory-bytes", "64M")

    with VllmServer(vllm_venv, model, tmp_path, flags(1024)) as first:
        first.wait_ready()
        pid, port, name = first.pid, first.port, first.name
        node = Node.of(first, tmp_path)
        with KvwatchDaemon.run(tmp_path, node.environment) as daemon:
            page = daemon.wait_ready().page()
        assert page.get("kvwatch_restart_feasible", server=name) == 1
        longest = int(page.get("kvwatch_restart_max_model_len_tokens", server=name) or 0)
        assert longest > 1024
        assert first.stop() == 0

    with VllmServer(vllm_venv, model, tmp_path, flags(longest), port=port) as second:
        second.wait_ready()
        assert second.pid != pid
        node.hold(*second.worker_pids)
        too_long = f"{FAST}servers: [{{url: {second.base_url}, flags: {{max_model_len: {longest + 1}}}}}]\n"
        with (
            KvwatchDaemon.run(tmp_path / "as-is", node.environment) as as_is,
            KvwatchDaemon.run(tmp_path / "too-long", node.environment, too_long) as longer,
        ):
            page = as_is.wait_ready().page()
            assert page.get("kvwatch_restart_feasible", server=name) == 1
            assert page.get("kvwatch_restart_max_model_len_tokens", server=name) == longest
            page = longer.wait_ready().page()
            assert page.get("kvwatch_restart_feasible", server=name) == 0
            blocking = [
                s.labels["check"] for s in page.having("kvwatch_restart_blocked", server=name) if s.value
            ]
            assert blocking == ["one_request"]
            assert page.get("kvwatch_restart_max_model_len_tokens", server=name) == longest
        assert second.stop() == 0

    with VllmServer(vllm_venv, model, tmp_path, flags(longest + 1), port=port) as third:
        failed = third.wait_failed()
    assert failed.exit_code == 1
    cause = next(cause for cause in failed.causes if MISSING_ROOM in cause)
    estimate = re.search(r"estimated maximum model length is (\d+)", cause)
    assert estimate
    assert int(estimate[1]) == longest
