"""The C library itself, called as NVML is."""

from __future__ import annotations

import ctypes
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pynvml
import pytest

import tests.fakenvml as fakenvml
from tests.fakenvml import UNKNOWN, Gpu, Instance, Process, Scenario, environment, fail, grow, hang, library

Load = Callable[..., ctypes.CDLL]
INSUFFICIENT_SIZE = 7


class ProcessV1(ctypes.Structure):
    """The entry of the first process lists, which nvidia-ml-py no longer knows."""

    _fields_ = (("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong))


@pytest.fixture
def scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "scenario"
    monkeypatch.setenv("KVWATCH_FAKENVML", str(path))
    Scenario().write(path)
    return path


@pytest.fixture
def load(tmp_path: Path, scenario: Path) -> Load:
    def load(driver: int = 570) -> ctypes.CDLL:
        # The loader shares what it loaded before by inode: a copy has a state of its own.
        copy = tmp_path / f"libnvidia-ml-{driver}.so"
        shutil.copy(library(driver) / "libnvidia-ml.so.1", copy)
        return ctypes.CDLL(str(copy))

    return load


def handle_of(nvml: ctypes.CDLL, index: int) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    assert nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0
    return handle


def count_of(nvml: ctypes.CDLL) -> int:
    count = ctypes.c_uint()
    assert nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0
    return count.value


def test_initialisations_are_counted(load: Load) -> None:
    nvml = load()
    count = ctypes.c_uint()
    assert nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 1
    assert nvml.nvmlShutdown() == 1
    assert (nvml.nvmlInitWithFlags(0), nvml.nvmlInitWithFlags(0), nvml.nvmlShutdown()) == (0, 0, 0)
    assert count_of(nvml) == 1
    assert nvml.nvmlShutdown() == 0
    assert nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 1


def test_a_replaced_scenario_shows_at_the_next_call(load: Load, scenario: Path) -> None:
    nvml = load()
    nvml.nvmlInitWithFlags(0)
    handle = handle_of(nvml, 0)
    name = ctypes.create_string_buffer(96)
    for given in ("NVIDIA L4", "NVIDIA T4", "NVIDIA A10G"):
        Scenario((Gpu(name=given),)).write(scenario)
        assert nvml.nvmlDeviceGetName(handle, name, 96) == 0
        assert name.value.decode() == given
    assert nvml.nvmlDeviceGetName(handle, name, len("NVIDIA A10G")) == INSUFFICIENT_SIZE


def test_handles_outlive_their_device(load: Load, scenario: Path) -> None:
    Scenario((Gpu(), Gpu(mig="on", instances=(Instance(index=3),)))).write(scenario)
    nvml = load()
    nvml.nvmlInitWithFlags(0)
    gpu, mig, found = handle_of(nvml, 1), ctypes.c_void_p(), ctypes.c_void_p()
    memory = pynvml.c_nvmlMemory_t()
    find = nvml.nvmlDeviceGetMigDeviceHandleByIndex
    assert [find(gpu, place, ctypes.byref(mig)) for place in (2, 3, 7)] == [6, 0, 2]
    find(gpu, 3, ctypes.byref(mig))
    assert nvml.nvmlDeviceGetMemoryInfo(mig, ctypes.byref(memory)) == 0
    by_uuid = nvml.nvmlDeviceGetHandleByUUID
    assert by_uuid(b"GPU-00000000-0000-0000-0000-000000000001", ctypes.byref(found)) == 0
    assert found.value == gpu.value
    assert by_uuid(b"MIG-00000000-0000-0000-0001-000000000003", ctypes.byref(found)) == 0
    assert found.value == mig.value
    assert by_uuid(b"GPU-no-such", ctypes.byref(found)) == 6

    Scenario((Gpu(), Gpu(mig="off"))).write(scenario)
    assert nvml.nvmlDeviceGetMemoryInfo(mig, ctypes.byref(memory)) == 15
    assert nvml.nvmlDeviceGetMemoryInfo(gpu, ctypes.byref(memory)) == 0
    Scenario().write(scenario)
    assert nvml.nvmlDeviceGetMemoryInfo(gpu, ctypes.byref(memory)) == 15
    assert nvml.nvmlDeviceGetHandleByIndex_v2(1, ctypes.byref(gpu)) == 2


def test_memory_of_both_versions(load: Load, scenario: Path) -> None:
    Scenario((Gpu(total=1000, reserved=100, used=300),)).write(scenario)
    nvml = load()
    nvml.nvmlInitWithFlags(0)
    handle = handle_of(nvml, 0)
    v1, v2 = pynvml.c_nvmlMemory_t(), pynvml.c_nvmlMemory_v2_t()
    assert nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(v1)) == 0
    assert (v1.total, v1.free, v1.used) == (1000, 600, 400)
    v2.version = pynvml.nvmlMemory_v2
    assert nvml.nvmlDeviceGetMemoryInfo_v2(handle, ctypes.byref(v2)) == 0
    assert (v2.total, v2.free, v2.used, v2.reserved) == (1000, 600, 300, 100)
    v2.version = 1
    assert nvml.nvmlDeviceGetMemoryInfo_v2(handle, ctypes.byref(v2)) == 25


def test_process_lists_of_all_versions(load: Load, scenario: Path) -> None:
    inside = Instance(index=1, gpu_instance=5, compute_instance=6, processes=(Process(30, 3),))
    own = (Process(10, 1), Process(20, UNKNOWN), Process(40, 4, "mps"))
    Scenario((Gpu(mig="on", instances=(inside,), processes=own),)).write(scenario)
    nvml = load()
    nvml.nvmlInitWithFlags(0)
    handle = handle_of(nvml, 0)
    for suffix, entry in (
        ("", ProcessV1),
        ("_v2", pynvml.c_nvmlProcessInfo_v2_t),
        ("_v3", pynvml.c_nvmlProcessInfo_v2_t),
    ):
        ask = getattr(nvml, f"nvmlDeviceGetComputeRunningProcesses{suffix}")
        count = ctypes.c_uint(0)
        assert ask(handle, ctypes.byref(count), None) == INSUFFICIENT_SIZE
        assert count.value == 3
        entries = (entry * 4)()
        count.value = 2
        assert ask(handle, ctypes.byref(count), entries) == INSUFFICIENT_SIZE
        count.value = 4
        assert ask(handle, ctypes.byref(count), entries) == 0
        fields = [name for name, _ in entry._fields_]
        rows = [tuple(getattr(e, name) for name in fields) for e in entries[: count.value]]
        none = 0xFFFFFFFF
        assert rows == [
            row[: len(fields)] for row in ((10, 1, none, none), (20, UNKNOWN, none, none), (30, 3, 5, 6))
        ]


def test_a_list_grows_as_often_as_told(load: Load, scenario: Path) -> None:
    Scenario((Gpu(processes=(Process(1, 1),)),), (grow("*Processes_v3", 2, "0"),)).write(scenario)
    nvml = load()
    nvml.nvmlInitWithFlags(0)
    handle, entries = handle_of(nvml, 0), (pynvml.c_nvmlProcessInfo_v2_t * 9)()
    codes = []
    for _ in range(3):
        count = ctypes.c_uint(9)
        codes.append(nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), entries))
    assert codes == [INSUFFICIENT_SIZE, INSUFFICIENT_SIZE, 0]


