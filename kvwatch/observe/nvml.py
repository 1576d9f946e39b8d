"""GPUs, their memory and who holds it, as NVML tells through nvidia-ml-py.

Facts: NVML API reference (return codes, MIG handles, process lists); nvidia-ml-py 12.535.108 and later.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import pynvml

from kvwatch.observe.records import Failure, Gpu, GpuMemory, GpuProcess, NvmlRecord

ERRORS: Mapping[int, str] = {
    1: "uninitialized",
    2: "invalid_argument",
    3: "not_supported",
    4: "no_permission",
    5: "already_initialized",
    6: "not_found",
    7: "insufficient_size",
    8: "insufficient_power",
    9: "driver_not_loaded",
    10: "timeout",
    11: "irq_issue",
    12: "library_not_found",
    13: "function_not_found",
    14: "corrupted_inforom",
    15: "gpu_lost",
    16: "reset_required",
    17: "operating_system",
    18: "driver_mismatch",
    19: "in_use",
    20: "out_of_memory",
    21: "no_data",
    22: "vgpu_ecc_not_supported",
    23: "insufficient_resources",
    24: "frequency_not_supported",
    25: "argument_version_mismatch",
    26: "deprecated",
    27: "not_ready",
    28: "gpu_not_found",
    29: "invalid_state",
    30: "reset_type_not_supported",
    999: "unknown",
}
"""Short names of NVML's return codes, fit for a label."""

_HINTS: Mapping[str, str] = {
    "driver_not_loaded": "no NVIDIA kernel module is loaded",
    "library_not_found": "libnvidia-ml.so.1 is not on this machine, or not in this container",
    "driver_mismatch": "the driver was upgraded under a running system: reboot, restart a container",
    "unknown": "in a container: access to the devices may be lost, restart it",
}

# NVML may go on answering these until it is initialised anew.
_STALE = frozenset(
    {
        "uninitialized",
        "driver_not_loaded",
        "gpu_lost",
        "reset_required",
        "driver_mismatch",
        "gpu_not_found",
        "unknown",
    }
)
# The driver, or this kind of GPU, does not have the call.
_ABSENT = frozenset({"not_supported", "function_not_found"})
_NO_MEMORY_V2 = _ABSENT | {"invalid_argument", "argument_version_mismatch"}

_LISTS: Mapping[str, str] = {
    "compute": "nvmlDeviceGetComputeRunningProcesses",
    "graphics": "nvmlDeviceGetGraphicsRunningProcesses",
    "mps": "nvmlDeviceGetMPSComputeRunningProcesses",
}
_LIST_TRIES = 4
_BOGUS_PIDS = frozenset({0, 0xFFFF_FFFF})
_MIG_PROFILE = re.compile(r"\bMIG (\S+)$")


