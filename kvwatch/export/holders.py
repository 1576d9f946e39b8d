"""What `kvwatch holders` prints: who holds the memory, what a restart would gain, and how to stop it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from kvwatch import __version__
from kvwatch.blockmath.startup import Verdict
from kvwatch.export.cycle import Cycle
from kvwatch.export.document import holder_document
from kvwatch.export.text import COLUMNS, source_down, table, wrapped
from kvwatch.forecast.gain import Gain, gains
from kvwatch.node import GpuState, Holder
from kvwatch.observe.records import Process
from kvwatch.ownership import Owner
from kvwatch.units import bytes_text

SCHEMA = 1
"""Version of the document's shape; fields are added without a change of it, never renamed or removed."""

UNWANTED = (Owner.ORPHAN, Owner.FOREIGN)
"""Classes for which a command is printed."""
EXPECTED = (Owner.NEIGHBOUR, Owner.ALLOWED)
"""Classes that are spoken of only where they stand in the way of a restart."""

_AGES = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_PROGRAM_WIDTH = 18
_NAME_WIDTH = 12
_RUNTIMES = (("libpod", "podman stop"), ("kubepods", "crictl stop"), ("cri-", "crictl stop"))
_SLURM = re.compile(r"slurm job (\d+)")
_SHORT_ID = 12


# --- what to type ---------------------------------------------------------------------------------------


def stop_command(holder: Holder) -> str | None:
    """The command that ends a process nobody wants; None for other classes.

    An orphan is ended by itself: its container or unit may be gone, or have a live server in it.
    """
    process = holder.process
    if process is None or holder.ownership.owner not in UNWANTED:
        return None
    whole = _workload_command(process) if holder.ownership.owner is Owner.FOREIGN else None
    return whole or f"kill {holder.pid}"


def _workload_command(process: Process) -> str | None:
    """Ends the job, container or service that would otherwise start the process again."""
    unit, path = process.unit or "", process.cgroup or ""
    if job := _SLURM.fullmatch(unit):
        return f"scancel {job[1]}"
    if process.container:
        runtime = next((stop for mark, stop in _RUNTIMES if mark in path), "docker stop")
        return f"{runtime} {process.container[:_SHORT_ID]}"
    if unit.endswith(".service") and "/user@" not in path:
        return f"systemctl stop {unit}"
    return None


# --- text -----------------------------------------------------------------------------------------------


def holders_text(cycle: Cycle) -> str:
    """A table of all holders, then what to know of those that nobody expects; 80 columns."""
    parts = [_table(cycle), *_explanations(cycle), *_blind_spots(cycle.snapshot.gpus)]
    parts.extend(
        source_down(source)
        for source in cycle.snapshot.sources
        if not source.up and source.name in ("nvml", "processes")
    )
    return "\n\n".join(part for part in parts if part)


def _table(cycle: Cycle) -> str:
    now = cycle.snapshot.time
    rows = [row for state in cycle.snapshot.gpus for row in _rows(state, now)]
    if not cycle.snapshot.gpus:
        return "no GPU was seen"
    if not rows:
        return "nobody is known to hold memory"
    headings = ("GPU", "PID", "OWNER", "HELD", "AGE", "USER", "PROGRAM", "WORKLOAD")
    fixed = sum(max(len(row[column]) for row in (headings, *rows)) for column in range(len(headings) - 2))
    room = COLUMNS - fixed - 2 * (len(headings) - 1)
    program = min(_PROGRAM_WIDTH, max(len(row[-2]) for row in (headings, *rows)))
    cut = [(*row[:-2], _cut(row[-2], program), _cut(row[-1], room - program)) for row in rows]
    return table(headings, cut, right=frozenset({1, 3, 4}))


def _rows(state: GpuState, now: float) -> Iterator[tuple[str, ...]]:
    for holder in state.holders:
        process = holder.process
        yield (
            state.gpu.index,
            str(holder.pid),
            _cut(holder.ownership.server or holder.ownership.owner, _NAME_WIDTH),
            bytes_text(holder.used_bytes) if holder.used_bytes is not None else "?",
            _age(now - process.start_time) if process else "?",
            _cut(process.user or "?", _NAME_WIDTH) if process else "?",
            holder.name if process else "",
            process.workload if process else "",
        )
    for owner, held in ((Owner.RELEASING, state.released), (Owner.UNATTRIBUTED, state.residue)):
        if held:
            yield state.gpu.index, "", str(owner), bytes_text(held), "", "", "", ""


def _age(seconds: float) -> str:
    size, unit = next(((size, unit) for size, unit in _AGES if seconds >= size), (1, "s"))
    return f"{max(0, int(seconds // size))} {unit}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"


