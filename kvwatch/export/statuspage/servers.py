"""Each server: would it start again, why not, what to do, and what is coming."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvwatch.export.statuspage.markup import Content, Markup, table, tag
from kvwatch.export.statuspage.trend import trend_part
from kvwatch.export.statuspage.verdicts import check_words, pill, reason_words, tightest_check
from kvwatch.export.statuspage.waterfall import waterfall
from kvwatch.export.statuspage.words import (
    UNKNOWN,
    Record,
    count_text,
    figure,
    flag_text,
    length_text,
    plural,
    share_text,
    signed_text,
)


def servers_section(told: Record) -> Markup:
    """All servers, with a table of them where there are several."""
    servers = told["servers"]
    empty = (
        "No vLLM server was found. kvwatch finds servers by their command lines; those that it cannot see"
        " can be named in kvwatch.yaml under servers."
    )
    return tag(
        "section",
        tag("h2", "Servers", id="servers"),
        _overview(servers) if len(servers) > 1 else None,
        [_card(server, f"server-{number}", told) for number, server in enumerate(servers)],
        None if servers else tag("p", empty, class_="empty"),
        aria_labelledby="servers",
    )


def _overview(servers: Sequence[Record]) -> Markup:
    headings = ("Server", "Restart", "GPUs", "Length", "Longest")
    rows = [
        tag(
            "tr",
            tag("th", tag("a", server["server"], href=f"#server-{number}"), scope="row"),
            tag("td", pill(server["restart"], server["up"])),
            tag("td", ", ".join(server["gpus"]) or UNKNOWN),
            tag("td", figure(server, "max_model_len", count_text), class_="number"),
            tag("td", figure(server["restart"], "max_model_len", length_text), class_="number"),
        )
        for number, server in enumerate(servers)
    ]
    listed = table("All servers", headings, rows, numbers={"Length", "Longest"})
    return tag("div", listed, class_="card overview")


def _card(server: Record, name: str, told: Record) -> Markup:
    return tag(
        "article",
        _heading(server, name),
        _figures(server),
        _trouble(server["restart"]),
        _remedies(server["restart"]),
        tag("div", _waterfalls(server, name, told), trend_part(server, told["time"]), class_="pair"),
        _plans(server["plans"]),
        _pending(server["pending"]),
        _further(server),
        _basis(server["restart"], name),
        class_="card deployment",
        aria_labelledby=name,
        data_server=server["server"],
    )


def _heading(server: Record, name: str) -> Markup:
    facts = [
        server["model"],
        f"vLLM {server['version']}" if server["version"] else ["vLLM version ", UNKNOWN],
        ["GPU ", ", ".join(server["gpus"]) or UNKNOWN],
        server["endpoint"],
    ]
    return tag(
        "header",
        tag("h3", server["server"], id=name, tabindex="-1"),
        pill(server["restart"], server["up"]),
        tag("ul", [tag("li", fact) for fact in facts if fact], class_="facts"),
    )


def _figures(server: Record) -> Markup:
    engines, restart = server["engines"], server["restart"]
    tightest = tightest_check(restart["checks"])
    entries: list[tuple[str, Content, Content]] = [
        ("KV cache in use", *_usage(engines)),
        ("Room now", *_room(engines)),
        (
            "Context length",
            [figure(server, "max_model_len", count_text), " tokens"],
            "as it runs",
        ),
        (
            "Longest that would start",
            _longest(restart),
            "with all else as it is",
        ),
        (
            "Tightest margin",
            UNKNOWN if tightest is None else figure(tightest, "margin_bytes", signed_text),
            None if tightest is None else check_words(tightest),
        ),
    ]
    return tag(
        "dl",
        [tag("div", tag("dt", name), tag("dd", value, tag("span", note))) for name, value, note in entries],
        class_="figures",
    )


def _longest(restart: Record) -> Content:
    longest = figure(restart, "max_model_len", length_text)
    return longest if restart["max_model_len"] == 0 else [longest, " tokens"]


def _usage(engines: Sequence[Record]) -> tuple[Content, Content]:
    known = [engine for engine in engines if engine["usage"] is not None]
    if not known:
        return UNKNOWN, None
    fullest = max(known, key=lambda engine: engine["usage"])
    where = f"engine {fullest['engine']}, the fullest of {len(engines)}; " if len(engines) > 1 else ""
    waiting = [engine["waiting"] for engine in engines]
    queue = f"{plural(int(sum(waiting)), 'request')} waiting" if None not in waiting else "queue unknown"
    return figure(fullest, "usage", share_text), where + queue


def _room(engines: Sequence[Record]) -> tuple[Content, Content]:
    """Of one engine as the document has it; of several the sum."""
    fields = ("free_tokens", "free_requests")
    if len(engines) == 1:
        tokens, requests = (figure(engines[0], field, count_text) for field in fields)
    else:
        tokens, requests = (_sum(engines, field) for field in fields)
    return [tokens, " tokens"], ["full-length requests: ", requests]


def _sum(engines: Sequence[Record], field: str) -> Markup:
    values = [engine[field] for engine in engines]
    return UNKNOWN if None in values or not values else Markup(count_text(sum(values)))


def _trouble(restart: Record) -> Markup | None:
    """Why the verdict is not yes, in kvwatch's words and in vLLM's."""
    reason = reason_words(restart)
    if reason is None:
        return None
    said = restart["message"]
    return tag(
        "div",
        tag("p", tag("strong", reason)),
        [tag("p", "vLLM would say:"), tag("blockquote", said)] if said else None,
        class_=f"trouble {'unsure' if restart['feasible'] is None else 'fail'}",
    )


def _remedies(verdict: Record) -> Markup | None:
    if verdict["feasible"] is not False:
        return None
    remedies = verdict["remedies"]
    none = "None by flags alone: more or larger GPUs, or quantized weights."
    return tag(
        "div",
        tag("h4", "Any one of these makes it start" if remedies else "Remedy"),
        tag("ol", [_remedy(remedy) for remedy in remedies]) if remedies else tag("p", none),
        class_="remedies",
    )


def _remedy(remedy: Record) -> Markup:
    flags = remedy["flags"]
    if not flags:
        return tag("li", remedy["text"])
    return tag("li", _typed(flags), tag("span", remedy["text"].removeprefix(flags), class_="soft"))


def _typed(flags: str) -> Markup:
    return tag("code", flags, class_="typed")


def _waterfalls(server: Record, name: str, told: Record) -> Markup | None:
    restart = server["restart"]
    if not restart["gpus"]:
        return None
    cards = {gpu["gpu"]: gpu for gpu in told["gpus"]}
    shown = _tightest_gpu(restart)
    return tag(
        "div",
        tag("h4", "From the card to one request"),
        [
            tag(
                "details",
                tag("summary", f"GPU {site['gpu']}"),
                waterfall(cards.get(site["gpu"]), restart, site),
                id=f"{name}-gpu-{site['gpu'].replace(':', '-')}",
                open=site["gpu"] == shown,
            )
            for site in restart["gpus"]
        ],
        class_="falls",
    )


def _tightest_gpu(restart: Record) -> str:
    if restart["blocking"] and restart["blocking"]["gpu"] is not None:
        return str(restart["blocking"]["gpu"])
    tightest = tightest_check(check for check in restart["checks"] if check["gpu"] is not None)
    return str((tightest or restart["gpus"][0])["gpu"])


def _plans(plans: Sequence[Record]) -> Markup | None:
    if not plans:
        return None
    rows = [
        tag(
            "tr",
            tag("th", plan["plan"], scope="row"),
            tag("td", _typed(flag_text(plan["changes"]))),
            tag("td", pill(plan), tag("span", " ", _basis_words(plan), reason_words(plan), class_="soft")),
            tag("td", figure(plan, "max_model_len", length_text), class_="number"),
        )
        for plan in plans
    ]
    headings = ("Plan", "Change", "Verdict", "Longest length")
    return _table("Plans", headings, rows)


def _pending(pending: Record | None) -> Markup | None:
    """What the next start is told otherwise, and whether it would start with that."""
    if pending is None or not (pending["changes"] or pending["unknown"]):
        return None
    rows = [
        tag(
            "tr",
            tag("th", change["setting"], scope="row"),
            tag("td", change["running"] or "not given"),
            tag("td", change["next"] or "not given"),
        )
        for change in pending["changes"]
    ]
    files = f"Read from {', '.join(pending['files'])}." if pending["files"] else None
    return tag(
        "div",
        _table("Pending: what the next start is told otherwise", ("Setting", "Running", "Next"), rows),
        tag("p", pill(pending), " ", _basis_words(pending), reason_words(pending)),
        tag("blockquote", pending["message"]) if pending["message"] else None,
        _remedies(pending),
        tag("p", files, class_="soft") if files else None,
        class_="pending",
    )


def _basis_words(verdict: Record) -> str | None:
    return "From an estimate. " if verdict["basis"] == "modelled" else None


def _table(title: str, headings: Sequence[str], rows: Sequence[Markup]) -> Markup:
    listed = table(title, headings, rows, numbers={"Longest length"})
    return tag("div", tag("h4", title), listed, class_="part")


def _further(server: Record) -> Markup | None:
    """What else is foretold, seen and advised."""
    lines = [*_wake(server["wake"]), *_together(server["together"]), *_lengths(server["request_tokens"])]
    advice = [
        tag("li", one["text"], tag("span", f" {one['rule']}", class_="soft")) for one in server["advice"]
    ]
    if not lines and not advice:
        return None
    return tag(
        "div",
        tag("h4", "Worth knowing"),
        tag("ul", [tag("li", line) for line in lines], advice),
        class_="part",
    )


def _wake(wake: Record | None) -> Iterator[Content]:
    if wake is None:
        return
    words = {True: "It sleeps and would wake", False: "It sleeps and would not wake"}
    if wake["feasible"] is None:
        yield ["It sleeps; whether it would wake is ", UNKNOWN, "."]
    else:
        margin = figure(wake, "margin_bytes", signed_text)
        yield [words[wake["feasible"]], ": ", margin, f" on GPU {wake['gpu']}."]


def _together(together: Record | None) -> Iterator[Content]:
    if together is None:
        return
    others = ", ".join(together["sharing"])
    words = {True: "it would start", False: "it would not start", None: "unknown"}
    first, last = (words[together[order]["feasible"]] for order in ("first", "last"))
    yield f"If {others} on the same card stopped too: {first} as the first, {last} as the last."


def _lengths(lengths: Record | None) -> Iterator[Content]:
    if lengths is None:
        return
    half, most, longest = (figure(lengths, field, count_text) for field in ("p50", "p99", "longest"))
    requests = figure(lengths, "count", count_text)
    yield [
        "Of ", requests, " requests, half had at most ", half, " tokens, 99 % at most ", most,
        ", all at most ", longest, ".",
    ]  # fmt: skip


def _basis(restart: Record, name: str) -> Markup | None:
    """What the verdict rests on."""
    if restart["basis"] is None:
        return None
    return tag(
        "details",
        tag("summary", f"What the verdict rests on: {restart['basis']}"),
        tag("p", "Flags of the next start: ", _typed(flag_text(restart["flags"]))),
        tag("ul", [tag("li", text) for text in restart["assumptions"]]),
        id=f"{name}-basis",
    )
