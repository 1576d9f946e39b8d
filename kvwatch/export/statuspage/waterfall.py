"""One GPU's way from the whole card to what one request needs, step by step, with the checks between."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvwatch.export.statuspage.markup import Content, Markup, table, tag
from kvwatch.export.statuspage.shapes import Span, bar
from kvwatch.export.statuspage.words import UNKNOWN, Record, count_text, figure, signed_text
from kvwatch.export.text import CHECK_TEXT

_LATE_CHECKS = ("state_slots", "sampler_warmup", "graph_capture")
"""Checks after the cache's, in vLLM's order."""


@dataclass(frozen=True, slots=True)
class Step:
    """One row: what there is (``sum``), what goes (``less``), or a check (``ok``, ``fail``, ``unsure``)."""

    kind: str
    label: Content
    size: Content
    begin: float
    end: float


def waterfall(gpu: Record | None, restart: Record, site: Record) -> Markup:
    """The steps of one GPU as a table with a bar in each row.

    Args:
        gpu: the card, None where it is not seen in this cycle.
    """
    scale = (gpu and gpu["total_bytes"]) or site["total_bytes"]
    rows = [_row(step, scale) for step in _steps(gpu, restart, site)]
    caption = f"GPU {site['gpu']}: from the whole card to one request"
    return table(caption, ("Step", "On the card", "Bytes"), rows, kind="waterfall", numbers={"Bytes"})


def _row(step: Step, scale: float) -> Markup:
    span = Span(step.kind, max(0.0, step.begin), min(float(scale), step.end))
    return tag(
        "tr",
        tag("th", step.label, scope="row"),
        tag("td", bar(scale, [span], height=14), class_="drawn"),
        tag("td", step.size, class_="number"),
        class_=step.kind,
    )


def _steps(gpu: Record | None, restart: Record, site: Record) -> Iterator[Step]:
    checks = {check["check"]: check for check in restart["checks"] if check["gpu"] in (site["gpu"], None)}
    yield from _card(gpu, site)
    yield from _free(gpu, checks, site)
    yield from _cache(checks, restart, site)
    for name in _LATE_CHECKS:
        if name in checks:
            yield _check(checks[name], site["budget_bytes"])


def _card(gpu: Record | None, site: Record) -> Iterator[Step]:
    total = site["total_bytes"]
    if gpu is not None and gpu["total_bytes"] is not None and gpu["reserved_bytes"]:
        whole = gpu["total_bytes"]
        yield Step("sum", "The whole card", figure(gpu, "total_bytes"), 0, whole)
        yield Step("less", "Reserved by the driver", _less(figure(gpu, "reserved_bytes")), total, whole)
    yield Step("sum", "Total, as CUDA tells it", figure(site, "total_bytes"), 0, total)


def _free(gpu: Record | None, checks: Mapping[str, Record], site: Record) -> Iterator[Step]:
    free, cost, budget = site["free_next_bytes"], site["start_cost_bytes"], site["budget_bytes"]
    if free is not None:
        yield from _others(gpu, site)
        yield Step("sum", "Free once this server stopped", figure(site, "free_next_bytes"), 0, free)
        taken = _less(figure(site, "start_cost_bytes"))
        yield Step("less", "CUDA context and NCCL of the start", taken, free - cost, free)
    share = "Budget: total \N{MULTIPLICATION SIGN} utilization"
    yield Step("sum", share, figure(site, "budget_bytes"), 0, budget)
    if "free_memory" in checks:
        yield _check(checks["free_memory"], budget)


def _others(gpu: Record | None, site: Record) -> Iterator[Step]:
    """What stays on the card when the server goes, and what is kept free for servers that sleep."""
    total, free = site["total_bytes"], site["free_next_bytes"]
    held = total - free
    if gpu is not None and gpu["used_bytes"] is not None and site["own_bytes"] is not None:
        held = gpu["used_bytes"] - site["own_bytes"]
    yield Step("less", "Held by others", signed_text(-held), total - held, total)
    if total - held > free:
        yield Step("less", "Kept for sleeping servers", signed_text(free - total + held), free, total - held)


def _cache(checks: Mapping[str, Record], restart: Record, site: Record) -> Iterator[Step]:
    budget, rest, cache = site["budget_bytes"], site["non_kv_bytes"], site["kv_bytes"]
    if cache is None:
        return
    if not restart["flags"].get("kv_cache_memory_bytes") and rest is not None:
        label = "Weights, activations, graphs and the rest"
        yield Step("less", label, _less(figure(site, "non_kv_bytes")), budget - rest, budget)
        aside = budget - rest - cache
        if aside > 0:
            yield Step("less", "Kept back from the pool", signed_text(-aside), cache, budget - rest)
    yield Step("sum", "Left for the KV cache", figure(site, "kv_bytes"), 0, cache)
    if "kv_memory" in checks and checks["kv_memory"]["passed"] is not True:
        yield _check(checks["kv_memory"], 0)
    if site["need_bytes"] is not None and "one_request" in checks:
        length = restart["flags"].get("max_model_len")
        tokens = f" of {count_text(length)} tokens" if isinstance(length, int) and length > 0 else ""
        yield Step("sum", f"One request{tokens} needs", figure(site, "need_bytes"), 0, site["need_bytes"])
        yield _check(checks["one_request"], site["need_bytes"])


def _check(check: Record, at: float) -> Step:
    """A check's margin, drawn from the figure that it is compared with."""
    kind: dict[Any, str] = {True: "ok", False: "fail", None: "unsure"}
    margin = check["margin_bytes"]
    label = [tag("span", class_="glyph"), "Check: ", CHECK_TEXT.get(check["check"], check["check"])]
    begin, end = sorted((at, at + (margin or 0)))
    return Step(kind[check["passed"]], label, _margin(check), begin, end)


def _margin(check: Record) -> Content:
    """What is left at a check; some measure themselves in requests, of which the document knows no count."""
    if check["margin_bytes"] is not None:
        return figure(check, "margin_bytes", signed_text)
    return {True: "passes", False: "fails", None: UNKNOWN}[check["passed"]]


def _less(size: Markup) -> Content:
    return size if size == UNKNOWN else ["\N{MINUS SIGN}", size]
