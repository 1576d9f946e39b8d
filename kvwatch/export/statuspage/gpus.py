"""Each GPU as a bar of its owners, with what the next starts on it will ask for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvwatch.export.statuspage.markup import Markup, table, tag
from kvwatch.export.statuspage.shapes import Span, bar
from kvwatch.export.statuspage.words import UNKNOWN, Record, figure, plural
from kvwatch.units import bytes_text, duration_text

SHADES = 4
"""Colours for servers; further ones begin again."""
MAX_HOLDERS = 20

_OWNER_TEXT = {
    "server": "a server",
    "neighbour": "another engine, expected",
    "orphan": "left behind by a dead vLLM server",
    "foreign": "not a server's",
    "allowed": "allowed by kvwatch.yaml",
    "releasing": "of an ended process, coming back",
    "unattributed": "held by no process that can be seen",
}


@dataclass(frozen=True, slots=True)
class Part:
    """One owner's share of a card."""

    kind: str
    name: str
    note: str | None
    size: Markup
    bytes: int


def gpus_section(told: Record) -> Markup:
    """All GPUs."""
    servers = told["servers"]
    shades = {server["server"]: f"server-{number % SHADES}" for number, server in enumerate(servers)}
    cards = [_card(gpu, _starts(gpu["gpu"], servers), shades, told["time"]) for gpu in told["gpus"]]
    nothing = tag("p", "No GPU could be read; the reason is under Sources.", class_="empty")
    return tag(
        "section",
        tag("h2", "GPUs", id="gpus"),
        tag("div", cards, class_="cards") if cards else nothing,
        aria_labelledby="gpus",
    )


def _starts(gpu: str, servers: Sequence[Record]) -> list[tuple[str, Record, Record]]:
    """Server, restart forecast and place of each start that is judged on a card."""
    return [
        (server["server"], server["restart"], site)
        for server in servers
        for site in server["restart"]["gpus"]
        if site["gpu"] == gpu
    ]


def _card(
    gpu: Record, starts: Sequence[tuple[str, Record, Record]], shades: Mapping[str, str], now: float
) -> Markup:
    name = f"gpu-{gpu['gpu'].replace(':', '-')}"
    title = tag(
        "h3",
        f"GPU {gpu['gpu']} ",
        tag("span", gpu["name"].removeprefix("NVIDIA "), class_="soft"),
        tag("span", f" MIG {gpu['mig_profile']}", class_="soft") if gpu["mig_profile"] else None,
        id=name,
    )
    free = tag("p", figure(gpu, "free_bytes"), " free of ", figure(gpu, "total_bytes"), class_="aside")
    parts = list(_parts(gpu, shades))
    return tag(
        "article",
        tag("header", title, free),
        _owners_bar(gpu, parts, starts) if gpu["total_bytes"] else None,
        tag("ul", [_legend(part) for part in parts], _budget_legend(starts), class_="legend"),
        [_start(gpu, *start, shades) for start in starts],
        _visibility(gpu),
        _holders(gpu, name, shades, now),
        class_="card",
        aria_labelledby=name,
        data_gpu=gpu["gpu"],
    )


def _parts(gpu: Record, shades: Mapping[str, str]) -> Iterator[Part]:
    """Servers from the left, then what is free, then everybody else; the driver's share at the end."""
    held = sorted(gpu["held"], key=lambda one: (one["owner"] != "server", -one["bytes"]))
    own = [one for one in held if one["owner"] == "server"]
    others = [one for one in held if one["owner"] != "server" and one["bytes"]]
    for one in own:
        kind = shades.get(one["server"], "server-0")
        yield Part(kind, one["server"], None, figure(one, "bytes"), one["bytes"])
    if gpu["free_bytes"] is not None:
        yield Part("free", "free", None, figure(gpu, "free_bytes"), gpu["free_bytes"])
    for one in others:
        yield Part(
            one["owner"], one["owner"], _OWNER_TEXT.get(one["owner"]), figure(one, "bytes"), one["bytes"]
        )
    if gpu["reserved_bytes"]:
        size = figure(gpu, "reserved_bytes")
        yield Part("reserved", "reserved", "by the driver", size, gpu["reserved_bytes"])


def _owners_bar(gpu: Record, parts: Sequence[Part], starts: Sequence[tuple[str, Record, Record]]) -> Markup:
    spans = []
    end = 0
    for part in parts:
        spans.append(Span(part.kind, end, end + part.bytes, f"{part.name}: {bytes_text(part.bytes)}"))
        end += part.bytes
    spoken = ", ".join(f"{part.name} {bytes_text(part.bytes)}" for part in parts)
    mark = starts[0][2]["budget_bytes"] if len(starts) == 1 else None
    if mark is not None:
        spoken += f"; the next start's budget is {bytes_text(mark)}"
    return bar(gpu["total_bytes"], spans, height=32, label=f"GPU {gpu['gpu']}: {spoken}", mark=mark)


