"""The wheel, installed where there is no checkout."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from kvwatch import __version__

ROOT = Path(__file__).resolve().parents[1]


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", folder, ROOT, cwd=folder)
    [built] = folder.glob("*.whl")
    return built


@pytest.mark.xdist_group("wheel")
def test_the_wheel_brings_what_it_needs_and_nothing_of_the_checkout(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for needed in (
        "kvwatch/py.typed",
        "kvwatch/kvwatch.yaml",
        "kvwatch/demo/data/metrics.prom",
        "kvwatch/export/statuspage/status.css",
        f"kvwatch-{__version__}.dist-info/licenses/LICENSE",
    ):
        assert needed in names
    tops = {name.split("/")[0] for name in names}
    assert tops == {"kvwatch", f"kvwatch-{__version__}.dist-info", f"kvwatch-{__version__}.data"}


@pytest.mark.xdist_group("wheel")
def test_the_wheel_works_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "venv"
    venv.create(home, with_pip=True)
    run(home / "bin/python", "-m", "pip", "install", "-q", wheel, cwd=tmp_path)
    kvwatch = home / "bin/kvwatch"
    assert run(kvwatch, "--version", cwd=tmp_path) == f"kvwatch {__version__}\n"
    listening = ("--web.listen-address", "127.0.0.1:0", "--duration", "2")
    assert "llama-3.3-70b" in run(kvwatch, "demo", *listening, cwd=tmp_path)
