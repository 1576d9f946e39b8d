from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvwatch.observe.procfs import (
    namespace_inode,
    process_root,
    read_bytes,
    read_environment,
    read_regular_file,
    resolve_in_root,
    split_arguments,
    working_directory,
)
from tests.observe.fake_proc import OWN_NAMESPACE, FakeProc


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    return FakeProc(tmp_path / "proc")


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 20000])
@pytest.mark.parametrize("limit", [10, 4096, 10000, 1 << 20])
def test_reads_up_to_the_limit(tmp_path: Path, size: int, limit: int) -> None:
    data = os.urandom(size)
    (tmp_path / "file").write_bytes(data)
    assert read_bytes(str(tmp_path / "file"), limit=limit) == data[:limit]


def test_file_that_another_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    assert read_regular_file(tmp_path / "file", limit=3) == b"abc"
    with pytest.raises(OSError, match="more than 2 bytes"):
        read_regular_file(tmp_path / "file", limit=2)
    os.mkfifo(tmp_path / "pipe")
    for name in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(OSError, match=r"regular file|Is a directory"):
            read_regular_file(name, limit=10)


@pytest.mark.parametrize(
    ("data", "argv"),
    [
        (b"", ()),
        (b"\0\0\0", ()),
        (b"a\0b c\0\0d\0\0\0", ("a", "b c", "", "d")),
        (b"title without an end", ("title without an end",)),
        (b"\xff\0", ("\ufffd",)),
    ],
)
def test_arguments(data: bytes, argv: tuple[str, ...]) -> None:
    assert split_arguments(data) == argv


def test_namespaces(proc: FakeProc) -> None:
    assert namespace_inode(proc.root, "self", "net") == OWN_NAMESPACE
    assert namespace_inode(proc.root, 1, "user") is None
    assert namespace_inode(Path("/proc"), os.getpid(), "mnt") == Path("/proc/self/ns/mnt").stat().st_ino


def test_only_named_variables_are_read(proc: FakeProc) -> None:
    proc.add(50, ["x"], environment={"HOME": "/h", "HF_TOKEN": "s3cret", "A": "b=c"})
    assert read_environment(proc.root, 50, {"HOME", "A", "NONE"}) == {"HOME": "/h", "A": "b=c"}


def test_remains_of_an_overwritten_environment(proc: FakeProc) -> None:
    folder = proc.add(50, ["x"])
    (folder / "environ").write_bytes(b"\0\0tail\0HOME=/h\0")
    assert read_environment(proc.root, 50, {"HOME"}) == {"HOME": "/h"}


def test_working_directory(proc: FakeProc) -> None:
    proc.add(50, ["x"], cwd="/srv")
    proc.add(51, ["x"], cwd=None)
    assert working_directory(proc.root, 50) == "/srv"
    assert working_directory(proc.root, 51) is None


# --- another process's file system ----------------------------------------------------------------------


def test_root_of_a_process(proc: FakeProc) -> None:
    proc.add(50, ["shares it"])
    proc.add(51, ["container"], namespaces={"mnt": 7})
    proc.add(52, ["chroot"], root="/jail")
    assert process_root(proc.root, None) == "/"
    assert process_root(proc.root, 50) == "/"
    assert process_root(proc.root, 51) == f"{proc.root}/51/root"
    assert process_root(proc.root, 52) == f"{proc.root}/52/root"


def test_root_that_the_kernel_does_not_tell(proc: FakeProc) -> None:
    (proc.add(50, ["x"]) / "ns/mnt").unlink()
    assert process_root(proc.root, 50) == "/"
    assert process_root(proc.root, 50, contained=True) == f"{proc.root}/50/root"


def test_links_stay_inside_of_the_root(tmp_path: Path) -> None:
    (tmp_path / "data/real").mkdir(parents=True)
    (tmp_path / "absolute").symlink_to("/data")
    (tmp_path / "data/relative").symlink_to("real")
    (tmp_path / "data/chain").symlink_to("/absolute/relative")
    (tmp_path / "escape").symlink_to("../../../data")
    for path in ("/absolute/real", "/data/relative", "/data/chain", "/escape/./x/../real", "//data//real/"):
        assert resolve_in_root(str(tmp_path), path) == f"{tmp_path}/data/real", path


def test_missing_parts_stay_as_they_are(tmp_path: Path) -> None:
    assert resolve_in_root(str(tmp_path), "/no/such/../file") == f"{tmp_path}/no/file"


def test_circle_of_links_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="symbolic links"):
        resolve_in_root(str(tmp_path), "/a/x")


def test_own_root_is_left_to_the_kernel() -> None:
    assert resolve_in_root("/", "//a/.//../b/") == "/a/../b"
