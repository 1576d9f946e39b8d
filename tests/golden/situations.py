"""What NVML does in the wild, cycle by cycle, and the node around it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvwatch.config import GIB
from kvwatch.observe.cycle import ObservedServer
from kvwatch.observe.records import Process as NodeProcess
from tests.fakenvml import UNKNOWN, Gpu, Instance, Process, Rule, Scenario, fail, grow, hang
from tests.nodes import PARENT, process, server

WORKER, NOTEBOOK, LEFTOVER = PARENT + 1, 900, 910
LISTS = "nvmlDevice*RunningProcesses*"
MEMORY = "nvmlDeviceGetMemoryInfo*"

PROCESSES = (
    process(PARENT, "vllm"),
    process(WORKER, "VLLM::EngineCore", ppid=PARENT),
    process(NOTEBOOK, "ipykernel_launcher", user="dana", unit="jupyter.service"),
    process(LEFTOVER, "VLLM::EngineCore"),
)
SERVING = Gpu(processes=(Process(WORKER, 73 * GIB),))
SHARED = Gpu(processes=(Process(NOTEBOOK, 5 * GIB), Process(LEFTOVER, 10 * GIB)), used=15 * GIB + 4096)
NODE = (SERVING, SHARED)
HEALTHY = Scenario(NODE)


@dataclass(frozen=True, slots=True)
class Cycle:
    """What the library answers in one cycle; a quarter of a minute lies between two."""

    title: str
    nvml: Scenario = HEALTHY


@dataclass(frozen=True, slots=True)
class Situation:
    """A story for one file of golden pages.

    Attributes:
        driver: branch of the library, None for a machine without one.
        alone: leaves a process behind in which nothing else can be played.
        errors: kvwatch_errors_total after the last cycle, all of it.
    """

    cycles: tuple[Cycle, ...]
    errors: Mapping[tuple[str, str], int]
    processes: tuple[NodeProcess, ...] = PROCESSES
    servers: tuple[ObservedServer, ...] = (server(),)
    driver: int | None = 570
    nvml_timeout: float = 10.0
    alone: bool = False


def _broken(title: str, *rules: Rule, gpus: tuple[Gpu, ...] = NODE) -> Cycle:
    return Cycle(title, Scenario(gpus, rules))


def _init_fails(code: int, reason: str) -> Situation:
    return Situation(
        (
            _broken(f"nvmlInit answers {code}", fail("nvmlInit*", code)),
            Cycle("nvmlInit succeeds"),
        ),
        {("nvml", reason): 1},
    )


_MIG = Gpu(
    mig="on",
    instances=(
        Instance(
            index=0,
            gpu_instance=1,
            name="NVIDIA H100 80GB HBM3 MIG 3g.40gb",
            total=40 * GIB,
            processes=(Process(NOTEBOOK, 5 * GIB),),
        ),
        Instance(index=2, gpu_instance=2, processes=(Process(LEFTOVER, 4 * GIB),)),
    ),
)
_MANY = tuple(range(2000, 2500))

SITUATIONS: Mapping[str, Situation] = {
    "plain": Situation((Cycle("two H100, a server, a notebook and what a dead server left"),), {}),
    "init_driver_mismatch": _init_fails(18, "driver_mismatch"),
    "init_driver_not_loaded": _init_fails(9, "driver_not_loaded"),
    "init_unknown": _init_fails(999, "unknown"),
    "no_library": Situation(
        (Cycle("libnvidia-ml.so.1 cannot be loaded"), Cycle("nor in the next cycle")),
        {("nvml", "library_not_found"): 2},
        driver=None,
    ),
    "gpu_lost": Situation(
        (
            Cycle("both GPUs answer"),
            _broken("GPU 1 has fallen off the bus", fail("*", 15, "1")),
            Cycle("GPU 1 is back"),
        ),
        {("nvml", "gpu_lost"): 1},
    ),
    "gpu_count": Situation(
        (
            Cycle("two GPUs"),
            Cycle("one GPU", Scenario((SERVING,))),
            Cycle("no GPU", Scenario(())),
            Cycle(
                "three GPUs", Scenario((*NODE, Gpu(name="NVIDIA L4", total=24152899584, reserved=493879296)))
            ),
        ),
        {},
    ),
    "mig_switched": Situation(
        (
            Cycle("MIG is off on GPU 1", Scenario((SERVING, Gpu(mig="off")))),
            Cycle("MIG is on, with two devices", Scenario((SERVING, _MIG))),
            Cycle("MIG is on, without devices", Scenario((SERVING, Gpu(mig="on")))),
            Cycle("MIG is off again", Scenario((SERVING, Gpu(mig="off")))),
        ),
        {},
    ),
    "mig_lists_of_parent": Situation(
        (
            _broken(
                "MIG devices have no process lists, their GPU has",
                fail(LISTS, 3, "1:*"),
                gpus=(SERVING, _MIG),
            ),
            _broken("nor has their GPU", fail(LISTS, 3, "1*"), gpus=(SERVING, _MIG)),
        ),
        {("nvml", "not_supported"): 9},
    ),
    "unified_memory": Situation(
        (
            Cycle(
                "the GPU has no memory of its own",
                Scenario((Gpu(name="NVIDIA GB10", total=None, processes=(Process(NOTEBOOK, 5 * GIB),)),)),
            ),
        ),
        {("nvml", "unified_memory"): 1},
        servers=(),
    ),
    "wsl": Situation(
        (
            Cycle(
                "the driver does not tell what a process holds",
                Scenario(
                    (
                        Gpu(processes=(Process(WORKER, UNKNOWN),), used=73 * GIB),
                        Gpu(
                            processes=(Process(NOTEBOOK, UNKNOWN), Process(LEFTOVER, 10 * GIB)), used=15 * GIB
                        ),
                    )
                ),
            ),
        ),
        {},
    ),
    "memory_v1": Situation(
        (_broken("the driver has no nvmlDeviceGetMemoryInfo_v2", fail("nvmlDeviceGetMemoryInfo_v2", 13)),), {}
    ),
    "driver_450": Situation(
        (Cycle("neither memory v2 nor process lists that nvidia-ml-py can ask for"),),
        {("nvml", "function_not_found"): 6},
        driver=450,
    ),
    "bogus_pids": Situation(
        (
            Cycle(
                "lists name pids 0 and 4294967295",
                Scenario(
                    (
                        SERVING,
                        Gpu(
                            processes=(Process(0, GIB), Process(0xFFFFFFFF, GIB), Process(NOTEBOOK, 5 * GIB))
                        ),
                    )
                ),
            ),
        ),
        {("nvml", "bogus_pid"): 1},
    ),
    "overlapping_lists": Situation(
        (
            Cycle(
                "three lists name the same process with other sizes",
                Scenario(
                    (
                        SERVING,
                        Gpu(
                            processes=(
                                Process(NOTEBOOK, GIB, "graphics"),
                                Process(NOTEBOOK, 5 * GIB),
                                Process(NOTEBOOK, UNKNOWN, "mps"),
                            )
                        ),
                    )
                ),
            ),
        ),
        {},
    ),
    "five_hundred_processes": Situation(
        (
            Cycle(
                "500 processes on GPU 1",
                Scenario(
                    (SERVING, Gpu(processes=tuple(Process(pid, (pid - 1990) << 20) for pid in _MANY[:250])))
                ),
            ),
            Cycle(
                "the same, and the driver does not tell the size of the smallest",
                Scenario(
                    (
                        SERVING,
                        Gpu(
                            processes=(
                                *(Process(pid, pid << 14) for pid in _MANY[1:]),
                                Process(_MANY[0], UNKNOWN),
                            )
                        ),
                    )
                ),
            ),
        ),
        {},
        processes=(*PROCESSES, *(process(pid, "train.py", user="dana") for pid in _MANY)),
    ),
    "list_growth": Situation(
        (
            _broken("the list grows between two calls", grow("nvmlDeviceGetCompute*", 2)),
            _broken("it never stops growing", grow("nvmlDeviceGetCompute*", 99, "1")),
        ),
        {("nvml", "insufficient_size"): 1},
    ),
    "permission_denied": Situation(
        (
            _broken("process lists are refused", fail(LISTS, 4)),
            _broken("memory is refused", fail(MEMORY, 4)),
            _broken("handles are refused", fail("nvmlDeviceGetHandle*", 4)),
        ),
        {("nvml", "no_permission"): 10},
    ),
    "foreign_pid_namespace": Situation(
        (Cycle("NVML's pids are those of the host, /proc shows a container's"),),
        {},
        processes=(process(1, "kvwatch"),),
        servers=(server(pid=None, members=frozenset()),),
    ),
    "hanging_call": Situation(
        (
            Cycle("all is well"),
            _broken("a memory call hangs for 60 s", hang("nvmlDeviceGetMemoryInfo_v2", 60, "1")),
            Cycle("it still hangs"),
        ),
        {("nvml", "timeout"): 1, ("nvml", "stuck"): 1},
        nvml_timeout=1.5,
        alone=True,
    ),
}
