"""What happens to a node over hours, for tests/forecast/test_timelines.py: one story per way of going wrong.

One H100 serves a Llama 8B at utilization 0.92. Alone on its card it comes back with `ALONE` bytes to spare.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import replace

from kvwatch.blockmath.flags import Flags
from kvwatch.config import GIB, MIB, Config, Holders, Plan, Rule, ServerConfig
from kvwatch.observe.cycle import ObservedServer
from kvwatch.observe.records import Process as NodeProcess
from tests.fakenvml import H100_RESERVED, H100_TOTAL, Gpu, Process, Scenario, fail
from tests.forecast.timeline import PATIENT, Moment, Story
from tests.nodes import NOW, PARENT, process, server

HOUR = 60
DAY = 24 * HOUR

SERVER_BYTES = 73 * GIB
CUDA_TOTAL = H100_TOTAL - H100_RESERVED
CUDA_CONTEXT = 512 * MIB


def budget(utilization: float) -> int:
    """Bytes that a server asks for."""
    return math.ceil(CUDA_TOTAL * utilization)


ALONE = CUDA_TOTAL - CUDA_CONTEXT - budget(0.92)
"""Margin of the check for free memory while nobody else holds any of the card."""

WORKER, OTHER, SUCCESSOR = PARENT + 1, 900, 700
SERVING = (process(PARENT, "vllm"), process(WORKER, "VLLM::EngineCore", ppid=PARENT))
NOTEBOOK = process(OTHER, "ipykernel_launcher", user="dana", unit="jupyter.service")
NEIGHBOUR = process(OTHER, "tritonserver", user="infer", unit="triton.service")


def clock(minute: int) -> float:
    """A clock that is right."""
    return NOW + 60 * minute


def shared(held: int, by: NodeProcess = NOTEBOOK) -> Moment:
    """The server, and one other process that holds so many bytes."""
    processes = [Process(WORKER, SERVER_BYTES)]
    if held:
        processes.append(Process(by.pid, held))
    return Moment(Scenario((Gpu(processes=tuple(processes)),)), (*SERVING, by), (server(),))


LEAK_BEGINS = 512 * MIB
LEAK_PER_MINUTE = 30 * MIB


def leaked(minute: int) -> int:
    """Bytes of a process that leaks, unevenly, until the card is full."""
    jitter = random.Random(minute).randrange(-8 * MIB, 8 * MIB)
    return min(LEAK_BEGINS + LEAK_PER_MINUTE * minute + jitter, CUDA_TOTAL - SERVER_BYTES)


LEAK_ENDS = math.ceil((ALONE - LEAK_BEGINS) / LEAK_PER_MINUTE)
"""Minute in which the leak has used the margin up, but for the jitter."""


def slow_leak(minute: int) -> Moment:
    return shared(leaked(minute))


NOON, AFTERNOON = 2 * HOUR, 3 * HOUR
NOTEBOOK_BYTES = 6 * GIB


def notebook_at_noon(minute: int) -> Moment:
    return shared(NOTEBOOK_BYTES if NOON <= minute < AFTERNOON else 0)


STEP_AT, STEP_BYTES = HOUR, 3 * GIB


def one_step(minute: int) -> Moment:
    return shared(GIB + (STEP_BYTES if minute >= STEP_AT else 0))


NEIGHBOUR_STOPS, NEIGHBOUR_LOADS, NEIGHBOUR_SERVES = 2 * HOUR, 2 * HOUR + 2, 2 * HOUR + 8
NEIGHBOUR_BEFORE, NEIGHBOUR_AFTER = 4 * GIB, 6 * GIB


def neighbour_holds(minute: int) -> int:
    """It goes, loads for six minutes, and comes back larger."""
    if minute < NEIGHBOUR_STOPS:
        return NEIGHBOUR_BEFORE
    loaded = (minute - NEIGHBOUR_LOADS + 1) / (NEIGHBOUR_SERVES - NEIGHBOUR_LOADS + 1)
    return int(NEIGHBOUR_AFTER * max(0.0, min(1.0, loaded)))


def neighbour_restart(minute: int) -> Moment:
    return shared(neighbour_holds(minute), NEIGHBOUR)


KILLED, RESCUED, CLEARED = HOUR, HOUR + 10, 2 * HOUR
PART, PART_BYTES, PART_BLOCKS = 0.6, 48 * GIB, 13_000
MAKESHIFT, MAKESHIFT_BYTES, MAKESHIFT_BLOCKS = 0.35, 28 * GIB, 2_800
"""Utilization, bytes held and blocks before the kill, and of the server that is started beside the orphan."""

ORPHANED = replace(SERVING[1], ppid=1)
SUCCESSORS = tuple(
    replace(one, start_time=clock(RESCUED))
    for one in (process(SUCCESSOR, "vllm"), process(SUCCESSOR + 1, "VLLM::EngineCore", ppid=SUCCESSOR))
)


def orphan_after_sigkill(minute: int) -> Moment:
    """The API server is killed, its engine stays; a smaller server starts beside it; the orphan is ended."""
    held: list[Process] = []
    processes: list[NodeProcess] = []
    servers: list[ObservedServer] = []
    if minute < CLEARED:
        held.append(Process(WORKER, PART_BYTES))
        processes.extend(SERVING if minute < KILLED else [ORPHANED])
    if minute < KILLED:
        servers.append(with_share(PART, PART_BLOCKS))
    if minute >= RESCUED:
        held.append(Process(SUCCESSOR + 1, MAKESHIFT_BYTES))
        processes.extend(SUCCESSORS)
        servers.append(successor())
    return Moment(Scenario((Gpu(processes=tuple(held)),)), tuple(processes), tuple(servers))


def with_share(utilization: float, blocks: int) -> ObservedServer:
    flags = Flags(max_model_len=32768, gpu_memory_utilization=utilization)
    return server(flags=flags, gpu_memory_utilization=utilization, num_blocks=blocks)


def successor() -> ObservedServer:
    found = with_share(MAKESHIFT, MAKESHIFT_BLOCKS)
    launch = replace(found.launch, pid=SUCCESSOR, start_time=clock(RESCUED))
    return replace(found, launch=launch, members=frozenset({SUCCESSOR, SUCCESSOR + 1}))


TOOTH, TOOTH_BYTES = 100, 5 * GIB // 2


def tooth(minute: int) -> int:
    """Bytes of a job whose memory grows and is given back at each checkpoint."""
    jitter = random.Random(minute).randrange(8 * MIB)
    return TOOTH_BYTES * (minute % TOOTH) // TOOTH + jitter


def sawtooth(minute: int) -> Moment:
    return shared(tooth(minute))


LOST, BACK = 120, 132


def gpu_lost(minute: int) -> Moment:
    """The card falls off the bus in the middle of a leak."""
    moment = slow_leak(minute)
    rules = (fail("*", 15, "0"),) if LOST <= minute < BACK else ()
    return replace(moment, nvml=replace(moment.nvml, rules=rules))


KVWATCH_RESTARTS = 120


JUMPS_FORWARD, JUMPS_BACK = 30, 110
JUMP = 6 * 3600


def jumping_clock(minute: int) -> float:
    """Six hours ahead for a while, then right again."""
    return clock(minute) + (JUMP if JUMPS_FORWARD <= minute < JUMPS_BACK else 0)


STORIES: Mapping[str, Story] = {
    "slow_leak": Story(LEAK_ENDS + 30, slow_leak, clock),
    "notebook_at_noon": Story(4 * HOUR, notebook_at_noon, clock),
    "orphan_after_sigkill": Story(
        3 * HOUR,
        orphan_after_sigkill,
        clock,
        Config(
            poll=PATIENT,
            servers=(ServerConfig(url="http://127.0.0.1:8000", name="llama"),),
            plans=(Plan("as-before", "llama", Flags(gpu_memory_utilization=PART)),),
        ),
    ),
    "neighbour_restart": Story(
        3 * HOUR,
        neighbour_restart,
        clock,
        Config(poll=PATIENT, holders=Holders(neighbours=(Rule(program="tritonserver"),))),
    ),
    "sawtooth": Story(DAY, sawtooth, clock),
    "one_step": Story(3 * HOUR, one_step, clock),
    "gpu_lost": Story(LEAK_ENDS + 30, gpu_lost, clock),
    "kvwatch_restarts": Story(LEAK_ENDS + 30, slow_leak, clock, restarts=frozenset({KVWATCH_RESTARTS})),
    "clock_jumps": Story(LEAK_ENDS + 30, slow_leak, jumping_clock),
    "clock_jumps_while_nothing_happens": Story(3 * HOUR, lambda _: shared(GIB), jumping_clock),
}
