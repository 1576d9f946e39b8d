"""Pending changes: what the next start is told otherwise than the running server, and whether it starts.

What was measured on the running server counts only as far as it still holds. Where it does not, a check that
needs no such figure may fail all the same, or vLLM refuse the flags outright. Else an estimate stands in that
the running server corrects (`kvwatch.forecast.modelled`), or the verdict is unknown.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from kvwatch.blockmath.errors import Refused, Unsupported
from kvwatch.blockmath.flags import Flags
from kvwatch.blockmath.pool import plan_pool
from kvwatch.blockmath.releases import Release
from kvwatch.blockmath.settings import check_flags_exist
from kvwatch.blockmath.startup import Verdict
from kvwatch.config import Config
from kvwatch.forecast.modelled import judge_modelled
from kvwatch.forecast.remedies import Remedy, remedies
from kvwatch.forecast.restart import RestartForecast, Unknown
from kvwatch.forecast.situation import ACTIVATION_FLAGS, Situation, refused, situation
from kvwatch.node import NodeSnapshot, ServerState
from kvwatch.observe import serve_flags
from kvwatch.observe.launch import ENVIRONMENT
from kvwatch.observe.records import Engine, Failure, ModelConfig, NextStart, VllmRecord

MAX_TEXT = 200

_DEFAULTS: Mapping[str, Any] = {
    "cpu_offload_gb": 0.0,
    "data_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "disable_sliding_window": False,
    "dtype": "auto",
    "enable_expert_parallel": False,
    "enable_sleep_mode": False,
    "enforce_eager": False,
    "kv_cache_dtype": "auto",
    "load_format": "auto",
    "pipeline_parallel_size": 1,
    "prefill_context_parallel_size": 1,
    "tensor_parallel_size": 1,
    "trust_remote_code": False,
}
"""Values that are the same as not given, in every release."""

_OFF = "false"
"""A switch that is turned off is the same as one not given."""

_TOLD_BY_THE_PAGE = ("max_model_len", "kv_cache_memory_bytes", "num_gpu_blocks_override")
_RANKS = frozenset({"tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"})
_GROWS_WITH = frozenset({"max_num_batched_tokens", "max_num_seqs"})
"""Flags that move memory beside the KV cache in one direction only."""

_NO_BEARING = frozenset(
    {
        *("HOME", "XDG_CACHE_HOME", "VLLM_PORT", "VLLM_PROCESS_NAME_PREFIX", "VLLM_SERVER_DEV_MODE"),
        *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"),
    }
)
"""Variables that move no figure, or (the last two) show in ``visible_devices``."""

_DEVICES = frozenset({"CUDA_DEVICE_ORDER", "visible_devices"})
_GRAPH_ESTIMATE = "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS"
_ANY_LENGTH = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
_MODELLED = frozenset({"activation_unknown", "model_changed"})
"""Doubts that an estimate may settle."""

_MODEL_SETTINGS = frozenset({"model", "model_config", "weight_bytes"})


@dataclass(frozen=True, slots=True)
class Change:
    """One setting that the next start has otherwise.

    Attributes:
        setting: a flag or environment variable, or ``vllm_version``, ``model_config``, ``weight_bytes``,
            ``model_path``, ``visible_devices``, ``graph_memory_estimate``, ``config_file`` or
            ``unknown_flags``.
        running, coming: the values in words; None where not given.
    """

    setting: str
    running: str | None
    coming: str | None


@dataclass(frozen=True, slots=True)
class PendingForecast:
    """What the next start of one server would change, and the verdict on it.

    Attributes:
        source: what starts it, as `NextStart.source`; empty where that could not be read.
        changes: empty where the next start is as the running one; there is no verdict then, the restart
            verdict says it.
        unknown: why there is no verdict.
        basis: ``measured``, or ``modelled`` where an estimate stands in; None where there is no verdict.
        assumptions: what an estimate takes for granted, in words.
        remedies: further changes that make it start, where all that bears on it was measured.
    """

    server: str
    source: str
    files: tuple[str, ...]
    changes: tuple[Change, ...]
    verdict: Verdict | None
    unknown: Unknown | None
    basis: str | None = None
    assumptions: tuple[str, ...] = ()
    remedies: tuple[Remedy, ...] = ()

    @property
    def feasible(self) -> bool | None:
        """True, False, or None where unknown or where nothing is pending."""
        return self.verdict.feasible if self.verdict else None


def forecast_pending(
    server: ServerState, restart: RestartForecast, snapshot: NodeSnapshot, config: Config
) -> PendingForecast | None:
    """Compare and judge the next start of one server; None where it was not looked for."""
    start = server.next_start
    if start is None:
        return None
    if isinstance(start, Failure):
        return PendingForecast(server.name, "", (), (), None, Unknown(start.reason, start.detail))
    changes = tuple(_changes(server, start))
    new = [failure for failure in start.failures if failure not in server.launch.failures]
    if not changes and not new:
        return PendingForecast(server.name, start.source, start.files, (), None, None)
    found = PendingForecast(server.name, start.source, start.files, changes, None, None)
    try:
        outcome = _Judge(server, start, changes, restart, snapshot, config).judge()
    except Unsupported as unsupported:
        return replace(found, unknown=Unknown(unsupported.reason, str(unsupported)))
    return replace(
        found,
        verdict=outcome.verdict,
        basis=outcome.basis,
        assumptions=outcome.assumptions,
        remedies=outcome.remedies,
    )


# --- differences ---------------------------------------------------------------------------------------


def _changes(server: ServerState, start: NextStart) -> Iterator[Change]:
    if any(failure.reason == "config_changed" for failure in server.launch.failures):
        yield Change("config_file", "as the server read it", f"{server.launch.config_file}, changed since")
    yield from _utilization(server, start)
    yield from _flags(server, start)
    yield from _release(server, start)
    yield from _environment(server, start)
    yield from _model(server, start)


def _utilization(server: ServerState, start: NextStart) -> Iterator[Change]:
    """The effective value: a release's default counts like a value given."""
    coming_release = next_release(server, start) or server.release
    given, told = server.launch.flags.gpu_memory_utilization, start.flags.gpu_memory_utilization
    engine = _engine(server)
    running = given or (engine.gpu_memory_utilization if engine else None) or _default(server.release)
    coming = told or _default(coming_release)
    if running is None or coming is None or math.isclose(running, coming):
        return
    marks = ["" if value else " (default)" for value in (given, told)]
    yield Change("gpu_memory_utilization", f"{running:g}{marks[0]}", f"{coming:g}{marks[1]}")


