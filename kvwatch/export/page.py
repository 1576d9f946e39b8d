"""The Prometheus page of one cycle."""

from __future__ import annotations

import sys

from kvwatch import __version__
from kvwatch.blockmath.startup import CHECKS
from kvwatch.export.catalogue import FAMILIES
from kvwatch.export.cycle import Cycle, SelfState
from kvwatch.export.textformat import FamilyWriter, written
from kvwatch.forecast.bundle import Forecasts
from kvwatch.forecast.pending import PendingForecast
from kvwatch.forecast.plans import PlanForecast
from kvwatch.forecast.restart import RestartForecast
from kvwatch.forecast.situation import CONFIGURATION
from kvwatch.headroom import Headroom, headroom
from kvwatch.node import GpuState, Holder, NodeSnapshot, ServerState
from kvwatch.observe.records import Engine, VllmRecord
from kvwatch.ownership import Owner

ALL_CHECKS = (CONFIGURATION, *CHECKS)
LISTED = (Owner.ORPHAN, Owner.FOREIGN, Owner.NEIGHBOUR)
"""Classes whose processes are published one by one."""


_WRITERS = {family.name: FamilyWriter(family) for family in FAMILIES}


class Page:
    """Samples by family, in the catalogue's order. Unknown families or labels are a programming error."""

    def __init__(self) -> None:
        self._lines: dict[str, list[str]] = {name: [] for name in _WRITERS}

    def add(self, name: str, value: float | None, /, **labels: str) -> None:
        """One sample; a value of None adds nothing.

        Raises:
            KeyError: the family is not in the catalogue, or these are not its labels.
        """
        if value is not None:
            self._lines[name].append(_WRITERS[name].line(value, labels))

    def text(self) -> bytes:
        """Prometheus text format 0.0.4."""
        return written((_WRITERS[name].text_head, lines) for name, lines in self._lines.items() if lines)

    def openmetrics(self) -> bytes:
        """OpenMetrics 1.0.0."""
        parts = ((_WRITERS[name].openmetrics_head, lines) for name, lines in self._lines.items() if lines)
        return written(parts) + b"# EOF\n"


def build_page(cycle: Cycle, *, top: int) -> Page:
    """Everything that one cycle has to say; `top` holders per GPU are published one by one."""
    page = Page()
    for state in cycle.snapshot.gpus:
        _add_gpu(page, state)
        _add_holders(page, state, top)
    for server in cycle.snapshot.servers:
        restart = cycle.forecasts.restart[server.name]
        _add_server(page, server, restart)
        _add_restart(page, restart)
        for plan in cycle.forecasts.plans[server.name]:
            _add_plan(page, plan)
        if (pending := cycle.forecasts.pending.get(server.name)) is not None:
            _add_pending(page, pending)
        _add_outlook(page, server.name, cycle.forecasts)
    _add_self(page, cycle.snapshot, cycle.own)
    return page


def _add_gpu(page: Page, state: GpuState) -> None:
    gpu = state.gpu
    ids = {"gpu": gpu.index, "uuid": gpu.uuid}
    # A card that has fallen off the bus does not tell what it is.
    page.add(
        "kvwatch_gpu_info",
        1 if gpu.uuid else None,
        **ids,
        name=gpu.name,
        pci_bus_id=gpu.pci_bus_id,
        mig_profile=gpu.mig_profile or "",
    )
    page.add("kvwatch_process_visibility", state.visibility, gpu=gpu.index)
    if gpu.memory is not None:
        page.add("kvwatch_gpu_memory_total_bytes", gpu.memory.total, **ids)
        page.add("kvwatch_gpu_memory_reserved_bytes", gpu.memory.reserved, **ids)
        page.add("kvwatch_gpu_memory_used_bytes", gpu.memory.used, **ids)
        page.add("kvwatch_gpu_memory_free_bytes", gpu.memory.free, **ids)
    for (owner, server), held in state.held().items():
        page.add("kvwatch_gpu_memory_held_bytes", held, **ids, owner=owner, server=server)


