"""The chart and the manifests, by Helm's own engine and the schemas of Kubernetes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from helm_python.chart import lint
from helm_python.errors import HelmError

from deploy.kubernetes.build import CHART, FOLDER, MANIFESTS, manifests, render
from deploy.prometheus.build import rule_groups
from deploy.prometheus.rules import JOB
from kvwatch import __version__
from kvwatch.config import load

KUBERNETES = "1.31"
OPERATOR = {"podMonitor": {"enabled": True}, "prometheusRule": {"enabled": True}}
EVERYTHING: dict[str, Any] = {
    **OPERATOR,
    "config": {"poll": {"interval": "30s"}},
    "hostNetwork": True,
    "runtimeClassName": "nvidia",
    "priorityClassName": "system-node-critical",
    "imagePullSecrets": [{"name": "registry"}],
    "affinity": {"nodeAffinity": {}},
    "image": {"repository": "registry.example/kvwatch", "tag": "1.2.3"},
}


def objects(values: dict[str, Any] | None = None) -> dict[str, dict[str, Any]]:
    texts = (text for name, text in render(values).items() if name != "NOTES.txt")
    return {one["kind"]: one for one in map(yaml.safe_load, texts)}


def test_plain_manifests_are_current() -> None:
    written = MANIFESTS.read_text(encoding="utf-8")
    assert written == manifests(), "run python -m deploy.kubernetes.build"


@pytest.mark.parametrize("values", [None, EVERYTHING], ids=["defaults", "everything"])
def test_kubernetes_accepts_every_object(values: dict[str, Any] | None) -> None:
    checked = [one for one in objects(values).values() if "monitoring.coreos.com" not in one["apiVersion"]]
    assert {one["kind"] for one in checked} >= {"DaemonSet", "NetworkPolicy", "ServiceAccount", "ConfigMap"}
    for one in checked:
        kubernetes_validate.validate(one, KUBERNETES, strict=True)


def test_the_validator_refuses_an_unknown_field() -> None:
    daemon_set = objects()["DaemonSet"]
    daemon_set["spec"]["template"]["spec"]["hostPid"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(daemon_set, KUBERNETES, strict=True)


def test_helm_lints_without_a_warning() -> None:
    report = lint(CHART, strict=True)
    assert report["errors"] == []
    assert {message["error"] for message in report["messages"]} <= {"icon is recommended"}


def test_the_chart_has_the_version_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["version"] == chart["appVersion"] == __version__


@pytest.mark.parametrize(
    "values",
    [{"port": "9744"}, {"prot": 9744}, {"image": {"repository": ""}}, {"podMonitor": {"enabled": "yes"}}],
    ids=str,
)
def test_the_schema_refuses_wrong_values(values: dict[str, Any]) -> None:
    with pytest.raises(HelmError):
        render(values)


def test_the_pod_sees_holders_and_can_do_no_more() -> None:
    pod = objects()["DaemonSet"]["spec"]["template"]["spec"]
    assert pod["hostPID"] is True
    assert pod["hostNetwork"] is False
    assert pod["automountServiceAccountToken"] is False
    [container] = pod["containers"]
    security = container["securityContext"]
    assert security["capabilities"] == {"drop": ["ALL"], "add": ["SYS_PTRACE", "DAC_READ_SEARCH"]}
    assert security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is False
    assert "nvidia.com/gpu" not in str(container["resources"])
    environment = {one["name"]: one["value"] for one in container["env"]}
    assert environment == {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "utility"}


def test_values_reach_the_objects() -> None:
    found = objects(EVERYTHING)
    pod = found["DaemonSet"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == "registry.example/kvwatch:1.2.3"
    assert (pod["runtimeClassName"], pod["priorityClassName"]) == ("nvidia", "system-node-critical")
    assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert pod["imagePullSecrets"] == [{"name": "registry"}]


def test_kvwatch_accepts_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "kvwatch.yaml"
    path.write_text(objects({"port": 9999, **EVERYTHING})["ConfigMap"]["data"]["kvwatch.yaml"])
    config = load(path)
    assert config.web.listen_addresses == (":9999",)
    assert config.poll.interval == 30


def test_a_changed_configuration_starts_new_pods() -> None:
    def checksum(values: dict[str, Any] | None) -> str:
        annotations = objects(values)["DaemonSet"]["spec"]["template"]["metadata"]["annotations"]
        return str(annotations["checksum/config"])

    assert checksum(None) == checksum({"config": {}}) != checksum(EVERYTHING)


def test_the_operators_objects_say_the_same_as_prometheus_files() -> None:
    found = objects(OPERATOR)
    assert found["PrometheusRule"]["spec"]["groups"] == rule_groups()
    plain = yaml.safe_load((FOLDER / "prometheusrule.yaml").read_text(encoding="utf-8"))
    assert plain["spec"] == found["PrometheusRule"]["spec"]
    monitors = (
        found["PodMonitor"],
        yaml.safe_load((FOLDER / "servicemonitor.yaml").read_text(encoding="utf-8")),
    )
    labels = found["DaemonSet"]["spec"]["template"]["metadata"]["labels"]
    for monitor in monitors:
        spec = monitor["spec"]
        assert labels[spec["jobLabel"]] == JOB
        assert spec["selector"]["matchLabels"].items() <= labels.items()
        [endpoint] = spec.get("podMetricsEndpoints") or spec["endpoints"]
        assert endpoint["port"] == "metrics"


def test_without_the_operator_its_objects_are_left_out() -> None:
    assert {"PodMonitor", "PrometheusRule"}.isdisjoint(objects())
