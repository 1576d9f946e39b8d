"""The survey of a fleet on a terminal, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

from kvwatch.export.text import CHECK_TEXT, table
from kvwatch.fleet.survey import Fleet, FleetNode, FleetServer
from kvwatch.units import bytes_text

SCHEMA = 1
"""Version of the document's shape; fields are added without a change of it, never renamed or removed."""


def fleet_json(fleet: Fleet) -> str:
    """The survey as text. Bytes and tokens are whole numbers, unknown values null."""
    document = {"schema": SCHEMA, **asdict(fleet)}
    return json.dumps(document, indent=2, allow_nan=False)


def fleet_text(fleet: Fleet, *, plan: str | None = None) -> str:
    """Nodes worst first, then what each server lacks, then the plans (or one of them)."""
    if not fleet.nodes:
        return "no node with kvwatch found"
    parts = [_nodes(fleet)]
    lines = [line for server in fleet.servers for line in _server_lines(server)]
    if lines:
        parts.append("\n".join(lines))
    if plans := _plans(fleet, plan):
        parts.append(plans)
    return "\n\n".join(parts)


def _nodes(fleet: Fleet) -> str:
    headings = (
        "NODE",
        "GPUS",
        "VRAM",
        "FREE",
        "ONE CARD",
        "FOREIGN",
        "ORPHAN",
        "SERVERS",
        "HEADROOM",
        "RESTART",
    )
    rows = [
        (
            node.node,
            "?" if node.gpus is None else str(node.gpus),
            _size(node.total),
            _size(node.free),
            _size(node.largest_free),
            _size(node.foreign),
            _size(node.orphan),
            str(len(node.servers)),
            _size(node.headroom),
            _verdict(node),
        )
        for node in fleet.nodes
    ]
    return table(headings, rows, right=frozenset(range(1, 9)))


def _size(number: int | None) -> str:
    return "" if number is None else bytes_text(number)


def _verdict(node: FleetNode) -> str:
    if not node.up:
        return "no answer"
    parts = [
        f"{count} {word}" for count, word in ((node.infeasible, "FAILS"), (node.unknown, "unknown")) if count
    ]
    return ", ".join(parts) or ("ok" if node.servers else "")


def _server_lines(server: FleetServer) -> Iterator[str]:
    name = f"{server.server} on {server.node}"
    if server.feasible is False:
        check = CHECK_TEXT.get(server.check or "", server.check or "an unnamed check")
        missing = f", {bytes_text(-server.margin)} missing" if server.margin and server.margin < 0 else ""
        length = f"; --max-model-len {server.longest} would start" if server.longest else ""
        yield f"{name}: a restart would fail: {check}{missing}{length}"
    elif server.feasible is None:
        yield f"{name}: unknown: {server.unknown or 'no verdict'}"
    if server.pending:
        verdict = {True: "would start", False: "would FAIL", None: "unknown"}[server.pending_feasible]
        yield f"{name}: next start changes {', '.join(server.pending)}: {verdict}"


def _plans(fleet: Fleet, name: str | None) -> str:
    rows = [
        (
            plan.plan,
            plan.server,
            plan.node,
            "starts" if plan.feasible else "FAILS",
            _size(plan.margin),
            "" if plan.longest is None else str(plan.longest),
            CHECK_TEXT.get(plan.check or "", plan.check or ""),
        )
        for plan in fleet.plans
        if name in (None, plan.plan)
    ]
    if not rows:
        return "" if name is None else f"no node judges a plan called {name}"
    headings = ("PLAN", "SERVER", "NODE", "START", "MARGIN", "LONGEST", "STOPPED BY")
    return table(headings, rows, right=frozenset({4, 5}))
