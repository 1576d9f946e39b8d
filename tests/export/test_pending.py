"""Pending changes on the page, in the document and on the terminal."""

from __future__ import annotations

from dataclasses import replace

from kvwatch.blockmath.flags import Flags
from kvwatch.export.document import document
from kvwatch.export.page import build_page
from kvwatch.export.text import status_text
from kvwatch.observe.cycle import Observation
from kvwatch.observe.records import Failure, NextStart
from tests.export.test_page import cycle, one, samples, values
from tests.nodes import serving_node


def seen(coming: NextStart | Failure | None) -> Observation:
    observed = serving_node(num_blocks=6000)
    return replace(observed, servers=tuple(replace(each, next_start=coming) for each in observed.servers))


def start(**flags: object) -> NextStart:
    told = Flags(max_model_len=32768).with_changes(**flags)
    return NextStart("systemd", ("/etc/systemd/system/chat.service",), told, version="0.32.0")


def test_a_change_that_fails() -> None:
    found = cycle(seen(start(max_model_len=131072)))
    page = samples(build_page(found, top=20))
    assert one(page, "kvwatch_pending_change", server="llama", setting="max_model_len") == 1
    assert one(page, "kvwatch_pending_feasible", server="llama") == 0
    assert one(page, "kvwatch_pending_blocked", server="llama", check="one_request") == 1
    assert sum(values(page, "kvwatch_pending_blocked", server="llama")) == 1
    pending = document(found)["servers"][0]["pending"]
    assert pending["source"] == "systemd"
    assert pending["files"] == ["/etc/systemd/system/chat.service"]
    assert pending["changes"] == [{"setting": "max_model_len", "running": "32768", "next": "131072"}]
    assert (pending["feasible"], pending["blocking"]["check"]) == (False, "one_request")
    assert {remedy["action"] for remedy in pending["remedies"]} >= {"max_model_len", "kv_cache_dtype"}
    text = " ".join(status_text(found).split())
    assert "pending: max_model_len: 32768 -> 131072" in text
    assert "the next start would fail: room for one full request on GPU 0: 4.28 GiB missing" in text
    assert "vLLM would say: To serve at least one request" in text
    assert "remedy: --max-model-len 95984 instead of 131072" in text


def test_a_change_that_works() -> None:
    found = cycle(seen(start(gpu_memory_utilization=0.9)))
    page = samples(build_page(found, top=20))
    assert one(page, "kvwatch_pending_feasible", server="llama") == 1
    assert sum(values(page, "kvwatch_pending_blocked", server="llama")) == 0
    text = " ".join(status_text(found).split())
    assert "pending: gpu_memory_utilization: 0.92 (default) -> 0.9" in text
    assert "the next start would succeed with these changes" in text


def test_what_is_unknown() -> None:
    found = cycle(seen(Failure("launch", "dynamic_script", "the server's arguments depend on LEN")))
    page = samples(build_page(found, top=20))
    labels = {"server": "llama", "forecast": "pending", "reason": "dynamic_script"}
    assert one(page, "kvwatch_forecast_unknown", **labels) == 1
    assert values(page, "kvwatch_pending_feasible") == []
    assert document(found)["servers"][0]["pending"]["source"] is None
    text = " ".join(status_text(found).split())
    assert "next start unknown (dynamic_script): the server's arguments depend on LEN" in text


def test_nothing_pending_adds_nothing() -> None:
    found = cycle(seen(start()))
    page = samples(build_page(found, top=20))
    assert not [name for name, _ in page if name.startswith("kvwatch_pending")]
    assert document(found)["servers"][0]["pending"]["changes"] == []
    assert "pending" not in status_text(found)
    assert document(cycle(seen(None)))["servers"][0]["pending"] is None


def test_the_verdict_of_the_restart_stays_its_own() -> None:
    page = samples(build_page(cycle(seen(start(max_model_len=131072))), top=20))
    assert one(page, "kvwatch_restart_feasible", server="llama") == 1
