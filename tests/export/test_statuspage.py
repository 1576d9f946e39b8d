from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from kvwatch.blockmath.flags import Flags
from kvwatch.config import GIB, Config, Plan
from kvwatch.export.content import render
from kvwatch.export.document import document
from kvwatch.export.statuspage import status_page
from kvwatch.export.statuspage.markup import join, tag
from kvwatch.export.statuspage.shapes import Span, bar, sparkline
from kvwatch.export.statuspage.words import flag_text, signed_text
from kvwatch.observe.cycle import Observation, SourceStatus
from kvwatch.observe.records import Failure
from tests.export.test_page import NOTEBOOK, cycle
from tests.nodes import NOW, PARENT, gpu, observation, process, server, serving_node

Document = dict[str, Any]

MINUS = "\N{MINUS SIGN}"
COUNTED_ON = frozenset(
    {
        *("time", "pid", "held", "flags", "changes", "margins", "wake", "request_tokens"),
        *("max_model_len", "total_bytes", "budget_bytes", "free_next_bytes", "start_cost_bytes"),
    }
)
"""Numbers that are never null where they stand."""

FAILING = serving_node((NOTEBOOK, 8 * GIB), own=70 * GIB)
PLANS = Config(plans=(Plan("longer", None, Flags(max_model_len=65536)),))


class Outline(HTMLParser):
    """The page's text, and whether its elements nest."""

    VOID = frozenset({"meta", "link"})
    INLINE = frozenset({"b", "code", "data", "span", "strong", "time"})

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.words: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page.decode())
        self.close()
        assert self.open == []

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((name, dict(attributes)))
        self._space(name)
        self.ids.extend(value or "" for key, value in attributes if key == "id")
        if name not in self.VOID:
            self.open.append(name)

    def handle_startendtag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((name, dict(attributes)))

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name
        self._space(name)

    def _space(self, name: str) -> None:
        if name not in self.INLINE:
            self.words.append(" ")

    def handle_data(self, data: str) -> None:
        if not {"style", "script", "title"} & set(self.open):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())


def outline(seen: Observation | Document, config: Config | None = None) -> Outline:
    told = seen if isinstance(seen, dict) else document(cycle(seen, config))
    return Outline(status_page(told))


def failing() -> Document:
    return document(cycle(FAILING, PLANS))


def test_elements_nest_and_ids_are_unique() -> None:
    page = outline(FAILING, PLANS)
    assert len(page.ids) == len(set(page.ids))
    targets = {
        (attributes["href"] or "")[1:]
        for name, attributes in page.tags
        if name == "a" and (attributes["href"] or "").startswith("#")
    }
    labels = {attributes.get("aria-labelledby") for _, attributes in page.tags} - {None}
    assert targets | labels <= set(page.ids)


def test_nothing_is_loaded_and_nothing_styled_inline() -> None:
    page = status_page(failing()).decode()
    assert not re.search(r"""\s(style|on\w+)=|url\(|@import|\ssrc=""", page)
    loaded = re.findall(r'<link[^>]*href="([^"]*)"', page)
    assert [address.split(":")[0] for address in loaded] == ["data"]


def test_a_restart_that_would_fail() -> None:
    text = outline(FAILING, PLANS).text
    assert "llama would not start again" in text
    assert "Free memory on the card, GPU 0: 2.15 GiB missing" in text
    assert "vLLM would say: Free memory on device cuda:0" in text
    assert "stop foreign ipykernel_launcher of dana (pid 900, 8.00 GiB on GPU 0)" in text
    assert "--gpu-memory-utilization 0.88 instead of 0.92" in text
    assert "longer --max-model-len 65536" in text
    assert "ipykernel_launcher 900 foreign dana · jupyter.service 1 h 8.00 GiB" in text


def test_a_restart_that_would_work() -> None:
    text = outline(serving_node((NOTEBOOK, GIB))).text
    assert "llama would start again" in text
    assert "Any one of these" not in text
    assert "full-length requests: 11" in text


def test_the_waterfall_adds_up() -> None:
    told = document(cycle(serving_node((NOTEBOOK, GIB))))
    site = told["servers"][0]["restart"]["gpus"][0]
    page = status_page(told).decode()
    table = page[page.index('class="waterfall"') :].split("</table>")[0]
    shown = {name: int(value) for value, name in re.findall(r'value="(-?\d+)" data-field="(\w+)"', table)}
    assert shown.items() >= {(name, site[name]) for name in ("free_next_bytes", "budget_bytes", "kv_bytes")}
    assert f"Held by others {MINUS}1.00 GiB" in outline(told).text


