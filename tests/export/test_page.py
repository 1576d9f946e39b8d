from __future__ import annotations

import json
import re

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from kvwatch.blockmath.flags import Flags
from kvwatch.config import GIB, Config, Plan
from kvwatch.export.catalogue import BY_NAME, FAMILIES
from kvwatch.export.cycle import Cycle, SelfState
from kvwatch.export.document import document
from kvwatch.export.page import Page, build_page
from kvwatch.forecast.bundle import forecast
from kvwatch.node import join
from kvwatch.observe.cycle import Observation
from kvwatch.observe.records import Failure, Histogram
from tests.nodes import (
    LLAMA_8B_BLOCK,
    NOW,
    PARENT,
    RESERVED,
    TOTAL,
    gpu,
    observation,
    process,
    server,
    serving_node,
)

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def cycle(seen: Observation, config: Config | None = None, **own: object) -> Cycle:
    snapshot = join(seen, config or Config())
    state = SelfState(cycles=3, cycle_seconds=0.01, errors={("nvml", "timeout"): 2}, **own)  # type: ignore[arg-type]
    return Cycle(snapshot, forecast(snapshot, config or Config()), state)


def samples(page: Page) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parse_text(page.text().decode())
        for sample in family.samples
    }


def values(found: Samples, name: str, **labels: str) -> list[float]:
    return [
        value
        for (sample, own), value in found.items()
        if sample == name and labels.items() <= dict(own).items()
    ]


def one(found: Samples, name: str, **labels: str) -> float:
    matching = values(found, name, **labels)
    assert len(matching) == 1, (name, labels, matching)
    return matching[0]


NOTEBOOK = process(900, "ipykernel_launcher", user="dana", unit="jupyter.service")


def test_a_whole_node() -> None:
    config = Config(plans=(Plan("long", None, Flags(max_model_len=131072)),))
    reasons = {"capacity": 2.0, "deferred": 1.0}
    seen = serving_node((NOTEBOOK, GIB), waiting=3, waiting_by_reason=reasons, preemptions=7)
    page = samples(build_page(cycle(seen, config), top=20))
    assert one(page, "kvwatch_gpu_memory_total_bytes", gpu="0", uuid="GPU-0") == TOTAL
    assert one(page, "kvwatch_gpu_memory_reserved_bytes") == RESERVED
    assert one(page, "kvwatch_gpu_memory_used_bytes") == 74 * GIB
    assert one(page, "kvwatch_gpu_memory_free_bytes") == TOTAL - RESERVED - 74 * GIB
    assert one(page, "kvwatch_gpu_memory_held_bytes", owner="server", server="llama") == 73 * GIB
    assert one(page, "kvwatch_gpu_memory_held_bytes", owner="foreign") == GIB
    assert one(page, "kvwatch_gpu_memory_held_bytes", owner="unattributed") == 0
    assert one(page, "kvwatch_holder_memory_bytes", pid="900", process="ipykernel_launcher") == GIB
    assert one(page, "kvwatch_holder_memory_bytes", user="dana", workload="jupyter.service") == GIB
    assert one(page, "kvwatch_holder_start_timestamp_seconds", gpu="0", pid="900") == NOW - 3600
    assert one(page, "kvwatch_process_visibility", gpu="0") == 1
    assert (
        one(page, "kvwatch_server_info", server="llama", version="0.32.0", layout="full", basis="measured")
        == 1
    )
    assert one(page, "kvwatch_server_up", server="llama") == 1
    assert one(page, "kvwatch_max_model_len_tokens", server="llama") == 32768
    assert one(page, "kvwatch_kv_cache_blocks", server="llama", engine="0") == 26_000
    assert one(page, "kvwatch_kv_cache_block_size_tokens") == 16
    assert one(page, "kvwatch_kv_cache_bytes") == 26_000 * LLAMA_8B_BLOCK
    assert one(page, "kvwatch_kv_cache_capacity_tokens") == 416_000
    assert one(page, "kvwatch_kv_cache_max_concurrency") == pytest.approx(416_000 / 32768)
    assert one(page, "kvwatch_kv_cache_usage_ratio") == 0.1
    assert one(page, "kvwatch_kv_headroom_tokens") == (25_999 - 2_600) * 16
    assert one(page, "kvwatch_requests_waiting", server="llama", engine="0") == 3
    for reason, waiting in reasons.items():
        told = {"server": "llama", "engine": "0", "reason": reason}
        assert one(page, "kvwatch_requests_waiting_by_reason", **told) == waiting
    assert one(page, "kvwatch_preemptions_total", server="llama", engine="0") == 7
    assert one(page, "kvwatch_kv_headroom_requests") == (25_999 - 2_600) // 2048
    assert one(page, "kvwatch_restart_feasible", server="llama") == 1
    assert sum(values(page, "kvwatch_restart_blocked", server="llama")) == 0
    assert {"free_memory", "kv_memory", "one_request"} <= {
        dict(labels)["check"] for name, labels in page if name == "kvwatch_restart_margin_bytes"
    }
    assert one(page, "kvwatch_plan_feasible", server="llama", plan="long") == 1
    assert one(page, "kvwatch_build_info", simulated="false") == 1
    assert one(page, "kvwatch_errors_total", source="nvml", reason="timeout") == 2
    assert one(page, "kvwatch_cycles_total") == 3
    assert one(page, "kvwatch_source_up", source="nvml") == 1


