"""A libnvidia-ml.so.1 that answers from a scenario file; see README.md beside this file.

scenario = Scenario((Gpu(processes=(Process(pid=child.pid, used=8 << 30),)),))
scenario.write(path)
subprocess.run([...], env=environment(path))
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

H100_TOTAL = 85520809984
H100_RESERVED = 351666176
UNKNOWN = 0xFFFF_FFFF_FFFF_FFFF
"""What NVML gives for the memory of a process that it cannot tell."""

_SOURCE = Path(__file__).with_name("nvml.c")
_CACHE = _SOURCE.parents[2] / ".cache" / "fakenvml"
_COMPILE = (
    "gcc",
    "-std=gnu17",
    "-O1",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
)


@dataclass(frozen=True, slots=True)
class Process:
    """One entry of one process list: ``compute``, ``graphics`` or ``mps``; ``used`` in bytes."""

    pid: int
    used: int
    kind: str = "compute"

    def lines(self) -> Iterator[str]:
        yield f"  process {self.kind} {self.pid} {self.used}"


@dataclass(frozen=True, slots=True)
class Device:
    """What a GPU and a MIG device have in common.

    Attributes:
        uuid: made up from the position where empty.
        total: bytes; None is a part without memory of its own (memory calls answer NOT_SUPPORTED).
        used: bytes, the sum over the processes where None.
    """

    name: str = "NVIDIA H100 80GB HBM3"
    uuid: str = ""
    total: int | None = H100_TOTAL
    reserved: int = H100_RESERVED
    used: int | None = None
    processes: tuple[Process, ...] = ()

    def properties(self, default_uuid: str) -> Iterator[str]:
        yield f"  uuid {self.uuid or default_uuid}"
        yield f"  name {self.name}"
        if self.total is not None:
            used = self.held() if self.used is None else self.used
            free = self.total - self.reserved - used
            if free < 0:
                raise ValueError(
                    f"{self.name}: {used} bytes used and {self.reserved} reserved of {self.total}"
                )
            yield f"  memory {self.total} {free} {used} {self.reserved}"
        for process in self.processes:
            yield from process.lines()

    def held(self) -> int:
        """Bytes over the processes, each once with its largest figure."""
        known = sorted((p.used, p.pid) for p in self.processes if p.used != UNKNOWN)
        return sum({pid: used for used, pid in known}.values())


@dataclass(frozen=True, slots=True)
class Instance(Device):
    """One MIG device. ``index`` is its place in the GPU, the other two are NVML's instance ids."""

    name: str = "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    total: int | None = 10 << 30
    reserved: int = 16 << 20
    index: int = 0
    gpu_instance: int = 7
    compute_instance: int = 0

    def lines(self, position: int) -> Iterator[str]:
        yield f" instance {self.index} {self.gpu_instance} {self.compute_instance}"
        yield from self.properties(f"MIG-00000000-0000-0000-{position:04}-{self.index:012}")


@dataclass(frozen=True, slots=True)
class Gpu(Device):
    """One GPU. ``mig`` is ``unsupported``, ``off`` or ``on``; ``capability`` None answers NOT_SUPPORTED."""

    pci: str = ""
    capability: tuple[int, int] | None = (9, 0)
    mig: str = "unsupported"
    instances: tuple[Instance, ...] = ()

    def lines(self, position: int) -> Iterator[str]:
        yield f"gpu {position}"
        yield from self.properties(f"GPU-00000000-0000-0000-0000-{position:012}")
        yield f"  pci {self.pci or f'00000000:{position + 0x1B:02X}:00.0'}"
        if self.capability:
            yield "  capability {} {}".format(*self.capability)
        yield f"  mig {self.mig} 7"
        for instance in self.instances:
            yield from instance.lines(position)

    def held(self) -> int:
        # Slotted dataclasses are made anew by the decorator, which leaves super() without its class.
        own = Device.held(self)
        return own + sum(i.held() if i.used is None else i.used for i in self.instances)


@dataclass(frozen=True, slots=True)
class Rule:
    """What goes wrong, and where. Function and target are shell patterns, see README.md."""

    action: str
    function: str
    target: str
    value: float

    def lines(self) -> Iterator[str]:
        yield f"{self.action} {self.function} {self.target} {self.value:g}"


def fail(function: str, code: int, target: str = "*") -> Rule:
    """The calls answer with this NVML return code."""
    return Rule("fail", function, target, code)


def hang(function: str, seconds: float, target: str = "*") -> Rule:
    """The calls take that long; signals do not shorten it."""
    return Rule("hang", function, target, seconds)


def grow(function: str, times: int, target: str = "*") -> Rule:
    """The first ``times`` process lists outgrow the room that was made for them."""
    return Rule("grow", function, target, times)


@dataclass(frozen=True, slots=True)
class Scenario:
    """The whole state of the library."""

    gpus: tuple[Gpu, ...] = (Gpu(),)
    rules: tuple[Rule, ...] = ()
    driver: str = "570.86.15"

    def text(self) -> str:
        lines = [f"driver {self.driver}"]
        for position, gpu in enumerate(self.gpus):
            lines += gpu.lines(position)
        for rule in self.rules:
            lines += rule.lines()
        return "\n".join(lines) + "\n"

    def write(self, path: Path) -> None:
        """Replaces the file in one step; the library sees it at its next call."""
        draft = path.with_name(path.name + ".new")
        draft.write_text(self.text(), encoding="utf-8")
        draft.replace(path)


def library(driver: int = 570) -> Path:
    """Folder with libnvidia-ml.so.1 as of that driver branch, compiled when there is none.

    Several processes may ask at once: each compiles aside and renames, and any of the results will do.
    """
    key = hashlib.sha256(_SOURCE.read_bytes() + " ".join(_COMPILE).encode()).hexdigest()[:16]
    built = _CACHE / f"{key}-{driver}" / "libnvidia-ml.so.1"
    if not built.exists():
        built.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_CACHE) as folder:
            draft = Path(folder) / built.name
            subprocess.run([*_COMPILE, f"-DNVML_DRIVER={driver}", "-o", draft, _SOURCE], check=True)
            draft.replace(built)
    return built.parent


def environment(scenario: Path, driver: int = 570) -> dict[str, str]:
    """This process's environment, with the library first and this scenario for it."""
    paths = [str(library(driver)), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(paths), "KVWATCH_FAKENVML": str(scenario)}
