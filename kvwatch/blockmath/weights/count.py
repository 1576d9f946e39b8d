"""From a config.json and flags to the parameter bytes of each pipeline stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvwatch.blockmath.errors import Refused, Unsupported
from kvwatch.blockmath.flags import Flags
from kvwatch.blockmath.modelconfig import ModelConfig
from kvwatch.blockmath.weights.catalogue import build
from kvwatch.blockmath.weights.parts import Linear, Model, Part
from kvwatch.blockmath.weights.shard import Shard

ITEMSIZE = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2, "float64": 8}


@dataclass(frozen=True, slots=True)
class Weights:
    """Parameter bytes of a model, as vLLM's model classes allocate them before any post-processing.

    Attributes:
        bytes_per_rank: one entry per pipeline stage: bytes on tensor-parallel rank 0 of it.
        parameters: elements of the whole model, padding of the vocabulary included, counted once.
        basis: ``exact``, or ``modelled`` where a quantization scheme's layout depends on kernels.
        quantization: name of the scheme, or None.
        mla_absorbed_bytes: bytes per stage that MLA layers add after loading, as the largest stage has them.
        assumptions: what was assumed, in words.
    """

    bytes_per_rank: tuple[int, ...]
    parameters: int
    basis: str
    quantization: str | None
    mla_absorbed_bytes: int
    assumptions: tuple[str, ...]


def stage_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each pipeline stage: even, the remainder on the stages before the last, from the back."""
    counts = [layers // stages] * stages
    for i in range(layers % stages):
        counts[-2 - i] += 1
    return tuple(counts)


def weight_bytes(config: Mapping[str, Any], flags: Flags) -> Weights:
    """Parameter bytes per rank.

    Args:
        config: parsed config.json.
        flags: dtype, quantization and the parallel sizes count.

    Raises:
        Unsupported: the architecture or scheme is not known.
        Refused: vLLM itself would refuse these sizes.
    """
    model_config = ModelConfig.read(config, flags.hf_overrides)
    itemsize = _itemsize(flags)
    spread = flags.tp * flags.dp
    shard = Shard(flags.tp, *((1, spread) if flags.enable_expert_parallel else (spread, 1)))
    model = build(model_config, shard)
    if flags.pp > 1 and not model.pipeline:
        raise Refused("no_pipeline", f"{model_config.architecture} cannot be split into pipeline stages")
    return Weights(
        bytes_per_rank=_stages(model, flags.pp, itemsize),
        parameters=0,
        basis="exact",
        quantization=None,
        mla_absorbed_bytes=0,
        assumptions=(),
    )


def _itemsize(flags: Flags) -> int:
    name = (flags.dtype or "auto").removeprefix("torch.")
    if name == "auto":
        return 2
    if name not in ITEMSIZE:
        raise Unsupported("unknown_dtype", f"--dtype {name} is not known")
    return ITEMSIZE[name]


def _stages(model: Model, stages: int, itemsize: int) -> tuple[int, ...]:
    cost: dict[int, int] = {}
    for parts in model.layers:
        if id(parts) not in cost:
            cost[id(parts)] = _bytes(parts, itemsize)
    resident = _bytes(model.resident, itemsize)
    totals = []
    start = 0
    for count in stage_layers(len(model.layers), stages):
        totals.append(resident + sum(cost[id(parts)] for parts in model.layers[start : start + count]))
        start += count
    totals[0] += _bytes(model.opening, itemsize)
    totals[-1] += _bytes(model.closing, itemsize)
    if stages > 1:
        totals[-1] += _bytes(model.tied, itemsize)
    return tuple(totals)


def _bytes(parts: Iterable[Part], itemsize: int) -> int:
    total = 0
    for part in parts:
        elements = part.elements + part.bias if isinstance(part, Linear) else part.elements
        total += elements * (ITEMSIZE[part.dtype] if part.dtype else itemsize)
    return total
