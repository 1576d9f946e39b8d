"""Joins one cycle's records into a picture of the node in which each byte of VRAM has one owner."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from kvwatch.blockmath.errors import Unsupported
from kvwatch.blockmath.releases import Release
from kvwatch.config import Config
from kvwatch.ledger import EMPTY, Ledger, Remembered
from kvwatch.lineage import Identity, Lineage, identity
from kvwatch.observe.cycle import Observation, ObservedServer, SourceStatus
from kvwatch.observe.records import (
    Failure,
    Gpu,
    Launch,
    ModelConfig,
    NextStart,
    Process,
    VllmRecord,
)
from kvwatch.ownership import Owner, Ownership, Ownerships, left_behind

MAX_LABEL = 128


@dataclass(frozen=True, slots=True)
class Holder:
    """One process on one GPU.

    Attributes:
        process: None where its pid could not be resolved.
        used_bytes: None where the driver does not tell.
    """

    gpu: str
    pid: int
    process: Process | None
    used_bytes: int | None
    kinds: frozenset[str]
    ownership: Ownership

    @property
    def name(self) -> str:
        """The program, for people."""
        return self.process.name if self.process else f"pid {self.pid}"


@dataclass(frozen=True, slots=True)
class GpuState:
    """One GPU with its memory shared out.

    Attributes:
        holders: largest first; those of unknown size last.
        residue: bytes in use that no named process holds and that are not known to be on their way back; None
            where a part of the sum is unknown.
        visibility: share of the named pids that could be resolved, None where no list could be read.
        inconsistent: the processes' sum exceeds what the card says is used.
        released: bytes on their way back that no list names any more.
        servers: those of which a process is named here.
    """

    gpu: Gpu
    holders: tuple[Holder, ...]
    residue: int | None
    visibility: float | None
    inconsistent: bool
    released: int = 0
    servers: frozenset[str] = frozenset()

    @property
    def coming_back(self) -> int:
        """Bytes that processes which have ended held, and that will be free in a moment."""
        return self.released + sum(
            holder.used_bytes or 0 for holder in self.holders if holder.ownership.owner is Owner.RELEASING
        )

    def held(self) -> dict[tuple[Owner, str], int]:
        """Bytes per (owner, server). A class whose bytes are not known in full is left out."""
        sums: Counter[tuple[Owner, str]] = Counter()
        unknown: set[tuple[Owner, str]] = set()
        for holder in self.holders:
            key = (holder.ownership.owner, holder.ownership.server)
            if holder.used_bytes is None:
                unknown.add(key)
            else:
                sums[key] += holder.used_bytes
        if self.residue is None:
            unknown.add((Owner.UNATTRIBUTED, ""))
        else:
            sums[Owner.RELEASING, ""] += self.released
            sums[Owner.UNATTRIBUTED, ""] += self.residue
        return {
            key: held
            for key, held in sums.items()
            if key not in unknown and (held or key[0] is not Owner.RELEASING)
        }

    def held_by_server(self, name: str) -> int | None:
        """Bytes that one server's processes hold here; None where they are not all known."""
        own = [holder.used_bytes for holder in self.holders if holder.ownership.server == name]
        known = [used for used in own if used is not None]
        return sum(known) if known and len(known) == len(own) else None


@dataclass(frozen=True, slots=True)
class ServerState:
    """One vLLM server as this cycle saw it.

    Attributes:
        name: label ``server``, unique on the node.
        model: what it serves, for people.
        release: None where its version is not known.
        gpus: NVML indices in rank order, empty where unknown.
        up: its ``/metrics`` answered.
        next_start: what it would be told if it started again; None where that was not looked for.
    """

    name: str
    model: str
    launch: Launch
    page: VllmRecord | Failure
    model_config: ModelConfig | Failure
    release: Release | None
    gpus: tuple[str, ...]
    next_start: NextStart | Failure | None = None

    @property
    def up(self) -> bool:
        """Whether its page was read in this cycle."""
        return isinstance(self.page, VllmRecord)

    @property
    def max_model_len(self) -> int | None:
        """The running length in tokens, from /v1/models."""
        if not isinstance(self.page, VllmRecord) or not self.page.models:
            return None
        lengths = [model.max_model_len for model in self.page.models if model.max_model_len is not None]
        return max(lengths, default=None)


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """The node at one moment. Immutable; a new one each cycle.

    Attributes:
        plan_models: config.json of the models that plans name, by plan.
        ledger: what the next cycle has to know.
    """

    time: float
    gpus: tuple[GpuState, ...]
    servers: tuple[ServerState, ...]
    sources: tuple[SourceStatus, ...]
    failures: tuple[Failure, ...] = ()
    plan_models: Mapping[str, ModelConfig | Failure] = field(default_factory=dict)
    ledger: Ledger = EMPTY

    def gpu(self, index: str) -> GpuState | None:
        """The GPU of that index."""
        return next((state for state in self.gpus if state.gpu.index == index), None)


