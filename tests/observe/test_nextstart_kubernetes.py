"""Kubernetes manifests: every kind of object that holds pods."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.observe.nextstart_server import RunningServer, launch_file

Container = dict[str, Any]
OFFICIAL = "vllm/vllm-openai:v0.20.0"


def container(*arguments: str, name: str = "vllm", **more: Any) -> Container:
    return {"name": name, "image": OFFICIAL, "args": ["--model", "/models/m", *arguments], **more}


def spec(*containers: Container) -> dict[str, Any]:
    sidecar = {"name": "proxy", "image": "envoy", "args": ["--log-level", "info"]}
    return {"initContainers": [{"name": "pull", "command": ["sh"]}], "containers": [sidecar, *containers]}


def deployment(*containers: Container, name: str = "chat", kind: str = "Deployment") -> dict[str, Any]:
    return {"kind": kind, "metadata": {"name": name}, "spec": {"template": {"spec": spec(*containers)}}}


@pytest.fixture
def server(tmp_path: Path) -> RunningServer:
    return RunningServer(tmp_path, "--max-model-len", "4096")


def write(tmp_path: Path, *documents: Any) -> Path:
    path = tmp_path / "chat.yaml"
    path.write_text(yaml.safe_dump_all(documents))
    return path


ONE = container("--max-model-len", "8192")
KINDS: dict[str, Any] = {
    "Pod": {"kind": "Pod", "metadata": {"name": "chat"}, "spec": spec(ONE)},
    "Deployment": deployment(ONE),
    "StatefulSet": deployment(ONE, kind="StatefulSet"),
    "CronJob": {
        "kind": "CronJob",
        "metadata": {"name": "chat"},
        "spec": {"jobTemplate": {"spec": {"template": {"spec": spec(ONE)}}}},
    },
    "LeaderWorkerSet": {
        "kind": "LeaderWorkerSet",
        "metadata": {"name": "chat"},
        "spec": {
            "leaderWorkerTemplate": {
                "leaderTemplate": {"spec": spec(ONE)},
                "workerTemplate": {"spec": {"containers": [{"name": "worker", "command": ["ray", "start"]}]}},
            }
        },
    },
    "InferenceService": {
        "kind": "InferenceService",
        "metadata": {"name": "chat"},
        "spec": {"predictor": {"containers": [ONE]}},
    },
    "List": {"kind": "List", "items": [{"kind": "Service", "metadata": {"name": "x"}}, deployment(ONE)]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_workload(server: RunningServer, tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, {"kind": "Service", "metadata": {"name": "chat"}}, KINDS[kind], None)
    found = server.known(launch_file(path, service="chat"))
    assert (found.source, found.version) == ("kubernetes", "0.20.0")
    assert found.flags.max_model_len == 8192


COMMANDS: dict[str, tuple[Container, dict[str, Any]]] = {
    "command and args": (
        {
            "name": "c",
            "image": "mine",
            "command": ["vllm", "serve"],
            "args": ["m", "--max-num-seqs", "3"],
        },
        {"max_num_seqs": 3},
    ),
    "a shell": (
        {
            "name": "c",
            "command": ["/bin/sh", "-c"],
            "args": ["exec vllm serve /models/m \\\n  --max-model-len ${LEN} --max-num-seqs $(SEQS)"],
            "env": [{"name": "LEN", "value": "8k"}, {"name": "SEQS", "value": "5"}],
        },
        {"max_model_len": 8000, "max_num_seqs": 5},
    ),
    "references": (
        container(
            "--max-model-len=$(LEN)",
            "--quantization",
            "$$(LEN)$(NONE)",
            env=[{"name": "N", "value": "81"}, {"name": "LEN", "value": "$(N)92"}],
        ),
        {"max_model_len": 8192, "quantization": "$(LEN)$(NONE)"},
    ),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_the_command_of_a_container(server: RunningServer, tmp_path: Path, case: str) -> None:
    one, flags = COMMANDS[case]
    assert server.flags(launch_file(write(tmp_path, deployment(one)))) == flags


def test_variables_of_the_container(server: RunningServer, tmp_path: Path) -> None:
    token = {"name": "HF_TOKEN", "value": "hf_secret"}
    secret = {"name": "CUDA_VISIBLE_DEVICES", "valueFrom": {"configMapKeyRef": {}}}
    one = container(env=[token, secret, {"name": "VLLM_USE_V1", "value": "1"}])
    found = server.known(launch_file(write(tmp_path, deployment(one))))
    assert found.environment == {"VLLM_USE_V1": "1"}
    assert "hf_secret" not in repr(found)


def test_one_of_several_is_named(server: RunningServer, tmp_path: Path) -> None:
    pair = [container("--max-num-seqs", "1", name="a"), container("--max-num-seqs", "2", name="b")]
    path = write(tmp_path, deployment(*pair), deployment(container("--max-num-seqs", "3"), name="other"))
    assert server.reason(launch_file(path)) == "several_servers"
    assert server.flags(launch_file(path, service="chat", container="b")) == {"max_num_seqs": 2}
    assert server.flags(launch_file(path, service="other")) == {"max_num_seqs": 3}
    assert server.reason(launch_file(path, container="none")) == "no_such_container"


REFUSED: dict[str, Container] = {
    "dynamic_variable": container("$(LEN)", env=[{"name": "LEN", "valueFrom": {"secretKeyRef": {}}}]),
    "image_entrypoint": {"name": "c", "image": "mine", "args": ["--max-model-len", "1"]},
    "dynamic_script": {"name": "c", "command": ["sh", "-c", "vllm serve $MODEL"]},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_told_is_said(server: RunningServer, tmp_path: Path, reason: str) -> None:
    one = deployment()
    one["spec"]["template"]["spec"]["containers"] = [REFUSED[reason]]
    assert server.reason(launch_file(write(tmp_path, one))) == reason


def test_objects_of_one_name_are_several_all_the_same(server: RunningServer, tmp_path: Path) -> None:
    twins = [deployment(container("--max-model-len", length)) for length in ("4k", "8k")]
    assert server.reason(launch_file(write(tmp_path, *twins))) == "several_servers"
    listed = {"kind": "List", "items": [deployment(container("-tp", "2")), deployment({"name": "vllm"})]}
    assert server.flags(launch_file(write(tmp_path, listed))) == {"tensor_parallel_size": 2}


def test_variables_from_elsewhere(server: RunningServer, tmp_path: Path) -> None:
    one = container("--max-model-len", "$(LEN)", envFrom=[{"configMapRef": {"name": "x"}}])
    assert server.reason(launch_file(write(tmp_path, deployment(one)))) == "dynamic_variable"


def test_a_circle_and_other_nonsense(server: RunningServer, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("kind: Pod\nspec: &s\n  again: *s\n  containers: &c [*c, 1, {}]\n---\n- 1\n---\nx\n")
    assert server.reason(launch_file(path)) == "no_server_command"
    path.write_text("")
    assert server.reason(launch_file(path)) == "no_such_container"
