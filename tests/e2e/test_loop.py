"""The whole loop: memory is taken, the page arrives, a start fails as foretold, memory is freed, all is well.

vLLM, kvwatch, Prometheus, Alertmanager and the webhook are real, with the rules and the routes of deploy/;
only their waiting times are shortened. The card is simulated, and vLLM runs on the CPU. The start that fails
meets the machine's memory instead of the card's: the same check of free memory against total x utilization,
with a utilization that the machine cannot give.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from deploy.prometheus.build import DEPLOY, RUNBOOKS, rule_groups
from tests.e2e.alertmanager import Alertmanager, Webhook
from tests.e2e.kvwatch_daemon import KvwatchDaemon
from tests.e2e.prometheus import Prometheus
from tests.e2e.vllm_server import BASE_FLAGS, VllmServer
from tests.fakenvml import Gpu, Process, Scenario, environment

pytestmark = pytest.mark.vllm

GIB = 1 << 30
USER = psutil.Process().username()
OWN, ORPHAN, NOTEBOOK = 60 * GIB, 6 * GIB, 9 * GIB
ALERT_SECONDS = 60.0
CONFIG = "poll: {interval: 1s}\nrestart: {cuda_context: 64MiB}\n"

UTILIZATION = 0.99
"""Of the machine's memory, more is always in use than the rest."""

WITHOUT_CACHE_BYTES = BASE_FLAGS[: BASE_FLAGS.index("--kv-cache-memory-bytes")]
"""With that flag, vLLM on the CPU leaves out the check of free memory."""


@contextmanager
def process_named(name: str, directory: Path) -> Iterator[int]:
    """A process of this name in a session of its own, without a living parent; yields its pid."""
    program = directory / name
    program.symlink_to(shutil.which("sleep") or "")
    script = 'setsid "$0" 600 >/dev/null 2>&1 & echo $!'
    started = subprocess.run(["bash", "-c", script, program], check=True, capture_output=True, text=True)
    pid = int(started.stdout)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)


def write_rules(path: Path) -> None:
    """The delivered rules without waiting times."""
    groups = rule_groups()
    for group in groups:
        group["interval"] = "1s"
        for rule in group["rules"]:
            rule.pop("for", None)
            rule.pop("keep_firing_for", None)
    path.write_text(yaml.safe_dump({"groups": groups}), encoding="utf-8")


def write_routes(path: Path, webhook: Webhook) -> None:
    """The delivered routes without waiting times, to this webhook."""
    text = (DEPLOY / "alertmanager/alertmanager.yml").read_text(encoding="utf-8")
    document = yaml.safe_load(text.replace("http://pager-bridge:8080/", webhook.url))
    for route in (document["route"], *document["route"]["routes"]):
        route["group_wait"] = "0s"
        route["group_interval"] = "1s"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    with Webhook() as running:
        yield running


@pytest.fixture
def monitoring(tmp_path: Path, webhook: Webhook) -> Iterator[Prometheus]:
    """Prometheus with the delivered rules, telling an Alertmanager with the delivered routes."""
    routes, rules = tmp_path / "alertmanager.yml", tmp_path / "kvwatch.rules.yml"
    write_routes(routes, webhook)
    write_rules(rules)
    with ExitStack() as stack:
        alertmanager = stack.enter_context(Alertmanager(routes, tmp_path))
        targets = f"alertmanagers: [{{static_configs: [{{targets: ['{alertmanager.address}']}}]}}]"
        alerting = f"rule_files: ['{rules}']\nalerting: {{{targets}}}\n"
        yield stack.enter_context(Prometheus(tmp_path, alerting=alerting))


def is_alert(alert: Mapping[str, Any], name: str, status: str) -> bool:
    return bool(alert["labels"]["alertname"] == name and alert["status"] == status)


def test_the_page_comes_before_the_failure_and_goes_with_its_cause(
    vllm_venv: Path, models: Path, tmp_path: Path, monitoring: Prometheus, webhook: Webhook
) -> None:
    scenario = tmp_path / "node.scenario"
    flags = ("--max-model-len", "1024", "--gpu-memory-utilization", str(UTILIZATION))

    def hold(*others: Process) -> None:
        Scenario((Gpu(processes=(Process(worker, OWN), *others)),)).write(scenario)

    def received(name: str, status: str) -> Mapping[str, Any]:
        return webhook.wait_for(lambda alert: is_alert(alert, name, status), ALERT_SECONDS)

    with VllmServer(vllm_venv, models / "llama", tmp_path, flags) as server, ExitStack() as stack:
        [worker] = server.wait_ready().worker_pids
        hold()
        daemon = stack.enter_context(KvwatchDaemon.run(tmp_path, environment(scenario), CONFIG)).wait_ready()
        monitoring.scrape(daemon.address)
        monitoring.wait_for(f'kvwatch_restart_feasible{{server="{server.name}"}} == 1')
        assert not [alert for alert in webhook.alerts if alert["labels"]["severity"] == "critical"]

        orphan = stack.enter_context(process_named("VLLM::Worker_TP0", tmp_path))
        notebook = stack.enter_context(process_named("ipykernel_launcher", tmp_path))
        hold(Process(orphan, ORPHAN), Process(notebook, NOTEBOOK))

        fired = received("KVWatchRestartInfeasible", "firing")
        assert fired["labels"]["server"] == server.name
        assert fired["labels"]["instance"] == daemon.address
        assert fired["annotations"]["runbook_url"] == f"{RUNBOOKS}/KVWatchRestartInfeasible.md"
        told = fired["annotations"]["description"]
        margins = daemon.page().having(
            "kvwatch_restart_margin_bytes", server=server.name, check="free_memory"
        )
        missing = -margins[0].value / GIB
        assert f"If {server.name} on {daemon.address} stopped now" in told
        assert "vLLM's check free_memory would stop it." in told
        assert f"{missing:.4g}GiB are missing on GPU 0." in told
        assert f"foreign process ipykernel_launcher of {USER} (PID {notebook}, 9GiB on GPU 0)" in told
        for name, holder in (("KVWatchOrphanedVLLM", orphan), ("KVWatchForeignVRAM", notebook)):
            ticket = received(name, "firing")
            assert f"(PID {holder}, " in ticket["annotations"]["description"]

        with VllmServer(vllm_venv, models / "llama", tmp_path, flags, base=WITHOUT_CACHE_BYTES) as again:
            failed = again.wait_failed()
        assert failed.exit_code == 1
        assert any("is less than desired CPU memory utilization" in cause for cause in failed.causes)
        assert not [
            alert for alert in webhook.alerts if is_alert(alert, "KVWatchRestartInfeasible", "resolved")
        ]

        hold()
        assert received("KVWatchRestartInfeasible", "resolved")["labels"] == fired["labels"]
        assert daemon.page().get("kvwatch_restart_feasible", server=server.name) == 1
