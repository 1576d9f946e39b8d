"""The example configuration, read by amtool and run by a real Alertmanager."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from deploy.prometheus.build import DEPLOY
from deploy.prometheus.rules import ALERTS, Alert
from tests.e2e.alertmanager import Alertmanager, Webhook
from tests.e2e.prometheus import tool
from tests.e2e.waiting import wait_until

pytestmark = pytest.mark.xdist_group("alertmanager")

CONFIG = DEPLOY / "alertmanager/alertmanager.yml"
RECEIVERS = {"critical": "page", "warning": "tickets", "info": "nobody"}
NODE = {"job": "kvwatch", "instance": "gpu1:9744"}
CHAT = {**NODE, "server": "chat"}
GPU = {**NODE, "gpu": "0"}


def amtool(*arguments: str) -> str:
    ran = subprocess.run([tool("amtool"), *arguments], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_amtool_accepts_it() -> None:
    assert "SUCCESS" in amtool("check-config", str(CONFIG))


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_severity_decides_who_is_told(alert: Alert) -> None:
    name, severity = alert.name, alert.severity
    labels = (f"alertname={name}", f"severity={severity}")
    told = amtool("config", "routes", "test", f"--config.file={CONFIG}", *labels)
    assert told.strip() == RECEIVERS[severity]


def test_inhibition_names_alerts_that_exist() -> None:
    named = {word for word in CONFIG.read_text().replace("|", '"').split('"') if word.startswith("KVWatch")}
    assert named - {"KVWatch.+"} <= {alert.name for alert in ALERTS}


@pytest.fixture(scope="module")
def alertmanager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alertmanager]:
    directory = tmp_path_factory.mktemp("alertmanager")
    with Webhook() as webhook:
        config = directory / "alertmanager.yml"
        config.write_text(CONFIG.read_text().replace("http://pager-bridge:8080/", webhook.url))
        with Alertmanager(config, directory) as server:
            yield server


SILENCED = {
    "KVWatchRestartInfeasible": (
        CHAT,
        ("KVWatchRestartInfeasibleSoon", "KVWatchRestartInfeasiblePredicted", "KVWatchRestartMarginLow"),
    ),
    "KVWatchVisibilityLost": (
        GPU,
        ("KVWatchForeignVRAM", "KVWatchOrphanedVLLM", "KVWatchUnattributedVRAM"),
    ),
    "KVWatchPendingChangeInfeasible": (CHAT, ("KVWatchPendingChange",)),
}


def test_the_greater_alert_silences_the_lesser(alertmanager: Alertmanager) -> None:
    alerts = [
        {"alertname": name, **labels}
        for source, (labels, targets) in SILENCED.items()
        for name in (source, *targets)
    ]
    other_server = {"alertname": "KVWatchAdvice", **NODE, "server": "other"}
    alertmanager.send([*alerts, other_server])
    expected = {name: True for _, targets in SILENCED.values() for name in targets}
    expected |= dict.fromkeys(SILENCED, False) | {"KVWatchAdvice": False}
    wait_until(
        lambda: alertmanager.inhibited() == expected, 10, otherwise=lambda: str(alertmanager.inhibited())
    )
