"""A running vLLM server laid out in a folder: its /proc entry, its file system, its Python environment."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvwatch.blockmath.flags import Flags
from kvwatch.config import LaunchFile, ServerConfig
from kvwatch.observe.command_line import server_arguments
from kvwatch.observe.launch import read_launch
from kvwatch.observe.nextstart import NextStartSource
from kvwatch.observe.processes import ProcessSource
from kvwatch.observe.records import Failure, Launch, NextStart, Process
from tests.observe.fake_proc import FakeProc

PID = 700
SITE = "opt/venv/lib/python3.12/site-packages"
URL = "http://127.0.0.1:8000"


class RunningServer:
    """One server whose root directory is a folder, so that nothing of this machine is read."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        unit: str | None = None,
        cgroup: str | None = None,
        environment: Mapping[str, str] | None = None,
        argv: Sequence[str] | None = None,
        version: str | None = "0.32.0",
    ) -> None:
        self.root = folder / "root"
        self.model = self.write("models/m/config.json", json.dumps({"max_position_embeddings": 4096}))
        if version is not None:
            self.install(version)
        self._proc = FakeProc(folder / "proc")
        self._proc.add(
            PID,
            argv or ["/opt/venv/bin/python3", "/opt/venv/bin/vllm", "serve", "/models/m", *arguments],
            cgroup=cgroup or (f"0::/system.slice/{unit}\n" if unit else "0::/user.slice/session-1.scope\n"),
            environment=environment,
            root=str(self.root),
            namespaces={"mnt": 1},
        )
        self.source = NextStartSource(self._proc.root)
        record = ProcessSource(self._proc.root).read()
        assert not isinstance(record, Failure)
        self.process: Process = record.processes[PID]
        self.launch: Launch = read_launch(
            self.process, server_arguments(self.process.argv) or (), proc_root=self._proc.root
        )

    def write(self, path: str, text: str | bytes) -> Path:
        """Write a file of the server's file system."""
        place = self.root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        place.write_bytes(text if isinstance(text, bytes) else text.encode())
        return place

    def install(self, version: str, site: str = SITE) -> None:
        """Put a vLLM release into a Python environment."""
        self.write(f"{site}/vllm/_version.py", f"__version__ = version = '{version}'\n")

    def next(self, launch_file: LaunchFile | None = None, **settings: Any) -> NextStart | Failure:
        """What its next start would be."""
        configured = ServerConfig(URL, launch=launch_file, **settings) if launch_file or settings else None
        return self.source.read(self.launch, self.process, None, configured)

    def known(self, launch_file: LaunchFile | None = None, **settings: Any) -> NextStart:
        """The same, where it must be known."""
        found = self.next(launch_file, **settings)
        assert isinstance(found, NextStart), found
        return found

    def flags(self, launch_file: LaunchFile | None = None) -> Mapping[str, Any]:
        """Flags of the next start but for the model."""
        return {
            name: value for name, value in self.known(launch_file).flags.given().items() if name != "model"
        }

    def reason(self, launch_file: LaunchFile | None = None) -> str:
        """Why its next start is not known."""
        found = self.next(launch_file)
        assert isinstance(found, Failure), found
        return found.reason


def launch_file(path: Path, *more: Path, **which: str) -> LaunchFile:
    """The configuration's word for what starts the server."""
    return LaunchFile((path, *more), **which)


__all__ = ["Flags", "RunningServer", "launch_file"]
