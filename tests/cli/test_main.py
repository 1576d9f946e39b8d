from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from kvwatch import __version__
from kvwatch.cli.main import COMMANDS, main
from tests.fakenvml import Gpu, Scenario, environment

KVWATCH = Path(sys.executable).with_name("kvwatch")


def kvwatch(
    *args: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [KVWATCH, *args], env=env, cwd=cwd, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture
def node(tmp_path: Path) -> dict[str, str]:
    """The environment of a node with two idle GPUs, whatever else runs on this machine."""
    (tmp_path / "kvwatch.yaml").write_text("discovery: false\n", encoding="utf-8")
    path = tmp_path / "nvml.scenario"
    Scenario((Gpu(), Gpu())).write(path)
    return environment(path)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"kvwatch {__version__}\n"


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    listed = " ".join(capsys.readouterr().out.split())
    assert all(f"{name} {summary}" in listed for name, summary in COMMANDS.items())


@pytest.mark.parametrize(
    "argv", [["--version"], ["--help"], ["check-config", "--help"], ["check-config", "k.yaml"]]
)
def test_a_light_command_imports_nothing_heavy(argv: list[str], tmp_path: Path) -> None:
    (tmp_path / "k.yaml").write_text("poll: {interval: 1s}\n", encoding="utf-8")
    program = "import sys; from kvwatch.cli.main import main\n"
    program += f"try: main({argv!r})\nexcept SystemExit: pass\n"
    program += (
        "print(*sorted({'numpy', 'requests', 'pynvml', 'psutil'} & sys.modules.keys()), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == "\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: kvwatch {command}")


@pytest.mark.parametrize("argv", [[], ["nothing"], ["run", "--nothing"]])
def test_a_wrong_command_line_ends_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert "usage: kvwatch" in capsys.readouterr().err


def test_check_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "k.yaml"
    path.write_text("plans: {a: {max_model_len: 4k}}\n", encoding="utf-8")
    assert main(["check-config", str(path)]) == 0
    assert "0 servers, 1 plan\n" in capsys.readouterr().out
    path.write_text("poll:\n  intervall: 1s\n", encoding="utf-8")
    assert main(["check-config", str(path)]) == 2
    assert capsys.readouterr().err == (
        f"kvwatch: {path}:2: poll.intervall: unknown field (did you mean interval?)\n"
    )


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"web: {listen_address: ':99999'}\n", ":1: web.listen_address[0]: ':99999' is not an address"),
        (b"web:\n  listen_address: [':1', nonsense]\n", ":2: web.listen_address[1]: 'nonsense' is not an"),
        (b"# caf\xe9\n", ": not UTF-8 text, from byte 5 on"),
    ],
)
def test_check_config_refuses_what_run_would(
    content: bytes, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "k.yaml"
    path.write_bytes(content)
    assert main(["check-config", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"kvwatch: {path}{told}")


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (("demo", "--speed", "fast"), "--speed: 'fast' is not a number above 0"),
        (("demo", "--duration", "inf"), "--duration: 'inf' is not a number above 0"),
        (("fleet", "--prometheus", "http://p", "--timeout", "0"), "--timeout: '0' is not a number above 0"),
        (("plan", "m", "--count", "x"), "--count: 'x' is not a whole number of at least 1"),
        (("plan", "m", "--vllm-version", "x"), "--vllm-version: 'x' is not a vLLM version"),
        (("explain", "--vllm-version", "x"), "--vllm-version: 'x' is not a vLLM version"),
    ],
)
def test_a_refused_value_is_told_with_its_flag_and_what_is_right(
    argv: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert f"error: argument {told}" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [("plan", "--help"), ("plan", "--gpus")])
def test_a_terminal_without_unicode_gets_what_it_can_show(argv: tuple[str, ...]) -> None:
    done = kvwatch(*argv, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")


def test_a_full_disk_is_an_error_of_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [KVWATCH, "plan", "--gpus"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (2, "kvwatch: No space left on device\n")


def test_a_reader_that_went_away_is_no_verdict() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone:
        done = subprocess.run(
            [KVWATCH, "plan", "--gpus"], stdout=gone, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("command", [["run"], ["run", "--once"], ["status"]])
def test_a_wrong_configuration_ends_with_2(command: list[str], tmp_path: Path) -> None:
    path = tmp_path / "k.yaml"
    path.write_text("servers: [{name: x}]\n", encoding="utf-8")
    done = kvwatch(*command, "--config", path)
    assert done.returncode == 2
    assert f"{path}:1: servers[0].url: missing" in done.stderr


def test_once_prints_the_page(node: dict[str, str], tmp_path: Path) -> None:
    done = kvwatch("run", "--once", env=node, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    names = {family.name for family in text_string_to_metric_families(done.stdout)}
    assert {"kvwatch_gpu_info", "kvwatch_gpu_memory_total_bytes", "kvwatch_up"} <= names


def test_once_writes_the_textfile(node: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "out" / "kvwatch.prom"
    done = kvwatch("run", "--once", "--textfile", path, env=node, cwd=tmp_path)
    assert done.returncode == 1
    assert f"{path}: No such file or directory" in done.stderr
    path.parent.mkdir()
    done = kvwatch("run", "--once", "--textfile", path, env=node, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "")
    assert "kvwatch_up 1.0" in path.read_text(encoding="utf-8")


def test_status_of_a_node_without_servers_is_unknown(node: dict[str, str], tmp_path: Path) -> None:
    done = kvwatch("status", env=node, cwd=tmp_path)
    assert done.returncode == 2
    assert "no vLLM server found" in done.stdout
    told = json.loads(kvwatch("status", "--json", env=node, cwd=tmp_path).stdout)
    assert [gpu["gpu"] for gpu in told["gpus"]] == ["0", "1"]


def test_status_without_nvml_says_so(tmp_path: Path) -> None:
    without = {key: value for key, value in os.environ.items() if key != "LD_LIBRARY_PATH"}
    done = kvwatch("status", env=without, cwd=tmp_path)
    assert done.returncode == 2
    assert "nvml:" in done.stdout


def test_an_address_in_use_ends_with_2(node: dict[str, str], tmp_path: Path) -> None:
    done = kvwatch("run", "--web.listen-address", "nonsense", env=node, cwd=tmp_path)
    assert done.returncode == 2
    assert "cannot serve" in done.stderr


def test_the_demo_serves_its_page_and_ends_on_sigterm(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [KVWATCH, "demo", "--web.listen-address", "127.0.0.1:0", "--speed", "120"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[1].rstrip("/")
        for _ in range(100):
            page = requests.get(f"{url}/metrics", timeout=5)
            if page.ok:
                break
        assert "kvwatch_build_info{" in page.text
        assert 'simulated="true"' in page.text
        assert requests.get(f"{url}/api/v1/snapshot", timeout=5).json()["simulated"] is True
        assert " · kvwatch</title>" in requests.get(url, timeout=5).text
    finally:
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "llama-3.3-70b" in output
