from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvwatch.blockmath.flags import Flags
from kvwatch.observe.launch import RETRY_CYCLES, LaunchSource, find_servers, server_members, title_prefix
from kvwatch.observe.processes import ProcessSource
from kvwatch.observe.records import Launch, ProcessRecord
from tests.observe.fake_proc import DATA_PARALLEL_TREE, SERVE, FakeProc, process, record


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    return FakeProc(tmp_path / "proc")


def serve(flags: str = "", program: str = "/venv/bin/python3 /venv/bin/vllm serve org/model") -> list[str]:
    return [*program.split(), *flags.split()]


def listing(proc: FakeProc) -> ProcessRecord:
    found = ProcessSource(proc.root).read()
    assert isinstance(found, ProcessRecord)
    return found


def launches(proc: FakeProc) -> tuple[Launch, ...]:
    return find_servers(listing(proc), proc_root=proc.root)


def only(proc: FakeProc) -> Launch:
    (launch,) = launches(proc)
    return launch


def reasons(launch: Launch) -> list[str]:
    return [failure.reason for failure in launch.failures]


# --- finding --------------------------------------------------------------------------------------------


def test_server_on_the_host(proc: FakeProc) -> None:
    argv = serve(
        "--max-model-len 4k --served-model-name chat --port 8001 --revision abc --odd x --api-key s3cret"
    )
    environment = {"HOME": "/home/vllm", "HF_TOKEN": "s3cret", "VLLM_API_KEY": "s3cret", "PATH": "/bin"}
    proc.add(50, argv, comm="vllm", environment=environment, cwd="/srv")
    launch = only(proc)
    assert launch == Launch(
        pid=50,
        start_time=listing(proc).processes[50].start_time,
        flags=Flags(model="org/model", max_model_len=4000),
        model="org/model",
        served_names=("chat",),
        base_url="http://127.0.0.1:8001",
        cwd="/srv",
        environment={"HOME": "/home/vllm"},
        revision="abc",
        unknown_flags=("--odd",),
    )
    assert "s3cret" not in repr(launch)


def test_several_servers_by_pid(proc: FakeProc) -> None:
    proc.add(60, serve("--port 2"), comm="vllm")
    proc.add(50, serve("--port 1"), comm="vllm")
    proc.add(55, ["bash", "-c", "vllm serve org/model"])
    assert [(launch.pid, launch.base_url) for launch in launches(proc)] == [
        (50, "http://127.0.0.1:1"),
        (60, "http://127.0.0.1:2"),
    ]


def test_forked_child_with_the_same_command_line_is_no_server(proc: FakeProc) -> None:
    proc.add(50, serve(), comm="vllm")
    proc.add(51, serve(), comm="vllm", ppid=50)
    proc.add(52, ["python3", "-c", "x"], ppid=50)
    proc.add(53, serve(), comm="vllm", ppid=52)
    assert only(proc).pid == 50


def test_shell_in_between_does_not_hide_the_server(proc: FakeProc) -> None:
    proc.add(49, ["bash", "-c", "vllm serve org/model"])
    proc.add(50, serve(), comm="vllm", ppid=49)
    assert only(proc).pid == 50


def test_dead_server_is_none(proc: FakeProc) -> None:
    proc.add(50, serve(), comm="vllm", state="Z")
    assert launches(proc) == ()


def test_circle_of_parents_ends() -> None:
    first = process(50, SERVE, ppid=51)
    assert len(find_servers(record(first, process(51, ["x"], ppid=50)), proc_root=Path("/nowhere"))) == 1


# --- address --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "url"),
    [
        ("", "http://127.0.0.1:8000"),
        ("--host 0.0.0.0 --port 9", "http://127.0.0.1:9"),
        ("--host ::", "http://[::1]:8000"),
        ("--host 10.0.0.5", "http://10.0.0.5:8000"),
        ("--ssl-keyfile k --ssl-certfile c", "https://127.0.0.1:8000"),
    ],
)
def test_addresses(proc: FakeProc, flags: str, url: str) -> None:
    proc.add(50, serve(flags), comm="vllm")
    launch = only(proc)
    assert (launch.base_url, reasons(launch)) == (url, [])


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--uds /run/vllm.sock", "unix_socket"),
        ("--headless", "headless"),
        ("--api-server-count 0", "headless"),
        ("--port x", "bad_flag"),
    ],
)
def test_servers_without_an_address(proc: FakeProc, flags: str, reason: str) -> None:
    proc.add(50, serve(flags), comm="vllm")
    launch = only(proc)
    assert (launch.base_url, reasons(launch)) == (None, [reason])


def test_ports_per_rank_are_told(proc: FakeProc) -> None:
    proc.add(50, serve("--data-parallel-multi-port-external-lb"), comm="vllm")
    launch = only(proc)
    assert (launch.base_url, reasons(launch)) == ("http://127.0.0.1:8000", ["ports_per_rank"])


