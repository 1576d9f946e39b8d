"""One cycle as JSON: what `status --json` prints and `/api/v1/snapshot` serves."""

from __future__ import annotations

import json
from typing import Any

from kvwatch import __version__
from kvwatch.blockmath.startup import CheckResult, Verdict
from kvwatch.export.cycle import Cycle
from kvwatch.forecast.pending import PendingForecast
from kvwatch.forecast.plans import PlanForecast
from kvwatch.forecast.restart import RestartForecast, Unknown
from kvwatch.headroom import headroom
from kvwatch.node import GpuState, Holder, ServerState
from kvwatch.observe.records import Failure, VllmRecord

SCHEMA = 1
"""Version of the document's shape; fields are added without a change of it, never renamed or removed."""


def as_json(cycle: Cycle, *, indent: int | None = None) -> str:
    """The document as text. Bytes and tokens are whole numbers, times Unix seconds, unknown values null."""
    return json.dumps(document(cycle), indent=indent, allow_nan=False)


def document(cycle: Cycle) -> dict[str, Any]:
    """The document as plain values."""
    snapshot = cycle.snapshot
    return {
        "schema": SCHEMA,
        "kvwatch": __version__,
        "simulated": cycle.own.simulated,
        "time": snapshot.time,
        "gpus": [_gpu(state) for state in snapshot.gpus],
        "servers": [
            {
                **_server(server, cycle.forecasts.restart[server.name], cycle.forecasts.plans[server.name]),
                "pending": _pending(cycle.forecasts.pending.get(server.name)),
            }
            for server in snapshot.servers
        ],
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
        "holders": [_holder(holder) for holder in state.holders],
        "process_visibility": state.visibility,
    }


def _holder(holder: Holder) -> dict[str, Any]:
    process = holder.process
    return {
        "pid": holder.pid,
        "process": process.name if process else None,
        "user": process.user if process else None,
        "workload": process.workload if process else None,
        "started": process.start_time if process else None,
        "owner": holder.ownership.owner,
        "server": holder.ownership.server,
        "bytes": holder.used_bytes,
    }


def _server(server: ServerState, restart: RestartForecast, plans: tuple[PlanForecast, ...]) -> dict[str, Any]:
    page = server.page if isinstance(server.page, VllmRecord) else None
    found = restart.situation
    pool = found.pool if found else None
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
                **_headroom(headroom(server, engine, pool)),
            }
            for engine in (page.engines if page else ())
        ],
        "restart": {
            **_verdict(restart.verdict, restart.unknown),
            "basis": found.basis if found else None,
            "assumptions": list(found.assumptions) if found else [],
            "flags": found.flags.given() if found else {},
            "non_kv_bytes": {site.gpu: site.non_kv for site in found.sites} if found else {},
            "remedies": [
                {
                    "action": remedy.action,
                    "flags": remedy.flags,
                    "text": remedy.text,
                    "pids": list(remedy.pids),
                }
                for remedy in restart.remedies
            ],
        },
        "plans": [
            {
                "plan": plan.plan.name,
                "changes": plan.plan.flags.given(),
                **_verdict(plan.verdict, plan.unknown),
            }
            for plan in plans
        ],
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
    }


def _headroom(room: Any) -> dict[str, Any]:
    return {name: getattr(room, name) for name in type(room).__dataclass_fields__}


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