def _default(release: Release | None) -> float | None:
    return release.default_utilization if release else None


def _flags(server: ServerState, start: NextStart) -> Iterator[Change]:
    told = _told_by_page(server)
    for name in _comparable(server) if server.launch.flags != start.flags else ():
        running, coming = getattr(server.launch.flags, name), getattr(start.flags, name)
        if running is None and coming is not None:
            running = told.get(name)
        default = _DEFAULTS.get(name)
        if (default if running is None else running) != (default if coming is None else coming):
            yield Change(name, _text(running), _text(coming))
    if server.launch.pid is None:
        return
    for name in sorted({*server.launch.beside, *start.beside}):
        running, coming = server.launch.beside.get(name), start.beside.get(name)
        if (running or _OFF) != (coming or _OFF):
            yield Change(name, _text(running), _text(coming))
    if set(start.unknown_flags) != set(server.launch.unknown_flags):
        listed = [", ".join(flags) or None for flags in (server.launch.unknown_flags, start.unknown_flags)]
        yield Change("unknown_flags", *listed)


def _comparable(server: ServerState) -> tuple[str, ...]:
    """Flags whose running value is known: all of a command line's, else those that the page tells."""
    if server.launch.pid is None:
        return _TOLD_BY_THE_PAGE
    return tuple(one.name for one in fields(Flags) if one.name != "gpu_memory_utilization")


def _told_by_page(server: ServerState) -> Mapping[str, Any]:
    engine = _engine(server)
    return {
        "max_model_len": server.max_model_len,
        "kv_cache_memory_bytes": engine.kv_cache_memory_bytes if engine else None,
        "num_gpu_blocks_override": engine.num_blocks_override if engine else None,
    }


