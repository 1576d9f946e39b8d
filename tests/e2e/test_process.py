"""The daemon as a process: how it ends, what it writes, what systemd hears."""

from __future__ import annotations

import json
import time
from pathlib import Path

from tests.e2e.kvwatch_daemon import FAST, KvwatchDaemon
from tests.e2e.waiting import wait_until
from tests.fakenvml import Gpu, Scenario, environment, hang
from tests.systemd import Manager


def test_sigterm_ends_it_within_two_seconds_with_nvml_wedged(tmp_path: Path) -> None:
    scenario = tmp_path / "nvml.scenario"
    Scenario((Gpu(),)).write(scenario)
    with KvwatchDaemon.run(tmp_path, environment(scenario), FAST + "discovery: false\n") as daemon:
        daemon.wait_ready()
        Scenario((Gpu(),), (hang("nvmlDeviceGetMemoryInfo*", 600),)).write(scenario)
        wait_until(
            lambda: daemon.page().get("kvwatch_source_up", source="nvml") == 0, 30, otherwise=daemon.log_text
        )
        assert not daemon.page().having("kvwatch_gpu_memory_free_bytes")
        begun = time.monotonic()
        assert daemon.stop() == 0
        assert time.monotonic() - begun < 2


def test_systemd_hears_of_start_reload_and_end(tmp_path: Path) -> None:
    scenario = tmp_path / "nvml.scenario"
    Scenario((Gpu(),)).write(scenario)
    with Manager(tmp_path / "notify") as manager:
        told = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "1000000"}
        config = FAST + "discovery: false\n"
        with KvwatchDaemon.run(tmp_path, {**environment(scenario), **told}, config) as daemon:
            manager.wait_for("READY=1", 30)
            manager.wait_for("WATCHDOG=1", 30)
            assert daemon.reload()
            manager.wait_for("RELOADING=1", 30)
            manager.wait_for("READY=1", 30)
            assert daemon.stop() == 0
            manager.wait_for("STOPPING=1")


def test_the_log_can_be_json(tmp_path: Path) -> None:
    scenario = tmp_path / "nvml.scenario"
    Scenario((Gpu(),)).write(scenario)
    (tmp_path / "kvwatch.yaml").write_text(FAST + "discovery: false\n", encoding="utf-8")
    command = ("run", "--config", "kvwatch.yaml", "--log-format", "json")
    with KvwatchDaemon(tmp_path, environment(scenario), *command) as daemon:
        wait_until(lambda: '"serving"' in daemon.log_text(), 30)
        assert daemon.stop() == 0
    lines = [json.loads(line) for line in daemon.log_text().splitlines()]
    assert "serving" in {line["event"] for line in lines}
