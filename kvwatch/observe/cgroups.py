"""What a cgroup path tells about a process: container, pod, job, unit. Pure functions.

Sources of the path layouts: the cgroupfs and systemd drivers of runc (Docker, containerd, CRI-O, Podman), the
Kubernetes kubelet, LXC, Slurm's cgroup plugins (v1 and v2) and systemd.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

_HEX_ID = re.compile(r"(?:^|[-:])([0-9a-f]{64})(?:\.scope)?$")
_LXC = re.compile(r"^lxc\.payload[./](?P<name>[^/]+)$")
_POD = re.compile(
    r"(?:^|[-:])pod(?P<uid>[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?:\.slice|$)"
)
_SLURM_JOB = re.compile(r"^job_(\d+)$")
_UNIT_SUFFIXES = (".service", ".scope")
_MONITOR = "conmon"
"""CRI-O and Podman name the scope of a container's monitor after the container; it is not inside of it."""
_CONTAINER_RUNTIMES = frozenset({"docker.service", "containerd.service", "crio.service", "podman.service"})
_EVERYONES = re.compile(r"^(?:-|system|user|user-\d+|machine)\.slice$|^init\.scope$")
_USER_MANAGER = re.compile(r"^user@\d+\.service$")
_V1_ORDER = ("name=systemd", "memory", "pids", "devices")


@dataclass(frozen=True, slots=True)
class Cgroup:
    """Where a process runs.

    Attributes:
        path: the path that says most; ``/`` where every hierarchy has the process in its root.
        container: id (64 hex digits), or an LXC container's name.
        pod: UID of a Kubernetes pod, with hyphens.
        slurm_job: job number.
        systemd_unit: innermost service or scope, else the innermost slice that is not everyone's.
    """

    path: str
    container: str | None = None
    pod: str | None = None
    slurm_job: str | None = None
    systemd_unit: str | None = None

    @property
    def unit(self) -> str | None:
        """The workload in words: ``slurm job 1234``, ``pod <uid>`` or ``ollama.service``."""
        if self.slurm_job:
            return f"slurm job {self.slurm_job}"
        if self.pod:
            return f"pod {self.pod}"
        return self.systemd_unit


@lru_cache(maxsize=1024)
def parse_cgroup(text: str) -> Cgroup | None:
    """Read ``/proc/PID/cgroup`` of either version, or of both mixed.

    Returns:
        None where no line has the form ``hierarchy:controllers:path``.
    """
    paths = _paths(text)
    if not paths:
        return None
    described = [describe_path(path) for path in paths]
    return max(described, key=_informative)


def describe_path(path: str) -> Cgroup:
    """Read one cgroup path, as seen from any cgroup namespace."""
    segments = [segment for segment in path.split("/") if segment and segment != ".."]
    position, container = _container(segments)
    outside = segments if position is None else segments[:position]
    return Cgroup(
        path=path,
        container=container,
        pod=_pod(segments),
        slurm_job=_slurm_job(segments),
        systemd_unit=_systemd_unit(outside, in_container=container is not None),
    )


def _paths(text: str) -> list[str]:
    by_controllers: dict[str, str] = {}
    for line in text.splitlines():
        hierarchy, colon, rest = line.partition(":")
        controllers, second, path = rest.partition(":")
        if colon and second and hierarchy.isdigit():
            by_controllers[controllers] = path
    preferred = [by_controllers.pop(name) for name in ("", *_V1_ORDER) if name in by_controllers]
    return preferred + list(by_controllers.values())


def _informative(cgroup: Cgroup) -> tuple[bool, bool, bool]:
    return (
        cgroup.container is not None,
        cgroup.unit is not None,
        cgroup.path != "/",
    )


def _container(segments: list[str]) -> tuple[int | None, str | None]:
    for position in reversed(range(len(segments))):
        segment = segments[position]
        if _MONITOR in segment:
            continue
        if match := _HEX_ID.search(segment):
            return position, match[1]
        if match := _LXC.match(segment):
            return position, match["name"]
        if position and segments[position - 1] in ("lxc", "lxc.payload"):
            return position, segment
    return None, None


def _pod(segments: Iterable[str]) -> str | None:
    for segment in segments:
        if match := _POD.search(segment.partition(".slice:")[0]):
            return match["uid"].replace("_", "-")
    return None


def _slurm_job(segments: list[str]) -> str | None:
    in_slurm = False
    for segment in segments:
        in_slurm = in_slurm or segment.startswith("slurm") or segment.endswith("_slurmstepd.scope")
        if in_slurm and (match := _SLURM_JOB.match(segment)):
            return match[1]
    return None


def _systemd_unit(segments: list[str], *, in_container: bool) -> str | None:
    """A container's own scope is no unit of interest, but the service that a Podman quadlet runs it in is."""
    suffixes = (".service",) if in_container else _UNIT_SUFFIXES
    named = [s for s in segments if s.endswith(suffixes) and not _EVERYONES.match(s)]
    named = [s for s in named if s not in _CONTAINER_RUNTIMES or not in_container]
    own = [s for s in named if not _USER_MANAGER.match(s)]
    if own:
        return own[-1]
    if in_container:
        return None
    slices = [s for s in segments if s.endswith(".slice") and not _EVERYONES.match(s)]
    candidates = slices or named
    return candidates[-1] if candidates else None