def test_rules_choose_function_and_device(load: Load, scenario: Path) -> None:
    gpus = (Gpu(), Gpu(mig="on", instances=(Instance(),)))
    Scenario(gpus, (fail("*MemoryInfo", 4, "1:*"), fail("nvmlDeviceGetName", 15, "0"))).write(scenario)
    nvml = load()
    nvml.nvmlInitWithFlags(0)
    first, second, mig = handle_of(nvml, 0), handle_of(nvml, 1), ctypes.c_void_p()
    nvml.nvmlDeviceGetMigDeviceHandleByIndex(second, 0, ctypes.byref(mig))
    memory, name = pynvml.c_nvmlMemory_t(), ctypes.create_string_buffer(96)
    asked = [nvml.nvmlDeviceGetMemoryInfo(h, ctypes.byref(memory)) for h in (first, second, mig)]
    named = [nvml.nvmlDeviceGetName(h, name, 96) for h in (first, second, mig)]
    assert (asked, named) == ([0, 0, 4], [15, 0, 0])


def test_signals_do_not_shorten_a_hang_and_other_threads_go_on(load: Load, scenario: Path) -> None:
    nvml = load()
    nvml.nvmlInitWithFlags(0)
    handle, name = handle_of(nvml, 0), ctypes.create_string_buffer(96)
    Scenario(rules=(hang("nvmlDeviceGetName", 0.4),)).write(scenario)
    signals: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda *received: signals.append(received[0]))
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    try:
        with ThreadPoolExecutor(1) as pool:
            start = time.monotonic()
            other = pool.submit(count_of, nvml)
            assert nvml.nvmlDeviceGetName(handle, name, 96) == 0
            hung = time.monotonic() - start
            went_on = other.done()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert signals
    assert hung >= 0.4
    assert went_on


