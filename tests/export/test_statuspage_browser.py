"""The status page in a real Chromium, over HTTP with its policy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvwatch.blockmath.flags import Flags
from kvwatch.config import GIB, Config, Plan
from kvwatch.export.content import render
from kvwatch.export.server import Content, ExporterServer
from kvwatch.observe.records import Failure
from kvwatch.units import bytes_text
from tests.export.chromium import PROGRAM, Browser, Page, browser
from tests.export.test_page import NOTEBOOK, cycle
from tests.nodes import gpu, observation, process, server, serving_node

pytestmark = [
    pytest.mark.skipif(PROGRAM is None, reason="needs Chromium"),
    pytest.mark.xdist_group("chromium"),
]

PLANS = Config(plans=(Plan("longer", None, Flags(max_model_len=65536)),))
SHOWN = {
    *("total_bytes", "free_bytes", "reserved_bytes", "bytes", "free_next_bytes", "start_cost_bytes"),
    *("budget_bytes", "non_kv_bytes", "kv_bytes", "need_bytes", "margin_bytes"),
    *("max_model_len", "free_tokens", "free_requests", "usage"),
}
LONG = "a-very-long-name-" * 7
NODES = {
    "failing": serving_node((NOTEBOOK, 8 * GIB), own=70 * GIB),
    "starting": serving_node((NOTEBOOK, GIB)),
    "down": observation(
        (gpu({101: None}, memory=False),),
        (process(1, "x"),),
        (server(page=Failure("vllm", "connection_refused", "nothing listens on 127.0.0.1:8000")),),
    ),
    "blind": observation(Failure("nvml", "library_not_found", "no libnvidia-ml.so.1")),
    "long names": serving_node((process(900, LONG, user=LONG, unit=LONG), 8 * GIB), own=70 * GIB, name=LONG),
}
CONTENTS = {name: render(cycle(seen, PLANS), PLANS) for name, seen in NODES.items()}

CONTRASTS = """
(() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (c) => c.slice(0, 3).map((v) => v / 255)
    .map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c.length < 4 || c[3] > 0) return c;
    }
    return [255, 255, 255];
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (!node.data.trim() || element.closest("svg, script, style") || !element.checkVisibility()) continue;
    const [a, b] = [light(parse(getComputedStyle(element).color)), light(behind(element))];
    found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), node.data.trim()]);
  }
  return found;
})()
"""
FIGURES = """
[...document.querySelectorAll("data")].map((e) => ({
  field: e.dataset.field, value: Number(e.value), text: e.textContent,
  gpu: e.closest("[data-gpu]")?.dataset.gpu, server: e.closest("[data-server]")?.dataset.server,
}))
"""
BEYOND = """
[...document.querySelectorAll("main *")]
  .filter((e) => !e.closest(".spoken, thead") && e.getBoundingClientRect().right > innerWidth + 1)
  .map((e) => e.outerHTML.slice(0, 80))
"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture
def page(chromium: Browser) -> Iterator[Page]:
    tab = Page(chromium)
    yield tab
    tab.close()


@pytest.fixture(scope="module")
def exporter() -> Iterator[ExporterServer]:
    running = ExporterServer(["127.0.0.1:0"])
    running.start()
    yield running
    running.close()


def show(page: Page, exporter: ExporterServer, content: Content, **look: Any) -> None:
    exporter.publish(content)
    page.look(**look)
    page.open(f"http://{exporter.addresses[0]}/")


@pytest.mark.parametrize("name", CONTENTS)
def test_text_can_be_read_in_light_and_dark(page: Page, exporter: ExporterServer, name: str) -> None:
    show(page, exporter, CONTENTS[name])
    for dark in (False, True):
        page.look(dark=dark)
        contrasts = page.evaluate(CONTRASTS)
        assert len(contrasts) > 20
        assert [found for found in contrasts if found[0] < 4.5] == []
    assert page.complaints() == []


