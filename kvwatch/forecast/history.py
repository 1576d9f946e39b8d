"""What is remembered from cycle to cycle: margins, free KV share, and what others hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvwatch.forecast.restart import RestartForecast
from kvwatch.forecast.trend import Series, Trend
from kvwatch.node import NodeSnapshot, ServerState
from kvwatch.observe.records import VllmRecord
from kvwatch.observe.vllm_page import MAX_ENGINES

RECENT_CYCLES = 8
UNSTABLE_BYTES = 64 * 2**20
"""Others' memory that moves by more than this within the last cycles can abort vLLM's profiling."""
MAX_POINTS = 60
"""Points of a margin's course that are handed out."""

T = TypeVar("T")
_Identity = tuple[str, float | None]


@dataclass(frozen=True, slots=True)
class Outlook:
    """Where one server's margins are heading.

    Attributes:
        margin: the fall of the margin that is used up first; None where none falls steadily.
        kv_full_at: Unix time by engine at which the KV cache is full, where it fills steadily.
        unstable_gpus: cards on which other processes' memory moves.
        margins_gpu: the card whose margin is the smallest now; None where no margin is known.
        margins: its course, (Unix time, bytes), oldest first and at most MAX_POINTS. Each point is the lowest
            of its span, so that no low is lost.
    """

    margin: Trend | None
    kv_full_at: dict[str, float]
    unstable_gpus: tuple[str, ...]
    margins_gpu: str | None = None
    margins: tuple[tuple[float, float], ...] = ()


class _Shelf(Generic[T]):
    """Series of one kind, by server and part; what the newest cycle did not add to is not handed out."""

    def __init__(self, new: Callable[[], T]) -> None:
        self._new = new
        self._parts: dict[_Identity, dict[str, T]] = {}
        self._fresh: set[tuple[_Identity, str]] = set()

    def begin(self, alive: Collection[_Identity]) -> None:
        """A new cycle, in which these servers were seen."""
        self._parts = {identity: parts for identity, parts in self._parts.items() if identity in alive}
        self._fresh.clear()

    def series(self, server: ServerState, part: str) -> T:
        """The series to add to."""
        identity = _identity(server)
        parts = self._parts.setdefault(identity, {})
        if part not in parts:
            if len(parts) >= MAX_ENGINES:
                # A page may name other engines each time: no more are remembered than one page may name.
                del parts[next(old for old in parts if (identity, old) not in self._fresh)]
            parts[part] = self._new()
        self._fresh.add((identity, part))
        return parts[part]

    def of(self, server: ServerState) -> dict[str, T]:
        """The series of one server that this cycle added to, by part."""
        identity = _identity(server)
        parts = self._parts.get(identity, {})
        return {part: series for part, series in parts.items() if (identity, part) in self._fresh}


class History:
    """Series per server and card, fed once per cycle. A restarted server begins anew.

    Attributes:
        verdicts: those of the newest cycle, by server.
    """

    def __init__(self) -> None:
        self.verdicts: Mapping[str, RestartForecast] = {}
        self._margins = _Shelf(Series)
        self._free = _Shelf(Series)
        self._others: _Shelf[deque[int]] = _Shelf(lambda: deque(maxlen=RECENT_CYCLES))

    def add(self, snapshot: NodeSnapshot, forecasts: dict[str, RestartForecast]) -> None:
        """Remember one cycle and forget servers that are gone."""
        self.verdicts = forecasts
        alive = {_identity(server) for server in snapshot.servers}
        for shelf in (self._margins, self._free, self._others):
            shelf.begin(alive)
        for server in snapshot.servers:
            for gpu, margin in _tightest_margins(forecasts[server.name]):
                self._margins.series(server, gpu).add(snapshot.time, margin)
            for engine, share in _free_shares(server):
                self._free.series(server, engine).add(snapshot.time, share)
            for gpu, held in _held_by_others(server, snapshot):
                self._others.series(server, gpu).append(held)

    def outlook(self, server: ServerState) -> Outlook:
        """What the series of one server say, as far as the newest cycle could add to them."""
        courses = self._margins.of(server)
        trends = [trend for series in courses.values() if (trend := series.trend()) is not None]
        tightest = min(courses, key=lambda gpu: courses[gpu].last, default=None)
        return Outlook(
            margin=min(trends, key=lambda trend: trend.zero_at, default=None),
            kv_full_at={
                engine: trend.zero_at
                for engine, series in self._free.of(server).items()
                if (trend := series.trend()) is not None
            },
            unstable_gpus=tuple(
                gpu for gpu, held in self._others.of(server).items() if max(held) - min(held) > UNSTABLE_BYTES
            ),
            margins_gpu=tightest,
            margins=() if tightest is None else courses[tightest].lows(MAX_POINTS),
        )


def _identity(server: ServerState) -> _Identity:
    return server.name, server.launch.start_time


def _tightest_margins(forecast: RestartForecast) -> Iterator[tuple[str, float]]:
    """The smallest margin per card."""
    if forecast.verdict is None:
        return
    tightest: dict[str, int] = {}
    for result in forecast.verdict.checks:
        if result.gpu is not None and result.margin_bytes is not None:
            tightest[result.gpu] = min(result.margin_bytes, tightest.get(result.gpu, result.margin_bytes))
    yield from tightest.items()


def _free_shares(server: ServerState) -> Iterator[tuple[str, float]]:
    if isinstance(server.page, VllmRecord):
        for engine in server.page.engines:
            if engine.usage is not None:
                yield engine.engine, 1 - engine.usage


def _held_by_others(server: ServerState, snapshot: NodeSnapshot) -> Iterator[tuple[str, int]]:
    for index in server.gpus:
        state = snapshot.gpu(index)
        if state is None or state.gpu.memory is None:
            continue
        own = state.held_by_server(server.name)
        if own is not None:
            yield index, state.gpu.memory.used - own
