"""What one change of a plan would buy, which cards are enough, and tables over several settings."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kvwatch.blockmath.gpus import Gpu
from kvwatch.forecast.sizing import Scenario, Sizing, try_size_up

TENSOR_PARALLEL_SIZES: Final = (1, 2, 4, 8)
HIGHER_UTILIZATION: Final = 0.95
MAX_UTILIZATION: Final = 0.98
"""Above this, graphs and the sampler have no room left outside of the budget."""
FEWER_REQUESTS: Final = 256


@dataclass(frozen=True, slots=True)
class Change:
    """One change and its outcome.

    Attributes:
        text: the change as it is typed, or in words where no flag makes it.
        result: the plan with it, or why there is no answer.
    """

    text: str
    result: Sizing | str


def changes(sizing: Sizing, gpu: Gpu | None) -> tuple[Change, ...]:
    """What each single change would buy, most harmless first.

    Args:
        sizing: the plan as it is.
        gpu: the card, where it is one of the table's; tells whether 8-bit numbers are worth offering.
    """
    return tuple(Change(text, try_size_up(scenario)) for text, scenario in _scenarios(sizing, gpu))


def _scenarios(sizing: Sizing, gpu: Gpu | None) -> Iterator[tuple[str, Scenario]]:
    scenario, settings = sizing.scenario, sizing.pool.settings
    flags = scenario.flags
    utilization = flags.gpu_memory_utilization or scenario.release.default_utilization
    if utilization < HIGHER_UTILIZATION and not flags.kv_cache_memory_bytes:
        yield _typed(scenario, gpu_memory_utilization=HIGHER_UTILIZATION)
    length = _shorter(sizing)
    if length:
        yield _typed(scenario, max_model_len=length)
    measured = scenario.non_kv_bytes is not None
    if not measured and settings.max_num_seqs > FEWER_REQUESTS:
        yield _typed(scenario, max_num_seqs=FEWER_REQUESTS)
    if not measured and scenario.release.graph_estimate_default and not flags.enforce_eager:
        yield _typed(scenario, enforce_eager=True)
    if settings.cache_dtype == "auto" and (gpu is None or gpu.has_fp8):
        yield _typed(scenario, kv_cache_dtype="fp8")
    if sizing.weights is not None and sizing.weights.quantization is None:
        if gpu is None or gpu.capability >= (8, 0):
            yield _typed(scenario, quantization="fp8")
        yield "a 4-bit checkpoint (AWQ)", _typed(scenario, quantization="awq")[1]
    if not measured and scenario.weight_bytes is None:
        for size in _larger_parallel(scenario):
            yield _typed(scenario, tensor_parallel_size=size)


def remedies(sizing: Sizing) -> tuple[str, ...]:
    """Single changes that make a plan start for sure, each one tried, as they are typed."""
    result = sizing.verdict.blocking or next(
        (check for check in sizing.verdict.checks if check.passed is None), None
    )
    if result is None:
        return ()
    candidates = _REMEDIES[result.check](sizing)
    found: dict[str, str] = {}
    for name, value in candidates:
        if name not in found:
            text, changed = _typed(sizing.scenario, **{name: value})
            outcome = try_size_up(changed)
            if isinstance(outcome, Sizing) and outcome.feasible:
                found[name] = text
    return tuple(found.values())


def _shorter_lengths(sizing: Sizing) -> Iterator[tuple[str, Any]]:
    if sizing.safe_length:
        yield "max_model_len", sizing.safe_length
    yield from _utilizations(sizing, up=True)


def _utilizations(sizing: Sizing, *, up: bool) -> Iterator[tuple[str, Any]]:
    """In steps of 0.01, the nearest first."""
    scenario = sizing.scenario
    present = scenario.flags.gpu_memory_utilization or scenario.release.default_utilization
    if up:
        steps = range(math.floor(present * 100) + 1, round(MAX_UTILIZATION * 100) + 1)
    else:
        steps = range(math.ceil(present * 100) - 1, 0, -1)
    yield from (("gpu_memory_utilization", step / 100) for step in steps)


def _fewer_requests(sizing: Sizing) -> Iterator[tuple[str, Any]]:
    """The blocks that there are for sure, then halves."""
    present = sizing.pool.settings.max_num_seqs
    doubtful = [stage.available - stage.uncertainty for stage in sizing.stages]
    sure = sizing.pool.num_blocks(doubtful)
    if 0 < sure < present:
        yield "max_num_seqs", sure
    while present > 1:
        present //= 2
        yield "max_num_seqs", present


def _outside_the_budget(sizing: Sizing) -> Iterator[tuple[str, Any]]:
    yield from _fewer_requests(sizing)
    yield from _utilizations(sizing, up=False)


_REMEDIES: Final[Mapping[str, Callable[[Sizing], Iterator[tuple[str, Any]]]]] = {
    "derived_length": lambda _: iter(()),
    "free_memory": functools.partial(_utilizations, up=False),
    "kv_memory": _shorter_lengths,
    "one_request": _shorter_lengths,
    "state_slots": _fewer_requests,
    "sampler_warmup": _outside_the_budget,
    "graph_capture": _outside_the_budget,
}


def _typed(scenario: Scenario, **flags: Any) -> tuple[str, Scenario]:
    changed = replace(scenario, flags=scenario.flags.with_changes(**flags))
    return " ".join(flag_text(name, value) for name, value in flags.items()), changed


def flag_text(name: str, value: object) -> str:
    """A flag as it is typed."""
    typed = f"--{name.replace('_', '-')}"
    return typed if value is True else f"{typed} {value}"


def _shorter(sizing: Sizing) -> int:
    """The length to type where the present one does not fit, else half of it."""
    present = sizing.pool.settings.max_model_len
    if sizing.pool.settings.auto_length:
        return 0
    return sizing.safe_length if sizing.safe_length < present else present // 2


def _larger_parallel(scenario: Scenario) -> Iterator[int]:
    """The next tensor-parallel sizes that divide the model, up to the first that starts."""
    for size in TENSOR_PARALLEL_SIZES:
        if size <= scenario.flags.tp:
            continue
        result = try_size_up(_typed(scenario, tensor_parallel_size=size)[1])
        if isinstance(result, Sizing):
            yield size
            if result.feasible:
                return


@dataclass(frozen=True, slots=True)
class Fit:
    """The fewest cards of one kind on which a plan starts.

    Attributes:
        sizing: on that many; None where it starts on none of the counts tried.
        reason: why not, for the largest count tried.
    """

    gpu: Gpu
    sizing: Sizing | None
    reason: str


def fits(scenario: Scenario, gpus: Iterable[Gpu]) -> tuple[Fit, ...]:
    """For each kind of card the fewest, split by tensor parallelism, that start with certainty."""
    return tuple(_fit(replace(scenario, device=gpu.device()), gpu) for gpu in gpus)


def _fit(scenario: Scenario, gpu: Gpu) -> Fit:
    reason = ""
    for size in TENSOR_PARALLEL_SIZES:
        flags = scenario.flags.with_changes(tensor_parallel_size=size)
        result = try_size_up(replace(scenario, flags=flags))
        if isinstance(result, str):
            reason = result
        elif result.feasible:
            return Fit(gpu, result, "")
        else:
            reason = _not_enough(result)
    return Fit(gpu, None, reason)


def _not_enough(sizing: Sizing) -> str:
    if sizing.feasible is None:
        return "too close to call"
    return sizing.verdict.failure_kind or "does not start"


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One row of a table.

    Attributes:
        values: by flag name, as they were given.
        result: the plan with them, or why there is no answer.
    """

    values: Mapping[str, Any]
    result: Sizing | str


def sweep(scenario: Scenario, axes: Mapping[str, Sequence[Any]]) -> tuple[SweepRow, ...]:
    """The plan at every combination of some flags' values, the last axis fastest. None = not given."""
    names = tuple(axes)
    return tuple(
        SweepRow(changed, try_size_up(_typed(scenario, **changed)[1]))
        for values in itertools.product(*axes.values())
        if (changed := dict(zip(names, values, strict=True)))
    )