def join(observation: Observation, config: Config, ledger: Ledger = EMPTY) -> NodeSnapshot:
    """One cycle's records as one snapshot.

    Args:
        ledger: of the cycle before.
    """
    now, rules = observation.time, config.holders
    lineage = Lineage(observation.processes)
    left = left_behind(observation.servers, lineage, ledger, now)
    live = tuple(server for server in observation.servers if server not in left)
    named = dict(zip(_names(live), live, strict=True))
    strays = frozenset(pid for server in left for pid in server.members)
    owners = Ownerships(lineage, named, rules, left=strays, ledger=ledger, now=now)
    listed = () if isinstance(observation.nvml, Failure) else observation.nvml.gpus
    since = now - rules.release_grace
    gpus = tuple(_gpu_state(gpu, lineage, owners, ledger, since) for gpu in listed)
    return NodeSnapshot(
        time=now,
        gpus=gpus,
        servers=tuple(_server_state(server, name, gpus) for name, server in named.items()),
        sources=observation.sources,
        failures=tuple(_failures(observation)),
        plan_models=observation.plan_models,
        ledger=ledger.turned(
            lineage,
            _remembered(gpus, owners, now),
            {_card(state.gpu): state.residue for state in gpus if state.residue is not None},
            now=now,
            grace=rules.release_grace,
        ),
    )


def _card(gpu: Gpu) -> str:
    """What a card is known by from one cycle to the next: indices move when one falls off the bus."""
    return gpu.uuid or gpu.index


def _remembered(gpus: tuple[GpuState, ...], owners: Ownerships, now: float) -> dict[Identity, Remembered]:
    held: defaultdict[Identity, dict[str, int]] = defaultdict(dict)
    processes: dict[Identity, Process] = {}
    for state in gpus:
        for holder in state.holders:
            if holder.process is None:
                continue
            who = identity(holder.process)
            processes[who] = holder.process
            if holder.used_bytes is not None:
                held[who][_card(state.gpu)] = holder.used_bytes
    return {who: Remembered(owners.origin(process), held[who], now) for who, process in processes.items()}


def _failures(observation: Observation) -> Iterable[Failure]:
    for record in (observation.nvml, observation.processes):
        if isinstance(record, Failure):
            yield record
        else:
            yield from record.failures
    if not isinstance(observation.nvml, Failure):
        for gpu in observation.nvml.gpus:
            yield from gpu.failures
    for server in observation.servers:
        yield from map(server.with_address, _failures_of(server))


def _failures_of(server: ObservedServer) -> Iterable[Failure]:
    yield from server.launch.failures
    if not isinstance(server.vllm, Failure):
        yield from server.vllm.failures
    for record in (server.vllm, server.model, server.next_start):
        if isinstance(record, Failure):
            yield record


def _gpu_state(gpu: Gpu, lineage: Lineage, owners: Ownerships, ledger: Ledger, since: float) -> GpuState:
    listed = gpu.processes or {}
    holders = [
        Holder(
            gpu.index, entry.pid, lineage.get(entry.pid), entry.used_bytes, entry.kinds, owners.of(entry.pid)
        )
        for entry in listed.values()
    ]
    holders.sort(key=lambda holder: (-(holder.used_bytes or 0), holder.pid))
    residue = _residue(gpu)
    released = _released(gpu, residue, lineage, ledger, since)
    return GpuState(
        gpu=gpu,
        holders=tuple(holders),
        residue=max(residue - released, 0) if residue is not None else None,
        visibility=_visibility(gpu, holders),
        inconsistent=residue is not None and residue < 0,
        released=released,
        servers=frozenset(holder.ownership.server for holder in holders if holder.ownership.server),
    )