class NvmlSource:
    """Reads all GPUs of the node.

    It may be called from any thread, one call at a time, and holds no lock: a source whose call hangs can be
    abandoned, with its thread, for a new one. Close it should the call come back: NVML counts
    initialisations, and an open one keeps the new source from starting NVML anew.
    """

    def __init__(
        self,
        *,
        first_delay: float = 1.0,
        longest_delay: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Delays, in seconds, between attempts to initialise; they double from the first to the longest."""
        self._first_delay = first_delay
        self._longest_delay = longest_delay
        self._clock = clock
        self._initialized = False
        self._stale = False
        self._delay = first_delay
        self._due = clock()
        self._failure: Failure | None = None

    def read(self) -> NvmlRecord | Failure:
        """One record, or the reason why NVML as a whole does not answer."""
        if self._stale and self._clock() >= self._due:
            self.close()
        if not self._initialized:
            self._initialize()
        if self._failure:
            return self._failure
        calls = _Calls("the node")
        answer = _read_node(calls)
        self._judge(calls)
        return answer

    def close(self) -> None:
        """Gives NVML back; the next read initialises it again."""
        if self._initialized:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
        self._initialized = self._stale = False

    def _initialize(self) -> None:
        if self._failure and self._clock() < self._due:
            return
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            self._failure = _failure("initialisation failed", error)
            self._postpone()
        else:
            self._failure = None
            self._initialized = True

    def _judge(self, calls: _Calls) -> None:
        if not calls.reasons & _STALE:
            self._stale = False
            self._delay = self._first_delay
        elif not self._stale:
            self._stale = True
            self._postpone()

    def _postpone(self) -> None:
        self._due = self._clock() + self._delay
        self._delay = min(2 * self._delay, self._longest_delay)


class _Calls:
    """Makes calls about one subject and keeps what failed.

    Attributes:
        reasons: what failures were met, said or not; shared by all that concerns one GPU.
    """

    def __init__(self, subject: str, reasons: set[str] | None = None) -> None:
        self.subject = subject
        self.failures: list[Failure] = []
        self.reasons: set[str] = set() if reasons is None else reasons

    def ask(self, what: str, call: Callable[..., Any], *arguments: Any, unsaid: Iterable[str] = ()) -> Any:
        """The answer, or None. Failures are kept, but for the reasons in ``unsaid``.

        A GPU that is lost is not asked again: each call may take the driver seconds.
        """
        if "gpu_lost" in self.reasons:
            return None
        try:
            return call(*arguments)
        except pynvml.NVMLError as error:
            self.reasons.add(_reason(error))
            if _reason(error) not in unsaid:
                self.failures.append(_failure(f"{what} of {self.subject}", error))
        except UnicodeDecodeError as error:
            self.say("bad_text", f"{what} of {self.subject}: {error}")
        return None

    def ask_text(self, what: str, call: Callable[..., Any], *arguments: Any) -> str:
        """The answer, or an empty text."""
        return self.ask(what, call, *arguments) or ""

    def say(self, reason: str, detail: str) -> None:
        self.failures.append(Failure("nvml", reason, detail))


def _reason(error: pynvml.NVMLError) -> str:
    return ERRORS.get(error.value, f"code_{error.value}")


def _failure(what: str, error: pynvml.NVMLError) -> Failure:
    reason = _reason(error)
    hint = f"; {_HINTS[reason]}" if reason in _HINTS else ""
    return Failure("nvml", reason, f"{what}: {error} (NVML error {error.value}{hint})")


def _read_node(calls: _Calls) -> NvmlRecord | Failure:
    count = calls.ask("number of GPUs", pynvml.nvmlDeviceGetCount)
    if count is None:
        return calls.failures[0]
    driver = calls.ask_text("driver version", pynvml.nvmlSystemGetDriverVersion)
    gpus = tuple(gpu for index in range(count) for gpu in _read_gpu(index, calls))
    return NvmlRecord(gpus, driver or None, tuple(calls.failures))


def _read_gpu(index: int, node: _Calls) -> list[Gpu]:
    """The GPU, or its MIG devices. What fails on a parent that these stand in for is the node's failure."""
    calls = _Calls(f"GPU {index}")
    handle = calls.ask("handle", pynvml.nvmlDeviceGetHandleByIndex, index)
    gpus = [] if handle is None else _read_instances(index, handle, calls)
    if gpus:
        node.failures += calls.failures
    else:
        gpus = [_read_whole(index, handle, calls)]
    node.reasons |= calls.reasons
    return gpus


def _read_whole(index: int, handle: Any, calls: _Calls) -> Gpu:
    if handle is None:
        return Gpu(str(index), "", "", "", None, None, None, None, tuple(calls.failures))
    return Gpu(
        index=str(index),
        uuid=calls.ask_text("UUID", pynvml.nvmlDeviceGetUUID, handle),
        name=calls.ask_text("name", pynvml.nvmlDeviceGetName, handle),
        pci_bus_id=_read_pci(handle, calls),
        mig_profile=None,
        capability=_read_capability(handle, calls),
        memory=calls.ask("memory", _ask_whole_memory, handle, calls),
        processes=_merge(_read_lists(handle, calls), calls),
        failures=tuple(calls.failures),
    )


def _read_pci(handle: Any, calls: _Calls) -> str:
    return calls.ask_text("PCI address", lambda: pynvml.nvmlDeviceGetPciInfo(handle).busId)


def _read_capability(handle: Any, calls: _Calls) -> tuple[int, int] | None:
    answer = calls.ask("compute capability", pynvml.nvmlDeviceGetCudaComputeCapability, handle)
    return answer and tuple(answer)


# --- MIG ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Parent:
    """What MIG devices take from the GPU they are cut from. ``lists`` asks for its process lists, once."""

    index: int
    pci: str
    capability: tuple[int, int] | None
    lists: Callable[[], list[_Entry] | None]


def _read_instances(index: int, handle: Any, calls: _Calls) -> list[Gpu]:
    """The MIG devices of a GPU; none where MIG is off, or on without a device."""
    mode = calls.ask("MIG mode", pynvml.nvmlDeviceGetMigMode, handle, unsaid=_ABSENT)
    if not mode or not mode[0]:
        return []
    places = calls.ask("number of MIG devices", pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0
    find = pynvml.nvmlDeviceGetMigDeviceHandleByIndex
    found = {
        place: calls.ask(f"MIG device {place}", find, handle, place, unsaid={"not_found"})
        for place in range(places)
    }
    parent = _Parent(
        index,
        _read_pci(handle, calls),
        _read_capability(handle, calls),
        cache(lambda: _read_lists(handle, calls)),
    )
    return [
        _read_instance(parent, place, instance, _Calls(f"GPU {index}:{place}", calls.reasons))
        for place, instance in found.items()
        if instance is not None
    ]


def _read_instance(parent: _Parent, place: int, handle: Any, calls: _Calls) -> Gpu:
    name = calls.ask_text("name", pynvml.nvmlDeviceGetName, handle)
    profile = _MIG_PROFILE.search(name)
    return Gpu(
        index=f"{parent.index}:{place}",
        uuid=calls.ask_text("UUID", pynvml.nvmlDeviceGetUUID, handle),
        name=name,
        pci_bus_id=parent.pci,
        mig_profile=profile[1] if profile else None,
        capability=parent.capability,
        memory=calls.ask("memory", _ask_memory, handle),
        processes=_merge(_read_instance_lists(parent, handle, calls), calls),
        failures=tuple(calls.failures),
    )


def _read_instance_lists(parent: _Parent, handle: Any, calls: _Calls) -> list[_Entry] | None:
    """The MIG device's own lists, else its share of the parent's."""
    attempt = _Calls(calls.subject, calls.reasons)
    own = _read_lists(handle, attempt)
    whole = parent.lists() if own is None else None
    if whole is None:
        calls.failures += attempt.failures
        return own
    gpu_instance = calls.ask("GPU instance id", pynvml.nvmlDeviceGetGpuInstanceId, handle)
    compute_instance = calls.ask("compute instance id", pynvml.nvmlDeviceGetComputeInstanceId, handle)
    if gpu_instance is None or compute_instance is None:
        return None
    return [e for e in whole if (e.gpu_instance, e.compute_instance) == (gpu_instance, compute_instance)]


# --- memory ---------------------------------------------------------------------------------------------


def _ask_memory(handle: Any) -> GpuMemory:
    """v2 where the driver has it (510 and later), else v1, whose ``used`` contains the reserved part."""
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        return GpuMemory(memory.total, memory.free, memory.used, memory.reserved)
    except pynvml.NVMLError as error:
        if _reason(error) not in _NO_MEMORY_V2:
            raise
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return GpuMemory(memory.total, memory.free, memory.used, None)


def _ask_whole_memory(handle: Any, calls: _Calls) -> GpuMemory:
    """A GPU without memory of its own (GB10, Jetson) uses the machine's."""
    try:
        return _ask_memory(handle)
    except pynvml.NVMLError as error:
        if _reason(error) != "not_supported":
            raise
    # Few nodes have such a GPU, and a command that looks once need not wait: see daemon.LATE_MODULES.
    import psutil

    machine = psutil.virtual_memory()
    calls.say(
        "unified_memory", f"{calls.subject} has no memory of its own: MemTotal and MemAvailable stand for it"
    )
    return GpuMemory(machine.total, machine.available, machine.total - machine.available, None)


# --- processes ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Entry:
    """One line of one process list. The instance ids are 0xFFFFFFFF outside MIG."""

    kind: str
    pid: int
    used: int | None
    gpu_instance: int
    compute_instance: int


def _read_lists(handle: Any, calls: _Calls) -> list[_Entry] | None:
    """The entries of all lists that answer.

    A list that this GPU does not have is missed only when there is no other.

    Returns:
        None where none answers, or where the list that holds nearly all of them, that of compute processes,
        exists and failed.
    """
    attempt = _Calls(calls.subject, calls.reasons)
    compute = attempt.ask("compute processes", _ask_list, "compute", handle)
    compute_failed = any(failure.reason not in _ABSENT for failure in attempt.failures)
    others = [attempt.ask(f"{kind} processes", _ask_list, kind, handle) for kind in ("graphics", "mps")]
    answers = [answer for answer in (compute, *others) if answer is not None]
    calls.failures += [f for f in attempt.failures if not answers or f.reason not in _ABSENT]
    return [entry for answer in answers for entry in answer] if answers and not compute_failed else None


def _ask_list(kind: str, handle: Any) -> list[_Entry]:
    """Asks again when more processes started than nvidia-ml-py had made room for."""
    for _ in range(_LIST_TRIES - 1):
        try:
            return _ask_list_once(kind, handle)
        except pynvml.NVMLError as error:
            if _reason(error) != "insufficient_size":
                raise
    return _ask_list_once(kind, handle)


def _ask_list_once(kind: str, handle: Any) -> list[_Entry]:
    name = _LISTS[kind]
    try:
        answer = getattr(pynvml, f"{name}_v3")(handle)
    except pynvml.NVMLError as error:  # a driver before 510; nvidia-ml-py 12.535 has no v2
        if _reason(error) != "function_not_found" or not hasattr(pynvml, f"{name}_v2"):
            raise
        answer = getattr(pynvml, f"{name}_v2")(handle)
    return [_Entry(kind, p.pid, p.usedGpuMemory, p.gpuInstanceId, p.computeInstanceId) for p in answer]


def _merge(entries: Iterable[_Entry] | None, calls: _Calls) -> dict[int, GpuProcess] | None:
    """Each process once, with the largest figure that a list gives for it."""
    if entries is None:
        return None
    by_pid: dict[int, list[_Entry]] = {}
    for entry in entries:
        by_pid.setdefault(entry.pid, []).append(entry)
    bogus = sum(len(by_pid.pop(pid, ())) for pid in _BOGUS_PIDS)
    if bogus:
        calls.say("bogus_pid", f"{bogus} entries of the process lists of {calls.subject} name no process")
    return {
        pid: GpuProcess(
            pid=pid,
            used_bytes=max((e.used for e in same if e.used is not None), default=None),
            kinds=frozenset(e.kind for e in same),
        )
        for pid, same in by_pid.items()
    }