def test_what_is_null_is_called_unknown_and_never_zero() -> None:
    down = server(page=Failure("vllm", "connection_refused", "nothing listens on 127.0.0.1:8000"))
    text = outline(observation((gpu({PARENT + 1: None}, memory=False),), (process(1, "x"),), (down,))).text
    assert "Unknown whether llama would start again" in text
    assert "Unknown (server_down): nothing listens on 127.0.0.1:8000" in text
    assert "No answer" in text
    assert "unknown free of unknown" in text
    assert "KV cache in use unknown" in text
    assert "Tightest margin unknown" in text
    assert not re.search(r"\b0(\.00)? (B|GiB|tokens)\b", text)


def null_everywhere(value: Any, *, keep: frozenset[str]) -> Any:
    if isinstance(value, dict):
        return {
            name: null_everywhere(one, keep=keep) if name not in keep else one for name, one in value.items()
        }
    if isinstance(value, list):
        return [null_everywhere(one, keep=keep) for one in value]
    return None if isinstance(value, int | float) and not isinstance(value, bool) else value


@pytest.mark.parametrize("seen", [FAILING, serving_node((NOTEBOOK, GIB)), serving_node(sleep_state="awake")])
def test_any_number_may_be_null(seen: Observation) -> None:
    told = document(cycle(seen, PLANS))
    text = outline(null_everywhere(told, keep=COUNTED_ON)).text
    assert text.count("unknown") > 5


def test_names_cannot_break_out() -> None:
    evil = '"><script>alert(1)</script><b title=\'x\' style="x">\x00\x1b[31m&amp;\ud800'
    odd = replace(process(900, evil, user=evil), unit=evil)
    seen = serving_node((odd, 8 * GIB), name=evil, own=70 * GIB)
    config = Config(plans=(Plan(evil, None, Flags(max_model_len=65536)),))
    page = outline(seen, config)
    plain = outline(FAILING, PLANS)
    assert [name for name, _ in page.tags] == [name for name, _ in plain.tags]
    assert "<script>alert(1)</script>" in page.text
    assert "\x00" not in page.text


def test_a_mistake_in_the_page_costs_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvwatch.export.statuspage.status_page", {}.__getitem__)
    content = render(cycle(FAILING), Config())
    assert b"kvwatch_restart_feasible" in content.metrics
    assert "The status page could not be made" in Outline(content.status()).text
    assert "status_page_failed" in caplog.text


def test_a_node_without_servers_or_nvml() -> None:
    text = outline(observation(Failure("nvml", "library_not_found", "no libnvidia-ml.so.1"))).text
    assert "No vLLM server found" in text
    assert "No GPU could be read" in text
    assert "nvml (library_not_found): no libnvidia-ml.so.1" in text


def test_a_source_that_is_down_says_why_and_since_when() -> None:
    failure = Failure("nvml", "timeout", "no answer within 5 s")
    seen = replace(
        serving_node(),
        sources=(SourceStatus("nvml", up=False, last_success=NOW - 90, seconds=None, failure=failure),),
    )
    text = outline(seen).text
    assert "No answer from nvml: what they tell is unknown." in text
    assert "Down no answer within 5 s 1 min 30 s ago not timed" in text


def test_several_servers_get_a_table_and_names() -> None:
    told = failing()
    told["servers"] = [told["servers"][0], {**told["servers"][0], "server": "second"}]
    page = outline(told)
    assert "2 of 2 servers would not start again" in page.text
    assert "second: Free memory on the card" in page.text
    assert {"server-0", "server-1"} <= set(page.ids)


def changed(change: Callable[[Document], None]) -> str:
    told = document(cycle(serving_node((NOTEBOOK, GIB))))
    change(told["servers"][0])
    return outline(told).text


