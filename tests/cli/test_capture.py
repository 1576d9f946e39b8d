"""`kvwatch capture` and `--replay`, over the NVML library of tests/fakenvml and this machine's processes."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import requests

from kvwatch.cli.capture import write_private
from kvwatch.cli.main import main
from kvwatch.config import GIB, Config
from kvwatch.observe.capture import Capture, capture_bytes, read_captures, take_capture
from kvwatch.observe.records import NvmlRecord, ProcessRecord
from tests.e2e.waiting import wait_until
from tests.fakenvml import Gpu, Process, Scenario, environment
from tests.nodes import NOW, observation, process, serving_node

KVWATCH = Path(sys.executable).with_name("kvwatch")
SECRET = "Zq7-planted"
SERVER = """
import sys, time
open(sys.argv[-1], "w").close()
time.sleep(600)
"""


def kvwatch(*args: str | Path, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([KVWATCH, *args], env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that looks like a vLLM server and was told secrets."""
    script, ready = tmp_path / "bin" / "vllm", tmp_path / "ready"
    script.parent.mkdir()
    os.mkfifo(ready)
    script.write_text(SERVER)
    arguments = [
        "serve",
        f"http://alice:{SECRET}@models/tiny",
        "--port",
        "1",
        "--api-key",
        SECRET,
        str(ready),
    ]
    told = {**os.environ, "HF_TOKEN": SECRET, "VLLM_API_KEY": SECRET, "HF_HOME": "/home/alice/hf"}
    with subprocess.Popen([sys.executable, str(script), *arguments], env=told) as child:
        ready.read_bytes()
        yield child
        child.kill()


@pytest.fixture
def node(tmp_path: Path, server: subprocess.Popen[bytes]) -> dict[str, str]:
    path = tmp_path / "nvml.scenario"
    Scenario((Gpu(processes=(Process(server.pid, 70 * GIB), Process(1, GIB))), Gpu())).write(path)
    return environment(path)


@pytest.mark.parametrize("name", ["node.json", "node.json.gz"])
def test_a_capture_of_this_machine(
    tmp_path: Path, node: dict[str, str], server: subprocess.Popen[bytes], name: str
) -> None:
    path = tmp_path / name
    done = kvwatch("capture", path, env=node)
    assert (done.returncode, done.stderr) == (0, "")
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []
    data = path.read_bytes()
    text = (gzip.decompress(data) if name.endswith(".gz") else data).decode()
    assert SECRET not in text
    assert "alice" not in text
    assert f"{len(data)} bytes with 2 GPUs" in done.stdout
    assert re.search(r"left out:\n  \d+ command lines", done.stdout)
    assert f"kvwatch status --replay {path}" in done.stdout

    (capture,) = read_captures(path)
    seen = capture.observation
    assert isinstance(seen.nvml, NvmlRecord)
    assert isinstance(seen.processes, ProcessRecord)
    assert [gpu.index for gpu in seen.nvml.gpus] == ["0", "1"]
    assert seen.processes.processes[server.pid].argv == ("vllm", "serve")
    (found,) = [one for one in seen.servers if one.launch.pid == server.pid]
    assert found.launch.model == "http://models/tiny"
    assert found.launch.base_url == "http://127.0.0.1:1"
    assert found.launch.environment["HF_HOME"] == "~/hf"

    replayed = kvwatch("status", "--json", "--replay", path)
    document = json.loads(replayed.stdout)
    assert document["simulated"] is True
    assert document["time"] == seen.time
    held = {(one["owner"], one["bytes"]) for one in document["gpus"][0]["held"]}
    assert ("server", 70 * GIB) in held
    assert [one["endpoint"] for one in document["servers"] if one["endpoint"] == "http://127.0.0.1:1"]