def _engine(server: ServerState) -> Engine | None:
    page = server.page
    return page.engines[0] if isinstance(page, VllmRecord) and page.engines else None


def next_release(server: ServerState, start: NextStart) -> Release | None:
    """The release of the next start where it differs from the running one, else None."""
    if start.version is None or server.release is None:
        return None
    try:
        found = Release.parse(start.version)
    except ValueError:
        return None
    same = (found.version, found.rank) == (server.release.version, server.release.rank)
    return None if same else found


def _release(server: ServerState, start: NextStart) -> Iterator[Change]:
    coming = next_release(server, start)
    if coming is None or server.release is None:
        return
    yield Change("vllm_version", server.release.text, coming.text)
    told = {**server.launch.environment, **start.environment}
    estimates = [release.graph_estimate_default for release in (server.release, coming)]
    if estimates[0] != estimates[1] and _GRAPH_ESTIMATE not in told:
        words = ["on (default)" if estimate else "off (default)" for estimate in estimates]
        yield Change("graph_memory_estimate", *words)


def _environment(server: ServerState, start: NextStart) -> Iterator[Change]:
    launch = server.launch
    unreadable = any(failure.reason == "environment_unreadable" for failure in launch.failures)
    if launch.pid is None or unreadable:
        return
    for name in sorted(ENVIRONMENT - _NO_BEARING):
        running, coming = launch.environment.get(name), start.environment.get(name)
        told = coming is not None or start.whole_environment
        if told and running != coming:
            yield Change(name, running, coming)
    if launch.visible_devices != start.visible_devices:
        both = (launch.visible_devices, start.visible_devices)
        listed = [None if devices is None else ",".join(devices) for devices in both]
        yield Change("visible_devices", *listed)


def _model(server: ServerState, start: NextStart) -> Iterator[Change]:
    """What changed in the model's directory; another model altogether is a change of the flag."""
    first, now = start.first_model, start.model
    if first is None or now is None or _another_model(server, start):
        return
    if isinstance(now, Failure):
        yield Change("model_config", first.path, now.detail)
        return
    if first.config != now.config:
        yield Change("model_config", *_differing(first.config, now.config))
    elif _written_since_start(first, server):
        yield Change("model_config", "as the server read it", f"{now.path}, written after the start")
    if first.path != now.path:
        yield Change("model_path", first.path, now.path)
    if first.weight_bytes != now.weight_bytes and not (_in_hub(first) and first.path == now.path):
        yield Change("weight_bytes", _text(first.weight_bytes), _text(now.weight_bytes))


def _another_model(server: ServerState, start: NextStart) -> bool:
    return server.launch.pid is not None and server.launch.flags.model != start.flags.model


def _written_since_start(first: ModelConfig, server: ServerState) -> bool:
    started = server.launch.start_time
    return started is not None and first.mtime_ns > started * 1e9 and not _in_hub(first)


def _in_hub(model: ModelConfig) -> bool:
    """A hub's cache is filled by the server itself, after its start, and its commits never change."""
    return "/snapshots/" in model.path or "/modelscope/" in model.path


def _differing(running: Mapping[str, Any], coming: Mapping[str, Any]) -> tuple[str, str]:
    names = sorted(name for name in {*running, *coming} if running.get(name) != coming.get(name))
    both = [{name: config[name] for name in names if name in config} for config in (running, coming)]
    return _text(both[0]) or "", _text(both[1]) or ""


def _text(value: object) -> str | None:
    match value:
        case None:
            return None
        case str():
            text = value
        case float():
            text = f"{value:g}"
        case _:
            text = json.dumps(value, default=str)
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


# --- the verdict ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Outcome:
    """A verdict, and what it rests on."""

    verdict: Verdict
    basis: str = "measured"
    assumptions: tuple[str, ...] = ()
    remedies: tuple[Remedy, ...] = ()


