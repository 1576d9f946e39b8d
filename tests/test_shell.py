"""The man page and the completion say what the command line does."""

from __future__ import annotations

import subprocess

import pytest

from kvwatch.cli.main import COMMANDS
from tests.support import ROOT
from tools.build_shell import man_page, stale

COMPLETION = ROOT / "share" / "bash-completion" / "completions" / "kvwatch"
REQUESTS = (".TH", ".SH", ".SS", ".TP", ".PP", ".nf", ".fi", ".B", ".I", '.\\"')


def test_both_are_up_to_date() -> None:
    assert stale() == [], "python -m tools.build_shell"


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