def test_older_drivers_lack_the_newer_symbols(load: Load) -> None:
    newer = {
        570: [],
        470: ["nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetComputeRunningProcesses_v3"],
        450: ["nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetComputeRunningProcesses_v2"],
    }
    for driver, missing in newer.items():
        nvml = load(driver)
        assert hasattr(nvml, "nvmlDeviceGetMPSComputeRunningProcesses")
        assert [name for name in missing if hasattr(nvml, name)] == []
        assert hasattr(nvml, "nvmlDeviceGetMemoryInfo_v2") == (driver >= 510)


@pytest.mark.parametrize(
    ("text", "line", "complaint"),
    [
        ("gpu 0\nbogus 1", 2, "unknown keyword: bogus"),
        ("name NVIDIA", 1, "name before any gpu"),
        ("# a comment\n\ngpu 1", 3, "expected 0"),
        ("gpu 0\n  memory 1 2 3", 2, "reserved is missing"),
        ("gpu 0\n  memory 1 2 3 -4", 2, "reserved is not a number up to 18446744073709551615: -4"),
        ("gpu 0\n  memory 1 2 3 4 5", 2, "more than expected: 5"),
        ("gpu 0\n  process video 1 2", 2, "unknown process list: video"),
        ("gpu 0\n  process compute 4294967296 2", 2, "pid is not a number up to 4294967295"),
        ("gpu 0\n instance 1 0 0\n instance 1 0 0", 3, "instance 1 is given twice"),
        ("fail nvmlShutdown *", 1, "value is missing"),
        ("hang nvmlShutdown * long", 1, "not a number: long"),
        ("gpu 0\n  uuid " + "x" * 80, 2, "longer than 79 characters"),
        ("#" * 600, 1, "longer than 510 characters"),
        (None, 0, "names no file that can be read"),
    ],
)
def test_a_bad_scenario_aborts_naming_file_and_line(
    tmp_path: Path, text: str | None, line: int, complaint: str
) -> None:
    path = tmp_path / "scenario"
    if text is not None:
        path.write_text(text + "\n")
    code = "import ctypes; ctypes.CDLL('libnvidia-ml.so.1').nvmlInitWithFlags(0)"
    done = subprocess.run(
        [sys.executable, "-S", "-E", "-c", code],
        env=environment(path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGABRT
    assert done.stderr.startswith(f"fakenvml: {path}:{line}: ")
    assert complaint in done.stderr


def test_the_writer_refuses_more_bytes_than_there_are() -> None:
    with pytest.raises(ValueError, match="NVIDIA L4: 900 bytes used and 200 reserved of 1000"):
        Scenario((Gpu(name="NVIDIA L4", total=1000, reserved=200, used=900),)).text()


def test_several_may_build_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fakenvml, "_CACHE", tmp_path)
    with ThreadPoolExecutor(2) as pool:
        folders = {folder.result() for folder in [pool.submit(library) for _ in range(2)]}
    (folder,) = folders
    assert list(tmp_path.iterdir()) == [folder]
    assert [file.name for file in folder.iterdir()] == ["libnvidia-ml.so.1"]
    assert ctypes.CDLL(str(folder / "libnvidia-ml.so.1")).nvmlErrorString