def _add_holders(page: Page, state: GpuState, top: int) -> None:
    listed = [holder for holder in state.holders if holder.ownership.owner in LISTED and holder.process]
    for holder in listed[:top]:
        _add_holder(page, state, holder)
    folded: dict[Owner, int | None] = {}
    for holder in listed[top:]:
        owner = holder.ownership.owner
        held = folded.get(owner, 0)
        folded[owner] = None if held is None or holder.used_bytes is None else held + holder.used_bytes
    for owner, held in folded.items():
        page.add(
            "kvwatch_holder_memory_bytes",
            held,
            gpu=state.gpu.index,
            uuid=state.gpu.uuid,
            pid="",
            process="",
            owner=owner,
            user="",
            workload="",
        )


def _add_holder(page: Page, state: GpuState, holder: Holder) -> None:
    process = holder.process
    if process is None:
        return
    page.add(
        "kvwatch_holder_memory_bytes",
        holder.used_bytes,
        gpu=state.gpu.index,
        uuid=state.gpu.uuid,
        pid=str(holder.pid),
        process=process.name,
        owner=holder.ownership.owner,
        user=process.user or "",
        workload=process.workload,
    )
    page.add(
        "kvwatch_holder_start_timestamp_seconds",
        process.start_time,
        gpu=state.gpu.index,
        pid=str(holder.pid),
    )


def _add_server(page: Page, server: ServerState, forecast: RestartForecast) -> None:
    found = forecast.situation
    page.add(
        "kvwatch_server_info",
        1,
        server=server.name,
        model=server.model,
        version=server.page.version or "" if isinstance(server.page, VllmRecord) else "",
        endpoint=server.launch.base_url or "",
        layout=found.pool.layout if found else "",
        basis=found.basis if found else "",
    )
    page.add("kvwatch_server_up", int(server.up), server=server.name)
    page.add("kvwatch_max_model_len_tokens", server.max_model_len, server=server.name)
    if isinstance(server.page, VllmRecord):
        for engine in server.page.engines:
            _add_engine(page, server, engine, headroom(server, engine, found.pool if found else None))
    for site in found.sites if found else ():
        page.add("kvwatch_server_non_kv_bytes", site.non_kv, server=server.name, gpu=site.gpu)


def _add_engine(page: Page, server: ServerState, engine: Engine, room: Headroom) -> None:
    ids = {"server": server.name, "engine": engine.engine}
    page.add("kvwatch_kv_cache_blocks", engine.num_blocks, **ids)
    page.add("kvwatch_kv_cache_block_size_tokens", engine.block_size, **ids)
    page.add("kvwatch_kv_cache_bytes", room.pool_bytes, **ids)
    page.add("kvwatch_kv_cache_capacity_tokens", room.capacity_tokens, **ids)
    page.add("kvwatch_kv_cache_usage_ratio", engine.usage, **ids)
    page.add("kvwatch_kv_headroom_tokens", room.free_tokens, **ids)
    page.add("kvwatch_kv_headroom_requests", room.free_requests, **ids)
    page.add("kvwatch_kv_cache_max_concurrency", room.max_concurrency, **ids)
    page.add("kvwatch_requests_waiting", engine.waiting, **ids)
    for reason, waiting in engine.waiting_by_reason.items():
        page.add("kvwatch_requests_waiting_by_reason", waiting, **ids, reason=reason)
    page.add("kvwatch_preemptions_total", engine.preemptions, **ids)


def _add_restart(page: Page, forecast: RestartForecast) -> None:
    name = forecast.server
    if forecast.unknown is not None:
        page.add(
            "kvwatch_forecast_unknown", 1, server=name, forecast="restart", reason=forecast.unknown.reason
        )
    verdict = forecast.verdict
    if verdict is None:
        return
    page.add("kvwatch_restart_feasible", int(bool(verdict.feasible)), server=name)
    blocking = verdict.blocking.check if verdict.blocking else None
    for check in ALL_CHECKS:
        page.add("kvwatch_restart_blocked", int(check == blocking), server=name, check=check)
    for result in verdict.checks:
        if result.gpu is not None:
            page.add(
                "kvwatch_restart_margin_bytes",
                result.margin_bytes,
                server=name,
                gpu=result.gpu,
                check=result.check,
            )
    page.add("kvwatch_restart_max_model_len_tokens", verdict.longest_length, server=name)