def _legend(part: Part) -> Markup:
    note = tag("span", f" {part.note}", class_="soft") if part.note else None
    return tag("li", tag("span", class_=f"swatch {part.kind}"), part.name, " ", tag("b", part.size), note)


def _budget_legend(starts: Sequence[tuple[str, Record, Record]]) -> Markup | None:
    if len(starts) != 1:
        return None
    size = figure(starts[0][2], "budget_bytes")
    return tag("li", tag("span", class_="swatch line"), "next budget ", tag("b", size))


def _start(
    gpu: Record, server: str, restart: Record, site: Record, shades: Mapping[str, str]
) -> Markup | None:
    """What the next start wants, from the left, and what others hold, from the right: a gap or an overlap."""
    total, budget = gpu["total_bytes"], site["budget_bytes"]
    margin = next(
        (
            check["margin_bytes"]
            for check in restart["checks"]
            if check["check"] == "free_memory" and check["gpu"] == site["gpu"]
        ),
        None,
    )
    if total is None or margin is None:
        return None
    missing = margin < 0
    asked = budget + site["start_cost_bytes"]
    spans = [
        Span("asked-fail" if missing else shades[server], 0, budget, f"budget: {bytes_text(budget)}"),
        Span("starting", budget, asked, f"taken while starting: {bytes_text(site['start_cost_bytes'])}"),
        Span("blocked", site["free_next_bytes"], total, "held by others"),
        Span("overlap", site["free_next_bytes"], asked, f"missing: {bytes_text(-margin)}"),
    ]
    verdict = f"{bytes_text(-margin)} missing" if missing else f"{bytes_text(margin)} to spare"
    return tag(
        "div",
        tag(
            "p",
            "Next start of ",
            tag("b", server),
            " finds ",
            figure(site, "free_next_bytes"),
            ", takes ",
            figure(site, "start_cost_bytes"),
            " while it starts and wants a budget of ",
            figure(site, "budget_bytes"),
            ": ",
            tag("strong", verdict, class_="fail" if missing else "ok"),
        ),
        bar(total, spans, height=20, mark=budget),
        class_="next",
    )


def _visibility(gpu: Record) -> Markup | None:
    seen = gpu["process_visibility"]
    if seen == 1:
        return None
    text = (
        "The processes on this card could not be listed."
        if seen is None
        else f"Only {seen:.0%} of the processes on this card can be seen: who holds the rest is unknown."
    )
    return tag("p", text, class_="note")


def _holders(gpu: Record, name: str, shades: Mapping[str, str], now: float) -> Markup | None:
    """The largest holders, and the rest in one row."""
    holders = gpu["holders"]
    if not holders:
        return None
    listed, rest = holders[:MAX_HOLDERS], holders[MAX_HOLDERS:]
    rows = [_holder(holder, shades, now) for holder in listed]
    if rest:
        known = sum(holder["bytes"] or 0 for holder in rest)
        more = tag("th", f"and {plural(len(rest), 'smaller holder')}", scope="row", colspan="4")
        rows.append(tag("tr", more, tag("td", bytes_text(known), class_="number")))
    caption = f"Processes that hold memory on GPU {gpu['gpu']}"
    headings = ("Process", "Owner", "User, workload", "Age", "Memory")
    return tag(
        "details",
        tag("summary", f"{plural(len(holders), 'holder')} on this card"),
        table(caption, headings, rows, kind="holders", numbers={"Age", "Memory"}),
        id=f"{name}-holders",
        open=any(holder["owner"] not in ("server", "allowed") for holder in holders),
    )


def _holder(holder: Record, shades: Mapping[str, str], now: float) -> Markup:
    process: Any = holder["process"] or UNKNOWN
    who = " · ".join(text for text in (holder["user"], holder["workload"]) if text)
    reason = tag("span", holder["reason"], class_="reason") if holder["reason"] else None
    age = UNKNOWN if holder["started"] is None else duration_text(max(0.0, now - holder["started"]))
    origin = f" of {holder['former_server']}" if holder["former_server"] else ""
    owner = holder["server"] or f"{holder['owner']}{origin}"
    kind = shades.get(holder["server"], holder["owner"])
    return tag(
        "tr",
        tag("th", process, tag("span", f" {holder['pid']}", class_="soft"), scope="row"),
        tag("td", tag("span", owner, class_=f"owner {kind}")),
        tag("td", who or UNKNOWN, reason),
        tag("td", age, class_="number"),
        tag("td", figure(holder, "bytes"), class_="number"),
        data_pid=holder["pid"],
    )