def test_server_in_a_container_is_reached_at_the_containers_address(proc: FakeProc) -> None:
    folder = proc.add(50, serve(), comm="vllm", namespaces={"net": 7})
    (folder / "net").mkdir()
    (folder / "net/fib_trie").write_text("Local:\n  |-- 172.17.0.2\n     /32 host LOCAL\n")
    launch = only(proc)
    assert (launch.base_url, reasons(launch)) == ("http://172.17.0.2:8000", [])


def test_server_in_a_namespace_without_an_address(proc: FakeProc) -> None:
    proc.add(50, serve(), comm="vllm", namespaces={"net": 7})
    launch = only(proc)
    assert (launch.base_url, reasons(launch)) == (None, ["other_network_namespace"])


def test_container_whose_namespace_cannot_be_read(proc: FakeProc) -> None:
    folder = proc.add(50, serve(), comm="vllm", cgroup=f"0::/docker/{'ab' * 32}\n")
    (folder / "ns/net").unlink()
    launch = only(proc)
    assert (launch.base_url, reasons(launch)) == ("http://127.0.0.1:8000", ["network_namespace_unreadable"])


# --- GPUs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "environment", "contained", "visible"),
    [
        ("", {}, False, None),
        ("", {"CUDA_VISIBLE_DEVICES": "2,3"}, False, ("2", "3")),
        ("", {"CUDA_VISIBLE_DEVICES": "GPU-ab, GPU-cd"}, False, ("GPU-ab", "GPU-cd")),
        ("", {"CUDA_VISIBLE_DEVICES": ""}, False, ()),
        ("", {"CUDA_VISIBLE_DEVICES": "1,-1,2"}, False, ("1",)),
        ("--device-ids 4,5", {}, False, ("4", "5")),
        ("--device-ids 1", {"CUDA_VISIBLE_DEVICES": "2,3"}, False, ("3",)),
        ("--device-ids 0,7,1", {"CUDA_VISIBLE_DEVICES": "2,3"}, False, ("2",)),
        ("", {"NVIDIA_VISIBLE_DEVICES": "5"}, False, None),
        ("", {"NVIDIA_VISIBLE_DEVICES": "all"}, True, None),
        ("", {"NVIDIA_VISIBLE_DEVICES": "void"}, True, None),
        ("", {"NVIDIA_VISIBLE_DEVICES": "GPU-ab,GPU-cd"}, True, ("GPU-ab", "GPU-cd")),
        ("", {"NVIDIA_VISIBLE_DEVICES": "4,6", "CUDA_VISIBLE_DEVICES": "1"}, True, ("6",)),
        ("", {"NVIDIA_VISIBLE_DEVICES": "6,4", "CUDA_VISIBLE_DEVICES": "0"}, True, ("4",)),
    ],
)
def test_visible_gpus(
    proc: FakeProc,
    flags: str,
    environment: Mapping[str, str],
    contained: bool,
    visible: tuple[str, ...] | None,
) -> None:
    cgroup = f"0::/docker/{'ab' * 32}\n" if contained else "0::/\n"
    proc.add(50, serve(flags), comm="vllm", environment=environment, cgroup=cgroup)
    assert only(proc).visible_devices == visible


# --- files and environment ------------------------------------------------------------------------------


