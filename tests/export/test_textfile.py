from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvwatch.export.textfile import write_textfile
from tests.support import ROOT


def test_the_file_is_replaced_whole_and_readable(tmp_path: Path) -> None:
    path = tmp_path / "kvwatch.prom"
    path.write_bytes(b"old " * 1000)
    write_textfile(path, b"new\n")
    assert path.read_bytes() == b"new\n"
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file_and_no_scraps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kvwatch.prom"
    path.write_bytes(b"old\n")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_textfile(path, b"new\n")
    assert path.read_bytes() == b"old\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_textfile(tmp_path / "no" / "kvwatch.prom", b"")


def test_a_writer_that_is_killed_leaves_a_whole_file_and_one_scrap_at_most(tmp_path: Path) -> None:
    path = tmp_path / "kvwatch.prom"
    program = f"""
from pathlib import Path
from kvwatch.export.textfile import write_textfile
while True:
    for letter in (b"a", b"b"):
        write_textfile(Path({str(path)!r}), letter * 300_000)
        print(flush=True)
"""
    for _ in range(4):
        with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE) as writer:
            assert writer.stdout
            for _ in range(3):
                writer.stdout.readline()
            writer.kill()
        assert path.read_bytes() in (b"a" * 300_000, b"b" * 300_000)
    assert len(list(tmp_path.iterdir())) <= 2
    write_textfile(path, b"new\n")
    assert list(tmp_path.iterdir()) == [path]


def test_what_others_put_in_its_way_is_not_written_to(tmp_path: Path) -> None:
    path, other = tmp_path / "kvwatch.prom", tmp_path / "precious"
    other.write_bytes(b"precious")
    (tmp_path / ".kvwatch.prom.new").symlink_to(other)
    write_textfile(path, b"new\n")
    assert other.read_bytes() == b"precious"
    assert path.read_bytes() == b"new\n"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_not_replaced(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "kvwatch.prom"
    make(path)
    before = path.lstat().st_mode
    with pytest.raises(OSError, match="not a regular file, so it is not replaced"):
        write_textfile(path, b"new\n")
    assert list(tmp_path.iterdir()) == [path]
    assert path.lstat().st_mode == before
