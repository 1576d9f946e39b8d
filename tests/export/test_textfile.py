from __future__ import annotations

from pathlib import Path

import pytest

from kvwatch.export.textfile import write_textfile


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
