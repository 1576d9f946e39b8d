"""The next start as a whole: where it comes from, what else on disk it would use, and when it is read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvwatch.observe import nextstart_files
from kvwatch.observe.procfs import read_regular_file
from kvwatch.observe.records import Failure, ModelConfig
from tests.observe.nextstart_server import PID, SITE, RunningServer, launch_file

UNIT = "etc/systemd/system/chat.service"


def test_without_any_source_the_command_line_starts_it_again(tmp_path: Path) -> None:
    server = RunningServer(tmp_path, "--max-model-len", "4096", environment={"VLLM_USE_V1": "1", "X": "y"})
    found = server.known()
    assert (found.source, found.files) == ("command_line", ())
    assert found.flags == server.launch.flags
    assert found.environment == {"VLLM_USE_V1": "1"}
    assert found.version == "0.32.0"


def test_flags_beside_those_that_are_followed_come_along(tmp_path: Path) -> None:
    server = RunningServer(tmp_path, "--enable-lora")
    assert server.known().beside == server.launch.beside == {"enable_lora": "true"}


def test_a_config_file_as_it_is_now(tmp_path: Path) -> None:
    server = RunningServer(tmp_path, "--config", "/etc/vllm.yaml")
    assert [failure.reason for failure in server.known().failures] == ["config_unreadable"]
    server.write("etc/vllm.yaml", "max-model-len: 8192\napi-key: secret\n")
    assert server.flags() == {"max_model_len": 8192}
    assert "secret" not in repr(server.known())
    server.write("etc/vllm.yaml", "max-model-len: 4096\nenforce-eager: true\n")
    assert server.flags() == {"max_model_len": 4096, "enforce_eager": True}


BROKEN: Mapping[str, str | bytes] = {
    "binary": b"\x7fELF\0\1\2",
    "not UTF-8": b"a: \xff\n",
    "huge": b"a: 1\n" * 100_000,
    "no mapping": "- 1\n",
    "no YAML": "a: [\n",
    "a circle": "max-model-len: &a [*a]\n",
    "deep": "a: " + "[" * 50_000,
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_config_file_is_a_failure_of_the_next_start(tmp_path: Path, case: str) -> None:
    server = RunningServer(tmp_path, "--config", "/etc/vllm.yaml")
    server.write("etc/vllm.yaml", BROKEN[case])
    assert server.known().failures


def test_a_launch_file_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = RunningServer(tmp_path)
    path = tmp_path / "start.sh"
    path.write_text("vllm serve m")
    opened = os.open

    def deny(name: str | Path, *more: int) -> int:
        if str(name) == str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(name, *more)

    monkeypatch.setattr(os, "open", deny)
    assert server.reason(launch_file(path)) == "eacces"


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe"])
def test_a_launch_file_that_is_none(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "start.sh"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    expected = {"missing": "enoent", "folder": "eisdir", "pipe": "einval"}
    assert RunningServer(tmp_path).reason(launch_file(path)) == expected[kind]


def test_a_configured_script(tmp_path: Path) -> None:
    server = RunningServer(tmp_path)
    path = tmp_path / "start.sh"
    path.write_text("#!/bin/sh\nLEN=8192\nexec vllm serve /models/m --max-model-len $LEN\n")
    assert server.known(launch_file(path)).source == "script"
    assert server.flags(launch_file(path)) == {"max_model_len": 8192}
    path.write_text("#!/bin/sh\nexec vllm serve /models/m --max-model-len $LEN\n")
    assert server.reason(launch_file(path)) == "dynamic_script"


def test_flags_of_the_configuration_win(tmp_path: Path) -> None:
    server = RunningServer(tmp_path, "--max-model-len", "4096")
    assert server.known(flags=server.launch.flags.with_changes(max_model_len=1)).flags.max_model_len == 1


def test_a_server_that_cannot_be_seen_needs_a_launch_file(tmp_path: Path) -> None:
    server = RunningServer(tmp_path)
    found = server.source.read(replace(server.launch, pid=None), None)
    assert isinstance(found, Failure)
    assert found.reason == "no_launch_source"


def test_files_are_read_again_only_when_they_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = RunningServer(tmp_path, unit="chat.service")
    server.write(UNIT, "[Service]\nExecStart=/opt/venv/bin/vllm serve /models/m --max-model-len 1\n")
    assert server.flags() == {"max_model_len": 1}
    reads: list[Path] = []

    def read(path: Path, *, limit: int) -> bytes:
        reads.append(path)
        return read_regular_file(path, limit=limit)

    monkeypatch.setattr(nextstart_files, "read_regular_file", read)
    assert server.flags() == {"max_model_len": 1}
    assert reads == []
    server.write(f"{UNIT}.d/a.conf", "[Service]\nEnvironment=VLLM_USE_V1=1\n")
    assert server.known().environment == {"VLLM_USE_V1": "1"}
    assert reads


# --- the release ---------------------------------------------------------------------------------------


def test_an_upgrade_in_place(tmp_path: Path) -> None:
    server = RunningServer(tmp_path)
    assert server.known().version == "0.32.0"
    server.install("0.33.0")
    assert server.known().version == "0.33.0"
    (server.root / SITE / "vllm/_version.py").unlink()
    assert server.known().version is None
    server.write(f"{SITE}/vllm-0.31.1+cu129.dist-info/METADATA", "")
    assert server.known().version == "0.31.1"


def test_the_release_of_the_program_that_the_unit_names(tmp_path: Path) -> None:
    server = RunningServer(tmp_path, unit="chat.service")
    server.install("0.33.0", "opt/new/lib/python3.12/site-packages")
    server.write(UNIT, "[Service]\nExecStart=/opt/new/bin/vllm serve /models/m\n")
    assert server.known().version == "0.33.0"


DEBIAN = "lib/python3.12/dist-packages"
PROGRAMS: Mapping[str, tuple[Sequence[str], str]] = {
    "console script": (["/opt/venv/bin/python3", "/opt/venv/bin/vllm", "serve", "m"], SITE),
    "interpreter and module": (
        ["/opt/venv/bin/python3", "-m", "vllm.entrypoints.openai.api_server"],
        SITE,
    ),
    "64-bit libraries": (["/opt/venv/bin/vllm", "serve"], "opt/venv/lib64/python3/site-packages"),
    "Debian's layout": (["/usr/bin/python3", "/usr/local/bin/vllm", "serve"], f"usr/local/{DEBIAN}"),
    "relative": (["venv/bin/python", "venv/bin/vllm", "serve"], "venv/lib/python3.11/site-packages"),
}


@pytest.mark.parametrize("case", PROGRAMS)
def test_where_a_release_is_installed(tmp_path: Path, case: str) -> None:
    argv, site = PROGRAMS[case]
    server = RunningServer(tmp_path, argv=argv, version=None)
    server.install("0.29.1", site)
    assert server.known().version == "0.29.1"


# --- the model -----------------------------------------------------------------------------------------


def config_of(found: ModelConfig | Failure | None) -> Any:
    assert isinstance(found, ModelConfig), found
    return found.config


def test_the_model_as_first_seen_and_as_it_is_now(tmp_path: Path) -> None:
    server = RunningServer(tmp_path)
    server.write("models/m/a.safetensors", b"x" * 10)
    first = server.known()
    assert config_of(first.model) == config_of(first.first_model) == {"max_position_embeddings": 4096}
    server.write("models/m/config.json", json.dumps({"max_position_embeddings": 2048}))
    server.write("models/m/a.safetensors", b"x" * 11)
    second = server.known()
    assert config_of(second.first_model) == {"max_position_embeddings": 4096}
    assert config_of(second.model) == {"max_position_embeddings": 2048}
    assert isinstance(second.model, ModelConfig)
    assert isinstance(second.first_model, ModelConfig)
    assert (second.first_model.weight_bytes, second.model.weight_bytes) == (10, 11)


def test_the_model_of_another_name_and_none(tmp_path: Path) -> None:
    server = RunningServer(tmp_path, unit="chat.service")
    server.write("models/n/config.json", json.dumps({"max_position_embeddings": 1}))
    server.write(UNIT, "[Service]\nExecStart=/opt/venv/bin/vllm serve /models/n\n")
    assert config_of(server.known().model) == {"max_position_embeddings": 1}
    (server.root / "models/n/config.json").unlink()
    assert isinstance(server.known().model, Failure)


def test_another_process_at_the_same_address_is_seen_afresh(tmp_path: Path) -> None:
    server = RunningServer(tmp_path)
    server.known()
    server.write("models/m/config.json", json.dumps({"max_position_embeddings": 2048}))
    assert server.launch.pid == PID
    server.launch = replace(server.launch, start_time=1.0)
    assert config_of(server.known().first_model) == {"max_position_embeddings": 2048}


def test_the_gpus_that_it_would_see(tmp_path: Path) -> None:
    server = RunningServer(tmp_path, unit="chat.service", environment={"CUDA_VISIBLE_DEVICES": "4,5"})
    command = "ExecStart=/opt/venv/bin/vllm serve /models/m"
    server.write(UNIT, f"[Service]\nEnvironment=CUDA_VISIBLE_DEVICES=6,7\n{command} --device-ids 1\n")
    assert server.known().visible_devices == ("7",)
    server.write(UNIT, f"[Service]\n{command}\n")
    assert server.known().visible_devices is None
    path = tmp_path / "start.sh"
    path.write_text("vllm serve /models/m\n")
    assert server.known(launch_file(path)).visible_devices == ("4", "5")
