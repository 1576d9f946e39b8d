from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.kvwatch_daemon import KvwatchDaemon
from tests.fakenvml import Gpu, Scenario, environment
from tests.support import ROOT

KVWATCH = Path(sys.executable).with_name("kvwatch")
DOCTOR: tuple[str | Path, ...] = (KVWATCH, "doctor", "--json")
UNPRIVILEGED = 65534

# The interpreter itself may lie where nobody else can read, so that the user changes within the process.
AS_NOBODY = f"""
import ctypes, os, sys
from kvwatch.cli import doctor
from kvwatch.cli.main import main
import pynvml, encodings.idna
os.setgroups([])
os.setgid({UNPRIVILEGED})
os.setuid({UNPRIVILEGED})
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE, as after an exec
sys.exit(main(["doctor", "--json", *sys.argv[1:]]))
"""


@pytest.fixture
def node(tmp_path: Path) -> dict[str, str]:
    """The environment of a node with one idle GPU and no server."""
    configure(tmp_path, "discovery: false\nweb: {listen_address: '127.0.0.1:0'}\n")
    scenario = tmp_path / "nvml.scenario"
    Scenario((Gpu(),)).write(scenario)
    return environment(scenario)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that others may enter, unlike those of tmp_path."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


def configure(folder: Path, text: str) -> Path:
    path = folder / "kvwatch.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def doctor(
    env: dict[str, str],
    cwd: Path,
    *arguments: str | Path,
    program: tuple[str | Path, ...] = DOCTOR,
) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code and the checks by subject."""
    done = subprocess.run(
        [*program, *arguments], env=env, cwd=cwd, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout, done.stderr
    document = json.loads(done.stdout)
    assert document["exit"] == done.returncode
    return done.returncode, {check["subject"]: check for check in document["checks"]}


def test_a_node_with_a_gpu(node: dict[str, str], tmp_path: Path) -> None:
    code, checks = doctor(node, tmp_path)
    assert code in (0, 1)  # this machine's clock may follow no reference
    assert checks["nvml"]["state"] == "ok"
    assert "driver 570.86.15, 1 GPUs" in checks["nvml"]["found"]
    assert checks["configuration"]["state"] == "ok"
    assert checks["address"]["state"] == "ok"


def test_without_nvml_the_price_is_named(tmp_path: Path) -> None:
    configure(tmp_path, "discovery: false\nweb: {listen_address: '127.0.0.1:0'}\n")
    code, checks = doctor({**os.environ, "LD_LIBRARY_PATH": ""}, tmp_path)
    assert code == 1
    assert checks["nvml"]["state"] == "missing"
    assert "kvwatch_gpu_memory_*" in checks["nvml"]["costs"]
    assert "libnvidia-ml.so.1" in checks["nvml"]["grant"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_as_a_plain_user(open_folder: Path) -> None:
    scenario = open_folder / "nvml.scenario"
    Scenario((Gpu(),)).write(scenario)
    token = open_folder / "token"
    token.write_text("secret", encoding="utf-8")
    token.chmod(0o600)
    configure(
        open_folder,
        "discovery: false\nweb: {listen_address: '127.0.0.1:0'}\n"
        "servers: [{url: 'http://127.0.0.1:1', token_file: token}]\n",
    )
    textfile = open_folder / "shut" / "kvwatch.prom"
    textfile.parent.mkdir(mode=0o700)
    code, checks = doctor(
        {**environment(scenario), "PYTHONPATH": str(ROOT)},
        open_folder,
        "--textfile",
        textfile,
        program=(sys.executable, "-c", AS_NOBODY),
    )
    assert code == 1
    assert checks["nvml"]["state"] == "ok"
    assert checks["user"]["state"] == "ok"
    assert checks[f"file {open_folder / 'token'}"]["state"] == "missing"
    assert "setfacl" in checks[f"file {open_folder / 'token'}"]["grant"]
    assert checks["textfile"]["state"] == "missing"
    unread = checks["vllm http://127.0.0.1:1"]
    assert "Permission denied" in unread["found"]
    assert "secret" not in json.dumps(checks)


def test_a_folder_in_the_place_of_the_textfile(node: dict[str, str], tmp_path: Path) -> None:
    configure(tmp_path, "discovery: false\nweb: {listen_address: '127.0.0.1:0'}\n")
    code, checks = doctor(node, tmp_path, "--textfile", tmp_path)
    assert code == 1
    assert checks["textfile"]["state"] == "missing"
    assert "not a regular file" in checks["textfile"]["found"]


def test_a_broken_configuration_is_fatal(node: dict[str, str], tmp_path: Path) -> None:
    configure(tmp_path, "poll:\n  intervall: 1s\n")
    code, checks = doctor(node, tmp_path)
    assert code == 2
    assert "kvwatch.yaml:2: poll.intervall" in checks["configuration"]["found"]


def test_a_broken_web_configuration_is_fatal(node: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "web.yml").write_text("tls_server_config: {}\n", encoding="utf-8")
    configure(tmp_path, "web: {config_file: web.yml, listen_address: '127.0.0.1:0'}\n")
    code, checks = doctor(node, tmp_path)
    assert code == 2
    assert checks["web configuration"]["state"] == "fatal"


def test_a_port_that_another_program_has_is_fatal(node: dict[str, str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.settimeout(30)
        port = other.getsockname()[1]
        configure(tmp_path, f"discovery: false\nweb: {{listen_address: '127.0.0.1:{port}'}}\n")
        code, checks = doctor(node, tmp_path)
    assert code == 2
    assert f":{port}" in checks["address"]["grant"]


def test_a_port_that_kvwatch_has_is_well(node: dict[str, str], tmp_path: Path) -> None:
    with KvwatchDaemon.run(tmp_path / "daemon", node, "discovery: false\n") as daemon:
        daemon.wait_ready()
        configure(tmp_path, f"discovery: false\nweb: {{listen_address: '{daemon.address}'}}\n")
        _, checks = doctor(node, tmp_path)
    assert checks["address"] == {
        "subject": "address",
        "state": "ok",
        "found": f"kvwatch serves {daemon.address} already",
        "costs": "",
        "grant": "",
    }


def test_for_people_it_is_text(node: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(
        [KVWATCH, "doctor"],
        env={**node, "LD_LIBRARY_PATH": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "MISSING  nvml: initialisation failed" in done.stdout
    assert "         grant: install the driver" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
