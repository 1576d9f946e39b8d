"""`kvwatch status` on a terminal: plain text, 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from kvwatch.blockmath.startup import CheckResult, Verdict
from kvwatch.export.cycle import Cycle
from kvwatch.forecast.pending import PendingForecast
from kvwatch.forecast.remedies import Remedy
from kvwatch.forecast.restart import RestartForecast
from kvwatch.headroom import headroom
from kvwatch.node import GpuState, ServerState
from kvwatch.observe.cycle import SourceStatus
from kvwatch.observe.records import VllmRecord
from kvwatch.ownership import Owner
from kvwatch.units import bytes_text, duration_text

COLUMNS = 80
_GAP = "  "
NOTHING_CUT: Mapping[int, int] = MappingProxyType({})
_GPU_HEADINGS = ("GPU", "NAME", "TOTAL", "FREE")
_MOST_NAME = 24
_LEAST_OWNERS = 24
_LEAST_OWNER = 12
CHECK_TEXT = {
    "configuration": "flags refused",
    "derived_length": "length above the model's own",
    "free_memory": "free memory on the card",
    "kv_memory": "memory for any KV block",
    "one_request": "room for one full request",
    "state_slots": "state slots",
    "sampler_warmup": "sampler warm-up",
    "graph_capture": "CUDA graph capture",
}


def table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    right: frozenset[int] = frozenset(),
    cut: Mapping[int, int] = NOTHING_CUT,
) -> str:
    """Columns as wide as their widest cell; columns in `right` are flush right.

    Args:
        cut: columns that give way, the first one first, where a line would be longer than COLUMNS, with the
            width that each keeps.
    """
    lines = [tuple(headings), *[tuple(row) for row in rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headings))]
    for column, least in cut.items():
        beyond = sum(widths) + len(_GAP) * (len(widths) - 1) - COLUMNS
        widths[column] = max(min(widths[column], least), widths[column] - max(0, beyond))
    lines = [tuple(map(shortened, line, widths)) for line in lines]
    return "\n".join(
        _GAP.join(
            cell.rjust(widths[column]) if column in right else cell.ljust(widths[column])
            for column, cell in enumerate(line)
        ).rstrip()
        for line in lines
    )


def shortened(text: str, width: int) -> str:
    """The text, or its beginning and an ellipsis where it is too long."""
    return text if len(text) <= width else text[: width - 1] + "…"


def status_text(cycle: Cycle) -> str:
    """The whole status: GPUs with owners, servers with verdicts, then what to do."""
    snapshot = cycle.snapshot
    parts = []
    if snapshot.gpus:
        parts.append(_gpus(snapshot.gpus))
    if snapshot.servers:
        parts.append(_servers(snapshot.servers, cycle))
    else:
        parts.append("no vLLM server found")
    for server in snapshot.servers:
        lines = list(_explanation(cycle.forecasts.restart[server.name]))
        lines.extend(_plan_lines(cycle, server.name))
        if (pending := cycle.forecasts.pending.get(server.name)) is not None:
            lines.extend(_pending_lines(pending))
        lines.extend(_outlook_lines(cycle, server.name))
        if lines:
            parts.append("\n".join([f"{server.name}:", *(wrapped(line) for line in lines)]))
    down = [source for source in snapshot.sources if not source.up]
    parts.extend(source_down(source) for source in down)
    return "\n\n".join(parts)


def source_down(source: SourceStatus) -> str:
    """Which source gave no answer, and why."""
    detail = source.failure.detail if source.failure else "no answer"
    return wrapped(f"{source.name}: {detail}", indent="")


def wrapped(line: str, *, indent: str = "  ") -> str:
    """One paragraph in 80 columns, its further lines a step deeper; no word is broken."""
    return textwrap.fill(
        line,
        COLUMNS,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _gpus(states: Sequence[GpuState]) -> str:
    cards = [_gpu_cells(state) for state in states]
    used = sum(max(map(len, column)) + len(_GAP) for column in zip(_GPU_HEADINGS, *cards, strict=True))
    rows = []
    for state, cells in zip(states, cards, strict=True):
        first, *further = _owner_lines(state, max(_LEAST_OWNERS, COLUMNS - used))
        rows.append((*cells, first))
        rows.extend(("", "", "", "", line) for line in further)
    return table((*_GPU_HEADINGS, "HELD BY"), rows, right=frozenset({2, 3}))


def _gpu_cells(state: GpuState) -> tuple[str, ...]:
    memory = state.gpu.memory
    return (
        state.gpu.index,
        shortened(state.gpu.name.removeprefix("NVIDIA "), _MOST_NAME),
        bytes_text(memory.total) if memory else "?",
        bytes_text(memory.free) if memory else "?",
    )


def _owner_lines(state: GpuState, width: int) -> list[str]:
    """Owners and what each holds, largest first, in lines of that width at most."""
    lines = [""]
    for (owner, server), held in sorted(state.held().items(), key=lambda item: -item[1]):
        if not held and owner is not Owner.SERVER:
            continue
        size = bytes_text(held)
        share = f"{shortened(server or owner, max(_LEAST_OWNER, width - len(size) - 2))} {size}"
        if not lines[-1]:
            lines[-1] = share
        elif len(lines[-1]) + len(share) + 3 <= width:
            lines[-1] += f", {share}"
        else:
            lines[-1] += ","
            lines.append(share)
    return lines


def _servers(servers: Sequence[ServerState], cycle: Cycle) -> str:
    rows = [_server_row(server, cycle.forecasts.restart[server.name]) for server in servers]
    headings = ("SERVER", "GPU", "USED", "ROOM NOW", "LENGTH", "RESTART", "LONGEST", "MARGIN")
    return table(headings, rows, right=frozenset({2, 3, 4, 6, 7}), cut={0: _LEAST_OWNER, 1: 5})


def _server_row(server: ServerState, restart: RestartForecast) -> tuple[str, ...]:
    pool = restart.situation.pool if restart.situation else None
    engines = server.page.engines if isinstance(server.page, VllmRecord) else ()
    rooms = [headroom(server, engine, pool) for engine in engines]
    usages = [engine.usage for engine in engines if engine.usage is not None]
    free = [room.free_tokens for room in rooms if room.free_tokens is not None]
    verdict = restart.verdict
    margins = (
        []
        if verdict is None
        else [result.margin_bytes for result in verdict.checks if result.margin_bytes is not None]
    )
    return (
        server.name,
        _ranges(server.gpus) or "?",
        f"{max(usages):.0%}" if usages else "?",
        f"{sum(free)} tok" if free else "?",
        str(server.max_model_len or "?"),
        {True: "ok", False: "FAILS", None: "unknown"}[restart.feasible] if server.up else "down",
        str(verdict.longest_length) if verdict and verdict.longest_length is not None else "?",
        bytes_text(min(margins)) if margins else "?",
    )


def _ranges(gpus: Sequence[str]) -> str:
    """Indices with three or more in a row drawn together: ``0-3,6``; MIG instances stay as they are."""
    runs: list[list[str]] = []
    for gpu in gpus:
        if runs and gpu.isdecimal() and runs[-1][-1].isdecimal() and int(gpu) == int(runs[-1][-1]) + 1:
            runs[-1].append(gpu)
        else:
            runs.append([gpu])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(run) for run in runs)


def _explanation(restart: RestartForecast) -> Iterator[str]:
    if restart.unknown is not None:
        yield f"restart unknown ({restart.unknown.reason}): {restart.unknown.detail}"
    verdict = restart.verdict
    if verdict is None or verdict.feasible or verdict.blocking is None:
        return
    yield f"a restart would fail: {_failed_text(verdict.blocking)}"
    yield from _more_of(verdict, verdict.blocking, restart.remedies)
    if not restart.remedies:
        yield "remedy: none by flags alone; more or larger GPUs, or quantized weights"


def _more_of(verdict: Verdict, blocking: CheckResult, remedies: Sequence[Remedy]) -> Iterator[str]:
    """What vLLM would print, which check lacks more than the first that fails, and what would help."""
    if verdict.message:
        yield f"vLLM would say: {verdict.message}"
    if (worst := _worst_behind(verdict.checks, blocking)) is not None:
        yield f"behind that: {_failed_text(worst)}"
    for remedy in remedies:
        yield f"remedy: {remedy.text}"


def _worst_behind(checks: Sequence[CheckResult], blocking: CheckResult) -> CheckResult | None:
    """The check that lacks most, where it is another one: to give the first what it lacks would not do."""
    failed = [result for result in checks if result.passed is False and result.margin_bytes is not None]
    worst = min(failed, key=lambda result: result.margin_bytes or 0, default=blocking)
    return None if worst.check == blocking.check else worst


def _failed_text(blocking: CheckResult) -> str:
    where = f" on GPU {blocking.gpu}" if blocking.gpu is not None else ""
    missing = f": {bytes_text(-blocking.margin_bytes)} missing" if blocking.margin_bytes is not None else ""
    return f"{CHECK_TEXT.get(blocking.check, blocking.check)}{where}{missing}"


def _plan_lines(cycle: Cycle, server: str) -> Iterator[str]:
    for plan in cycle.forecasts.plans[server]:
        if plan.unknown is not None:
            yield f"plan {plan.plan.name}: unknown ({plan.unknown.reason}): {plan.unknown.detail}"
        elif plan.verdict is not None and plan.verdict.feasible:
            yield f"plan {plan.plan.name}: would start"
        elif plan.verdict is not None:
            blocking = plan.verdict.blocking
            reason = CHECK_TEXT.get(blocking.check, blocking.check) if blocking else "?"
            longest = plan.verdict.longest_length
            yield f"plan {plan.plan.name}: would fail: {reason}" + (f"; longest {longest}" if longest else "")


def _outlook_lines(cycle: Cycle, name: str) -> Iterator[str]:
    forecasts, now = cycle.forecasts, cycle.snapshot.time
    outlook = forecasts.outlook[name]
    failing = forecasts.restart[name].feasible is False
    if outlook.margin is not None and outlook.margin.zero_at > now and not failing:
        fall = bytes_text(int(-outlook.margin.slope * 3600))
        yield f"trend: infeasible in {duration_text(outlook.margin.zero_at - now)} ({fall} less per hour)"
    for engine, full_at in outlook.kv_full_at.items():
        if full_at > now:
            yield f"trend: KV cache of engine {engine} full in {duration_text(full_at - now)}"
    wake = forecasts.wake.get(name)
    if wake is not None and wake.margin_bytes is not None:
        verdict = "would wake" if wake.feasible else "would not wake"
        yield f"asleep: {verdict}, margin {bytes_text(wake.margin_bytes)} on GPU {wake.gpu}"
    together = forecasts.together.get(name)
    if together is not None and together.last.feasible is False:
        yield f"would not come back after {', '.join(together.sharing)} on the same card"
    elif together is not None and together.at_once.feasible is False:
        yield f"might not come back at the same moment as {', '.join(together.sharing)} on the same card"
    for advice in forecasts.advice[name]:
        yield f"advice: {advice.text} ({advice.rule})"


def _pending_lines(pending: PendingForecast) -> Iterator[str]:
    for change in pending.changes:
        running, coming = (value or "not given" for value in (change.running, change.coming))
        yield f"pending: {change.setting}: {running} -> {coming}"
    if pending.unknown is not None:
        yield f"next start unknown ({pending.unknown.reason}): {pending.unknown.detail}"
    verdict = pending.verdict
    if verdict is None:
        return
    basis = " (modelled)" if pending.basis == "modelled" else ""
    if verdict.feasible:
        yield f"the next start would succeed with these changes{basis}"
    elif verdict.blocking is not None:
        yield f"the next start would fail{basis}: {_failed_text(verdict.blocking)}"
        yield from _more_of(verdict, verdict.blocking, pending.remedies)
