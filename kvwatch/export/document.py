"""One cycle as JSON: what `status --json` prints and `/api/v1/snapshot` serves."""

from __future__ import annotations

import json
from typing import Any

from kvwatch import __version__
from kvwatch.blockmath.startup import CheckResult, Verdict
from kvwatch.export.cycle import Cycle
from kvwatch.forecast.bundle import Forecasts
from kvwatch.forecast.history import Outlook
from kvwatch.forecast.pending import PendingForecast
from kvwatch.forecast.restart import RestartForecast, Unknown
from kvwatch.forecast.together import TogetherForecast
from kvwatch.headroom import headroom
from kvwatch.node import GpuState, Holder, ServerState
from kvwatch.observe.records import Failure, VllmRecord

SCHEMA = 1
"""Version of the document's shape; fields are added without a change of it, never renamed or removed."""


def as_json(cycle: Cycle, *, indent: int | None = None) -> str:
    """The document as text. Bytes and tokens are whole numbers, times Unix seconds, unknown values null."""
    return encode(document(cycle), indent=indent)


def encode(told: dict[str, Any], *, indent: int | None = None) -> str:
    """A document as JSON."""
    return json.dumps(told, indent=indent, allow_nan=False)


def document(cycle: Cycle) -> dict[str, Any]:
    """The document as plain values."""
    snapshot = cycle.snapshot
    return {
        "schema": SCHEMA,
        "kvwatch": __version__,
        "simulated": cycle.own.simulated,
        "time": snapshot.time,
        "gpus": [_gpu(state) for state in snapshot.gpus],
        "servers": [_server(server, cycle.forecasts) for server in snapshot.servers],
        "sources": [
            {
                "source": source.name,
                "up": source.up,
                "last_success": source.last_success,
                "seconds": source.seconds,
                "failure": _failure(source.failure),
            }
            for source in snapshot.sources
        ],
        "failures": [_failure(failure) for failure in snapshot.failures],
    }


def _failure(failure: Failure | None) -> dict[str, str] | None:
    if failure is None:
        return None
    return {"source": failure.source, "reason": failure.reason, "detail": failure.detail}


def _gpu(state: GpuState) -> dict[str, Any]:
    gpu, memory = state.gpu, state.gpu.memory
    return {
        "gpu": gpu.index,
        "uuid": gpu.uuid,
        "name": gpu.name,
        "mig_profile": gpu.mig_profile,
        "total_bytes": memory.total if memory else None,
        "reserved_bytes": memory.reserved if memory else None,
        "used_bytes": memory.used if memory else None,
        "free_bytes": memory.free if memory else None,
        "held": [
            {"owner": owner, "server": server, "bytes": held}
            for (owner, server), held in state.held().items()
        ],
        "holders": [holder_document(holder) for holder in state.holders],
        "process_visibility": state.visibility,
    }


def holder_document(holder: Holder) -> dict[str, Any]:
    """One process on one card."""
    process = holder.process
    return {
        "pid": holder.pid,
        "process": process.name if process else None,
        "user": process.user if process else None,
        "workload": process.workload if process else None,
        "container": process.container if process else None,
        "started": process.start_time if process else None,
        "owner": holder.ownership.owner,
        "server": holder.ownership.server,
        "former_server": holder.ownership.origin,
        "reason": holder.ownership.reason,
        "bytes": holder.used_bytes,
    }


def _server(server: ServerState, forecasts: Forecasts) -> dict[str, Any]:
    page = server.page if isinstance(server.page, VllmRecord) else None
    restart = forecasts.restart[server.name]
    pool = restart.situation.pool if restart.situation else None
    return {
        "server": server.name,
        "model": server.model,
        "version": page.version if page else None,
        "endpoint": server.launch.base_url,
        "up": server.up,
        "gpus": list(server.gpus),
        "layout": pool.layout if pool else None,
        "max_model_len": server.max_model_len,
        "engines": [
            {
                "engine": engine.engine,
                "blocks": engine.num_blocks,
                "block_size": engine.block_size,
                "usage": engine.usage,
                "running": engine.running,
                "waiting": engine.waiting,
                "waiting_by_reason": dict(engine.waiting_by_reason),
                "preemptions": engine.preemptions,
                **(_fields(headroom(server, engine, pool)) or {}),
            }
            for engine in (page.engines if page else ())
        ],
        "restart": _restart(restart),
        "plans": [
            {
                "plan": plan.plan.name,
                "changes": plan.plan.flags.given(),
                "basis": plan.basis,
                "assumptions": list(plan.assumptions),
                **_verdict(plan.verdict, plan.unknown),
            }
            for plan in forecasts.plans[server.name]
        ],
        "pending": _pending(forecasts.pending.get(server.name)),
        "trend": _trend(forecasts.outlook[server.name]),
        "wake": _fields(forecasts.wake.get(server.name)),
        "together": _together(forecasts.together.get(server.name)),
        "request_tokens": _fields(forecasts.lengths.get(server.name)),
        "advice": [_fields(advice) for advice in forecasts.advice[server.name]],
    }


