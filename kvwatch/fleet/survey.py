"""Headroom by node, verdicts by server and plan, out of the newest samples of every node."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from kvwatch.fleet.api import Sample

Query = Callable[[str], list[Sample]]


@dataclass(frozen=True, slots=True)
class FleetServer:
    """One vLLM server of one node.

    Attributes:
        feasible: None where unknown.
        check: the start-up check that would stop it.
        margin: bytes left at the tightest check, or at the one that stops it: negative is what is missing.
        longest: largest max_model_len that would start now.
        length: the running one.
        pending: settings that the next start has otherwise.
        pending_feasible: the verdict on that start; None where nothing is pending or it is unknown.
        unknown: why there is no verdict.
    """

    node: str
    server: str
    feasible: bool | None = None
    check: str | None = None
    margin: int | None = None
    longest: int | None = None
    length: int | None = None
    pending: tuple[str, ...] = ()
    pending_feasible: bool | None = None
    unknown: str | None = None


@dataclass(frozen=True, slots=True)
class FleetNode:
    """One node; sizes in bytes over all its cards.

    Attributes:
        up: whether its kvwatch answered Prometheus's last scrape. Nothing else is known where not.
        largest_free: free bytes on the card that has most.
        headroom: the smallest margin of its servers.
    """

    node: str
    up: bool
    gpus: int | None = None
    total: int | None = None
    free: int | None = None
    largest_free: int | None = None
    foreign: int | None = None
    orphan: int | None = None
    headroom: int | None = None
    servers: tuple[FleetServer, ...] = ()

    @property
    def infeasible(self) -> int:
        """Servers that would not start again."""
        return sum(server.feasible is False for server in self.servers)

    @property
    def unknown(self) -> int:
        """Servers without a verdict."""
        return sum(server.feasible is None for server in self.servers)


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """The verdict on one plan for one server."""

    plan: str
    node: str
    server: str
    feasible: bool
    check: str | None = None
    margin: int | None = None
    longest: int | None = None


@dataclass(frozen=True, slots=True)
class Fleet:
    """Everything, worst first."""

    nodes: tuple[FleetNode, ...]
    plans: tuple[FleetPlan, ...] = ()

    @property
    def servers(self) -> tuple[FleetServer, ...]:
        """Of all nodes, in the nodes' order."""
        return tuple(server for node in self.nodes for server in node.servers)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Values by key, a key being the values of some labels."""

    values: Mapping[tuple[str, ...], Sample] = field(default_factory=dict)

    def number(self, *key: str) -> int | None:
        found = self.values.get(key)
        return None if found is None else int(found.value)

    def verdict(self, *key: str) -> bool | None:
        found = self.values.get(key)
        return None if found is None else bool(found.value)

    def label(self, name: str, *key: str) -> str | None:
        found = self.values.get(key)
        return None if found is None else found.labels.get(name)


class _Survey:
    def __init__(self, query: Query, match: str, node_label: str) -> None:
        self._query = query
        self._match = match
        self._node = node_label

    def rows(self, aggregation: str, family: str, *by: str, only: str = "", also: str = "") -> _Rows:
        """One aggregated family, keyed by node and `by`; `only` further matchers, `also` a label to keep."""
        matchers = ",".join(part for part in (self._match, only) if part)
        selector = f"{family}{{{matchers}}}{' == 1' if also else ''}"
        labels = ", ".join(name for name in (self._node, *by, also) if name)
        found = self._query(f"{aggregation} by ({labels}) ({selector})")
        return _Rows({tuple(one.labels.get(name, "") for name in (self._node, *by)): one for one in found})

    def margins(self) -> _Rows:
        """Bytes left by node and server: at the check that stops it, else at the tightest one."""
        margin = f"kvwatch_restart_margin_bytes{{{self._match}}}"
        blocked = f"kvwatch_restart_blocked{{{self._match}}} == 1"
        by = f"min by ({self._node}, server)"
        found = self._query(
            f"{by} ({margin} and on (job, instance, server, check) ({blocked})) or {by} ({margin})"
        )
        return _Rows({(one.labels.get(self._node, ""), one.labels.get("server", "")): one for one in found})

    def reached(self) -> dict[str, bool]:
        """Nodes with whether their kvwatch answers."""
        match = self._match
        up = self._query(f"max by ({self._node}) (kvwatch_up{{{match}}})")
        down = self._query(
            f"max by ({self._node}) (up{{{match}}} == 0 and on (job)"
            f" group by (job) (last_over_time(kvwatch_up{{{match}}}[1d])))"
        )
        named = {one.labels.get(self._node, ""): False for one in down}
        return named | {one.labels.get(self._node, ""): True for one in up}


def survey(query: Query, *, match: str = "", node_label: str = "instance") -> Fleet:
    """Ask for everything.

    Args:
        query: an instant query.
        match: matchers that narrow the nodes, as in PromQL: ``cluster="eu",job="kvwatch"``.
        node_label: the label that names a node.
    """
    asked = _Survey(query, match, node_label)
    servers = _servers(asked)
    totals = {
        "gpus": asked.rows("count", "kvwatch_gpu_info"),
        "total": asked.rows("sum", "kvwatch_gpu_memory_total_bytes"),
        "free": asked.rows("sum", "kvwatch_gpu_memory_free_bytes"),
        "largest_free": asked.rows("max", "kvwatch_gpu_memory_free_bytes"),
        "foreign": asked.rows("sum", "kvwatch_gpu_memory_held_bytes", only='owner="foreign"'),
        "orphan": asked.rows("sum", "kvwatch_gpu_memory_held_bytes", only='owner="orphan"'),
        "headroom": asked.rows("min", "kvwatch_restart_margin_bytes"),
    }
    nodes = [
        FleetNode(
            node=node,
            up=up,
            servers=tuple(server for server in servers if server.node == node),
            **{name: rows.number(node) for name, rows in totals.items()},
        )
        for node, up in asked.reached().items()
    ]
    return Fleet(tuple(sorted(nodes, key=_urgency)), _plans(asked))


def _urgency(node: FleetNode) -> tuple[bool, bool, bool, float, str]:
    """Infeasible ones first, then those that do not answer or know, then the least headroom."""
    headroom = float("inf") if node.headroom is None else node.headroom
    return (not node.infeasible, node.up, not node.unknown, headroom, node.node)


def _servers(asked: _Survey) -> list[FleetServer]:
    known = asked.rows("max", "kvwatch_server_up", "server")
    feasible = asked.rows("min", "kvwatch_restart_feasible", "server")
    blocked = asked.rows("max", "kvwatch_restart_blocked", "server", also="check")
    margin = asked.margins()
    longest = asked.rows("min", "kvwatch_restart_max_model_len_tokens", "server")
    length = asked.rows("max", "kvwatch_max_model_len_tokens", "server")
    unknown = asked.rows(
        "max", "kvwatch_forecast_unknown", "server", only='forecast="restart"', also="reason"
    )
    pending = asked.rows("min", "kvwatch_pending_feasible", "server")
    changes = asked.rows("max", "kvwatch_pending_change", "server", "setting")
    return sorted(
        (
            FleetServer(
                node=node,
                server=server,
                feasible=feasible.verdict(node, server),
                check=blocked.label("check", node, server),
                margin=margin.number(node, server),
                longest=longest.number(node, server),
                length=length.number(node, server),
                pending=_settings(changes.values, node, server),
                pending_feasible=pending.verdict(node, server),
                unknown=unknown.label("reason", node, server),
            )
            for node, server in known.values
        ),
        key=lambda server: (server.node, server.feasible is not False, server.server),
    )


def _settings(changes: Iterable[tuple[str, ...]], node: str, server: str) -> tuple[str, ...]:
    return tuple(sorted(key[2] for key in changes if key[:2] == (node, server)))


def _plans(asked: _Survey) -> tuple[FleetPlan, ...]:
    feasible = asked.rows("min", "kvwatch_plan_feasible", "server", "plan")
    blocked = asked.rows("max", "kvwatch_plan_blocked", "server", "plan", also="check")
    margin = asked.rows("min", "kvwatch_plan_margin_bytes", "server", "plan")
    longest = asked.rows("min", "kvwatch_plan_max_model_len_tokens", "server", "plan")
    plans = [
        FleetPlan(
            plan=plan,
            node=node,
            server=server,
            feasible=bool(verdict.value),
            check=blocked.label("check", node, server, plan),
            margin=margin.number(node, server, plan),
            longest=longest.number(node, server, plan),
        )
        for (node, server, plan), verdict in feasible.values.items()
    ]
    return tuple(sorted(plans, key=lambda one: (one.plan, one.feasible, one.node, one.server)))
