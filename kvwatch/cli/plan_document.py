"""The answers of `kvwatch plan` as JSON documents. All sizes in bytes, all lengths in tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvwatch.blockmath.gpus import Gpu
from kvwatch.blockmath.weights import Weights
from kvwatch.forecast.roofline import DecodeEstimate
from kvwatch.forecast.sizing import Sizing, StageMemory
from kvwatch.forecast.whatif import Change, Fit, SweepRow


@dataclass(frozen=True, slots=True)
class Answer:
    """Everything that is said about one plan.

    Attributes:
        model: its name for people.
        gpu: the card; None where only its memory was given.
        count: cards that are there.
        sizing: the plan.
        remedies: what to type so that it starts, where it does not.
        changes: what each single change would buy.
        decode: the decoding estimate; empty where there is none.
    """

    model: str
    gpu: Gpu | None
    count: int
    sizing: Sizing
    remedies: tuple[str, ...]
    changes: tuple[Change, ...]
    decode: tuple[DecodeEstimate, ...]


def as_json(answer: Answer) -> dict[str, Any]:
    """One plan."""
    sizing = answer.sizing
    scenario = sizing.scenario
    return {
        "model": answer.model,
        "gpu": _gpu(answer.gpu, scenario.device.total_bytes),
        "count": answer.count,
        "world_size": sizing.world_size,
        "vllm_version": scenario.release.text,
        "flags": scenario.flags.given(),
        **result_json(sizing),
        "assumptions": list(sizing.assumptions),
        "remedies": list(answer.remedies),
        "changes": [{"change": change.text, **_outcome(change.result)} for change in answer.changes],
        "decode_estimate": [
            {
                "requests": each.batch,
                "context": each.context,
                "tokens_per_second": round(each.tokens_per_second, 1),
                "tokens_per_second_per_request": round(each.per_request, 1),
                "fits": each.fits,
            }
            for each in answer.decode
        ],
    }


def _gpu(gpu: Gpu | None, total: int) -> dict[str, Any]:
    if gpu is None:
        return {"name": None, "total_bytes": total, "total_source": "given"}
    return {
        "name": gpu.name,
        "label": gpu.label,
        "total_bytes": total,
        "total_source": gpu.total_source if total == gpu.total_bytes else "given",
        "bandwidth_gb_s": gpu.bandwidth_gb_s,
        "bandwidth_source": gpu.bandwidth_source,
    }


def result_json(sizing: Sizing) -> dict[str, Any]:
    """The numbers and the verdict of one plan."""
    pool, verdict = sizing.pool, sizing.verdict
    settings = pool.settings
    blocking = verdict.blocking
    return {
        "feasible": verdict.feasible,
        "blocking_check": blocking.check if blocking else None,
        "failure_kind": verdict.failure_kind,
        "message": verdict.message,
        "unknown_reason": verdict.unknown_reason,
        "memory_per_gpu": [_stage(stage) for stage in sizing.stages],
        "weights_basis": sizing.weights.basis if sizing.weights else "given",
        "layout": pool.layout,
        "layout_basis": pool.basis,
        "dtype": settings.dtype,
        "cache_dtype": settings.cache_dtype,
        "block_size": settings.block_size,
        "bytes_per_block": list(pool.bytes_per_block),
        "kv_bytes_per_token": pool.kv_bytes_per_token,
        "max_model_len": sizing.length,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "max_num_seqs": settings.max_num_seqs,
        "bytes_per_request": list(pool.need_bytes(sizing.length)) if sizing.length else None,
        "blocks_per_request": list(pool.blocks_per_request(sizing.length)) if sizing.length else None,
        "num_blocks": sizing.num_blocks,
        "kv_cache_size_tokens": sizing.capacity_tokens,
        "max_concurrency": sizing.max_concurrency,
        "longest_length": sizing.longest_length,
        "safe_length": sizing.safe_length,
    }


def _stage(stage: StageMemory) -> dict[str, Any]:
    beside = stage.allowance
    return {
        "budget_bytes": stage.budget,
        "weight_bytes": stage.weights,
        "rotary_bytes": beside.rotary if beside else None,
        "activation_bytes": beside.activation if beside else None,
        "non_torch_bytes": beside.non_torch if beside else None,
        "cuda_graph_bytes": beside.graphs if beside else None,
        "cuda_graphs_in_budget": beside.graphs_in_budget if beside else None,
        "non_kv_bytes": stage.non_kv,
        "kv_bytes": stage.available,
        "uncertainty_bytes": stage.uncertainty,
    }


def _outcome(result: Sizing | str) -> dict[str, Any]:
    return {"reason": result} if isinstance(result, str) else result_json(result)


def sweep_json(rows: Sequence[SweepRow]) -> list[dict[str, Any]]:
    """A table."""
    return [{"flags": dict(row.values), **_outcome(row.result)} for row in rows]


def fit_json(found: Sequence[Fit]) -> list[dict[str, Any]]:
    """The fewest cards of each kind."""
    return [
        {
            "gpu": fit.gpu.name,
            "label": fit.gpu.label,
            "count": fit.sizing.world_size if fit.sizing else None,
            **(result_json(fit.sizing) if fit.sizing else {"reason": fit.reason}),
        }
        for fit in found
    ]


def weights_json(weights: Weights) -> dict[str, Any]:
    """Only the weights."""
    return {
        "weight_bytes": list(weights.bytes_per_rank),
        "parameters": weights.parameters,
        "basis": weights.basis,
        "quantization": weights.quantization,
        "mla_absorbed_bytes": list(weights.mla_absorbed_bytes),
        "assumptions": list(weights.assumptions),
    }