def _visibility(gpu: Gpu, holders: list[Holder]) -> float | None:
    """A process that ended a moment ago was seen then."""
    if gpu.processes is None:
        return None
    resolved = sum(one.process is not None or one.ownership.owner is Owner.RELEASING for one in holders)
    return resolved / len(holders) if holders else 1.0


def _released(gpu: Gpu, residue: int | None, lineage: Lineage, ledger: Ledger, since: float) -> int:
    """The part of the residue that is new since processes ended which held as much or more."""
    before = ledger.unattributed.get(_card(gpu))
    if residue is None or before is None or not lineage.known:
        return 0
    return max(0, min(residue - before, ledger.released(_card(gpu), gpu.processes or (), lineage, since)))


def _residue(gpu: Gpu) -> int | None:
    """Bytes in use less those of the named processes.

    Unknown under v1 of NVML's memory call, whose `used` contains a reserved part of unknown size.
    """
    if gpu.memory is None or gpu.memory.reserved is None or gpu.processes is None:
        return None
    sizes = [entry.used_bytes for entry in gpu.processes.values()]
    known = [used for used in sizes if used is not None]
    return gpu.memory.used - sum(known) if len(known) == len(sizes) else None


def _names(servers: tuple[ObservedServer, ...]) -> list[str]:
    """A unique name per server: configured, else the served model's, with the port where two share it."""
    plain = [_plain_name(server) for server in servers]
    often = Counter(plain)
    with_port = [
        f"{name}:{_port(server)}" if often[name] > 1 else name
        for name, server in zip(plain, servers, strict=True)
    ]
    still = Counter(with_port)
    return [
        f"{name}#{server.launch.pid}" if still[name] > 1 else name
        for name, server in zip(with_port, servers, strict=True)
    ]


def _plain_name(server: ObservedServer) -> str:
    if server.settings and server.settings.name:
        return server.settings.name[:MAX_LABEL]
    if isinstance(server.vllm, VllmRecord) and server.vllm.models:
        return server.vllm.models[0].id[:MAX_LABEL]
    if server.launch.served_names:
        return server.launch.served_names[0][:MAX_LABEL]
    return (server.launch.model or server.launch.base_url or "vllm")[:MAX_LABEL]


def _port(server: ObservedServer) -> int | str:
    parts = urlsplit(server.launch.base_url or "")
    return parts.port or server.launch.pid or "?"


def _server_state(server: ObservedServer, name: str, gpus: tuple[GpuState, ...]) -> ServerState:
    page = server.vllm
    root = page.models[0].root if isinstance(page, VllmRecord) and page.models else None
    return ServerState(
        name=name,
        model=(server.launch.model or root or name)[:MAX_LABEL],
        launch=server.launch,
        page=page,
        model_config=server.model,
        release=_release(page),
        gpus=_server_gpus(server, name, gpus),
        next_start=server.next_start,
    )


def _release(page: VllmRecord | Failure) -> Release | None:
    if isinstance(page, Failure) or page.version is None:
        return None
    try:
        return Release.parse(page.version)
    except (Unsupported, ValueError):
        return None


def _server_gpus(server: ObservedServer, name: str, gpus: tuple[GpuState, ...]) -> tuple[str, ...]:
    """Where its ranks run: as configured, else the cards on which its processes hold most.

    A rank can keep a small context on cards that are another rank's; those are not counted as ranks. Ranks
    take the cards in the order in which the server sees them.
    """
    if server.settings and server.settings.gpus:
        return server.settings.gpus
    visible = server.launch.visible_devices or ()
    if ",".join(visible) == server.launch.environment.get("NVIDIA_VISIBLE_DEVICES"):
        visible = ()  # A container's list has no order of its own.
    seen = sorted(
        (state for state in gpus if name in state.servers), key=lambda state: _place(state, visible)
    )
    held = {state.gpu.index: state.held_by_server(name) or 0 for state in seen}
    ranks = server.launch.flags.tp * server.launch.flags.pp * server.launch.flags.dp
    largest = sorted(held, key=lambda index: -held[index])[:ranks]
    return tuple(index for index in held if index in largest)


def _place(state: GpuState, visible: tuple[str, ...]) -> int:
    """Where a list as of CUDA_VISIBLE_DEVICES names a card: by index, or by the beginning of its UUID."""
    gpu = state.gpu
    places = (
        place
        for place, named in enumerate(visible)
        if named == gpu.index or (not named.isdigit() and (gpu.uuid or "").startswith(named))
    )
    return next(places, len(visible))
