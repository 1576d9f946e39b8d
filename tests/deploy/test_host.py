"""The systemd unit, the container image's recipe and the Compose file, by their own validators."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.prometheus.build import DEPLOY
from tests.e2e.prometheus import tool

UNIT = DEPLOY / "systemd/kvwatch.service"
COMPOSE = DEPLOY / "docker/compose.yaml"
SCRIPTS = Path(sys.executable).parent
EXPOSURE_AT_MOST = 30
"""Tenths of systemd's exposure level; an unhardened service has 96."""
BLINDING = ("PrivateDevices", "DevicePolicy", "ProtectClock", "ProtectProc", "ProcSubset", "PrivateUsers")


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={"PATH": "/usr/bin:/bin", **environment}
    )


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit with a program that exists here."""
    path = tmp_path / UNIT.name
    text = UNIT.read_text(encoding="utf-8")
    path.write_text(text.replace("/opt/kvwatch/bin/kvwatch", str(SCRIPTS / "kvwatch")), encoding="utf-8")
    return path


def verify(unit: Path) -> str:
    """What systemd objects to; it exits with 0 on unknown keys."""
    verified = run(tool("systemd-analyze"), "verify", "--recursive-errors=no", unit)
    return verified.stdout + verified.stderr


def test_systemd_accepts_the_unit(unit: Path) -> None:
    assert verify(unit) == ""


def test_systemd_objects_to_an_unknown_key(unit: Path) -> None:
    unit.write_text(unit.read_text().replace("PrivateTmp=", "PrivateTemp="))
    assert "PrivateTemp" in verify(unit)


def test_the_unit_is_hardened_and_not_blind(unit: Path) -> None:
    offline = ("security", "--offline=true", f"--threshold={EXPOSURE_AT_MOST}")
    judged = run(tool("systemd-analyze"), *offline, unit)
    assert judged.returncode == 0, judged.stdout
    settings = [line.partition("=")[0] for line in UNIT.read_text().splitlines() if line[:1] != "#"]
    assert set(settings).isdisjoint(BLINDING)


def test_hadolint_finds_nothing() -> None:
    linted = run(SCRIPTS / "hadolint", DEPLOY / "docker/Dockerfile")
    assert (linted.returncode, linted.stdout) == (0, "")


def test_the_image_runs_without_root() -> None:
    lines = (DEPLOY / "docker/Dockerfile").read_text(encoding="utf-8").splitlines()
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users[-1:] == ["65532:65532"]


def compose() -> dict[str, Any]:
    asked = run(SCRIPTS / "docker-compose", "-f", COMPOSE, "config", "--format", "json", GRAFANA_PASSWORD="x")
    assert asked.returncode == 0, asked.stderr
    assert asked.stderr == ""
    document: dict[str, Any] = json.loads(asked.stdout)
    return document["services"]  # type: ignore[no-any-return]


def test_compose_accepts_the_file() -> None:
    assert set(compose()) == {"kvwatch", "prometheus", "alertmanager", "grafana"}


def test_compose_refuses_to_start_without_a_password() -> None:
    asked = run(SCRIPTS / "docker-compose", "-f", COMPOSE, "config", "-q")
    assert "set GRAFANA_PASSWORD" in asked.stderr
    assert asked.returncode != 0


def test_every_mounted_file_exists() -> None:
    mounts = [
        Path(volume["source"])
        for service in compose().values()
        for volume in service.get("volumes", ())
        if volume["type"] == "bind"
    ]
    assert len(mounts) == 5
    assert [mount for mount in mounts if not mount.exists()] == []


def test_the_container_sees_holders_and_can_do_no_more() -> None:
    service = compose()["kvwatch"]
    assert (service["pid"], service["network_mode"]) == ("host", "host")
    assert service["cap_drop"] == ["ALL"]
    assert service["cap_add"] == ["SYS_PTRACE", "DAC_READ_SEARCH"]
    assert service["read_only"] is True


def test_grafana_is_given_the_boards_and_the_data_source() -> None:
    folder = DEPLOY / "docker/grafana/provisioning"
    [source] = yaml.safe_load((folder / "datasources/prometheus.yaml").read_text())["datasources"]
    assert source["type"] == "prometheus"
    [provider] = yaml.safe_load((folder / "dashboards/kvwatch.yaml").read_text())["providers"]
    targets = {volume["target"] for volume in compose()["grafana"]["volumes"]}
    assert provider["options"]["path"] in targets


def test_prometheus_accepts_its_configuration() -> None:
    checked = run(tool("promtool"), "check", "config", DEPLOY / "prometheus/prometheus.yml")
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_yaml_is_clean() -> None:
    rules = (
        "{extends: default, rules: {line-length: disable, document-start: disable,"
        " comments-indentation: disable, braces: {max-spaces-inside: 0}}}"
    )
    plain = [
        path
        for path in sorted(DEPLOY.rglob("*.y*ml"))
        # The chart's templates are no YAML before Helm has seen them.
        if "templates" not in path.parts
    ]
    assert len(plain) > 10
    linted = run(SCRIPTS / "yamllint", "--strict", "-d", rules, *plain)
    assert linted.returncode == 0, linted.stdout