def test_an_infeasible_restart_names_one_check() -> None:
    page = samples(build_page(cycle(serving_node((NOTEBOOK, 8 * GIB), own=70 * GIB)), top=20))
    assert one(page, "kvwatch_restart_feasible", server="llama") == 0
    assert one(page, "kvwatch_restart_blocked", check="free_memory") == 1
    assert sum(values(page, "kvwatch_restart_blocked", server="llama")) == 1
    assert one(page, "kvwatch_restart_margin_bytes", check="free_memory") < 0


def test_what_is_unknown_is_absent_never_zero() -> None:
    seen = observation((gpu({PARENT + 1: None}),), (), (server(page=Failure("vllm", "timeout", "late")),))
    page = samples(build_page(cycle(seen), top=20))
    assert one(page, "kvwatch_server_up", server="llama") == 0
    assert (
        one(page, "kvwatch_forecast_unknown", server="llama", forecast="restart", reason="server_down") == 1
    )
    for family in (
        "kvwatch_restart_feasible",
        "kvwatch_restart_margin_bytes",
        "kvwatch_kv_cache_blocks",
        "kvwatch_max_model_len_tokens",
        "kvwatch_gpu_memory_held_bytes",
    ):
        assert values(page, family) == []


def test_a_down_server_leaves_only_its_name() -> None:
    page = samples(
        build_page(cycle(observation((), (), (server(page=Failure("vllm", "timeout", "x")),))), top=20)
    )
    names = {name for name, labels in page if dict(labels).get("server") == "llama"}
    assert names == {"kvwatch_server_info", "kvwatch_server_up", "kvwatch_forecast_unknown"}


def test_small_holders_are_folded() -> None:
    extra = tuple((process(900 + number, "python"), (10 - number) * 2**20) for number in range(5))
    page = samples(build_page(cycle(serving_node(*extra)), top=2))
    assert values(page, "kvwatch_holder_memory_bytes", pid="900") == [10 * 2**20]
    assert values(page, "kvwatch_holder_memory_bytes", pid="902") == []
    assert one(page, "kvwatch_holder_memory_bytes", pid="", owner="foreign") == (8 + 7 + 6) * 2**20
    assert sum(values(page, "kvwatch_holder_memory_bytes")) == one(
        page, "kvwatch_gpu_memory_held_bytes", owner="foreign"
    )


