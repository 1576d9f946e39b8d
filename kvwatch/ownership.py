"""Who holds a card's memory: the class of each process that NVML names, and why it is that one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase

from kvwatch.config import Holders, Rule
from kvwatch.ledger import EMPTY, Ledger, Origin
from kvwatch.lineage import (
    Descent,
    Lineage,
    identity,
    is_dead,
    is_python,
    is_ray,
    is_ray_worker,
    is_server,
    is_spawned,
    is_vllm_title,
)
from kvwatch.observe.command_line import is_preload
from kvwatch.observe.cycle import ObservedServer
from kvwatch.observe.records import Failure, Process

STARTING_SECONDS = 3600.0
"""A server on whose port nothing listens may be loading; after an hour it is not (vLLM gives up after ten
minutes unless it is told otherwise)."""


class Owner(StrEnum):
    """Classes of holders. Each byte of VRAM has exactly one."""

    SERVER = "server"
    NEIGHBOUR = "neighbour"
    ORPHAN = "orphan"
    FOREIGN = "foreign"
    ALLOWED = "allowed"
    RELEASING = "releasing"
    UNATTRIBUTED = "unattributed"


@dataclass(frozen=True, slots=True)
class Ownership:
    """The verdict on one process.

    Attributes:
        server: the server that it is a part of; of the class `server` only.
        origin: the server that it was a part of; of the classes `orphan` and `releasing`.
        reason: why it is of this class, for people.
    """

    owner: Owner
    server: str = ""
    origin: str = ""
    reason: str = ""


def left_behind(
    servers: Iterable[ObservedServer], lineage: Lineage, ledger: Ledger, now: float
) -> tuple[ObservedServer, ...]:
    """Those that are no servers: forked children of a dead one, which show their parent's command line.

    Releases before 0.10.1 gave them no title. They are known by what the ledger has of them, or, where they
    were never seen before, by a port on which nothing listens long after the start. A server whose children
    have titles is none of these, however long it loads.
    """
    return tuple(server for server in servers if _is_left_behind(server, lineage, ledger, now))


def _is_left_behind(server: ObservedServer, lineage: Lineage, ledger: Ledger, now: float) -> bool:
    process = lineage.get(server.launch.pid or 0)
    if process is None:
        return False
    entry = ledger.holders.get(identity(process))
    if entry and entry.origin and entry.origin.server != identity(process):
        return not lineage.alive(entry.origin.server)
    members = (lineage.get(pid) for pid in server.members)
    if any(member is not None and is_vllm_title(member.name) for member in members):
        return False
    refused = isinstance(server.vllm, Failure) and server.vllm.reason == "connection_refused"
    late = now - process.start_time > STARTING_SECONDS
    return refused and late and lineage.descent(process).abandoned


class Ownerships:
    """Gives every process of one cycle its class.

    Args:
        servers: the live ones, by name.
        left: pids of what `left_behind` found, with their descendants.
        now: Unix time of the cycle.
    """

    def __init__(
        self,
        lineage: Lineage,
        servers: Mapping[str, ObservedServer],
        rules: Holders,
        *,
        left: Set[int] = frozenset(),
        ledger: Ledger = EMPTY,
        now: float = 0.0,
    ) -> None:
        self._lineage = lineage
        self._servers = servers
        self._rules = rules
        self._left = left
        self._ledger = ledger
        self._now = now
        self._members = {pid: name for name, server in servers.items() for pid in server.members}
        self._origins = {
            name: origin for name, server in servers.items() if (origin := _origin(name, server)) is not None
        }
        self._names = {origin.server: name for name, origin in self._origins.items()}
        self._users = self._engine_users()
        self._known: dict[int, Ownership] = {}

    def of(self, pid: int) -> Ownership:
        """The class of the process with this pid."""
        if pid not in self._known:
            self._known[pid] = self._judge(pid)
        return self._known[pid]

    def origin(self, process: Process) -> Origin | None:
        """The server that a process belongs to, or else the one that it belonged to."""
        return self._origins.get(self.of(process.pid).server) or self._former(process)

    def _judge(self, pid: int) -> Ownership:
        process = self._lineage.get(pid)
        if process is None and pid in self._members:
            return Ownership(Owner.SERVER, server=self._members[pid])
        if process is None or is_dead(process):
            return self._ended(pid, process)
        if name := self._server_of(process):
            return Ownership(Owner.SERVER, server=name)
        if any(_matches(rule, process) for rule in self._rules.allowed):
            return Ownership(Owner.ALLOWED, reason="kvwatch.yaml allows it")
        if any(_matches(rule, process) for rule in self._rules.neighbours):
            return Ownership(Owner.NEIGHBOUR, reason="kvwatch.yaml expects it")
        return self._stray(process) or self._engine(process) or Ownership(Owner.FOREIGN)

    def _ended(self, pid: int, process: Process | None) -> Ownership:
        entry = self._ledger.holders.get(identity(process)) if process else self._ledger.of_pid(pid)
        first_seen = entry is None and process is not None
        recent = entry is not None and self._now - entry.alive <= self._rules.release_grace
        if self._lineage.known and (first_seen or recent):
            origin = entry.origin.name if entry and entry.origin else ""
            return Ownership(Owner.RELEASING, origin=origin, reason="it has ended, its memory is coming back")
        reason = "it has ended, its memory did not come back" if process else "no such process can be seen"
        return Ownership(Owner.UNATTRIBUTED, reason=reason)

    # --- parts of live servers ---

    def _server_of(self, process: Process) -> str | None:
        if process.pid in self._members:
            return self._members[process.pid]
        former = self._former(process)
        if former is not None:
            return self._names.get(former.server)
        candidates = self._candidates(process)
        return candidates[0] if len(candidates) == 1 else None

    def _former(self, process: Process) -> Origin | None:
        entry = self._ledger.holders.get(identity(process))
        return entry.origin if entry else None

    def _candidates(self, process: Process) -> list[str]:
        """Live servers that can have a process as a worker which is no descendant of theirs."""
        if is_ray_worker(process) or (is_vllm_title(process.name) and self._is_under_ray(process)):
            return self._older(process, lambda name, _: self._servers[name].launch.ray)
        if is_vllm_title(process.name):
            return self._older(process, lambda _, parent: _shares_container(parent, process))
        return []

    def _older(self, process: Process, wanted: Callable[[str, Process], bool]) -> list[str]:
        """A worker that is older than a server is a former one's."""
        return [
            name
            for name, server in self._servers.items()
            if (parent := self._lineage.get(server.launch.pid or 0)) is not None
            and parent.start_time <= process.start_time
            and wanted(name, parent)
        ]

    def _is_under_ray(self, process: Process) -> bool:
        """Ray's newer actors give themselves vLLM's titles."""
        parent = self._lineage.descent(process).parent
        return parent is not None and is_ray(parent)

    # --- what is left of servers that are gone ---

    def _stray(self, process: Process) -> Ownership | None:
        former = self._former(process)
        if former is not None:
            reason = f"its server {former.name} is gone"
            return Ownership(Owner.ORPHAN, origin=former.name, reason=reason)
        if process.pid in self._left:
            return Ownership(Owner.ORPHAN, reason="a part of a server that is gone: nothing listens")
        return None

    # --- engines that kvwatch does not watch ---

    def _engine(self, process: Process) -> Ownership | None:
        """What has a mark of an engine, the surest first."""
        if is_preload(process.argv):
            return Ownership(Owner.NEIGHBOUR, reason="holds weights for servers to share")
        if is_server(process):
            return Ownership(Owner.NEIGHBOUR, reason="a vLLM server that is not watched")
        if process.pid in self._users:
            return Ownership(Owner.NEIGHBOUR, reason="runs a vLLM engine of its own")
        if len(self._candidates(process)) > 1:
            return Ownership(
                Owner.NEIGHBOUR, reason="a part of one of several servers, which one is not known"
            )
        descent = self._lineage.descent(process)
        if self._is_vllms(process, descent):
            return _child_of(descent)
        return None

    def _is_vllms(self, process: Process, descent: Descent) -> bool:
        parent = descent.parent
        if is_ray_worker(process) or is_vllm_title(process.name) or is_vllm_title(descent.oldest.name):
            return True
        if is_spawned(process):
            # With its parent gone nobody can tell whose it was; it is of use to nobody all the same.
            return descent.abandoned or (
                parent is not None and (is_preload(parent.argv) or parent.pid in self._users)
            )
        return descent.abandoned and is_python(process) and self._has_titled_mates(process)

    def _has_titled_mates(self, process: Process) -> bool:
        mates = self._lineage.session_mates(process)
        return any(is_vllm_title(mate.name) and mate.pid not in self._members for mate in mates)

    def _engine_users(self) -> frozenset[int]:
        """Programs with an engine for a child: LLM() in somebody's script."""
        descents = [
            self._lineage.descent(process)
            for process in self._lineage.titled()
            if process.pid not in self._members and not is_dead(process)
        ]
        return frozenset(
            descent.parent.pid
            for descent in descents
            if descent.parent is not None and not descent.abandoned and not is_ray(descent.parent)
        )


def _origin(name: str, server: ObservedServer) -> Origin | None:
    launch = server.launch
    if launch.pid is None or launch.start_time is None:
        return None
    return Origin(name, (launch.pid, launch.start_time))


def _child_of(descent: Descent) -> Ownership:
    parent = descent.parent
    named = f"{parent.name} (pid {parent.pid})" if parent else "a process that cannot be seen"
    if not descent.abandoned:
        return Ownership(Owner.NEIGHBOUR, reason=f"belongs to {named}, which is not watched")
    adopted = f", now under {named}" if parent else ""
    return Ownership(Owner.ORPHAN, reason=f"the process that started it is gone{adopted}")


def _shares_container(one: Process, other: Process) -> bool:
    if one.container is not None and one.container == other.container:
        return True
    return one.unit is not None and one.unit == other.unit and one.unit.startswith("pod ")


def _matches(rule: Rule, process: Process) -> bool:
    tests = (
        (rule.program, process.name),
        (rule.user, process.user or ""),
        (rule.workload, process.workload),
        (rule.container, process.container or ""),
    )
    return all(pattern is None or fnmatchcase(text, pattern) for pattern, text in tests)
