"""What a vLLM ``/metrics`` page says about the engines of a server, for releases 0.3.3 to 0.33.

Facts that the reading rests on:

* ``vllm:cache_config_info`` carries the cache configuration as labels whose values are Python reprs
  (``"None"``, ``"True"``, ``"0.92"``). Releases before 0.8.5 put no ``engine`` label on any series, 0.8.5
  puts none on this one, 0.9 shows one row for all engines.
* Its ``num_gpu_blocks`` is the sum over the engines that the page covers, on every row; the other values are
  one configuration shared by all of them.
* With several API servers the scheduler's gauges are absent until the first request: unknown, not zero.

A value that cannot be right (NaN, a negative count, a usage above 1, a histogram that falls) is left out and
named in ``failures``; it never becomes a number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from operator import add, le, lt
from typing import Any, TypeVar

from kvwatch.observe.exposition import FamilyFilter, MalformedPage, Pairs, Sample
from kvwatch.observe.records import Engine, Failure, Histogram

T = TypeVar("T")

INFO = "vllm:cache_config_info"
USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")  # the newer name wins where both are shown
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
WAITING_BY_REASON = "vllm:num_requests_waiting_by_reason"
PREEMPTIONS = "vllm:num_preemptions_total"
SLEEP_STATE = "vllm:engine_sleep_state"
PROMPT_TOKENS = "vllm:request_prompt_tokens"
GENERATION_TOKENS = "vllm:request_generation_tokens"
START_TIME = "process_start_time_seconds"

_HISTOGRAM_PARTS = ("_bucket", "_sum", "_count")
_SCALARS = (INFO, *USAGE, RUNNING, WAITING, WAITING_BY_REASON, PREEMPTIONS, SLEEP_STATE)
_HISTOGRAMS = tuple(name + part for name in (PROMPT_TOKENS, GENERATION_TOKENS) for part in _HISTOGRAM_PARTS)
_FILTER = FamilyFilter((*_SCALARS, *_HISTOGRAMS, START_TIME))

_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
MAX_ENGINES = 256
"""So many engines a page may name."""
MAX_COUNT = 2.0**53
"""What a float counts up to. Sums of counts are then far from infinity."""
_MAX_LABEL = 64
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class VllmPage:
    """The engines of one page.

    Attributes:
        engines: in the order of their numbers; empty where the page has no cache information.
        has_vllm_families: False for a page of another program, or of a server with ``--disable-log-stats``.
        identity: changes when the server behind the page was started anew; None where the page does not tell.
        failures: values that were left out.
    """

    engines: tuple[Engine, ...]
    has_vllm_families: bool
    identity: float | None
    failures: tuple[Failure, ...]


def read_page(page: bytes) -> VllmPage:
    """Reads one ``/metrics`` page.

    Raises:
        MalformedPage: the page is not complete, valid exposition text.
    """
    if page.lstrip()[:1] in (b"<", b"{"):
        raise MalformedPage("not_metrics", "the page is HTML or JSON, not metrics")
    samples = _FILTER.samples(page)
    if not samples and b"\n# TYPE " not in b"\n" + page:
        raise MalformedPage("not_metrics", "the page has no metric family")
    reader = _Reader(samples)
    engines = reader.engines()
    return VllmPage(
        engines=engines,
        has_vllm_families=any(name != START_TIME for name in samples),
        identity=reader.one_value(samples.get(START_TIME, ()), _positive),
        failures=tuple(reader.failures),
    )


# --- values -----------------------------------------------------------------------------------------------


def _count(value: float) -> float | None:
    return value if 0 <= value <= MAX_COUNT and value.is_integer() else None


def _ratio(value: float) -> float | None:
    return value if 0 <= value <= 1 else None


def _positive(value: float) -> float | None:
    return value if math.isfinite(value) and value > 0 else None


_INTEGER = re.compile(r"[0-9]{1,18}", re.ASCII)
_DECIMAL = re.compile(r"[0-9]{1,18}(\.[0-9]{1,25})?([eE][+-]?[0-9]{1,2})?", re.ASCII)
_ENGINE = re.compile(r"[0-9]{1,6}", re.ASCII)
_WORD = re.compile(r"[\x21-\x7e]{1,64}")


def _as_int(text: str) -> int:
    if _INTEGER.fullmatch(text) is None:
        raise ValueError("not a whole number")
    return int(text)


def _as_positive_int(text: str) -> int | None:
    """Zero is how a count that is not known yet is shown."""
    return _as_int(text) or None


def _as_float(text: str) -> float:
    if _DECIMAL.fullmatch(text) is None:
        raise ValueError("not a number")
    return float(text)


def _as_share(text: str) -> float:
    share = _as_float(text)
    if not 0 < share <= 1:
        raise ValueError("not within 0 and 1")
    return share


def _as_bool(text: str) -> bool:
    if text not in ("True", "False"):
        raise ValueError("neither True nor False")
    return text == "True"


def _as_word(text: str) -> str:
    if _WORD.fullmatch(text) is None:
        raise ValueError("not a short word")
    return text


def _as_gib(text: str) -> float:
    return _as_float(text) / _GIB


# Field of Engine, label, converter. Of two labels for one field the first that is there counts.
_CONFIG: tuple[tuple[str, str, Callable[[str], Any]], ...] = (
    ("block_size", "block_size", _as_positive_int),
    ("cache_dtype", "cache_dtype", _as_word),
    ("gpu_memory_utilization", "gpu_memory_utilization", _as_share),
    ("kv_cache_memory_bytes", "kv_cache_memory_bytes", _as_int),
    ("num_blocks_override", "num_gpu_blocks_override", _as_int),
    ("enable_prefix_caching", "enable_prefix_caching", _as_bool),
    ("swap_space", "swap_space", _as_float),
    ("swap_space", "swap_space_bytes", _as_gib),
    ("mamba_cache_mode", "mamba_cache_mode", _as_word),
    ("mamba_block_size", "mamba_block_size", _as_positive_int),
    ("sliding_window", "sliding_window", _as_positive_int),
    ("max_concurrency", "kv_cache_max_concurrency", _as_float),
    ("size_tokens", "kv_cache_size_tokens", _as_int),
)


# --- the page ---------------------------------------------------------------------------------------------


class _Reader:
    """Turns samples into engines and keeps account of what it had to leave out."""

    def __init__(self, samples: Mapping[str, list[Sample]]) -> None:
        self.failures: list[Failure] = []
        self._samples = samples
        self._engines = _engine_names(samples)
        self._rows = {name: self._by_engine(name, rows) for name, rows in samples.items()}

    def engines(self) -> tuple[Engine, ...]:
        info = self._samples.get(INFO)
        if info is None:
            self._note("no_cache_config_info", f"no {INFO} (as with --disable-log-stats)")
            return ()
        if any(row.value != 1 for row in info):
            self._note("bad_value", f"{INFO} is not 1")
            return ()
        blocks = self._blocks_per_engine(info)
        return tuple(self._engine(engine, info, blocks) for engine in self._engines)

    def one_value(self, rows: Iterable[Sample], check: Callable[[float], float | None]) -> float | None:
        """The value that all the rows agree on."""
        rows = tuple(rows)
        values = {check(row.value) for row in rows}
        if len(values) > 1 or None in values:
            self._note("bad_value", f"{rows[0].name} is {', '.join(str(row.value) for row in rows[:4])}")
            return None
        return next(iter(values), None)

    def _engine(self, engine: str, info: list[Sample], blocks: int | None) -> Engine:
        usage = next((name for name in USAGE if name in self._samples), USAGE[0])
        return Engine(
            engine=engine,
            num_blocks=blocks,
            **self._config(engine, info),
            usage=self.one_value(self._of(usage, engine), _ratio),
            running=self._total(RUNNING, engine),
            waiting=self._total(WAITING, engine),
            waiting_by_reason=self._waiting_by_reason(engine),
            preemptions=self._total(PREEMPTIONS, engine),
            sleep_state=self._sleep_state(engine),
            prompt_tokens=self._histogram(PROMPT_TOKENS, engine),
            generation_tokens=self._histogram(GENERATION_TOKENS, engine),
        )

    def _by_engine(self, name: str, rows: Iterable[Sample]) -> dict[str, list[Sample]]:
        """Rows by engine; a row without engine label belongs to the only engine, if there is only one."""
        groups: dict[str, list[Sample]] = {}
        for row in rows:
            groups.setdefault(row.labels.get("engine", ""), []).append(row)
        shared = groups.pop("", [])
        if shared and len(self._engines) == 1:
            groups.setdefault(self._engines[0], []).extend(shared)
        elif shared and name not in (INFO, START_TIME):
            self._note("ambiguous_engines", f"{name} has no engine label on a page of several engines")
        return groups

    def _of(self, name: str, engine: str) -> list[Sample]:
        return self._rows.get(name, {}).get(engine, [])

    # --- cache_config_info

    def _blocks_per_engine(self, info: list[Sample]) -> int | None:
        label = "num_gpu_blocks"
        totals = {self._label(row, label, _as_positive_int) for row in info}
        if len(totals) > 1:
            self._note("conflicting_rows", f"{INFO}: the rows disagree on {label}")
            return None
        (total,) = totals
        count = len(self._engines)
        if total is None or count == 1:
            return total
        if any("engine" not in row.labels for row in info):
            self._note("ambiguous_engines", f"{INFO} has no engine label on a page of several engines")
            return None
        if total % count:
            self._note("uneven_engines", f"{total} blocks do not divide among {count} engines")
            return None
        return total // count

    def _config(self, engine: str, info: list[Sample]) -> dict[str, Any]:
        """Fields of Engine out of the row of this engine, else out of the one row for all of them."""
        rows = self._of(INFO, engine) or info
        if len(rows) > 1:
            self._note("conflicting_rows", f"{INFO}: several rows for engine {engine}")
            return {}
        fields: dict[str, Any] = {}
        for field, label, convert in _CONFIG:
            if fields.get(field) is None:
                fields[field] = self._label(rows[0], label, convert)
        return fields

    def _label(self, row: Sample, label: str, convert: Callable[[str], T]) -> T | None:
        text = row.labels.get(label, "None")
        if text == "None":
            return None
        try:
            return convert(text)
        except ValueError as error:
            self._note("bad_value", f"{INFO}: {label} is {text[:_MAX_LABEL]!r}, {error}")
            return None

    # --- gauges, counters, histograms

    def _total(self, name: str, engine: str) -> float | None:
        """Sum over the rows of one engine, which differ in the model name; None without rows."""
        rows = self._of(name, engine)
        values = [count for row in rows if (count := _count(row.value)) is not None]
        if len(values) < len(rows):
            self._note("bad_value", f"{name} is no count")
            return None
        return sum(values) if values else None

    def _waiting_by_reason(self, engine: str) -> Mapping[str, float]:
        totals: dict[str, float] = {}
        for row in self._of(WAITING_BY_REASON, engine):
            reason, count = row.labels.get("reason", ""), _count(row.value)
            if count is None or _WORD.fullmatch(reason) is None:
                self._note("bad_value", f"{WAITING_BY_REASON} has a bad reason or is no count")
                return {}
            totals[reason] = totals.get(reason, 0.0) + count
        return totals

    def _sleep_state(self, engine: str) -> str | None:
        rows = self._of(SLEEP_STATE, engine)
        states = {row.labels.get("sleep_state", "") for row in rows if row.value == 1}
        if (
            len(states) > 1
            or not states.issubset(_SLEEP_STATES)
            or any(row.value not in (0, 1) for row in rows)
        ):
            self._note("bad_value", f"{SLEEP_STATE} is not one of {', '.join(_SLEEP_STATES)}")
            return None
        return next(iter(states), None)

    def _histogram(self, name: str, engine: str) -> Histogram | None:
        """Sum over the rows of one engine, which differ in the model name; None without rows."""
        columns: dict[Pairs, list[tuple[float, float]]] = {}
        for row in self._of(name + "_bucket", engine):
            text = row.labels.get("le", "")
            others = row.pairs - {("le", text)}
            bound = _bound(text) if len(text) <= _MAX_LABEL else math.nan
            columns.setdefault(others, []).append((bound, row.value))
        if not columns:
            return None
        totals = _summed(columns.values())
        if totals is None or self._total(name + "_count", engine) not in (None, totals[-1][1]):
            self._note("bad_histogram", f"{name} has bounds or counts that cannot be")
            return None
        return Histogram(totals, sum=self._total(name + "_sum", engine), count=totals[-1][1])

    def _note(self, reason: str, detail: str) -> None:
        self.failures.append(Failure("vllm", reason, detail))


def _engine_names(samples: Mapping[str, list[Sample]]) -> tuple[str, ...]:
    names = {row.labels["engine"] for rows in samples.values() for row in rows if "engine" in row.labels}
    if not all(_ENGINE.fullmatch(name) for name in names):
        raise MalformedPage("bad_label", "an engine label is not a short number")
    if len(names) > MAX_ENGINES:
        raise MalformedPage("too_many_series", f"the page names {len(names)} engines")
    return tuple(sorted(names, key=int)) or ("0",)


@lru_cache(maxsize=256)
def _bound(text: str) -> float:
    """The ``le`` of a bucket; NaN, which compares with nothing, where it is no number."""
    if text == "+Inf":
        return math.inf
    try:
        return _as_float(text)
    except ValueError:
        return math.nan


def _summed(columns: Iterable[list[tuple[float, float]]]) -> tuple[tuple[float, float], ...] | None:
    """Cumulative buckets added bound by bound; None unless all have the same bounds and rise to infinity."""
    shared: tuple[float, ...] = ()
    totals: tuple[float, ...] = ()
    for column in columns:
        bounds, counts = zip(*sorted(column), strict=True)
        if bounds[-1] != math.inf or not all(map(lt, bounds, bounds[1:])):
            return None
        if _count(counts[0]) is None or _count(counts[-1]) is None:
            return None
        if not all(map(float.is_integer, counts)) or not all(map(le, counts, counts[1:])):
            return None
        if shared not in ((), bounds):
            return None
        totals = tuple(map(add, totals or (0.0,) * len(bounds), counts))
        shared = bounds
    return tuple(zip(shared, totals, strict=True)) or None
