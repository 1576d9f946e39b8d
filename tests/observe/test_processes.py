from __future__ import annotations

import os
import pwd
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwatch.observe import processes
from kvwatch.observe.processes import ProcessSource, parse_stat, program_name, python_arguments
from kvwatch.observe.records import Failure, ProcessRecord
from tests.observe.fake_proc import BOOT_TIME, DATA_PARALLEL_TREE, KERNEL_THREAD, OWN_NAMESPACE, FakeProc


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    return FakeProc(tmp_path / "proc")


def look(source: ProcessSource) -> ProcessRecord:
    found = source.read()
    assert isinstance(found, ProcessRecord), found
    return found


# --- names ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("comm", "argv", "name"),
    [
        ("systemd", ["/sbin/init"], "systemd"),
        ("kworker/0:1-eve", [], "kworker/0:1-eve"),
        ("ollama", ["/usr/local/bin/ollama", "runner", "--model", "/x"], "ollama"),
        ("VLLM::EngineCor", ["VLLM::EngineCore_DP0"], "VLLM::EngineCore_DP0"),
        ("team/VLLM::Engi", ["team/VLLM::EngineCore"], "team/VLLM::EngineCore"),
        ("ray::RayWorkerW", ["ray::RayWorkerWrapper.execute_method"], "ray::RayWorkerWrapper.execute_method"),
        ("gnome-terminal-", ["/usr/libexec/gnome-terminal-server", "--x"], "gnome-terminal-server"),
        ("long-script-nam", ["/bin/bash", "/opt/long-script-name.sh", "secret"], "long-script-name.sh"),
        ("chromium-browse", ["/usr/lib/chromium-browser --type=gpu --key=secret"], "chromium-browser"),
        ("nginx", ["nginx: worker process"], "nginx"),
        ("python3", ["python3", "train.py", "--token", "secret"], "train.py"),
        ("python3", ["/usr/bin/python3.12", "-u", "/srv/app/train.py"], "train.py"),
        ("python", ["python", "-m", "torch.distributed.run", "train.py"], "torch.distributed.run"),
        ("python", ["python", "-Bmhttp.server"], "http.server"),
        ("python", ["python", "-X", "dev", "-W", "error", "a.py"], "a.py"),
        ("python3", ["python3", "-c", "import secret"], "python3"),
        ("python3", ["python3"], "python3"),
        ("python3", ["python3", "-"], "python3"),
        ("pt_main_thread", ["python3", "-c", "from multiprocessing.spawn import x"], "pt_main_thread"),
        ("pt_main_thread", ["python3", "serve_llm.py"], "serve_llm.py"),
        (
            "vllm",
            ["/opt/venv/bin/python3", "/opt/venv/bin/vllm", "serve", "m", "--api-key", "secret"],
            "vllm",
        ),
        ("a\x1b[31mb\n", ["a"], "a[31mb"),
        ("python3", ["python3", "y" * 200 + ".py"], "y" * 64),
    ],
)
def test_program_names(comm: str, argv: list[str], name: str) -> None:
    assert program_name(comm, argv) == name


def test_names_agree_with_psutil_on_a_real_servers_tree() -> None:
    for _, _, comm, argv, name in DATA_PARALLEL_TREE:
        assert program_name(comm, argv) == name


@given(st.text(max_size=20), st.lists(st.text(max_size=80), max_size=4))
def test_any_name_is_short_and_printable(comm: str, argv: list[str]) -> None:
    name = program_name(comm, argv)
    assert len(name) <= 64
    assert not any(ord(character) < 32 or 127 <= ord(character) < 160 for character in name)


@pytest.mark.parametrize(
    ("argv", "taken"),
    [
        (["python3.11", "-I", "x.py", "a"], ("script", "x.py", ("a",))),
        (["/a/python3.13t", "-m", "m", "a", "b"], ("module", "m", ("a", "b"))),
        (["pypy3", "-Ic", "code", "a"], ("code", "", ("a",))),
        (["python", "--check-hash-based-pycs", "never", "x"], ("script", "x", ())),
        (["python", "-Xfrozen_modules=off", "-m", "m"], ("module", "m", ())),
        (["python", "-Wignore::cm", "x.py"], ("script", "x.py", ())),
        (["python", "-m"], ("module", "", ())),
        (["python", "-i"], ("interpreter", "", ())),
    ],
)
def test_python_command_lines(argv: list[str], taken: tuple[str, str, tuple[str, ...]]) -> None:
    assert python_arguments(argv) == taken


@pytest.mark.parametrize("argv", [[], ["bash", "python"], ["/usr/bin/pythonista"], ["python-config"]])
def test_what_is_no_python(argv: list[str]) -> None:
    assert python_arguments(argv) is None


