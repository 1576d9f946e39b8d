"""What one change of a plan would buy, which cards are enough, and tables over several settings."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kvwatch.blockmath.gpus import Gpu
from kvwatch.forecast.sizing import Scenario, Sizing, try_size_up

TENSOR_PARALLEL_SIZES: Final = (1, 2, 4, 8)
HIGHER_UTILIZATION: Final = 0.95
FEWER_REQUESTS: Final = 256

FOUR_BIT: Final[Mapping[str, Any]] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 128,
    "zero_point": True,
    "version": "gemm",
}
"""What a 4-bit checkpoint's config.json says; such weights cannot be made by a flag."""

QUANTIZED_CHECKPOINTS: Final[Mapping[str, Mapping[str, Any]]] = {"awq": FOUR_BIT}
"""Values of ``quantization`` in a table that stand for another checkpoint of the same model."""


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
        yield "a 4-bit checkpoint (AWQ)", _quantized(scenario, FOUR_BIT)
    if not measured and scenario.weight_bytes is None:
        following = _next_parallel(scenario)
        if following is not None:
            yield _typed(scenario, tensor_parallel_size=following)


def _typed(scenario: Scenario, **flags: Any) -> tuple[str, Scenario]:
    changed = replace(scenario, flags=scenario.flags.with_changes(**flags))
    return " ".join(flag_text(name, value) for name, value in flags.items()), changed


def flag_text(name: str, value: object) -> str:
    """A flag as it is typed."""
    typed = f"--{name.replace('_', '-')}"
    return typed if value is True else f"{typed} {value}"


def _quantized(scenario: Scenario, quantization: Mapping[str, Any]) -> Scenario:
    config = {**scenario.config, "quantization_config": dict(quantization)}
    return replace(scenario, config=config, flags=scenario.flags.with_changes(quantization=None))


def _shorter(sizing: Sizing) -> int:
    """The length to type where the present one does not fit, else half of it."""
    present = sizing.pool.settings.max_model_len
    if sizing.pool.settings.auto_length:
        return 0
    return sizing.safe_length if sizing.safe_length < present else present // 2


def _next_parallel(scenario: Scenario) -> int | None:
    """The next tensor-parallel size that divides the model."""
    for size in TENSOR_PARALLEL_SIZES:
        if size > scenario.flags.tp:
            changed = replace(scenario, flags=scenario.flags.with_changes(tensor_parallel_size=size))
            if isinstance(try_size_up(changed), Sizing):
                return size
    return None


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
        SweepRow(dict(zip(names, values, strict=True)), try_size_up(_at(scenario, names, values)))
        for values in itertools.product(*axes.values())
    )


def _at(scenario: Scenario, names: Sequence[str], values: Sequence[Any]) -> Scenario:
    flags = dict(zip(names, values, strict=True))
    checkpoint = QUANTIZED_CHECKPOINTS.get(str(flags.get("quantization")))
    if checkpoint is not None and not scenario.config.get("quantization_config"):
        del flags["quantization"]
        scenario = _quantized(scenario, checkpoint)
    return replace(scenario, flags=scenario.flags.with_changes(**flags))
