"""`kvwatch status --watch` on a pseudo-terminal, over the NVML library of tests/fakenvml."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvwatch.cli.main import main
from kvwatch.config import GIB, Config
from kvwatch.observe.capture import capture_text, take_capture
from tests.fakenvml import Gpu, Scenario, environment
from tests.nodes import NOW, process, serving_node

KVWATCH = Path(sys.executable).with_name("kvwatch")
PATIENCE = 60.0


@pytest.fixture
def node(tmp_path: Path) -> dict[str, str]:
    """The environment of a node with two idle GPUs, whatever else runs on this machine."""
    (tmp_path / "kvwatch.yaml").write_text("discovery: false\n", encoding="utf-8")
    path = tmp_path / "nvml.scenario"
    Scenario((Gpu(), Gpu())).write(path)
    return environment(path)


class Terminal:
    """A command on a pseudo-terminal of so many lines."""

    def __init__(self, *command: str | Path, env: dict[str, str], cwd: Path, lines: int) -> None:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, 80, 0, 0))
        self._fd = ours
        # What a test runner says of its own terminal goes before what the pseudo-terminal says.
        env = {name: value for name, value in env.items() if name not in ("LINES", "COLUMNS")}
        # A test run in the background of a shell ignores Ctrl-C, and so would whatever it starts.
        heedful = ("env", "--default-signal=INT", *command)
        self.process = subprocess.Popen(heedful, env=env, cwd=cwd, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        self.seen = ""

    def read_until(self, text: str, times: int = 1) -> None:
        """Read on until the text has come so often."""
        while self.seen.count(text) < times:
            try:
                data = os.read(self._fd, 1 << 16)
            except OSError:
                data = b""
            assert data, f"it ended with {self.process.wait(PATIENCE)}:\n{self.seen}"
            self.seen += data.decode()

    def end(self) -> int:
        """Ctrl-C, and the rest of what is written; returns the exit code."""
        self.process.send_signal(signal.SIGINT)
        # EIO: the other side has closed it.
        with contextlib.suppress(OSError):
            while data := os.read(self._fd, 1 << 16):
                self.seen += data.decode()
        return self.process.wait(PATIENCE)

    def close(self) -> None:
        """End whatever still runs."""
        self.process.kill()
        self.process.wait()
        os.close(self._fd)


PLAIN = (
    sys.executable,
    "-c",
    "import sys; sys.modules['rich'] = None; from kvwatch.cli.main import main; sys.exit(main())",
)
"""kvwatch where rich is not installed."""


@contextlib.contextmanager
def terminal(
    *args: str | Path,
    env: dict[str, str],
    cwd: Path,
    lines: int = 40,
    command: Sequence[str | Path] = (KVWATCH,),
) -> Iterator[Terminal]:
    running = Terminal(*command, *args, env=env, cwd=cwd, lines=lines)
    watchdog = threading.Timer(PATIENCE, running.process.kill)
    watchdog.start()
    try:
        yield running
    finally:
        watchdog.cancel()
        running.close()


def test_it_draws_over_itself_and_ends_on_ctrl_c(node: dict[str, str], tmp_path: Path) -> None:
    with terminal("status", "--watch", "0.1", env=node, cwd=tmp_path, command=PLAIN) as shown:
        shown.read_until("no vLLM server found", times=3)
        assert shown.seen.startswith("\x1b[?1049h\x1b[?25l")
        assert shown.seen.count("\x1b[H") >= 3
        assert shown.end() == 2
    before, _, after = shown.seen.partition("\x1b[?25h\x1b[?1049l")
    assert "GPU  NAME" in before
    # The last look stays on the first screen.
    assert "no vLLM server found" in after
    assert "\x1b" not in after
    assert "Traceback" not in shown.seen


def test_rich_draws_in_colour(node: dict[str, str], tmp_path: Path) -> None:
    node = {name: value for name, value in node.items() if name != "NO_COLOR"} | {"TERM": "xterm-256color"}
    with terminal("status", "--watch", "0.1", env=node, cwd=tmp_path) as shown:
        shown.read_until("no vLLM server found", times=3)
        assert "\x1b[?1049h" in shown.seen
        assert shown.end() == 2
    before, _, after = shown.seen.rpartition("\x1b[?1049l")
    assert "\x1b[1mGPU  NAME" in before
    assert "no vLLM server found" in after
    assert "\x1b[1m" not in after
    assert "Traceback" not in shown.seen


@pytest.mark.parametrize("command", [PLAIN, (KVWATCH,)], ids=["plain", "rich"])
def test_what_does_not_fit_is_counted(
    node: dict[str, str], tmp_path: Path, command: Sequence[str | Path]
) -> None:
    with terminal("status", "--watch", "0.1", env=node, cwd=tmp_path, lines=5, command=command) as shown:
        shown.read_until("more lines")
        assert shown.end() == 2
    drawn = shown.seen.split("more lines")[0]
    assert drawn.count("\n") == 3
    assert drawn.endswith("… 4 ")


@pytest.fixture
def captures(tmp_path: Path) -> Path:
    """Two looks at one node: the restart would work, then it would not."""
    notebook = process(900, "python")
    seen = [
        serving_node((notebook, GIB), own=70 * GIB),
        replace(serving_node((notebook, 8 * GIB), own=70 * GIB), time=NOW + 15),
    ]
    path = tmp_path / "captures.json"
    path.write_text("".join(capture_text(take_capture(one, Config())) for one in seen), encoding="utf-8")
    return path


def test_captures_are_shown_one_after_the_other(captures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--watch", "--replay", str(captures)]) == 1
    first, second = capsys.readouterr().out.split("GPU  NAME")[1:]
    assert "FAILS" not in first
    assert "FAILS" in second


def test_json_is_one_line_per_look(captures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--watch", "--json", "--replay", str(captures)]) == 1
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["servers"][0]["restart"]["feasible"] for one in told] == [True, False]


def test_a_wrong_interval_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["status", "--watch", "never"])
    assert ended.value.code == 2
    assert "--watch: 'never' is not a duration (15s, 500ms, 5m)" in capsys.readouterr().err