@pytest.mark.parametrize("name", CONTENTS)
def test_nothing_scrolls_sideways(page: Page, exporter: ExporterServer, name: str) -> None:
    show(page, exporter, CONTENTS[name])
    page.evaluate("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
    for width in (360, 480, 768, 1200):
        page.look(width=width)
        assert page.evaluate(BEYOND) == [], width
        assert page.evaluate("document.documentElement.scrollWidth") == width


@pytest.mark.parametrize("name", CONTENTS)
def test_figures_are_those_of_the_json(page: Page, exporter: ExporterServer, name: str) -> None:
    show(page, exporter, CONTENTS[name])
    told = page.evaluate("fetch('/api/v1/snapshot').then((answer) => answer.json())")
    assert told == json.loads(CONTENTS[name].snapshot())
    figures = page.evaluate(FIGURES)
    for figure in figures:
        scope = next((one for one in told["servers"] if one["server"] == figure.get("server")), told)
        known = numbers(scope, figure["field"]) | numbers(told["gpus"], figure["field"])
        assert figure["value"] in known, figure
        if figure["field"].endswith("bytes"):
            plain = figure["text"].replace("\N{MINUS SIGN}", "-").removeprefix("+")
            assert plain == bytes_text(figure["value"])
    shown = {figure["field"] for figure in figures}
    if name in ("failing", "starting"):
        assert shown >= SHOWN


def numbers(value: Any, field: str) -> set[float]:
    """Every number that a document has under one name."""
    if isinstance(value, list):
        return set().union(*(numbers(one, field) for one in value))
    if not isinstance(value, dict):
        return set()
    own = {value[field]} if isinstance(value.get(field), int | float) else set()
    return own.union(*(numbers(one, field) for one in value.values()))


def test_the_bar_is_drawn_to_scale(page: Page, exporter: ExporterServer) -> None:
    show(page, exporter, CONTENTS["starting"])
    rectangle = "(() => {{ const r = document.querySelector('#gpu-0').closest('article').querySelector('{}')"
    share = page.evaluate(
        f"{rectangle.format('.bar .server-0').replace('{{', '{')}.getBoundingClientRect().width;"
        " return r / document.querySelector('article .bar').getBoundingClientRect().width; })()"
    )
    card = json.loads(CONTENTS["starting"].snapshot())["gpus"][0]
    assert share == pytest.approx(73 * GIB / card["total_bytes"], abs=0.005)


def test_a_reader_of_the_screen_finds_its_way(page: Page, exporter: ExporterServer) -> None:
    show(page, exporter, CONTENTS["failing"])
    tree = page.call("Accessibility.getFullAXTree")["nodes"]
    nodes = [
        (node["role"]["value"], node.get("name", {}).get("value", "")) for node in tree if not node["ignored"]
    ]
    roles = [role for role, _ in nodes]
    assert {"banner", "main", "contentinfo", "navigation", "status"} <= set(roles)
    assert {("region", "GPUs"), ("region", "Servers"), ("region", "Sources")} <= set(nodes)
    (bar,) = [name for role, name in nodes if role == "image" and name.startswith("GPU 0:")]
    assert bar == (
        "GPU 0: llama 70.0 GiB, free 1.32 GiB, foreign 8.00 GiB, reserved 335 MiB;"
        " the next start's budget is 73.0 GiB"
    )
    assert [name for role, name in nodes if role in ("button", "link", "table", "image") and not name] == []
    assert "rowheader" in roles
    assert "columnheader" in roles
    levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3,h4')].map((e) => Number(e.tagName[1]))")
    assert levels[0] == 1
    assert all(later - earlier <= 1 for earlier, later in pairwise(levels))


def test_the_keyboard_reaches_everything_and_shows_where_it_is(page: Page, exporter: ExporterServer) -> None:
    show(page, exporter, CONTENTS["failing"])
    seen = []
    for _ in range(20):
        page.press("Tab")
        where = page.evaluate(
            "[document.activeElement.tagName, getComputedStyle(document.activeElement).outlineStyle]"
        )
        if where[0] == "BODY":
            break
        seen.append(where)
    assert [name for name, _ in seen][:2] == ["A", "BUTTON"]
    assert {name for name, _ in seen} == {"A", "BUTTON", "SUMMARY"}
    assert {outline for _, outline in seen} == {"solid"}


def test_without_scripts_all_is_there_and_it_reloads(page: Page, exporter: ExporterServer) -> None:
    show(page, exporter, CONTENTS["failing"])
    page.evaluate("document.querySelectorAll('main button').forEach((e) => e.remove())")
    with_scripts = page.evaluate("document.querySelector('main').innerText")
    show(page, exporter, CONTENTS["failing"], scripts=False)
    text = page.evaluate("document.querySelector('main').innerText")
    assert text.split() == with_scripts.split()
    assert page.evaluate("document.querySelector('meta[http-equiv=refresh]').content") == "15"
    assert page.complaints() == []


REFRESHED = """
new Promise((resolve) => {
  const check = () => document.title.startsWith(TITLE) ? resolve(true) : setTimeout(check, 50);
  document.dispatchEvent(new Event("visibilitychange"));
  check();
})
"""


def test_it_refreshes_itself_and_keeps_what_the_reader_opened(page: Page, exporter: ExporterServer) -> None:
    show(page, exporter, CONTENTS["failing"])
    page.evaluate("document.querySelector('#server-0-gpu-0 summary').click()")
    page.evaluate("document.querySelector('#server-0-basis summary').click()")
    page.evaluate("document.querySelector('#server-0-basis summary').focus()")
    exporter.publish(CONTENTS["starting"])
    page.evaluate(REFRESHED.replace("TITLE", "'llama would start'"))
    assert page.evaluate("document.querySelector('#announced').textContent") == "llama would start again"
    assert page.evaluate("document.querySelector('h1').textContent") == "llama would start again"
    opened = page.evaluate("[...document.querySelectorAll('details')].filter((e) => e.open).map((e) => e.id)")
    assert "server-0-basis" in opened
    assert "server-0-gpu-0" not in opened
    assert page.evaluate("document.activeElement.closest('details').id") == "server-0-basis"
    assert page.complaints() == []


def test_it_refreshes_on_under_a_focused_button_but_not_under_a_selection(
    page: Page, exporter: ExporterServer
) -> None:
    show(page, exporter, CONTENTS["failing"])
    page.evaluate("document.querySelector('ol button').focus()")
    exporter.publish(CONTENTS["long names"])
    page.evaluate(REFRESHED.replace("TITLE", "'a-very-long'"))
    focused = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert focused == "Copy --gpu-memory-utilization 0.88"
    page.evaluate("getSelection().selectAllChildren(document.querySelector('h1'))")
    exporter.publish(CONTENTS["starting"])
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    assert "Waiting while text is selected." in page.evaluate("document.querySelector('#updates').innerText")
    assert page.evaluate("document.title").startswith("a-very-long")
    page.evaluate("getSelection().removeAllRanges()")
    page.evaluate(REFRESHED.replace("TITLE", "'llama would start'"))
    assert page.complaints() == []


def test_it_says_so_when_kvwatch_is_gone(page: Page) -> None:
    gone = ExporterServer(["127.0.0.1:0"])
    gone.start()
    show(page, gone, CONTENTS["failing"])
    gone.close()
    page.evaluate(
        "new Promise((resolve) => { const check = () => document.querySelector('#updates').textContent"
        ".includes('does not answer') ? resolve(true) : setTimeout(check, 50);"
        " document.dispatchEvent(new Event('visibilitychange')); check(); })"
    )
    assert page.evaluate("document.querySelector('h1').textContent") == "llama would not start again"


def test_flags_can_be_copied(page: Page, exporter: ExporterServer) -> None:
    show(page, exporter, CONTENTS["failing"])
    page.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    page.evaluate("document.querySelector('ol button').click()")
    wait = "new Promise((done) => { const check = () => document.querySelector('ol button').textContent"
    page.evaluate(f"{wait} === 'Copied' ? done(true) : setTimeout(check, 20); check(); }})")
    assert page.evaluate("navigator.clipboard.readText()") == "--gpu-memory-utilization 0.88"


def test_pictures_of_names_that_try_to_break_out(
    page: Page, exporter: ExporterServer, tmp_path: Path
) -> None:
    evil = "<img src=x onerror=alert(1)>'\"</style></script>"
    seen = serving_node((process(900, evil, user=evil), 8 * GIB), own=70 * GIB, name=evil)
    show(page, exporter, render(cycle(seen), Config()))
    assert page.evaluate("document.querySelectorAll('img').length") == 0
    assert evil in page.evaluate("document.querySelector('main').innerText")
    assert page.complaints() == []
