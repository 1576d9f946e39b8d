"""A proc file system laid out in a folder, as kvwatch reads it, and the process trees of real servers."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvwatch.observe.records import Process, ProcessRecord

BOOT_TIME = 1_700_000_000
TICKS = 100
"""Clock ticks per second of every Linux that kvwatch runs on."""
OWN_NAMESPACE = 4026531836
KERNEL_THREAD = 0x00200000


class FakeProc:
    """Processes as files. All share kvwatch's namespaces unless said otherwise."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(exist_ok=True)
        (root / "stat").write_text(f"cpu  1 2 3\nintr 5\nbtime {BOOT_TIME}\nprocesses 9\n")
        self.namespaces("self", {})
        self.add(1, ["/sbin/init"], comm="systemd", ppid=0)

    def add(
        self,
        pid: int,
        argv: Sequence[str],
        *,
        comm: str | None = None,
        ppid: int = 1,
        session: int | None = None,
        state: str = "S",
        start: int = 1000,
        flags: int = 0x400000,
        cgroup: str = "0::/\n",
        environment: Mapping[str, str] | None = None,
        cwd: str | None = "/",
        root: str | None = "/",
        namespaces: Mapping[str, int] | None = None,
    ) -> Path:
        """Lay out one process. ``start`` is in clock ticks after boot; namespaces are inodes by kind."""
        folder = self.root / str(pid)
        folder.mkdir(exist_ok=True)
        name = comm if comm is not None else (argv[0] if argv else "").rpartition("/")[2][:15]
        fields = [state, ppid, pid, pid if session is None else session, 0, -1, flags, *[0] * 12, start]
        (folder / "stat").write_text(f"{pid} ({name}) {' '.join(map(str, fields))} {' '.join(['0'] * 30)}\n")
        (folder / "cmdline").write_bytes(b"".join(argument.encode() + b"\0" for argument in argv))
        (folder / "cgroup").write_text(cgroup)
        variables = "".join(f"{key}={value}\0" for key, value in (environment or {}).items())
        (folder / "environ").write_bytes(variables.encode())
        for link, target in (("cwd", cwd), ("root", root)):
            (folder / link).unlink(missing_ok=True)
            if target is not None:
                (folder / link).symlink_to(target)
        self.namespaces(pid, namespaces or {})
        return folder

    def namespaces(self, pid: int | str, inodes: Mapping[str, int]) -> None:
        """Set the namespaces of a process."""
        folder = self.root / str(pid) / "ns"
        folder.mkdir(parents=True, exist_ok=True)
        for kind in ("pid", "mnt", "net"):
            link = folder / kind
            link.unlink(missing_ok=True)
            link.symlink_to(f"{kind}:[{inodes.get(kind, OWN_NAMESPACE)}]")

    def remove(self, pid: int) -> None:
        """End a process."""
        shutil.rmtree(self.root / str(pid))


def process(pid: int, argv: Sequence[str], *, ppid: int = 1, session: int | None = None) -> Process:
    """A process record with what the search for servers looks at."""
    name = argv[0].rpartition("/")[2] if argv else ""
    return Process(
        pid, ppid, BOOT_TIME + 10.0, name, "vllm", 1000, pid if session is None else session, "S", tuple(argv)
    )


def record(*processes: Process) -> ProcessRecord:
    """A listing of these processes."""
    return ProcessRecord({each.pid: each for each in processes})


SERVE = ("venv/bin/python3", "venv/bin/vllm", "serve", "models/tiny-llama")
_TRACKER = ("venv/bin/python3", "-B", "-c", "from multiprocessing.resource_tracker import main;main(11)")

# (pid, parent, comm, argv, name that psutil shows) of vLLM 0.32.0 on CPU, all in the launcher's session.
DATA_PARALLEL_TREE: tuple[tuple[int, int, str, tuple[str, ...], str], ...] = (
    (11700, 1, "vllm", (*SERVE, "--data-parallel-size", "2", "--port", "18003"), "vllm"),
    (11864, 11700, "python3", _TRACKER, "python3"),
    (11865, 11700, "VLLM::DPCoordin", ("VLLM::DPCoordinator",), "VLLM::DPCoordinator"),
    (11933, 11700, "VLLM::EngineCor", ("VLLM::EngineCore_DP0",), "VLLM::EngineCore_DP0"),
    (12320, 11933, "VLLM::Worker", ("VLLM::Worker",), "VLLM::Worker"),
    (11935, 11700, "VLLM::EngineCor", ("VLLM::EngineCore_DP1",), "VLLM::EngineCore_DP1"),
    (12311, 11935, "VLLM::Worker", ("VLLM::Worker",), "VLLM::Worker"),
    (11936, 11700, "VLLM::APIServer", ("VLLM::APIServer_0",), "VLLM::APIServer_0"),
    (11937, 11700, "VLLM::APIServer", ("VLLM::APIServer_1",), "VLLM::APIServer_1"),
)
