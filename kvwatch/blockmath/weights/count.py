"""From a config.json and flags to the parameter bytes of each pipeline stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvwatch.blockmath.errors import Refused, Unsupported
from kvwatch.blockmath.flags import Flags
from kvwatch.blockmath.modelconfig import ModelConfig
from kvwatch.blockmath.weights.catalogue import build
from kvwatch.blockmath.weights.parts import Linear, Model, Part, Parts, section
from kvwatch.blockmath.weights.schemes import Scheme, scheme_of
from kvwatch.blockmath.weights.shard import WHOLE, Shard

ITEMSIZE = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2, "int32": 4}
PLAIN_RESIDENTS = "towers and other parts on every stage keep the model's dtype"
UNNAMED_METHOD = "quantization_config names no quant_method: counted as unquantized, as vLLM reads it"


@dataclass(frozen=True, slots=True)
class Weights:
    """Parameter bytes of a model, as vLLM's model classes allocate them before any post-processing.

    Attributes:
        bytes_per_rank: one entry per pipeline stage: bytes on tensor-parallel rank 0 of it.
        parameters: elements of the whole model, each counted once, vocabulary padding included.
        basis: ``exact``, or ``modelled`` where a quantization scheme's layout depends on kernels.
        quantization: name of the scheme, or None.
        mla_absorbed_bytes: per stage, what MLA layers add after loading: a second form of ``kv_b_proj``.
        assumptions: what was assumed, in words.
    """

    bytes_per_rank: tuple[int, ...]
    parameters: int
    basis: str
    quantization: str | None
    mla_absorbed_bytes: tuple[int, ...]
    assumptions: tuple[str, ...]


def stage_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each pipeline stage: even; a remainder goes to the stages before the last, from the back."""
    counts = [layers // stages] * stages
    for i in range(layers % stages):
        counts[-2 - i] += 1
    return tuple(counts)


def weight_bytes(config: Mapping[str, Any], flags: Flags) -> Weights:
    """Parameter bytes per rank.

    Args:
        config: parsed config.json.
        flags: dtype, quantization, hf_overrides and the parallel sizes. ``quantization`` on a model whose
            config.json describes none tells what its weights would take (``fp8``, ``w4a16``, ``awq``, …).

    Raises:
        Unsupported: the architecture or scheme is not known, or a field is missing.
        Refused: vLLM itself would refuse these sizes.
    """
    model_config = _with_defaults(ModelConfig.read(config, flags.hf_overrides))
    scheme = scheme_of(model_config, flags.quantization)
    spread = flags.tp * flags.dp
    shard = Shard(flags.tp, *((1, spread) if flags.enable_expert_parallel else (spread, 1)))
    model = build(model_config, shard)
    if flags.pp > 1 and not model.pipeline:
        raise Refused("no_pipeline", f"{model_config.architecture} cannot be split into pipeline stages")
    itemsize = _itemsize(flags)
    whole = model if shard == WHOLE else build(model_config, WHOLE)
    return Weights(
        bytes_per_rank=_Counter(itemsize, scheme).stages(model, flags.pp),
        parameters=_parameters(whole),
        basis="modelled" if scheme else "exact",
        quantization=scheme.name if scheme else None,
        mla_absorbed_bytes=_absorbed(model, flags.pp, itemsize),
        assumptions=(*_assumptions(model_config, scheme, model), *_left_out(flags)),
    )


def quantized(config: Mapping[str, Any], flags: Flags, scheme: str) -> Weights:
    """What an unquantized model would take under a scheme: ``fp8``, ``w8a8``, ``w4a16``, ``awq``, ``nvfp4`` …

    Raises:
        Unsupported: as ``weight_bytes``, or the model is quantized already.
    """
    weights = weight_bytes(config, flags.with_changes(quantization=scheme))
    if weights.quantization != scheme:
        raise Unsupported("already_quantized", f"the model is quantized with {weights.quantization}")
    return weights


def _with_defaults(config: ModelConfig) -> ModelConfig:
    return replace(
        config,
        root=section(config.root.own, config.root.model_type),
        text=section(config.text.own, config.text.model_type),
    )


def _itemsize(flags: Flags) -> int:
    name = (flags.dtype or "auto").removeprefix("torch.")
    if name == "auto":
        return 2
    if name not in ITEMSIZE:
        raise Unsupported("unknown_dtype", f"--dtype {name} is not known")
    return ITEMSIZE[name]


def _assumptions(config: ModelConfig, scheme: Scheme | None, model: Model) -> tuple[str, ...]:
    if scheme is not None:
        return (*scheme.assumptions, PLAIN_RESIDENTS) if model.resident else scheme.assumptions
    described = config.root.get("quantization_config") or config.text.get("quantization_config")
    return (UNNAMED_METHOD,) if described else ()


def _left_out(flags: Flags) -> tuple[str, ...]:
    """What these flags add to or take from the GPU that is not counted here."""
    draft = ("the speculative decoder's own weights are not counted",) if flags.speculative_config else ()
    offload = ("weights offloaded to the host are counted as if on the GPU",) if flags.cpu_offload_gb else ()
    return draft + offload


@dataclass(frozen=True, slots=True)
class _Counter:
    """Adds up bytes under one dtype and scheme."""

    itemsize: int
    scheme: Scheme | None

    def stages(self, model: Model, stages: int) -> tuple[int, ...]:
        costs = self._layer_costs(model)
        resident = self._plain(model.resident)
        totals, start = [], 0
        for count in stage_layers(len(costs), stages):
            totals.append(resident + sum(costs[start : start + count]))
            start += count
        totals[0] += self._plain(model.opening)
        totals[-1] += self._stored(model.closing, "") + (self._plain(model.tied) if stages > 1 else 0)
        return tuple(totals)

    def _layer_costs(self, model: Model) -> list[int]:
        if self.scheme is not None and self.scheme.per_module:
            return [self._stored(parts, f"{model.layer_prefix}.{i}") for i, parts in enumerate(model.layers)]
        known: dict[int, int] = {}
        for parts in model.layers:
            if id(parts) not in known:
                known[id(parts)] = self._stored(parts, "")
        return [known[id(parts)] for parts in model.layers]

    def _stored(self, parts: Parts, prefix: str) -> int:
        if self.scheme is None:
            return self._plain(parts)
        total = 0
        for part in parts:
            form = self.scheme.format_of(part, prefix) if isinstance(part, Linear) else None
            if form is None or not isinstance(part, Linear):
                total += self._plain((part,))
            else:
                total += form.stored_bytes(part, self.itemsize)
        return total

    def _plain(self, parts: Iterable[Part]) -> int:
        total = 0
        for part in parts:
            elements = part.elements + part.bias if isinstance(part, Linear) else part.elements
            total += elements * (ITEMSIZE[part.dtype] if part.dtype else self.itemsize)
        return total


def _parameters(model: Model) -> int:
    known: dict[int, int] = {}
    total = 0
    for parts in (model.opening, *model.layers, model.closing, model.resident):
        if id(parts) not in known:
            known[id(parts)] = sum(
                part.elements + (part.bias if isinstance(part, Linear) else 0) for part in parts
            )
        total += known[id(parts)]
    return total


def _absorbed(model: Model, stages: int, itemsize: int) -> tuple[int, ...]:
    known = {
        id(parts): sum(part.elements for part in parts if isinstance(part, Linear) and part.absorbed)
        for parts in {id(parts): parts for parts in model.layers}.values()
    }
    totals, start = [], 0
    for count in stage_layers(len(model.layers), stages):
        totals.append(itemsize * sum(known[id(parts)] for parts in model.layers[start : start + count]))
        start += count
    return tuple(totals)
