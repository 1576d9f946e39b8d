from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from kvwatch.filestamp import WatchedFile


def set_age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_a_file_that_stays_as_it_is_has_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("a", encoding="utf-8")
    assert not WatchedFile(path).changed()


def test_a_replaced_file_has_changed_once(tmp_path: Path) -> None:
    path, new = tmp_path / "f", tmp_path / "new"
    path.write_text("a", encoding="utf-8")
    watched = WatchedFile(path)
    new.write_text("b", encoding="utf-8")
    set_age(new, 60)
    new.replace(path)
    assert watched.changed()
    assert not watched.changed()


def test_a_file_just_written_is_given_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    path.write_text("a", encoding="utf-8")
    watched = WatchedFile(path)
    path.write_text("half", encoding="utf-8")
    set_age(path, 0)
    assert not watched.changed()
    now = time.monotonic()
    monkeypatch.setattr("kvwatch.filestamp.time.monotonic", lambda: now + 5)
    assert watched.changed()


def test_a_file_that_is_gone_has_changed_when_it_stays_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    path.write_text("a", encoding="utf-8")
    watched = WatchedFile(path)
    path.unlink()
    assert not watched.changed()
    now = time.monotonic()
    monkeypatch.setattr("kvwatch.filestamp.time.monotonic", lambda: now + 5)
    assert watched.changed()
    assert not watched.changed()


def test_a_file_dated_to_the_future_is_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    path.write_text("a", encoding="utf-8")
    watched = WatchedFile(path)
    set_age(path, -3600)
    assert not watched.changed()
    now = time.monotonic()
    monkeypatch.setattr("kvwatch.filestamp.time.monotonic", lambda: now + 5)
    assert watched.changed()