@dataclass(frozen=True, slots=True)
class _Judge:
    """One server's next start under judgement."""

    server: ServerState
    start: NextStart
    changes: tuple[Change, ...]
    restart: RestartForecast
    snapshot: NodeSnapshot
    config: Config

    def judge(self) -> _Outcome:
        """Raises Unsupported where there is no verdict."""
        try:
            self._refuse_unknown_flags()
            base = self._base()
            return self._outcome(base, self._coming(base))
        except Refused as refusal:
            return _Outcome(refused(refusal))

    @property
    def _moved(self) -> frozenset[str]:
        return frozenset(change.setting for change in self.changes)

    @property
    def _release(self) -> Release | None:
        return next_release(self.server, self.start) or self.server.release

    def _refuse_unknown_flags(self) -> None:
        """Raises Refused where the parser of the next release is known not to have a flag."""
        release, same = self._release, "vllm_version" not in self._moved
        if release is None:
            return
        running = self.server.launch.flags
        new = {
            name: value
            for name, value in self.start.flags.given().items()
            if not same or value != getattr(running, name)
        }
        check_flags_exist(Flags(**new), release)
        unknown: list[str] = []
        if release.version == Release.parse(serve_flags.RELEASE).version:
            ours = self.server.launch.unknown_flags if same else ()
            unknown = [flag for flag in self.start.unknown_flags if flag not in ours]
        if unknown:
            listed = " ".join(unknown)
            raise Refused("unrecognized_arguments", f"vllm: error: unrecognized arguments: {listed}")

    def _base(self) -> Situation:
        """The running server as measured, with the model that it started with."""
        first, now = self.start.first_model, self.server.model_config
        if first is not None and isinstance(now, ModelConfig) and first.config != now.config:
            return situation(replace(self.server, model_config=first), self.snapshot, self.config.restart)
        if self.restart.situation is None:
            known = self.restart.unknown or Unknown("refused", "vLLM refuses the running server's flags")
            raise Unsupported(known.reason, known.detail)
        return self.restart.situation

    def _coming(self, base: Situation) -> Situation:
        """The same place with the next start's flags, model and release."""
        flags, release = self._flags(base), self._release or base.release
        model = self.start.model
        if self._moved & {"model", "model_config"} and not isinstance(model, ModelConfig):
            detail = model.detail if model else "its config.json was not looked for"
            raise Unsupported("model_config_unreadable", f"model {flags.model or ''}: {detail}")
        config = model.config if isinstance(model, ModelConfig) and self._model_moved else base.config
        keeps_block = not self._model_moved and release is base.release and not flags.block_size
        flags = replace(flags, allow_long_max_model_len=self._any_length_allowed or None)
        pool = plan_pool(
            config,
            flags,
            device=base.device,
            release=release,
            effective_block_size=base.effective_block_size if keeps_block else None,
        )
        return replace(base, config=config, flags=flags, release=release, pool=pool)

    @property
    def _any_length_allowed(self) -> bool:
        told = {**self.server.launch.environment, **self.start.environment}
        return told.get(_ANY_LENGTH, "0").strip().lower() in ("1", "true")

    @property
    def _model_moved(self) -> bool:
        return bool(self._moved & {*_MODEL_SETTINGS, "hf_overrides"})

    def _flags(self, base: Situation) -> Flags:
        """The next start's flags; what both leave out stays as the running server has it."""
        given, told = self.server.launch.flags, self.start.flags
        names = (*_comparable(self.server), "gpu_memory_utilization")
        changed: dict[str, Any] = {
            name: getattr(told, name) for name in names if getattr(told, name) != getattr(given, name)
        }
        if "vllm_version" in self._moved:
            changed["gpu_memory_utilization"] = told.gpu_memory_utilization
        if self._model_moved:
            changed |= {name: getattr(told, name) for name in ("max_model_len", "kv_cache_dtype")}
        return base.flags.with_changes(**changed)

    def _outcome(self, base: Situation, coming: Situation) -> _Outcome:
        doubt = self._doubt(base, coming)
        if doubt is None:
            verdict = _decided(coming.judge())
            ways = () if verdict.feasible else remedies(coming, verdict, self.snapshot)
            return _Outcome(verdict, remedies=ways)
        sure = self._without_measure(coming)
        if sure is not None:
            return _Outcome(sure)
        direction = self._direction(base, coming) if doubt.reason == "activation_unknown" else 0
        if direction:
            measured = coming.judge()
            if measured.feasible is (direction < 0):
                return _Outcome(measured)
        return self._modelled(base, coming, doubt)

    def _modelled(self, base: Situation, coming: Situation, doubt: Unknown) -> _Outcome:
        """What the estimate says; only flags and config.json enter it."""
        changed = _changed_flags(base, coming)
        model = self.start.model if self._model_moved else None
        known = isinstance(model, ModelConfig) and bool(self._moved & {"model", "model_config"})
        if (
            changed is None
            or doubt.reason not in _MODELLED
            or (doubt.reason == "model_changed" and not known)
        ):
            raise Unsupported(doubt.reason, doubt.detail)
        config = coming.config if known else None
        try:
            modelled = judge_modelled(base, changed, self.snapshot, config)
            return _Outcome(_decided(modelled.verdict), "modelled", modelled.assumptions)
        except Unsupported as unsupported:
            raise Unsupported(doubt.reason, f"{doubt.detail}; no estimate: {unsupported}") from None

    def _without_measure(self, coming: Situation) -> Verdict | None:
        """The verdict where a check fails that needs no figure of the running server's own memory."""
        if self._moved & (_RANKS | _DEVICES):
            return None
        bare = replace(coming, sites=tuple(replace(site, non_kv=None) for site in coming.sites))
        verdict = bare.judge()
        return verdict if verdict.feasible is False else None

    def _doubt(self, base: Situation, coming: Situation) -> Unknown | None:
        """Why the measured memory beside the KV cache says nothing of the next start."""
        new = [one for one in self.start.failures if one not in self.server.launch.failures]
        if new:
            return Unknown(new[0].reason, new[0].detail)
        if "config_file" in self._moved:
            return Unknown("config_changed", "the flags that the running server read are not known")
        if "vllm_version" in self._moved:
            detail = f"memory beside the KV cache was measured under {base.release.text} and is another's"
            return Unknown("release_changed", f"{detail} under {coming.release.text}")
        if moved := sorted(self._moved & ((ENVIRONMENT - _NO_BEARING) | _DEVICES)):
            return Unknown("environment_changed", f"what {', '.join(moved)} changes was not measured")
        if moved := sorted(self._moved & _MODEL_SETTINGS):
            return Unknown("model_changed", f"with another {', '.join(moved)} the measure no longer holds")
        if moved := sorted({*self.server.launch.beside, *self.start.beside} & self._moved):
            return Unknown("flags_not_modelled", f"what {', '.join(moved)} changes was not measured")
        if moved := self._activation_flags(base, coming):
            detail = f"with another {', '.join(moved)} the measured non-KV memory no longer holds"
            return Unknown("activation_unknown", detail)
        return None

    @staticmethod
    def _activation_flags(base: Situation, coming: Situation) -> list[str]:
        return sorted(
            name
            for name in ACTIVATION_FLAGS
            if _effective(base, name) != _effective(coming, name) and name != "model"
        )

    def _direction(self, base: Situation, coming: Situation) -> int:
        """1 where the memory beside the KV cache can only grow, -1 where it can only shrink, else 0."""
        moved = self._activation_flags(base, coming)
        if not moved or not set(moved) <= _GROWS_WITH:
            return 0
        grows = {_effective(coming, name) > _effective(base, name) for name in moved}
        return 0 if len(grows) > 1 else 1 if True in grows else -1


def _changed_flags(base: Situation, coming: Situation) -> Flags | None:
    """The flags that differ, given in full; None where one goes whose default is not known."""
    changed: dict[str, Any] = {}
    for name in (one.name for one in fields(Flags)):
        before, after = getattr(base.flags, name), getattr(coming.flags, name)
        if before == after:
            continue
        default = coming.pool.settings.max_model_len if name == "max_model_len" else _DEFAULTS.get(name)
        changed[name] = default if after is None else after
        if changed[name] is None:
            return None
    return Flags(**changed)


def _effective(found: Situation, name: str) -> Any:
    if name in _GROWS_WITH:
        return getattr(found.pool.settings, name)
    value = getattr(found.flags, name)
    return _DEFAULTS.get(name) if value is None else value


def _decided(verdict: Verdict) -> Verdict:
    if verdict.feasible is None:
        raise Unsupported(verdict.unknown_reason or "input_missing", "a check lacks an input")
    return verdict
