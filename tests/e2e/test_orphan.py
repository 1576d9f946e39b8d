"""A real vLLM whose parent is killed: its engine survives it with its memory, and is called an orphan."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.e2e.kvwatch_daemon import FAST, KvwatchDaemon, Page, run_kvwatch
from tests.e2e.vllm_server import GONE_SECONDS, VllmServer
from tests.fakenvml import Gpu, Process, Scenario, environment

pytestmark = pytest.mark.vllm

GIB = 1 << 30
OWN = 70 * GIB
VICTIMS = 8 * GIB
"""Too much beside what the other server wants: 92 % of the card."""


def owners(page: Page) -> dict[tuple[str, str], float]:
    """Bytes by class and server."""
    held = page.having("kvwatch_gpu_memory_held_bytes")
    return {(s.labels["owner"], s.labels["server"]): s.value for s in held if s.value}


def feasible(page: Page, server: VllmServer) -> float | None:
    return page.get("kvwatch_restart_feasible", server=server.name)


def test_what_a_killed_server_leaves_behind(
    server: VllmServer, vllm_venv: Path, models: Path, tmp_path: Path
) -> None:
    scenario = tmp_path / "node.scenario"
    node = environment(scenario)
    [own] = server.worker_pids
    alone = Scenario((Gpu(processes=(Process(own, OWN),)),))
    alone.write(scenario)
    with (
        VllmServer(vllm_venv, models / "llama", tmp_path, ("--max-model-len", "2048")) as victim,
        KvwatchDaemon.run(tmp_path, node, FAST) as daemon,
    ):
        victim.wait_ready()
        assert feasible(daemon.wait_ready().page_after(), server) == 1
        [engine], [worker] = victim.engine_pids, victim.worker_pids
        shared = Scenario((Gpu(processes=(Process(own, OWN), Process(worker, VICTIMS))),))
        shared.write(scenario)
        page = daemon.page_after()
        assert owners(page) == {("server", server.name): OWN, ("server", victim.name): VICTIMS}

        victim.kill_parent()
        survivors = [psutil.Process(engine), psutil.Process(worker)]
        page = daemon.page_after(cycles=2)
        assert owners(page) == {("server", server.name): OWN, ("orphan", ""): VICTIMS}
        [holder] = page.having("kvwatch_holder_memory_bytes")
        assert (holder.labels["pid"], holder.labels["process"]) == (str(worker), "VLLM::Worker")
        assert page.having(server=victim.name) == []
        assert feasible(page, server) == 0

        # One look without any memory of what was before says the same, and what to type.
        looked = run_kvwatch(node, "holders", "--json", cwd=tmp_path)
        assert looked.returncode == 0, looked.stderr
        [card] = json.loads(looked.stdout)["gpus"]
        [told] = [one for one in card["holders"] if one["pid"] == worker]
        assert (told["owner"], told["command"]) == ("orphan", f"kill {worker}")
        [restart] = [one for one in told["restarts"] if one["server"] == server.name]
        assert (restart["feasible"], restart["feasible_without"]) == (False, True)
        assert all(process.is_running() for process in survivors)

        for process in survivors:
            os.kill(process.pid, signal.SIGKILL)
        psutil.wait_procs(survivors, GONE_SECONDS)
        page = daemon.page_after()
        assert owners(page) == {("server", server.name): OWN, ("releasing", ""): VICTIMS}
        assert feasible(page, server) == 1
        alone.write(scenario)
        page = daemon.page_after()
        assert owners(page) == {("server", server.name): OWN}
        assert page.having("kvwatch_holder_memory_bytes") == []
