"""Process trees as records, and one look at a node that has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvwatch.blockmath.flags import Flags
from kvwatch.config import GIB, Config
from kvwatch.ledger import EMPTY, Ledger
from kvwatch.node import NodeSnapshot, join
from kvwatch.observe.cycle import ObservedServer
from kvwatch.observe.launch import server_members
from kvwatch.observe.records import Failure, Process, ProcessRecord, VllmRecord
from kvwatch.ownership import Owner, Ownership
from tests.nodes import NOW, gpu, observation, process, server

SERVE = ("/venv/bin/python3", "/venv/bin/vllm", "serve", "org/model")
OLD_SERVE = ("python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "org/model")
SPAWN = (
    "python3",
    "-c",
    "from multiprocessing.spawn import spawn_main; spawn_main()",
    "--multiprocessing-fork",
)
SCRIPT = ("python3", "rag.py")
REFUSED = Failure("vllm", "connection_refused", "nothing listens")

INIT = process(1, "systemd", ppid=0)
SHELL = process(70, "bash", session=70, argv=("-bash",))


def parent(pid: int, *, argv: tuple[str, ...] = SERVE, name: str = "vllm", **more: Any) -> Process:
    """A `vllm serve` in the session of SHELL."""
    return process(pid, name, **{"ppid": SHELL.pid, "session": SHELL.pid, "argv": argv, **more})


def child(pid: int, name: str, of: Process, **more: Any) -> Process:
    """A retitled child in its parent's session, container and unit."""
    given = {"argv": (name,), "session": of.session, "container": of.container, "unit": of.unit, **more}
    return process(pid, name, **{"ppid": of.pid, **given})


def spawned(pid: int, of: Process, **more: Any) -> Process:
    """A multiprocessing child without a title."""
    return child(pid, "python3", of, **{"argv": SPAWN, **more})


def left(one: Process, *, to: Process = INIT) -> Process:
    """The same process after its parent has died and `to` has taken it over."""
    return replace(one, ppid=to.pid)


@dataclass(frozen=True, slots=True)
class Look:
    """What one cycle made of the node."""

    snapshot: NodeSnapshot

    @property
    def owners(self) -> dict[int, Owner]:
        """Class by pid."""
        return {pid: one.owner for pid, one in self.ownerships.items()}

    @property
    def ownerships(self) -> dict[int, Ownership]:
        """Verdict by pid; it is the same on every card."""
        return {holder.pid: holder.ownership for state in self.snapshot.gpus for holder in state.holders}

    @property
    def ledger(self) -> Ledger:
        """For the next cycle."""
        return self.snapshot.ledger

    def held(self, index: str = "0") -> Mapping[tuple[Owner, str], int]:
        """Bytes by class on one card."""
        state = self.snapshot.gpu(index)
        assert state is not None
        return state.held()


def look(
    *processes: Process,
    holding: Mapping[int, int] | Iterable[int],
    serving: Iterable[Process | ObservedServer] = (),
    after: Ledger = EMPTY,
    at: float = NOW,
    other: int = 0,
    config: Config | None = None,
    hidden: bool = False,
) -> Look:
    """One cycle over a card on which these pids hold memory, a GiB each unless said otherwise.

    Args:
        serving: parents of servers that answer, or servers made by `serves`.
        other: bytes in use that no list names.
        hidden: other users' processes cannot be seen.
    """
    held = dict(holding) if isinstance(holding, Mapping) else dict.fromkeys(holding, GIB)
    unseen = (Failure("processes", "hidden", "hidepid"),) if hidden else ()
    record = ProcessRecord({one.pid: one for one in processes}, failures=unseen)
    servers = tuple(one if isinstance(one, ObservedServer) else serves(one) for one in serving)
    members = server_members([one.launch for one in servers], record)
    servers = tuple(replace(one, members=own) for one, own in zip(servers, members, strict=True))
    seen = observation((gpu(dict(held), other=other),), processes, servers, time=at)
    return Look(join(replace(seen, processes=record), config or Config(), after))


def serves(
    one: Process,
    *,
    name: str = "llama",
    flags: Flags | None = None,
    page: VllmRecord | Failure | None = None,
    ray: bool = False,
    port: int = 8000,
) -> ObservedServer:
    """The server whose parent is this process."""
    made = server(pid=one.pid, name=name, flags=flags, page=page, port=port)
    return replace(made, launch=replace(made.launch, start_time=one.start_time, ray=ray))
