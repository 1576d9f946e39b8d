"""Fresh command lines, read by the installed vLLM and by kvwatch: a release that differs is noticed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.observe.command_lines import check, read_cases
from tests.support import ROOT

pytestmark = pytest.mark.vllm

CASES = "500"
SEED = "20"


def test_reads_what_the_installed_vllm_reads(vllm_venv: Path) -> None:
    recorder = [f"{vllm_venv}/bin/python", f"{ROOT}/tools/record_command_lines.py", CASES, SEED]
    recorded = subprocess.run(recorder, check=True, capture_output=True, text=True)
    head, *cases = read_cases(recorded.stdout)
    assert len(cases) == int(CASES)
    for case in cases:
        check(case, head["defaults"])
