"""The alert rules, run by promtool."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.prometheus.build import DEPLOY, files, rule_groups
from deploy.prometheus.rules import ALERT_GROUPS, ALERTS, RECORDING_GROUPS, Alert
from kvwatch.export.catalogue import BY_NAME as CATALOGUE
from tests.deploy.cases import CASES, Case
from tests.deploy.promql import families
from tests.e2e.prometheus import tool

RULES = DEPLOY / "prometheus/kvwatch.rules.yml"
TARGET = {"job": "kvwatch", "instance": "gpu1:9744"}
ALERT_RULES = {rule["alert"]: rule for group in rule_groups() for rule in group["rules"] if "alert" in rule}
ALWAYS = {"up": "1+0x800", "kvwatch_up": "1+0x800"}


def rules_of(alert: str, directory: Path) -> Path:
    """A rule file with the recording rules and the group of one alert: the rest only takes time."""
    groups = [
        group
        for group in rule_groups()
        if group["name"] in RECORDING_GROUPS or alert in (rule["alert"] for rule in group["rules"])
    ]
    path = directory / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": groups}), encoding="utf-8")
    return path


def promtool(test: dict[str, Any], directory: Path) -> None:
    path = directory / "test.yml"
    path.write_text(yaml.safe_dump(test, sort_keys=False), encoding="utf-8")
    ran = subprocess.run(
        [tool("promtool"), "test", "rules", path], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def rules_test(series: dict[str, str], alerts: list[dict[str, Any]], rules: Path = RULES) -> dict[str, Any]:
    return {
        "rule_files": [str(rules)],
        "evaluation_interval": "1m",
        # Groups that are left out share the first place, in an order that varies.
        "group_eval_order": [*RECORDING_GROUPS, *ALERT_GROUPS],
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "alert_rule_test": alerts,
            }
        ],
    }


def on_target(series: str) -> str:
    family, _, labels = series.rstrip("}").partition("{")
    target = ",".join(f'{name}="{value}"' for name, value in TARGET.items())
    return f"{family}{{{target}{',' if labels else ''}{labels}}}"


def expectation(case: Case) -> list[dict[str, Any]]:
    rule = ALERT_RULES[case.alert]
    return [
        {
            "eval_time": time,
            "alertname": case.alert,
            "exp_alerts": [
                {
                    "exp_labels": {**TARGET, **rule["labels"], **firing.labels},
                    "exp_annotations": {**rule["annotations"], "description": firing.description},
                }
                for firing in alerts
            ],
        }
        for time, alerts in case.expected.items()
    ]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.alert}: {case.name}")
def test_fires_and_resolves(case: Case, tmp_path: Path) -> None:
    series = {on_target(name): values for name, values in (ALWAYS | dict(case.series)).items()}
    promtool(rules_test(series, expectation(case), rules_of(case.alert, tmp_path)), tmp_path)


def test_absent_fires_without_any_target(tmp_path: Path) -> None:
    rule = ALERT_RULES["KVWatchAbsent"]
    firing = {"exp_labels": {"job": "kvwatch", **rule["labels"]}, "exp_annotations": rule["annotations"]}
    expected: list[dict[str, Any]] = [
        {"eval_time": "10m", "alertname": "KVWatchAbsent", "exp_alerts": []},
        {"eval_time": "20m", "alertname": "KVWatchAbsent", "exp_alerts": [firing]},
        {"eval_time": "50m", "alertname": "KVWatchAbsent", "exp_alerts": []},
    ]
    promtool(rules_test({on_target("up"): "_x30 1+0x60"}, expected), tmp_path)


def test_a_node_without_servers_fires_nothing(tmp_path: Path) -> None:
    series = {on_target(name): values for name, values in ALWAYS.items()}
    expected: list[dict[str, Any]] = [
        {"eval_time": time, "alertname": alert.name, "exp_alerts": []}
        for alert in ALERTS
        for time in ("30m", "8h")
    ]
    promtool(rules_test(series, expected), tmp_path)


def test_every_alert_is_seen_firing_and_resolved() -> None:
    firing = {case.alert for case in CASES if any(case.expected.values())}
    ending = {case.alert for case in CASES if (seen := [*case.expected.values()]) and not seen[-1]}
    every = {alert.name for alert in ALERTS} - {"KVWatchAbsent"}
    assert firing == every
    assert ending == every


def test_generated_files_are_current() -> None:
    stale = [path for path, text in files().items() if (DEPLOY / path).read_text(encoding="utf-8") != text]
    assert not stale, f"run python -m deploy.prometheus.build: {stale}"


def test_promtool_accepts_the_rules() -> None:
    ran = subprocess.run(
        [tool("promtool"), "check", "rules", "--lint=all", "--lint-fatal", RULES],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_names_and_texts_follow_the_conventions(alert: Alert) -> None:
    assert alert.name.startswith("KVWatch")
    assert alert.name.isalnum()
    assert len(alert.name) <= 40
    assert "{{" not in alert.summary
    assert alert.summary.endswith(".")
    assert alert.summary.count(".") == 1
    assert "$labels" in alert.description or alert.name == "KVWatchAbsent"


def test_rules_use_families_that_exist() -> None:
    recorded = {rule["record"] for group in rule_groups() for rule in group["rules"] if "record" in rule}
    for group in rule_groups():
        for rule in group["rules"]:
            used = families(rule["expr"])
            assert used, rule
            assert used - recorded - {"up"} <= set(CATALOGUE), rule


def test_runbooks_and_alerts_are_the_same_list() -> None:
    pages = {path.stem for path in (DEPLOY.parent / "docs/runbooks").glob("KVWatch*.md")}
    assert pages == {alert.name for alert in ALERTS}


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_runbook_says_what_to_do(alert: Alert) -> None:
    text = (DEPLOY.parent / f"docs/runbooks/{alert.name}.md").read_text(encoding="utf-8")
    headings = [line for line in text.splitlines() if line.startswith("#")]
    assert headings == [f"# {alert.name}", "## Meaning", "## Impact", "## Diagnosis", "## Remedy"]
    assert "```" in text.partition("## Diagnosis")[2].partition("## Remedy")[0]