def _add_plan(page: Page, forecast: PlanForecast) -> None:
    ids = {"server": forecast.server, "plan": forecast.plan.name}
    if forecast.unknown is not None:
        page.add(
            "kvwatch_forecast_unknown",
            1,
            server=forecast.server,
            forecast=f"plan:{forecast.plan.name}",
            reason=forecast.unknown.reason,
        )
    verdict = forecast.verdict
    if verdict is None:
        return
    page.add("kvwatch_plan_feasible", int(bool(verdict.feasible)), **ids)
    blocking = verdict.blocking.check if verdict.blocking else None
    for check in ALL_CHECKS:
        page.add("kvwatch_plan_blocked", int(check == blocking), **ids, check=check)
    margins: dict[str, int] = {}
    for result in verdict.checks:
        if result.margin_bytes is not None:
            margins[result.check] = min(result.margin_bytes, margins.get(result.check, result.margin_bytes))
    for check, margin in margins.items():
        page.add("kvwatch_plan_margin_bytes", margin, **ids, check=check)
    page.add("kvwatch_plan_max_model_len_tokens", verdict.longest_length, **ids)


def _add_pending(page: Page, forecast: PendingForecast) -> None:
    name = forecast.server
    for change in forecast.changes:
        page.add("kvwatch_pending_change", 1, server=name, setting=change.setting)
    if forecast.unknown is not None:
        reason = forecast.unknown.reason
        page.add("kvwatch_forecast_unknown", 1, server=name, forecast="pending", reason=reason)
    if forecast.verdict is None:
        return
    page.add("kvwatch_pending_feasible", int(bool(forecast.feasible)), server=name)
    blocking = forecast.verdict.blocking.check if forecast.verdict.blocking else None
    for check in ALL_CHECKS:
        page.add("kvwatch_pending_blocked", int(check == blocking), server=name, check=check)


def _add_outlook(page: Page, name: str, forecasts: Forecasts) -> None:
    """Trend, wake-up, sharing, request lengths and advice of one server."""
    outlook = forecasts.outlook[name]
    if outlook.margin is not None:
        page.add("kvwatch_restart_margin_slope_bytes_per_second", outlook.margin.slope, server=name)
        page.add("kvwatch_restart_infeasible_timestamp_seconds", outlook.margin.zero_at, server=name)
    for engine, full_at in outlook.kv_full_at.items():
        page.add("kvwatch_kv_cache_full_timestamp_seconds", full_at, server=name, engine=engine)
    wake = forecasts.wake.get(name)
    if wake is not None:
        page.add("kvwatch_wake_feasible", None if wake.feasible is None else int(wake.feasible), server=name)
        page.add("kvwatch_wake_margin_bytes", wake.margin_bytes, server=name)
    together = forecasts.together.get(name)
    if together is not None and together.last.feasible is not None:
        page.add("kvwatch_restart_together_feasible", int(together.last.feasible), server=name)
    lengths = forecasts.lengths.get(name)
    if lengths is not None:
        for quantile, tokens in (("0.5", lengths.p50), ("0.99", lengths.p99), ("1", lengths.longest)):
            page.add("kvwatch_request_tokens", tokens, server=name, quantile=quantile)
        page.add("kvwatch_requests_near_limit_ratio", lengths.near_limit, server=name)
    for advice in forecasts.advice[name]:
        page.add("kvwatch_advice", 1, server=name, rule=advice.rule)


def _add_self(page: Page, snapshot: NodeSnapshot, own: SelfState) -> None:
    page.add("kvwatch_up", 1)
    page.add(
        "kvwatch_build_info",
        1,
        version=__version__,
        python=sys.version.partition(" ")[0],
        simulated=str(own.simulated).lower(),
    )
    for source in snapshot.sources:
        page.add("kvwatch_source_up", int(source.up), source=source.name)
        page.add("kvwatch_source_last_success_timestamp_seconds", source.last_success, source=source.name)
        page.add("kvwatch_source_duration_seconds", source.seconds, source=source.name)
    page.add("kvwatch_cycle_duration_seconds", own.cycle_seconds)
    page.add("kvwatch_cycle_timestamp_seconds", snapshot.time)
    page.add("kvwatch_cycles_total", own.cycles)
    for (source_name, reason), count in sorted(own.errors.items()):
        page.add("kvwatch_errors_total", count, source=source_name, reason=reason)
    page.add("kvwatch_config_last_reload_successful", int(own.reload_successful))
    page.add("kvwatch_config_last_reload_success_timestamp_seconds", own.reload_time)
