from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from kvwatch.privileges import DAC_OVERRIDE, NEEDED, drop_privileges
drop_privileges((*NEEDED, DAC_OVERRIDE) if "write" in sys.argv else NEEDED)
wanted = ("CapEff", "CapPrm", "CapInh", "NoNewPrivs")
print(*(line.split()[1] for line in open("/proc/self/status") if line.startswith(wanted)))
"""
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root has something to give up")


def status(*prefix: str, arguments: tuple[str, ...] = ()) -> list[int]:
    """Inheritable, permitted and effective capabilities, then no_new_privs, after the drop."""
    command = [*prefix, sys.executable, "-c", PROGRAM, *arguments]
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, timeout=60)
    return [int(word, 16) for word in done.stdout.split()]


@ROOT
def test_root_keeps_two_capabilities() -> None:
    assert status() == [0, 1 << 2 | 1 << 19, 1 << 2 | 1 << 19, 1]


@ROOT
def test_writing_a_textfile_takes_a_third() -> None:
    assert status(arguments=("write",)) == [0, 1 << 1 | 1 << 2 | 1 << 19, 1 << 1 | 1 << 2 | 1 << 19, 1]


@ROOT
def test_what_was_not_there_is_not_gained() -> None:
    without = ("setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-all")
    assert status(*without) == [0, 1 << 2, 1 << 2, 1]