def _restart(restart: RestartForecast) -> dict[str, Any]:
    found = restart.situation
    return {
        **_verdict(restart.verdict, restart.unknown),
        "basis": found.basis if found else None,
        "assumptions": list(found.assumptions) if found else [],
        "flags": found.flags.given() if found else {},
        "gpus": [
            {
                "gpu": site.gpu,
                "total_bytes": site.total,
                "free_next_bytes": site.free_next,
                "start_cost_bytes": found.start_cost(found.flags) if found else None,
                "budget_bytes": budget,
                "own_bytes": site.own,
                "non_kv_bytes": site.non_kv,
                **_kv_memory(restart.verdict, site.gpu),
            }
            for site, budget in (found.budgets() if found else ())
        ],
        "remedies": [_fields(remedy) for remedy in restart.remedies],
    }


def _kv_memory(verdict: Verdict | None, gpu: str) -> dict[str, int | None]:
    """What the checks of the KV cache compare on one GPU: bytes for it, and bytes that one request needs."""
    margins = (
        {}
        if verdict is None
        else {result.check: result.margin_bytes for result in verdict.checks if result.gpu == gpu}
    )
    above_nothing, spare = margins.get("kv_memory"), margins.get("one_request")
    # The first check asks for more than nothing: one byte is its least.
    kv = None if above_nothing is None else above_nothing + 1
    return {"kv_bytes": kv, "need_bytes": None if kv is None or spare is None else kv - spare}


def _trend(outlook: Outlook) -> dict[str, Any]:
    return {
        "margin_slope_bytes_per_second": outlook.margin.slope if outlook.margin else None,
        "infeasible_at": outlook.margin.zero_at if outlook.margin else None,
        "kv_cache_full_at": outlook.kv_full_at,
        "unstable_gpus": list(outlook.unstable_gpus),
        "gpu": outlook.margins_gpu,
        "margins": [{"time": time, "margin_bytes": int(margin)} for time, margin in outlook.margins],
    }


def _together(forecast: TogetherForecast | None) -> dict[str, Any] | None:
    if forecast is None:
        return None
    return {
        "sharing": list(forecast.sharing),
        "first": _verdict(forecast.first, None),
        "last": _verdict(forecast.last, None),
        "at_once": _verdict(forecast.at_once, None),
        "overcommitted": dict(forecast.overcommitted),
    }


def _pending(forecast: PendingForecast | None) -> dict[str, Any] | None:
    if forecast is None:
        return None
    return {
        "source": forecast.source or None,
        "files": list(forecast.files),
        "changes": [
            {"setting": change.setting, "running": change.running, "next": change.coming}
            for change in forecast.changes
        ],
        **_verdict(forecast.verdict, forecast.unknown),
        "basis": forecast.basis,
        "assumptions": list(forecast.assumptions),
        "remedies": [_fields(remedy) for remedy in forecast.remedies],
    }


def _fields(record: Any) -> dict[str, Any] | None:
    """A flat record as a mapping, tuples as lists; None for None."""
    if record is None:
        return None
    values = {name: getattr(record, name) for name in type(record).__dataclass_fields__}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _verdict(verdict: Verdict | None, unknown: Unknown | None) -> dict[str, Any]:
    return {
        "feasible": verdict.feasible if verdict else None,
        "unknown": {"reason": unknown.reason, "detail": unknown.detail} if unknown else None,
        "blocking": _check(verdict.blocking) if verdict and verdict.blocking else None,
        "message": verdict.message if verdict and not verdict.feasible else None,
        "checks": [_check(result) for result in verdict.checks] if verdict else [],
        "max_model_len": verdict.longest_length if verdict else None,
    }


def _check(result: CheckResult) -> dict[str, Any]:
    return {
        "check": result.check,
        "gpu": result.gpu,
        "passed": result.passed,
        "margin_bytes": result.margin_bytes,
    }