def test_stat_of_a_name_with_blanks_and_parentheses() -> None:
    stat = parse_stat(b"7 (a) (b c) R 3 7 9 0 -1 4194304 0 0 0 0 0 0 0 0 20 0 1 0 777 0 0 0\n")
    assert (stat.comm, stat.state, stat.ppid, stat.session, stat.start_ticks) == ("a) (b c", "R", 3, 9, 777)
    assert not stat.kernel_thread


@pytest.mark.parametrize(
    "data", [b"", b"7 (a) R 1", b"7 a R 3 7 9 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 777 0 0 0"]
)
def test_broken_stat_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="stat"):
        parse_stat(data)


# --- a laid-out node ------------------------------------------------------------------------------------


def test_fields_of_a_process(proc: FakeProc) -> None:
    identifier = "ab" * 32
    proc.add(
        50,
        ["python3", "train.py", "", ""],
        comm="python3",
        ppid=40,
        session=30,
        state="R",
        start=250,
        cgroup=f"0::/system.slice/docker-{identifier}.scope\n",
        namespaces={"pid": 77},
    )
    found = look(ProcessSource(proc.root))
    process = found.processes[50]
    assert process.argv == ("python3", "train.py")
    assert (process.ppid, process.session, process.state) == (40, 30, "R")
    assert process.start_time == BOOT_TIME + 2.5
    assert (process.name, process.container, process.workload) == ("train.py", identifier, identifier[:12])
    assert process.pid_namespace == 77
    assert process.uid == os.getuid()
    assert process.user == pwd.getpwuid(os.getuid()).pw_name
    assert found.pid_namespace == OWN_NAMESPACE
    assert found.boot_time == BOOT_TIME
    assert found.failures == ()


def test_arguments_are_in_no_repr(proc: FakeProc) -> None:
    proc.add(50, ["python3", "train.py", "--token", "s3cret"], comm="python3")
    found = look(ProcessSource(proc.root))
    assert "s3cret" in found.processes[50].argv
    assert "s3cret" not in repr(found)