def test_a_capture_on_standard_output_is_nothing_but_the_capture(
    node: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    done = kvwatch("capture", "-", env=node)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["kvwatch_capture"] == 1


# --- the file -------------------------------------------------------------------------------------------


def test_an_existing_file_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "node.json"
    path.write_text("mine")
    assert main(["capture", str(path)]) == 2
    assert capsys.readouterr().err == f"kvwatch: {path}: exists already; --force overwrites it\n"
    assert path.read_text() == "mine"
    assert main(["capture", "--force", str(path)]) == 0
    assert len(read_captures(path)) == 1
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_that_appears_meanwhile_is_not_overwritten_either(tmp_path: Path) -> None:
    path = tmp_path / "node.json"
    path.write_text("mine")
    with pytest.raises(FileExistsError):
        write_private(path, b"ours", overwrite=False)
    assert [entry.name for entry in tmp_path.iterdir()] == ["node.json"]
    assert path.read_text() == "mine"


def test_what_is_no_file_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = tmp_path / "node.json"
    os.mkfifo(pipe)
    assert main(["capture", "--force", str(pipe)]) == 1
    assert capsys.readouterr().err == f"kvwatch: {pipe}: not a regular file, so it is not replaced\n"
    assert pipe.is_fifo()


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "none" / "node.json"
    assert main(["capture", str(path)]) == 1
    assert capsys.readouterr().err == f"kvwatch: {path}: No such file or directory\n"


def test_a_wrong_configuration_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "kvwatch.yaml"
    config.write_text("pol: {}\n")
    assert main(["capture", "--config", str(config), str(tmp_path / "node.json")]) == 2
    assert "kvwatch.yaml" in capsys.readouterr().err
    assert not (tmp_path / "node.json").exists()


# --- replay ---------------------------------------------------------------------------------------------

NOTEBOOK = process(900, "ipykernel_launcher", user="dana", uid=1001)


def saved(path: Path, *captures: Capture) -> Path:
    path.write_bytes(b"".join(capture_bytes(one, compress=False) for one in captures))
    return path


@pytest.fixture
def story(tmp_path: Path) -> Path:
    """A node before and after a notebook took what a restart needs."""
    before, after = serving_node(), serving_node((NOTEBOOK, 6 * GIB))
    return saved(tmp_path / "story.json", *(take_capture(seen, Config()) for seen in (before, after)))


def test_status_of_a_capture(story: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--replay", str(story)]) == 1
    out = capsys.readouterr().out
    assert "FAILS" in out
    assert "foreign 6.00 GiB" in out


def test_a_capture_with_another_configuration(
    tmp_path: Path, story: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "kvwatch.yaml"
    config.write_text("servers: [{url: 'http://127.0.0.1:8000', name: chat}]\n")
    assert main(["status", "--json", "--replay", str(story), "--config", str(config)]) == 1
    (server,) = json.loads(capsys.readouterr().out)["servers"]
    assert server["server"] == "chat"


def test_the_page_of_a_capture(story: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main(["run", "--once", "--replay", str(story)]) == 0
    page = capsysbinary.readouterr().out.decode()
    assert 'simulated="true"' in page
    assert "kvwatch_cycles_total 2.0" in page
    assert f"kvwatch_cycle_timestamp_seconds {NOW:.1e}" in page
    assert 'kvwatch_restart_feasible{server="llama"} 0.0' in page


def test_a_capture_is_served_like_a_node(tmp_path: Path) -> None:
    path = saved(tmp_path / "c.json", take_capture(observation(()), Config()))
    command: list[str | Path] = [KVWATCH, "run", "--replay", path, "--web.listen-address", "127.0.0.1:0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as daemon:
        assert daemon.stderr
        log = iter(daemon.stderr.readline, "")
        address = next(match[1] for line in log if (match := re.search(r"event=serving address=(\S+)", line)))
        page = wait_until(lambda: page_at(address), 30)
        daemon.terminate()
        assert daemon.wait(20) == 0
    assert 'simulated="true"' in page
    assert f"kvwatch_cycle_timestamp_seconds {NOW:.1e}" in page


def page_at(address: str) -> str:
    """The page, empty before the first cycle."""
    with requests.Session() as session:
        session.trust_env = False
        answer = session.get(f"http://{address}/metrics", timeout=10)
        return answer.text if answer.ok else ""


@pytest.mark.parametrize("command", ["status", "run"])
def test_what_is_no_capture_is_refused(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text("{}")
    assert main([command, "--replay", str(wrong)]) == 2
    assert capsys.readouterr().err == f"kvwatch: {wrong}: not a capture: no field kvwatch_capture\n"
    assert main([command, "--replay", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == f"kvwatch: {tmp_path / 'none'}: No such file or directory\n"