def test_config_file_is_relative_to_the_working_directory(proc: FakeProc, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("max-num-seqs: 7\n")
    os.utime(tmp_path / "c.yaml", (1, 1))
    proc.add(50, serve("--config c.yaml"), comm="vllm", cwd=str(tmp_path))
    launch = only(proc)
    assert (launch.flags.max_num_seqs, launch.config_file, reasons(launch)) == (7, "c.yaml", [])


def test_config_file_in_a_container(proc: FakeProc, tmp_path: Path) -> None:
    inside = tmp_path / "container"
    (inside / "etc/real").mkdir(parents=True)
    (inside / "etc/real/c.yaml").write_text("max-num-seqs: 7\n")
    (inside / "etc/c.yaml").symlink_to("/etc/real/c.yaml")
    os.utime(inside / "etc/real/c.yaml", (1, 1))
    proc.add(50, serve("--config c.yaml"), comm="vllm", cwd="/etc", root=str(inside), namespaces={"mnt": 7})
    launch = only(proc)
    assert (launch.flags.max_num_seqs, reasons(launch)) == (7, [])


def test_config_file_of_an_unknown_folder(proc: FakeProc) -> None:
    proc.add(50, serve("--config c.yaml"), comm="vllm", cwd=None)
    launch = only(proc)
    assert reasons(launch) == ["config_unreadable"]
    assert "working directory" in launch.failures[0].detail


def test_config_file_changed_since_the_start(proc: FakeProc, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("max-num-seqs: 7\n")
    proc.add(50, serve(f"--config {tmp_path}/c.yaml"), comm="vllm")
    launch = only(proc)
    assert (launch.flags.max_num_seqs, reasons(launch)) == (7, ["config_changed"])


def test_environment_that_may_not_be_read(proc: FakeProc) -> None:
    (proc.add(50, serve("--max-num-seqs 7"), comm="vllm") / "environ").unlink()
    launch = only(proc)
    assert (launch.flags.max_num_seqs, launch.environment, reasons(launch)) == (
        7,
        {},
        ["environment_unreadable"],
    )


def test_what_a_server_was_told_is_kept_while_it_runs(proc: FakeProc, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("max-num-seqs: 7\n")
    os.utime(file, (1, 1))
    proc.add(50, serve(f"--config {file}"), comm="vllm")
    source = LaunchSource(proc.root)
    (before,) = source.read(listing(proc))
    file.write_text("max-num-seqs: 8\n")
    assert source.read(listing(proc)) == (before,)
    proc.add(50, serve(f"--config {file}"), comm="vllm", start=5000)
    (after,) = source.read(listing(proc))
    assert after.flags.max_num_seqs == 8


def test_what_could_not_be_read_is_tried_again(proc: FakeProc) -> None:
    folder = proc.add(50, serve(), comm="vllm", environment={"HOME": "/h"})
    (folder / "environ").rename(folder / "hidden")
    source = LaunchSource(proc.root)
    (before,) = source.read(listing(proc))
    assert reasons(before) == ["environment_unreadable"]
    (folder / "hidden").rename(folder / "environ")
    (after,) = [source.read(listing(proc)) for _ in range(RETRY_CYCLES)][-1]
    assert (after.environment, reasons(after)) == ({"HOME": "/h"}, [])


def test_gone_servers_are_forgotten(proc: FakeProc) -> None:
    proc.add(50, serve(), comm="vllm")
    source = LaunchSource(proc.root)
    assert len(source.read(listing(proc))) == 1
    proc.remove(50)
    assert source.read(listing(proc)) == ()


# --- members --------------------------------------------------------------------------------------------

TREE = [process(pid, argv, ppid=ppid, session=11700) for pid, ppid, _, argv, _ in DATA_PARALLEL_TREE]


def members(
    *others: tuple[int, list[str], int, int], environment: Mapping[str, str] | None = None
) -> set[int]:
    """Members of the recorded tree's server beside those, given as pid, argv, parent and session."""
    listed = record(*TREE, *(process(pid, argv, ppid=ppid, session=sid) for pid, argv, ppid, sid in others))
    (launch,) = find_servers(listed, proc_root=Path("/nowhere"))
    if environment is not None:
        launch = Launch(launch.pid, None, Flags(), None, (), None, environment=environment)
    return set(*server_members([launch], listed))


def test_members_of_a_real_servers_tree() -> None:
    assert members() == {pid for pid, *_ in DATA_PARALLEL_TREE}


def test_worker_that_lost_its_engine_core_is_a_member() -> None:
    assert 900 in members((900, ["VLLM::Worker_TP1"], 1, 11700))


def test_custom_titles() -> None:
    stray = (900, ["prod::Worker_TP1"], 1, 11700)
    assert 900 not in members(stray)
    assert 900 in members(stray, environment={"VLLM_PROCESS_NAME_PREFIX": "prod"})


@pytest.mark.parametrize(
    "stray",
    [
        (900, ["VLLM::Worker_TP1"], 1, 4),
        (900, ["bash"], 1, 11700),
        (900, ["x", "VLLM::Worker_TP1"], 1, 11700),
    ],
)
def test_strangers(stray: tuple[int, list[str], int, int]) -> None:
    assert 900 not in members(stray)


def test_orphans_in_a_session_that_several_share_belong_to_none() -> None:
    """Two servers started from one shell: what a dead one left is not the living one's."""
    server = process(50, SERVE, ppid=40, session=40)
    orphan = process(60, ["VLLM::EngineCore"], ppid=1, session=40)
    listed = record(process(40, ["bash"]), server, orphan)
    (launch,) = find_servers(listed, proc_root=Path("/nowhere"))
    assert server_members([launch], listed) == (frozenset({50}),)


def test_members_of_a_server_that_is_gone() -> None:
    gone, elsewhere = (Launch(pid, None, Flags(), None, (), None) for pid in (99, None))
    assert server_members([gone, elsewhere], record(*TREE)) == (frozenset(), frozenset())


@pytest.mark.parametrize(
    ("title", "prefix"),
    [
        ("VLLM::EngineCore", "VLLM"),
        ("VLLM::EngineCore_DP3", "VLLM"),
        ("VLLM::DPEngineCore_3", "VLLM"),
        ("VLLM::Worker_DP0_PP1_TP0_EP2", "VLLM"),
        ("VLLM::APIServer_DP1", "VLLM"),
        ("VLLM::DPCoordinator", "VLLM"),
        ("team/a::Worker", "team/a"),
        ("std::vector", None),
        ("::Worker", None),
        ("ray::RayWorkerWrapper", None),
        ("VLLM::Workers", None),
    ],
)
def test_titles(title: str, prefix: str | None) -> None:
    assert title_prefix(process(1, [title])) == prefix