def test_uid_without_a_user_is_named_by_number(proc: FakeProc, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> pwd.struct_passwd:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert look(ProcessSource(proc.root)).processes[1].user == str(os.getuid())


def test_process_that_vanishes_meanwhile_is_left_out(proc: FakeProc) -> None:
    (proc.root / "60").mkdir()
    assert 60 not in look(ProcessSource(proc.root)).processes


def test_what_may_not_be_read_is_none(proc: FakeProc) -> None:
    folder = proc.add(50, ["x"])
    (folder / "cgroup").unlink()
    (folder / "cmdline").unlink()
    (folder / "ns/pid").unlink()
    process = look(ProcessSource(proc.root)).processes[50]
    assert (process.cgroup, process.container, process.pid_namespace) == (None, None, None)
    assert process.argv == ()
    assert process.name == "x"


def test_hidden_processes_are_told(proc: FakeProc) -> None:
    proc.remove(1)
    assert [failure.reason for failure in look(ProcessSource(proc.root)).failures] == ["hidden"]


def test_no_proc_is_a_failure(tmp_path: Path) -> None:
    found = ProcessSource(tmp_path / "none").read()
    assert isinstance(found, Failure)
    assert (found.source, found.reason) == ("processes", "enoent")


def test_proc_without_a_boot_time_is_a_failure(proc: FakeProc) -> None:
    (proc.root / "stat").write_text("cpu 1\n")
    found = ProcessSource(proc.root).read()
    assert isinstance(found, Failure)
    assert found.reason == "unreadable"


def test_boot_time_is_read_once(proc: FakeProc) -> None:
    """The kernel moves it when the clock is set; identities must not move with it."""
    source = ProcessSource(proc.root)
    before = look(source).processes[1].start_time
    (proc.root / "stat").write_text(f"btime {BOOT_TIME + 100}\n")
    proc.add(50, ["x"])
    after = look(source)
    assert (after.processes[1].start_time, after.boot_time) == (before, BOOT_TIME)
    assert after.processes[50].start_time == BOOT_TIME + 10


# --- from one look to the next --------------------------------------------------------------------------


def test_births_and_deaths_are_seen_at_once(proc: FakeProc) -> None:
    source = ProcessSource(proc.root)
    proc.add(50, ["a"])
    assert look(source).processes.keys() == {1, 50}
    proc.remove(50)
    proc.add(51, ["b"])
    assert look(source).processes.keys() == {1, 51}


def test_another_process_under_the_same_pid(proc: FakeProc) -> None:
    source = ProcessSource(proc.root)
    proc.add(50, ["old"])
    proc.add(51, ["child"], ppid=50)
    look(source)
    old = proc.root / "50"
    old.rename(proc.root / "kept")  # so that the new folder cannot get its inode
    proc.add(51, ["child"], ppid=1)
    proc.add(50, ["new"], start=9000)
    found = look(source).processes
    assert found[50].name == "new"
    assert found[50].start_time == BOOT_TIME + 90
    assert found[51].ppid == 1


def test_retitling_is_seen_at_once(proc: FakeProc) -> None:
    source = ProcessSource(proc.root)
    proc.add(50, ["python3", "-c", "spawn"], comm="python3")
    assert look(source).processes[50].name == "python3"
    proc.add(50, ["VLLM::Worker", "", ""], comm="VLLM::Worker")
    assert look(source).processes[50].name == "VLLM::Worker"
    proc.add(50, ["VLLM::Worker_TP0", "", ""], comm="VLLM::Worker_TP")
    assert look(source).processes[50].name == "VLLM::Worker_TP0"


@pytest.mark.parametrize("end", ["gone", "zombie"])
def test_children_of_the_dead_get_their_new_parent_at_once(proc: FakeProc, end: str) -> None:
    source = ProcessSource(proc.root)
    proc.add(50, ["python3", "/bin/vllm", "serve", "m"], comm="vllm")
    proc.add(51, ["helper"], ppid=50)
    assert look(source).processes[51].ppid == 50
    if end == "gone":
        proc.remove(50)
    else:
        proc.add(50, [], comm="vllm", state="Z")
    proc.add(51, ["helper"], ppid=1)
    found = look(source).processes
    assert found[51].ppid == 1
    assert end == "gone" or found[50].state == "Z"


def test_child_that_dies_with_its_parent_is_left_out(proc: FakeProc) -> None:
    source = ProcessSource(proc.root)
    proc.add(50, ["a"])
    child = proc.add(51, ["b"], ppid=50)
    look(source)
    proc.remove(50)
    (child / "stat").unlink()
    assert look(source).processes.keys() == {1}


def test_everything_is_read_again_in_turn(proc: FakeProc) -> None:
    source = ProcessSource(proc.root)
    proc.add(50, ["old"], comm="old")
    look(source)
    proc.add(50, ["new"], comm="new", cgroup="0::/system.slice/new.service\n")
    looks = [look(source).processes[50] for _ in range(processes.REFRESH_CYCLES)]
    assert (looks[-1].name, looks[-1].unit) == ("new", "new.service")
    assert [each.name for each in looks].count("old") > 0


def test_young_processes_are_read_again_each_time(proc: FakeProc) -> None:
    source = ProcessSource(proc.root)
    start = int((time.time() - BOOT_TIME) * 100)
    proc.add(50, ["sh"], comm="sh", start=start)
    look(source)
    proc.add(50, ["ollama", "serve"], comm="ollama", start=start)
    assert look(source).processes[50].name == "ollama"


@pytest.mark.parametrize(
    "change",
    [{"argv": ["a", "2"]}, {"cgroup": "0::/system.slice/b.service\n"}, {"ppid": 7}, {"state": "R"}],
)
def test_a_young_process_is_made_anew_once_something_changed(proc: FakeProc, change: dict[str, Any]) -> None:
    young: dict[str, Any] = {
        "argv": ["a", "1"],
        "start": int((time.time() - BOOT_TIME) * os.sysconf("SC_CLK_TCK")),
    }
    source = ProcessSource(proc.root)
    proc.add(50, **young)
    first = look(source).processes[50]
    assert look(source).processes[50] is first
    proc.add(50, **{**young, **change})
    assert look(source).processes[50] != first


def test_kernel_threads_are_read_once(proc: FakeProc) -> None:
    source = ProcessSource(proc.root)
    folder = proc.add(50, [], comm="kworker/0:0", flags=KERNEL_THREAD, cgroup="0::/x.service\n")
    first = look(source).processes[50]
    assert (first.name, first.argv, first.cgroup) == ("kworker/0:0", (), None)
    (folder / "stat").unlink()
    for _ in range(processes.REFRESH_CYCLES):
        assert look(source).processes[50] is first


def test_what_did_not_change_stays_the_same_object(proc: FakeProc) -> None:
    source = ProcessSource(proc.root)
    proc.add(50, ["python3", "x.py"], comm="python3")
    before = look(source).processes[50]
    assert look(source).processes[50] is before


# --- this machine ---------------------------------------------------------------------------------------


def test_agrees_with_psutil_about_this_process() -> None:
    found = look(ProcessSource()).processes[os.getpid()]
    real = psutil.Process()
    assert found.start_time == pytest.approx(real.create_time(), abs=0.02)
    assert (found.ppid, found.user, found.uid) == (real.ppid(), real.username(), real.uids().effective)
    assert found.argv == tuple(real.cmdline())
    assert found.session == os.getsid(0)


def test_sees_a_real_process_come_and_go() -> None:
    source = ProcessSource()
    look(source)
    code = "import sys; sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as child:
        found = look(source).processes[child.pid]
        assert found.argv == (sys.executable, "-c", code)
        assert found.ppid == os.getpid()
        assert child.stdin is not None
        child.stdin.close()
        child.wait()
    assert child.pid not in look(source).processes