def test_a_sleeper_that_shares_its_card_and_was_never_pinned() -> None:
    seen = serving_node((NOTEBOOK, 8 * GIB), own=GIB, sleep_state="weights_offloaded")
    page = samples(build_page(cycle(seen), top=20))
    assert one(page, "kvwatch_wake_feasible", server="llama") == 0
    assert one(page, "kvwatch_wake_margin_bytes", server="llama") < 0
    assert one(page, "kvwatch_advice", server="llama", rule="utilization_not_pinned") == 1
    assert values(page, "kvwatch_restart_together_feasible") == []
    assert values(page, "kvwatch_request_tokens") == []
    assert values(page, "kvwatch_restart_infeasible_timestamp_seconds") == []


def test_observed_lengths_are_published() -> None:
    lengths = Histogram(((100.0, 99.0), (5000.0, 100.0), (float("inf"), 100.0)), None, 100.0)
    page = samples(build_page(cycle(serving_node(prompt_tokens=lengths, generation_tokens=lengths)), top=20))
    assert one(page, "kvwatch_request_tokens", quantile="0.5") == 200
    assert one(page, "kvwatch_request_tokens", quantile="1") == 10000
    assert one(page, "kvwatch_requests_near_limit_ratio") == 0


def test_labels_that_need_escaping_survive() -> None:
    odd = process(900, 'a"b\\c\nd', user="ü")
    page = samples(build_page(cycle(serving_node((odd, GIB))), top=20))
    assert one(page, "kvwatch_holder_memory_bytes", process='a"b\\c\nd', user="ü") == GIB


def test_both_formats_say_the_same() -> None:
    page = build_page(cycle(serving_node((NOTEBOOK, GIB))), top=20)
    text = samples(page)
    om = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parse_openmetrics(page.openmetrics().decode())  # type: ignore[no-untyped-call]
        for sample in family.samples
    }
    assert text == om


def test_the_page_keeps_the_catalogue() -> None:
    page = build_page(cycle(serving_node((NOTEBOOK, GIB))), top=20)
    for name, labels in samples(page):
        assert {key for key, _ in labels} == set(BY_NAME[name].labels)
    with pytest.raises(KeyError):
        Page().add("kvwatch_nonsense", 1)
    with pytest.raises(KeyError):
        Page().add("kvwatch_up", 1, gpu="0")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_names_follow_the_conventions(family: object) -> None:
    found = BY_NAME[family.name]  # type: ignore[attr-defined]
    assert re.fullmatch(r"kvwatch_[a-z0-9_]+", found.name)
    assert (found.kind == "counter") == found.name.endswith("_total")
    assert len(found.labels) <= 8
    assert not {"instance", "job", "env", "cluster"} & set(found.labels)
    assert found.help.endswith(".")


def test_the_document_is_json_and_says_the_same() -> None:
    config = Config(plans=(Plan("long", None, Flags(max_model_len=131072)),))
    told = document(cycle(serving_node((NOTEBOOK, 8 * GIB), own=70 * GIB), config))
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    found = told["servers"][0]
    assert found["restart"]["feasible"] is False
    assert found["restart"]["blocking"]["check"] == "free_memory"
    assert found["restart"]["remedies"][0]["pids"] == [900]
    assert found["plans"][0]["feasible"] is False
    assert {holder["pid"]: holder["owner"] for holder in told["gpus"][0]["holders"]} == {
        PARENT + 1: "server",
        900: "foreign",
    }


def test_the_document_tells_what_the_cache_checks_compare() -> None:
    restart = document(cycle(serving_node()))["servers"][0]["restart"]
    (site,) = restart["gpus"]
    margins = {check["check"]: check["margin_bytes"] for check in restart["checks"]}
    # The pool as it runs, without the block that vLLM keeps back.
    assert site["kv_bytes"] == pytest.approx(25_999 * LLAMA_8B_BLOCK, abs=LLAMA_8B_BLOCK)
    assert site["need_bytes"] == 32768 // 16 * LLAMA_8B_BLOCK
    assert site["kv_bytes"] - site["need_bytes"] == margins["one_request"]


def test_the_document_tells_the_course_of_the_margin() -> None:
    trend = document(cycle(serving_node()))["servers"][0]["trend"]
    assert trend["gpu"] == "0"
    assert [point["time"] for point in trend["margins"]] == [NOW]
