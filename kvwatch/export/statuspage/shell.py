"""The page around the sections: its head, the answer in one sentence, and how the sources did."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any
from urllib.parse import quote

from kvwatch.export.statuspage.gpus import gpus_section
from kvwatch.export.statuspage.markup import Content, Markup, join, table, tag
from kvwatch.export.statuspage.servers import servers_section
from kvwatch.export.statuspage.trend import outlook_lines
from kvwatch.export.statuspage.verdicts import check_words, reason_words, tightest_check
from kvwatch.export.statuspage.words import UNKNOWN, Record, figure, moment
from kvwatch.units import duration_text

REFRESH_SECONDS = 5
"""Between two looks of the page's script; without scripts the whole page is loaded anew more seldom."""
RELOAD_SECONDS = 15
_ICON = '<svg xmlns="http://www.w3.org/2000/svg"><circle cx="8" cy="8" r="7" fill="{colour}"/></svg>'
_ICON_COLOURS = {"ok": "#1f8a54", "fail": "#d0362c", "unsure": "#b77900"}


def status_page(told: Mapping[str, Any]) -> bytes:
    """The page of one document."""
    tone, headline = _headline(told["servers"])
    body = tag("body", _body(told, tone, headline), data_seconds=REFRESH_SECONDS)
    return _whole(_head(f"{headline} · kvwatch", tone), body)


def apology() -> bytes:
    """A page for a cycle whose status page could not be made."""
    text = "The status page could not be made; the log says why. The rest is published all the same."
    body = tag("body", tag("main", tag("h1", "kvwatch"), tag("p", text), _links()))
    return _whole(_head("kvwatch", "unsure"), body)


def _whole(head: Markup, body: Markup) -> bytes:
    return join(Markup("<!doctype html>\n"), tag("html", head, body, lang="en")).encode()


@cache
def _asset(name: str) -> Markup:
    """A file of this package; its text goes into an element whose content HTML does not escape."""
    return Markup((files(__package__) / name).read_text(encoding="utf-8"))


def _head(title: str, tone: str) -> Markup:
    dot = _ICON.format(colour=_ICON_COLOURS[tone])
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("noscript", tag("meta", http_equiv="refresh", content=RELOAD_SECONDS)),
        tag("title", title),
        tag("link", rel="icon", href=f"data:image/svg+xml,{quote(dot)}"),
        tag("style", _asset("status.css")),
    )


def _body(told: Record, tone: str, headline: str) -> Iterator[Content]:
    yield tag("a", "Skip to the servers", href="#servers", class_="skip")
    yield tag(
        "header",
        tag("p", tag("b", "kvwatch"), f" {told['kvwatch']}", class_="brand"),
        tag("p", "Simulated node", class_="badge") if told["simulated"] else None,
        tag("p", "As seen at ", moment(told["time"]), id="seen"),
        tag("p", id="updates"),
        class_="top",
    )
    yield tag("p", headline, class_="spoken", id="announced", role="status", aria_live="polite")
    yield tag(
        "main",
        tag("div", tag("h1", headline), _concerns(told), class_=f"answer {tone}"),
        gpus_section(told),
        servers_section(told),
        _sources(told),
        id="main",
    )
    yield tag("footer", _links())
    yield tag("script", _asset("status.js"))


def _links() -> Markup:
    metrics = tag("a", "Metrics", href="/metrics")
    snapshot = tag("a", "This page as JSON", href="/api/v1/snapshot")
    return tag("nav", metrics, snapshot, aria_label="Other forms of this page")


def _headline(servers: Sequence[Record]) -> tuple[str, str]:
    """Tone and text of the answer to the page's question."""
    failing = [server["server"] for server in servers if server["restart"]["feasible"] is False]
    unsure = [server["server"] for server in servers if server["restart"]["feasible"] is None]
    if not servers:
        return "unsure", "No vLLM server found"
    if failing:
        return "fail", f"{_names(failing, servers)} would not start again"
    if unsure:
        return "unsure", f"Unknown whether {_names(unsure, servers)} would start again"
    return "ok", f"{servers[0]['server'] if len(servers) == 1 else 'Every server'} would start again"


def _names(names: Sequence[str], servers: Sequence[Record]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} of {len(servers)} servers"


def _concerns(told: Record) -> Markup | None:
    servers = told["servers"]
    lines: list[Content] = []
    if len(servers) == 1:
        lines.extend(_spare(servers[0]["restart"]))
    for server in servers:
        name = [tag("b", server["server"]), ": "] if len(servers) > 1 else None
        lines.extend([name, line] for line in _server_concerns(server, told["time"]))
    down = [source["source"] for source in told["sources"] if not source["up"]]
    if down:
        lines.append(f"No answer from {', '.join(down)}: what they tell is unknown.")
    return tag("ul", [tag("li", line) for line in lines]) if lines else None


def _spare(restart: Record) -> Iterator[Content]:
    tightest = tightest_check(restart["checks"])
    if restart["feasible"] and tightest is not None:
        spare = figure(tightest, "margin_bytes")
        yield [spare, f" to spare at the tightest check: {check_words(tightest)}"]


def _server_concerns(server: Record, now: float) -> Iterator[Content]:
    """What an operator would want to know first, one line each."""
    if reason := reason_words(server["restart"]):
        yield reason
    yield from outlook_lines(server, now)
    pending = server["pending"]
    if pending is not None and (reason := reason_words(pending)):
        yield f"With the changes that are pending: {reason}"
    if server["wake"] is not None and server["wake"]["feasible"] is False:
        yield "It sleeps and would not wake"


def _sources(told: Record) -> Markup:
    rows = [_source(source, told["time"]) for source in told["sources"]]
    shown = {source["failure"]["detail"] for source in told["sources"] if source["failure"]}
    unread = [
        tag("li", tag("b", f"{failure['source']} ({failure['reason']}): "), failure["detail"])
        for failure in told["failures"]
        if failure["detail"] not in shown
    ]
    headings = ("Source", "State", "Last answer", "Took")
    return tag(
        "section",
        tag("h2", "Sources", id="sources"),
        table("What kvwatch reads", headings, rows),
        [tag("h3", "What could not be read"), tag("ul", unread)] if unread else None,
        class_="card",
        aria_labelledby="sources",
    )


def _source(source: Record, now: float) -> Markup:
    failure, last = source["failure"], source["last_success"]
    detail = tag("span", f" {failure['detail']}", class_="soft") if failure else None
    state = "Up" if source["up"] else "Down"
    kind = "ok" if source["up"] else "fail"
    return tag(
        "tr",
        tag("th", source["source"], scope="row"),
        tag("td", tag("span", tag("span", class_="glyph"), state, class_=f"pill {kind}"), detail),
        tag("td", UNKNOWN if last is None else "now" if last >= now else f"{duration_text(now - last)} ago"),
        tag("td", "not timed" if source["seconds"] is None else f"{source['seconds'] * 1000:.0f} ms"),
    )
