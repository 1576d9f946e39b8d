"""NvmlSource over unmodified nvidia-ml-py and the C library of tests/fakenvml, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pynvml
import pytest

from kvwatch.observe.nvml import ERRORS
from tests.fakenvml import (
    H100_RESERVED,
    H100_TOTAL,
    UNKNOWN,
    Gpu,
    Instance,
    Process,
    Scenario,
    environment,
    fail,
    grow,
    hang,
)

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
LISTS = "nvmlDevice*RunningProcesses*"


class Probe:
    """A process that reads NVML when told to, under the scenario of the moment."""

    def __init__(self, path: Path, env: Mapping[str, str]) -> None:
        self.path = path
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.observe.nvml_probe"],
            cwd=ROOT,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def read(self, scenario: Scenario | None = None, at: float = 0.0) -> Any:
        if scenario:
            scenario.write(self.path)
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{at}\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def read_gpu(self, *gpus: Gpu, rules: tuple[Any, ...] = ()) -> Any:
        """The first GPU of the answer."""
        return self.read(Scenario(gpus or (Gpu(),), rules))["gpus"][0]


@contextmanager
def started(folder: Path, driver: int = 570, **variables: str) -> Iterator[Probe]:
    path = folder / "scenario"
    Scenario().write(path)
    probe = Probe(path, {**environment(path, driver), **variables})
    yield probe
    probe.process.kill()
    probe.process.communicate()


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probe]:
    """Shared by the tests that leave the source in good health."""
    with started(tmp_path_factory.mktemp("nvml")) as probe:
        yield probe


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Probe]:
    """For tests of initialisation."""
    with started(tmp_path) as probe:
        yield probe


def reasons(record: Any) -> list[str]:
    return [failure["reason"] for failure in record["failures"]]


# --- one GPU --------------------------------------------------------------------------------------------


def test_a_gpu_with_its_memory_and_processes(probe: Probe) -> None:
    gpus = (
        Gpu(processes=(Process(4242, 17 * GIB), Process(17, GIB), Process(17, GIB // 2, "graphics"))),
        Gpu(name="NVIDIA L4", capability=(8, 9), total=24152899584, reserved=493879296),
    )
    record = probe.read(Scenario(gpus))
    first, second = record["gpus"]
    assert record["driver_version"] == "570.86.15"
    assert record["failures"] == first["failures"] == second["failures"] == []
    assert first["memory"] == {
        "total": H100_TOTAL,
        "free": H100_TOTAL - H100_RESERVED - 18 * GIB,
        "used": 18 * GIB,
        "reserved": H100_RESERVED,
    }
    assert first["processes"] == {
        "4242": {"pid": 4242, "used_bytes": 17 * GIB, "kinds": ["compute"]},
        "17": {"pid": 17, "used_bytes": GIB, "kinds": ["compute", "graphics"]},
    }
    assert (second["index"], second["name"], second["capability"]) == ("1", "NVIDIA L4", [8, 9])
    assert (second["processes"], second["mig_profile"]) == ({}, None)
    assert second["uuid"] == "GPU-00000000-0000-0000-0000-000000000001"
    assert second["pci_bus_id"] == "00000000:1C:00.0"


@pytest.mark.parametrize(
    ("function", "code", "field", "missing", "reason"),
    [
        ("nvmlDeviceGetMemoryInfo*", 4, "memory", None, "no_permission"),
        ("nvmlDeviceGetUUID", 10, "uuid", "", "timeout"),
        ("nvmlDeviceGetName", 17, "name", "", "operating_system"),
        ("nvmlDeviceGetPciInfo_v3", 77, "pci_bus_id", "", "code_77"),
        ("nvmlDeviceGetCudaComputeCapability", 3, "capability", None, "not_supported"),
    ],
)
def test_a_failing_call_costs_its_own_value(
    probe: Probe, function: str, code: int, field: str, missing: object, reason: str
) -> None:
    rules = (fail(function, code),)
    gpu = probe.read_gpu(Gpu(processes=(Process(5, GIB),)), rules=rules)
    assert gpu[field] == missing
    assert reasons(gpu) == [reason]
    assert gpu["processes"]["5"]["used_bytes"] == GIB
    assert gpu["failures"][0]["detail"].endswith(f"(NVML error {code})")


def test_a_driver_version_that_fails_is_said(probe: Probe) -> None:
    record = probe.read(Scenario(rules=(fail("nvmlSystemGetDriverVersion", 10),)))
    assert record["driver_version"] is None
    assert reasons(record) == ["timeout"]
    assert len(record["gpus"]) == 1


def test_a_name_that_is_not_utf8_costs_the_name(probe: Probe) -> None:
    draft = probe.path.with_name("draft")
    draft.write_bytes(Scenario().text().encode().replace(b"NVIDIA H100", b"\xff\xfe"))
    draft.replace(probe.path)
    gpu = probe.read()["gpus"][0]
    assert gpu["name"] == ""
    assert reasons(gpu) == ["bad_text"]
    assert gpu["memory"]["total"] == H100_TOTAL


@pytest.mark.parametrize("code", [2, 3, 13, 25])
def test_memory_falls_back_to_v1_where_used_contains_reserved(probe: Probe, code: int) -> None:
    gpu = probe.read_gpu(Gpu(used=GIB), rules=(fail("nvmlDeviceGetMemoryInfo_v2", code),))
    assert gpu["memory"] == {
        "total": H100_TOTAL,
        "free": H100_TOTAL - H100_RESERVED - GIB,
        "used": H100_RESERVED + GIB,
        "reserved": None,
    }
    assert gpu["failures"] == []


def test_unified_memory_is_the_machines_and_said_so(probe: Probe) -> None:
    gpu = probe.read_gpu(Gpu(name="NVIDIA GB10", total=None, processes=(Process(9, GIB),)))
    memory = gpu["memory"]
    assert memory["total"] == psutil.virtual_memory().total == memory["used"] + memory["free"]
    assert 0 < memory["free"] < memory["total"]
    assert memory["reserved"] is None
    assert reasons(gpu) == ["unified_memory"]
    assert gpu["processes"]["9"]["used_bytes"] == GIB


# --- process lists --------------------------------------------------------------------------------------


def test_lists_are_merged_by_pid_with_the_largest_known_figure(probe: Probe) -> None:
    processes = (
        Process(1, UNKNOWN),
        Process(2, UNKNOWN),
        Process(2, 2 * GIB, "mps"),
        Process(3, GIB, "graphics"),
        Process(3, 3 * GIB, "mps"),
        Process(3, 2 * GIB),
    )
    gpu = probe.read_gpu(Gpu(processes=processes))
    assert gpu["processes"] == {
        "1": {"pid": 1, "used_bytes": None, "kinds": ["compute"]},
        "2": {"pid": 2, "used_bytes": 2 * GIB, "kinds": ["compute", "mps"]},
        "3": {"pid": 3, "used_bytes": 3 * GIB, "kinds": ["compute", "graphics", "mps"]},
    }
    assert gpu["failures"] == []


def test_pids_that_name_no_process_are_counted_not_kept(probe: Probe) -> None:
    processes = (Process(0, GIB), Process(0, GIB, "mps"), Process(0xFFFFFFFF, GIB), Process(7, GIB))
    gpu = probe.read_gpu(Gpu(processes=processes))
    assert list(gpu["processes"]) == ["7"]
    assert reasons(gpu) == ["bogus_pid"]
    assert gpu["failures"][0]["detail"].startswith("3 entries")


@pytest.mark.parametrize("code", [3, 13])
def test_a_list_that_this_gpu_lacks_is_not_missed(probe: Probe, code: int) -> None:
    rules = (fail("*GraphicsRunningProcesses*", code), fail("*MPS*", code))
    gpu = probe.read_gpu(Gpu(processes=(Process(7, GIB),)), rules=rules)
    assert list(gpu["processes"]) == ["7"]
    assert gpu["failures"] == []


def test_a_list_that_is_refused_is_said(probe: Probe) -> None:
    rules = (fail("nvmlDeviceGetCompute*", 4), fail("*MPS*", 3))
    card = Gpu(processes=(Process(7, GIB), Process(8, GIB, "graphics")))
    gpu = probe.read_gpu(card, rules=rules)
    assert gpu["processes"] is None, "the other lists cannot stand in for that of compute processes"
    assert reasons(gpu) == ["no_permission"]
    gpu = probe.read_gpu(card, rules=(fail("nvmlDeviceGetGraphics*", 4),))
    assert list(gpu["processes"]) == ["7"]
    assert reasons(gpu) == ["no_permission"]


def test_processes_are_unknown_when_no_list_answers(probe: Probe) -> None:
    gpu = probe.read_gpu(Gpu(processes=(Process(7, GIB),)), rules=(fail(LISTS, 3),))
    assert gpu["processes"] is None
    assert reasons(gpu) == ["not_supported"] * 3


def test_a_list_that_grows_between_two_calls_is_read_again(probe: Probe) -> None:
    gpu = Gpu(processes=(Process(7, GIB),))
    patient = probe.read_gpu(gpu, rules=(grow("nvmlDeviceGetCompute*", 3),))
    assert list(patient["processes"]) == ["7"]
    assert patient["failures"] == []
    hopeless = probe.read_gpu(gpu, rules=(grow("nvmlDeviceGetCompute*", 4),))
    assert hopeless["processes"] is None
    assert reasons(hopeless) == ["insufficient_size"]


def test_five_hundred_processes(probe: Probe) -> None:
    processes = tuple(Process(1000 + n, n << 10) for n in range(500))
    gpu = probe.read_gpu(Gpu(processes=processes))
    assert {int(pid): p["used_bytes"] for pid, p in gpu["processes"].items()} == {
        p.pid: p.used for p in processes
    }


@pytest.mark.parametrize(("driver", "answers"), [(470, True), (450, False)])
def test_drivers_without_the_newer_calls(tmp_path: Path, driver: int, answers: bool) -> None:
    with started(tmp_path, driver) as old:
        gpu = old.read_gpu(Gpu(processes=(Process(7, GIB),)))
    assert gpu["memory"]["reserved"] is None
    assert gpu["memory"]["used"] == H100_RESERVED + GIB
    has_v2_lists = hasattr(pynvml, "nvmlDeviceGetComputeRunningProcesses_v2")
    if answers and has_v2_lists:
        assert (list(gpu["processes"]), gpu["failures"]) == (["7"], [])
    else:
        assert gpu["processes"] is None
        assert reasons(gpu) == ["function_not_found"] * 3


# --- several GPUs ---------------------------------------------------------------------------------------


def test_gpus_come_and_go(probe: Probe) -> None:
    for count in (1, 3, 0, 2):
        record = probe.read(Scenario((Gpu(),) * count))
        assert [gpu["index"] for gpu in record["gpus"]] == [str(n) for n in range(count)]
        assert record["failures"] == []


def test_a_lost_gpu_costs_nothing_but_itself_and_is_asked_once(fresh: Probe) -> None:
    gpus = (Gpu(), Gpu(), Gpu())
    for function in ("*", "nvmlDeviceGet[!H]*"):
        record = fresh.read(Scenario(gpus, (fail(function, 15, "1"),)))
        first, lost, last = record["gpus"]
        assert first["failures"] == last["failures"] == record["failures"] == []
        assert last["memory"]["total"] == H100_TOTAL
        assert lost["index"] == "1"
        assert (lost["memory"], lost["processes"], lost["capability"]) == (None, None, None)
        assert reasons(lost) == ["gpu_lost"]


# --- MIG ------------------------------------------------------------------------------------------------

HALVES = (
    Instance(
        index=0,
        gpu_instance=1,
        name="NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        total=40 * GIB,
        processes=(Process(11, 30 * GIB),),
    ),
    Instance(index=2, gpu_instance=2, processes=(Process(12, GIB), Process(11, GIB))),
)
MIG = Gpu(mig="on", instances=HALVES)


def test_mig_devices_stand_for_their_gpu(probe: Probe) -> None:
    refusals = (fail("nvmlDeviceGetMemoryInfo*", 4, "1"), fail(LISTS, 4, "1"))
    record = probe.read(Scenario((Gpu(), MIG), refusals))
    whole, large, small = record["gpus"]
    assert [whole["index"], large["index"], small["index"]] == ["0", "1:0", "1:2"]
    assert [large["mig_profile"], small["mig_profile"]] == ["3g.40gb", "1g.10gb"]
    assert large["memory"]["total"] == 40 * GIB
    assert large["memory"]["used"] == 30 * GIB
    assert large["uuid"] == "MIG-00000000-0000-0000-0001-000000000000"
    assert large["pci_bus_id"] == small["pci_bus_id"] == "00000000:1C:00.0"
    assert large["capability"] == [9, 0]
    assert {pid: p["used_bytes"] for pid, p in large["processes"].items()} == {"11": 30 * GIB}
    assert {pid: p["used_bytes"] for pid, p in small["processes"].items()} == {"11": GIB, "12": GIB}
    assert record["failures"] == large["failures"] == small["failures"] == []


def test_the_parents_list_is_split_where_mig_devices_have_none(probe: Probe) -> None:
    own = Gpu(mig="on", instances=HALVES, processes=(Process(99, GIB),))
    record = probe.read(Scenario((own,), (fail(LISTS, 3, "0:*"),)))
    large, small = record["gpus"]
    assert list(large["processes"]) == ["11"]
    assert list(small["processes"]) == ["12", "11"]
    assert record["failures"] == large["failures"] == small["failures"] == []


def test_mig_processes_are_unknown_when_parent_and_device_refuse(probe: Probe) -> None:
    record = probe.read(Scenario((MIG,), (fail(LISTS, 3, "0:*"), fail(LISTS, 4, "0"))))
    for gpu in record["gpus"]:
        assert gpu["processes"] is None
        assert reasons(gpu) == ["not_supported"] * 3
    assert reasons(record) == ["no_permission"] * 3


def test_mig_processes_are_unknown_when_the_instance_ids_are(probe: Probe) -> None:
    rules = (fail(LISTS, 3, "0:*"), fail("nvmlDeviceGetGpuInstanceId", 4, "0:2"))
    large, small = probe.read(Scenario((MIG,), rules))["gpus"]
    assert (list(large["processes"]), small["processes"]) == (["11"], None)
    assert (reasons(large), reasons(small)) == ([], ["no_permission"])


def test_mig_is_switched_at_run_time(probe: Probe) -> None:
    indexes = []
    for gpu in (Gpu(mig="off", instances=HALVES), MIG, Gpu(mig="on"), Gpu()):
        record = probe.read(Scenario((gpu,)))
        indexes.append([g["index"] for g in record["gpus"]])
        assert reasons(record) + [r for g in record["gpus"] for r in reasons(g)] == []
    assert indexes == [["0"], ["0:0", "0:2"], ["0"], ["0"]]


def test_a_mig_device_that_fails_costs_nothing_but_itself(probe: Probe) -> None:
    rules = (fail("nvmlDeviceGetMemoryInfo*", 3, "0:0"), fail("nvmlDeviceGetName", 999, "0:2"))
    large, small = probe.read(Scenario((MIG,), rules))["gpus"]
    assert (large["memory"], reasons(large)) == (None, ["not_supported"])
    assert (small["mig_profile"], reasons(small)) == (None, ["unknown"])
    assert small["memory"]["total"] == 10 * GIB


def test_a_gpu_whose_mig_devices_cannot_be_told_is_shown_whole(probe: Probe) -> None:
    gpu = probe.read_gpu(MIG, rules=(fail("nvmlDeviceGetMaxMigDeviceCount", 4),))
    assert (gpu["index"], reasons(gpu)) == ("0", ["no_permission"])
    assert gpu["memory"]["total"] == H100_TOTAL


# --- NVML as a whole ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "reason"), [(18, "driver_mismatch"), (9, "driver_not_loaded"), (999, "unknown")]
)
def test_initialisation_is_tried_again_with_growing_delays(fresh: Probe, code: int, reason: str) -> None:
    broken = Scenario(rules=(fail("nvmlInit*", code),))
    first = fresh.read(broken, at=0.0)
    assert (first["source"], first["reason"]) == ("nvml", reason)
    assert f"NVML error {code}; " in first["detail"]
    assert fresh.read(at=1.0)["reason"] == reason
    assert fresh.read(Scenario(), at=2.9)["reason"] == reason
    assert len(fresh.read(at=3.0)["gpus"]) == 1


def test_a_missing_library_is_said(tmp_path: Path) -> None:
    # A file that is no library hides a real one, on a machine that has it.
    (tmp_path / "libnvidia-ml.so.1").write_text("no library")
    with started(tmp_path, LD_LIBRARY_PATH=str(tmp_path)) as probe:
        answer = probe.read()
    assert (answer["source"], answer["reason"]) == ("nvml", "library_not_found")


def test_nvml_is_initialised_anew_after_it_lost_its_footing(fresh: Probe) -> None:
    assert len(fresh.read(at=0.0)["gpus"]) == 1
    lost = fresh.read(Scenario(rules=(fail("nvmlDeviceGetCount_v2", 999),)), at=10.0)
    assert lost["reason"] == "unknown"
    # Init fails now: only a source that initialises anew notices.
    no_init = (fail("nvmlInit*", 18),)
    assert len(fresh.read(Scenario(rules=no_init), at=10.5)["gpus"]) == 1
    refuses_again = (*no_init, fail("nvmlDeviceGetCount_v2", 999))
    assert fresh.read(Scenario(rules=refuses_again), at=20.0)["reason"] == "unknown"
    assert fresh.read(at=21.0)["reason"] == "driver_mismatch"
    assert len(fresh.read(Scenario(), at=23.0)["gpus"]) == 1


def test_a_gpu_that_stays_lost_is_reason_to_initialise_ever_more_rarely(fresh: Probe) -> None:
    lost = Scenario((Gpu(), Gpu()), (fail("*", 15, "1"),))
    assert len(fresh.read(lost, at=0.0)["gpus"]) == 2
    # Each attempt at 1 and 3 succeeds and changes nothing; the next is due at 7.
    for at in (1.0, 2.0, 3.0):
        assert len(fresh.read(at=at)["gpus"]) == 2
    watched = Scenario(lost.gpus, (*lost.rules, fail("nvmlInit*", 9)))
    assert len(fresh.read(watched, at=6.9)["gpus"]) == 2
    assert fresh.read(at=7.0)["reason"] == "driver_not_loaded"


HANGING = """
import sys, threading
from pathlib import Path
from kvwatch.observe.nvml import NvmlSource
from tests.fakenvml import Scenario
first = NvmlSource()
first.read()
Path(sys.argv[1]).replace(sys.argv[2])
stuck = threading.Thread(target=first.read, daemon=True)
stuck.start()
stuck.join(0.3)
Scenario().write(Path(sys.argv[2]))
print(stuck.is_alive(), len(NvmlSource().read().gpus), stuck.is_alive())
"""


def test_a_hung_call_stops_neither_a_new_source_nor_the_end_of_the_process(tmp_path: Path) -> None:
    now, later = tmp_path / "now", tmp_path / "later"
    Scenario().write(now)
    Scenario(rules=(hang("nvmlDeviceGetMemoryInfo_v2", 60),)).write(later)
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", HANGING, later, now],
        cwd=ROOT,
        env=environment(now),
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    assert done.stdout.split() == ["True", "1", "True"]
    assert time.monotonic() - start < 30


def test_every_return_code_of_nvml_has_a_name() -> None:
    known = {value for name, value in vars(pynvml).items() if name.startswith("NVML_ERROR_")}
    assert known <= set(ERRORS)
    assert len(set(ERRORS.values())) == len(ERRORS)
