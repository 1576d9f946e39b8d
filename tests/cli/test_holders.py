"""`kvwatch holders` on captures, and once on this machine with the NVML library of tests/fakenvml."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvwatch.cli.main import main
from kvwatch.config import GIB, Config
from kvwatch.observe.capture import capture_text, take_capture
from kvwatch.observe.cycle import Observation
from kvwatch.observe.records import Failure
from tests.fakenvml import Gpu, Process, Scenario, environment
from tests.nodes import NOW, gpu, observation
from tests.trees import INIT, child, left, parent, serves

KVWATCH = Path(sys.executable).with_name("kvwatch")
SERVER = parent(100)
CORE = child(101, "VLLM::EngineCore", SERVER)


def captured(path: Path, *seen: Observation) -> Path:
    path.write_text("".join(capture_text(take_capture(one, Config())) for one in seen), encoding="utf-8")
    return path


@pytest.fixture
def story(tmp_path: Path) -> Path:
    """A server is killed, its engine survives it, then ends, and its memory comes back slowly."""
    server = replace(serves(SERVER, name="chat"), members=frozenset({100, 101}))
    card = gpu({101: 70 * GIB})
    return captured(
        tmp_path / "story.json",
        observation((card,), (INIT, SERVER, CORE), (server,)),
        observation((card,), (INIT, left(CORE)), time=NOW + 15),
        observation((gpu({}, other=9 * GIB),), (INIT,), time=NOW + 30),
        observation((gpu({}),), (INIT,), time=NOW + 45),
    )


def owners(line: str) -> list[tuple[str, str]]:
    [card] = json.loads(line)["gpus"]
    return [(holder["owner"], holder["former_server"]) for holder in card["holders"]]


def test_watching_tells_the_story(story: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["holders", "--watch", "--json", "--replay", str(story)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert list(map(owners, lines)) == [[("server", "")], [("orphan", "chat")], [], []]
    released = [json.loads(line)["gpus"][0]["released_bytes"] for line in lines]
    assert released == [0, 0, 9 * GIB, 0]


def test_watching_as_text(story: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["holders", "--watch", "--replay", str(story)]) == 0
    told = capsys.readouterr().out
    assert "orphan 101 VLLM::EngineCore holds 70.0 GiB on GPU 0: its server chat is gone" in told
    assert "to stop it: kill 101" in told
    assert told.endswith("nobody is known to hold memory\n\n")
    assert "\x1b" not in told, "a pipe is no terminal"


def test_one_look_is_the_last(story: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["holders", "--replay", str(story)]) == 0
    assert capsys.readouterr().out == "nobody is known to hold memory\n"


def test_without_nvml_nothing_is_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = captured(tmp_path / "c.json", observation(Failure("nvml", "driver_mismatch", "reboot"), (INIT,)))
    assert main(["holders", "--replay", str(path)]) == 2
    assert "no GPU was seen" in capsys.readouterr().out


def test_a_file_that_is_no_capture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.json").write_text("{}")
    assert main(["holders", "--replay", str(tmp_path / "c.json")]) == 2
    assert "not a capture" in capsys.readouterr().err


def test_this_machine(tmp_path: Path) -> None:
    (tmp_path / "kvwatch.yaml").write_text("discovery: false\n", encoding="utf-8")
    scenario = tmp_path / "node.scenario"
    Scenario((Gpu(processes=(Process(os.getpid(), 5 * GIB),)),)).write(scenario)
    told = subprocess.run(
        [KVWATCH, "holders", "--json"],
        env=environment(scenario),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    [card] = json.loads(told.stdout)["gpus"]
    [holder] = card["holders"]
    assert (holder["pid"], holder["owner"], holder["bytes"]) == (os.getpid(), "foreign", 5 * GIB)
    assert holder["started"] > 0