def test_a_trend_has_a_time_and_a_picture() -> None:
    def fall(server: Document) -> None:
        server["trend"] |= {
            "margins": [{"time": NOW - 3600 + 60 * n, "margin_bytes": (61 - n) * 2**26} for n in range(61)],
            "infeasible_at": NOW + 4500,
            "margin_slope_bytes_per_second": -(2**30) / 3600,
            "kv_cache_full_at": {"0": NOW + 2 * 86400},
        }

    text = changed(fall)
    assert (
        "A restart becomes impossible in 1 h 15 min (09:15 UTC) if it goes on: 1.00 GiB less per hour."
        in text
    )
    assert "The KV cache of engine 0 is full in 2 d (Sun 17 Jan, 08:00 UTC)." in text
    assert "Lowest in the last 1 h: +64.0 MiB, on GPU 0." in text


def test_pending_changes_and_their_verdict() -> None:
    def pend(server: Document) -> None:
        server["pending"] = {
            **server["restart"],
            "feasible": None,
            "unknown": {"reason": "model_changed", "detail": "another model"},
            "source": "systemd",
            "files": ["/etc/systemd/system/vllm.service"],
            "changes": [{"setting": "max_model_len", "running": None, "next": "65536"}],
        }

    text = changed(pend)
    assert "From an estimate." not in text
    assert "With the changes that are pending: Unknown (model_changed): another model" in text
    assert "max_model_len not given 65536" in text
    assert "Read from /etc/systemd/system/vllm.service." in text


def test_a_pending_change_that_would_fail_has_remedies() -> None:
    def pend(server: Document) -> None:
        change = {"setting": "max_num_seqs", "running": "8", "next": "1024"}
        failed = {**failing()["servers"][0]["restart"], "basis": "modelled"}
        server["pending"] = {**failed, "source": None, "files": [], "changes": [change]}

    text = changed(pend)
    assert "With the changes that are pending: Free memory on the card, GPU 0: 2.15 GiB missing" in text
    assert "Would not start From an estimate. Free memory" in text
    assert "Any one of these makes it start" in text


def test_sleepers_sharers_and_lengths() -> None:
    def more(server: Document) -> None:
        server["wake"] = {"server": "x", "feasible": False, "margin_bytes": -GIB, "gpu": "0"}
        server["together"] = {
            "sharing": ["other"],
            "first": {"feasible": True},
            "last": {"feasible": False},
            "overcommitted": {},
        }
        server["request_tokens"] = {
            "count": 2000,
            "p50": 100.0,
            "p99": 900.0,
            "longest": 1500.0,
            "near_limit": 0,
        }

    text = changed(more)
    assert f"It sleeps and would not wake: {MINUS}1.00 GiB on GPU 0." in text
    assert (
        "If other on the same card stopped too: it would start as the first, it would not start as the last."
        in text
    )
    assert "Of 2,000 requests, half had at most 100 tokens, 99 % at most 900, all at most 1,500." in text


def test_only_the_largest_holders_are_listed() -> None:
    extra = tuple((process(1000 + number, "python"), 2**20) for number in range(30))
    text = outline(serving_node(*extra)).text
    assert "31 holders on this card" in text
    assert "and 11 smaller holders 11.0 MiB" in text


def test_attributes() -> None:
    assert tag("p", "<&>", class_="a", data_x=1, hidden=True, title=None) == (
        '<p class="a" data-x="1" hidden>&lt;&amp;&gt;</p>'
    )
    assert join("a", [None, ["b", tag("b", "c")]]) == "ab<b>c</b>"


def test_a_bar_stays_on_its_scale_and_shows_the_smallest_span() -> None:
    drawn = bar(100, [Span("x", 0, 50), Span("y", 100 - 1e-6, 100), Span("z", 50, 50)], height=10, mark=25)
    places = [tuple(map(float, found)) for found in re.findall(r'x="([\d.]+)%" width="([\d.]+)%"', drawn)]
    assert places == [(0, 50), (99.5, 0.5)]
    assert 'x1="25.000%"' in drawn


def test_a_sparkline_has_its_zero_and_what_is_coming() -> None:
    drawn = sparkline([(0, 10.0), (10, 5.0)], label="x", ahead=(20, 0.0))
    assert 'class="course" points="0.0,2.0 160.0,36.0"' in drawn
    assert 'class="coming" points="160.0,36.0 320.0,70.0"' in drawn


def test_flags_as_typed() -> None:
    changes = {"max_model_len": 1024, "enforce_eager": True, "enable_chunked_prefill": False}
    assert flag_text(changes) == "--max-model-len 1024 --enforce-eager --no-enable-chunked-prefill"
    assert signed_text(-GIB) == f"{MINUS}1.00 GiB"