def _explanations(cycle: Cycle) -> Iterator[str]:
    for parts in _by_process(cycle):
        owner = parts[0].ownership.owner
        found = gains(parts[0].pid, cycle.snapshot, cycle.forecasts.restart)
        if owner in UNWANTED or (owner in EXPECTED and any(gain.turns for gain in found)):
            yield "\n".join(_explanation(parts, found))


def _by_process(cycle: Cycle) -> list[list[Holder]]:
    """Each process with all its cards: orphans first, then foreign ones, then the rest, large first."""
    found: dict[int, list[Holder]] = {}
    for state in cycle.snapshot.gpus:
        for holder in state.holders:
            found.setdefault(holder.pid, []).append(holder)
    order = (*UNWANTED, *EXPECTED)
    ranked = [parts for parts in found.values() if parts[0].ownership.owner in order]
    return sorted(
        ranked,
        key=lambda parts: (order.index(parts[0].ownership.owner), -sum(p.used_bytes or 0 for p in parts)),
    )


def _explanation(parts: list[Holder], found: Iterable[Gain]) -> Iterator[str]:
    first = parts[0]
    cards = ", ".join(
        f"{bytes_text(part.used_bytes) if part.used_bytes is not None else 'memory of unknown size'} on GPU"
        f" {part.gpu}"
        for part in parts
    )
    where = f" in {first.process.workload}" if first.process and first.process.workload else ""
    why = f": {first.ownership.reason}" if first.ownership.reason else ""
    yield wrapped(f"{first.ownership.owner} {first.pid} {first.name}{where} holds {cards}{why}", indent="")
    for gain in found:
        if text := _gain_text(gain):
            yield wrapped(f"restart of {gain.server}: {text}")
    if command := stop_command(first):
        yield wrapped(f"to stop it: {command}")


def _gain_text(gain: Gain) -> str:
    """Empty where nothing would be gained."""
    if gain.before is None or gain.after is None:
        return f"unknown ({gain.unknown})" if gain.unknown else "unknown"
    words = {True: "feasible", False: "infeasible", None: "unknown"}
    before, after = words[gain.before.feasible], words[gain.after.feasible]
    if before != after:
        return f"{before} -> {after}{_longest(gain.after)}"
    if gain.before.feasible:
        changed = gain.before.longest_length != gain.after.longest_length
        return (
            f"feasible, longest {gain.before.longest_length} -> {gain.after.longest_length}"
            if changed
            else ""
        )
    return f"{before}{_missing(gain.before)} ->{_missing(gain.after).removeprefix(',') or f' {after}'}"


def _longest(verdict: Verdict) -> str:
    return f" (longest {verdict.longest_length})" if verdict.feasible and verdict.longest_length else ""


def _missing(verdict: Verdict) -> str:
    margin = verdict.blocking.margin_bytes if verdict.blocking else None
    return f", {bytes_text(-margin)} missing" if margin is not None else ""


def _blind_spots(states: Iterable[GpuState]) -> Iterator[str]:
    for state in states:
        if state.visibility is None:
            yield wrapped(f"GPU {state.gpu.index}: NVML does not list its processes", indent="")
        elif state.visibility < 1:
            share = f"{1 - state.visibility:.0%}"
            yield wrapped(
                f"GPU {state.gpu.index}: {share} of its processes cannot be seen from here; in a container"
                " kvwatch needs the host's PID namespace",
                indent="",
            )


# --- JSON -----------------------------------------------------------------------------------------------


def holders_json(cycle: Cycle, *, indent: int | None = None) -> str:
    """The same as JSON: bytes and tokens are whole numbers, times Unix seconds, unknown values null."""
    snapshot = cycle.snapshot
    document = {
        "schema": SCHEMA,
        "kvwatch": __version__,
        "time": snapshot.time,
        "gpus": [
            {
                "gpu": state.gpu.index,
                "uuid": state.gpu.uuid,
                "released_bytes": state.released,
                "unattributed_bytes": state.residue,
                "process_visibility": state.visibility,
                "holders": [_holder(holder, cycle) for holder in state.holders],
            }
            for state in snapshot.gpus
        ],
    }
    return json.dumps(document, indent=indent, allow_nan=False)


def _holder(holder: Holder, cycle: Cycle) -> dict[str, Any]:
    asked = holder.ownership.owner in (*UNWANTED, *EXPECTED)
    found = gains(holder.pid, cycle.snapshot, cycle.forecasts.restart) if asked else ()
    return {
        **holder_document(holder),
        "restarts": [_restart(gain) for gain in found],
        "command": stop_command(holder),
    }


def _restart(gain: Gain) -> dict[str, Any]:
    return {
        "server": gain.server,
        "feasible": gain.before.feasible if gain.before else None,
        "feasible_without": gain.after.feasible if gain.after else None,
        "max_model_len": gain.before.longest_length if gain.before else None,
        "max_model_len_without": gain.after.longest_length if gain.after else None,
        "unknown": gain.unknown or None,
    }
