"""The man page and the completions say what the command line does."""

from __future__ import annotations

import os
import pty
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvwatch.cli.main import COMMANDS
from tests.support import ROOT
from tools.build_shell import FILES, man_page
from tools.generated import stale

COMPLETION = ROOT / "share" / "bash-completion" / "completions" / "kvwatch"
ZSH_FUNCTIONS = ROOT / "share" / "zsh" / "site-functions"
REQUESTS = (".TH", ".SH", ".SS", ".TP", ".PP", ".nf", ".fi", ".B", ".I", '.\\"')


def test_all_are_up_to_date() -> None:
    assert stale(FILES) == [], "python -m tools.build_shell"


def test_the_man_page_has_every_command_and_no_stray_request() -> None:
    lines = man_page().splitlines()
    for command in COMMANDS:
        assert f'.SH "KVWATCH {command.upper()}"'.replace("-", r"\-") in lines
    stray = [line for line in lines if line.startswith((".", "'")) and line.split()[0] not in REQUESTS]
    assert stray == []


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("kvwatch", "st"), {"status"}),
        (("kvwatch", "status", "--w"), {"--watch"}),
        (("kvwatch", "run", "--log-level", ""), {"debug", "info", "warning", "error"}),
        (("kvwatch", "run", "--log-level", "w"), {"warning"}),
        (("kvwatch", "check-config", ""), set()),
    ],
)
def test_bash_completes(words: tuple[str, ...], found: set[str]) -> None:
    script = (
        'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _kvwatch;'
        ' printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "-euc", script, "bash", COMPLETION, *words],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    assert set(done.stdout.split()) == found


@pytest.fixture
def zsh(tmp_path: Path) -> Iterator[int]:
    """The terminal of a real zsh with the completion loaded; it prints what kvwatch would be called with."""
    terminal, theirs = pty.openpty()
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TERM": "dumb"}
    with subprocess.Popen(
        ["zsh", "-f", "-i"], stdin=theirs, stdout=theirs, stderr=theirs, env=environment, cwd=tmp_path
    ) as process:
        os.close(theirs)
        load = f"fpath=({ZSH_FUNCTIONS} $fpath); autoload -Uz compinit; compinit -D"
        os.write(terminal, f"{load}; kvwatch() {{ print -r -- \"<$*>\" }}; echo rea''dy\n".encode())
        read_until("ready", terminal)
        yield terminal
        process.kill()
    os.close(terminal)


def read_until(pattern: str, terminal: int) -> re.Match[str]:
    """Waits for a text on a terminal; an error where its shell ends before."""
    shown = ""
    while (found := re.search(pattern, shown)) is None:
        shown += os.read(terminal, 4096).decode(errors="replace")
    return found


@pytest.mark.parametrize(
    ("typed", "called_with"),
    [
        ("stat\t", "status"),
        ("status --wa\t", "status --watch"),
        ("run --log-level w\t", "run --log-level warning"),
        ("plan --no-trust\t", "plan --no-trust-remote-code"),
        ("doctor --te\tk\t", "doctor --textfile k.yaml"),
        ("check-config k\t", "check-config k.yaml"),
    ],
)
def test_zsh_completes(typed: str, called_with: str, zsh: int, tmp_path: Path) -> None:
    (tmp_path / "k.yaml").touch()
    os.write(zsh, f"kvwatch {typed}\n".encode())
    assert read_until(r"<([a-z].*)>\r", zsh)[1] == called_with
