from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import pytest

from kvwatch.observe.exposition import MalformedPage
from kvwatch.observe.records import Engine
from kvwatch.observe.vllm_page import VllmPage, read_page
from tests.observe.vllm_pages import gauge, histogram, info, page, recorded, series


def reasons(result: VllmPage) -> list[str]:
    return [failure.reason for failure in result.failures]


def only(result: VllmPage) -> Engine:
    (engine,) = result.engines
    return engine


# --- recorded pages: vLLM 0.32.0 on CPU, 128 blocks of 128 tokens per engine ------------------------------

CONFIG = Engine(
    engine="0",
    num_blocks=128,
    block_size=128,
    cache_dtype="auto",
    gpu_memory_utilization=0.92,
    kv_cache_memory_bytes=8388608,
    enable_prefix_caching=True,
    mamba_cache_mode="none",
    max_concurrency=8.0,
    size_tokens=16384,
)
IDLE = replace(
    CONFIG,
    usage=0.0,
    running=0.0,
    waiting=0.0,
    waiting_by_reason={"capacity": 0.0, "deferred": 0.0},
    preemptions=0.0,
    sleep_state="awake",
)
BEFORE_FIRST_REQUEST = replace(IDLE, usage=None, running=None, waiting=None, waiting_by_reason={})
STAGES = replace(IDLE, num_blocks=256, max_concurrency=16.0, size_tokens=32768)


def without_histograms(engines: Iterable[Engine]) -> list[Engine]:
    return [replace(engine, prompt_tokens=None, generation_tokens=None) for engine in engines]


@pytest.mark.parametrize(
    ("name", "engines"),
    [
        ("dev_idle", [IDLE]),
        (
            "dev_load",
            [
                replace(
                    IDLE,
                    usage=0.9921259842519685,
                    running=14.0,
                    waiting=6.0,
                    waiting_by_reason={"capacity": 6.0, "deferred": 0.0},
                )
            ],
        ),
        ("dev_after", [replace(IDLE, preemptions=5.0)]),
        ("dp2_idle", [BEFORE_FIRST_REQUEST, replace(BEFORE_FIRST_REQUEST, engine="1")]),
        ("dp2_after", [IDLE, replace(IDLE, engine="1")]),
        (
            "idle_default",
            [
                replace(
                    IDLE,
                    num_blocks=16384,
                    kv_cache_memory_bytes=1 << 30,
                    max_concurrency=1024.0,
                    size_tokens=2097152,
                )
            ],
        ),
        ("pp2_idle", [STAGES]),
        (
            "tp2_api2_idle",
            [replace(BEFORE_FIRST_REQUEST, num_blocks=256, max_concurrency=16.0, size_tokens=32768)],
        ),
    ],
)
def test_recorded_page(name: str, engines: list[Engine]) -> None:
    result = read_page(recorded(f"0.32.0-{name}"))
    assert without_histograms(result.engines) == engines
    assert result.failures == ()
    assert result.has_vllm_families


def test_recorded_histograms() -> None:
    engine = only(read_page(recorded("0.32.0-dev_after")))
    prompt = engine.prompt_tokens
    assert prompt is not None
    assert (prompt.sum, prompt.count) == (12000.0, 20.0)
    assert prompt.buckets[-4:] == ((500.0, 0.0), (1000.0, 20.0), (2000.0, 20.0), (math.inf, 20.0))
    assert engine.generation_tokens is not None
    assert engine.generation_tokens.count == 20.0


def test_recorded_histograms_are_kept_apart_by_engine() -> None:
    first, second = read_page(recorded("0.32.0-dp2_after")).engines
    assert first.prompt_tokens is not None
    assert second.prompt_tokens is not None
    assert (first.prompt_tokens.sum, second.prompt_tokens.sum) == (15100.0, 13700.0)


def test_recorded_identity_is_the_start_of_the_process() -> None:
    assert read_page(recorded("0.32.0-dev_idle")).identity == 1.79601243669e09
    assert read_page(recorded("0.32.0-dp2_idle")).identity is None


# --- one page in the manner of each era -------------------------------------------------------------------


def old(name: str, value: float) -> str:
    return gauge(name, value, engine=None)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        pytest.param(
            [
                series(
                    "vllm:cache_config_info",
                    {
                        "block_size": "16",
                        "cache_dtype": "auto",
                        "gpu_memory_utilization": "0.9",
                        "num_cpu_blocks": "2048",
                        "num_gpu_blocks": "1001",
                        "sliding_window": "4096",
                        "swap_space_bytes": "4294967296",
                    },
                    "1.0",
                ),
                old("gpu_cache_usage_perc", 0.25),
                old("cpu_cache_usage_perc", 0.75),
                old("num_requests_running", 3.0),
                old("num_requests_waiting", 1.0),
                old("num_requests_swapped", 9.0),
                old("num_preemptions_total", 2.0),
            ],
            Engine(
                engine="0",
                num_blocks=1001,
                block_size=16,
                cache_dtype="auto",
                gpu_memory_utilization=0.9,
                sliding_window=4096,
                swap_space=4.0,
                usage=0.25,
                running=3.0,
                waiting=1.0,
                preemptions=2.0,
            ),
            id="0.3.3",
        ),
        pytest.param(
            [
                info(
                    None,
                    enable_prefix_caching="False",
                    num_gpu_blocks_override="None",
                    is_attention_free="False",
                ),
                old("gpu_cache_usage_perc", 0.5),
                old("gpu_prefix_cache_hit_rate", -1.0),
            ],
            Engine(
                engine="0",
                num_blocks=1001,
                block_size=16,
                cache_dtype="auto",
                gpu_memory_utilization=0.9,
                enable_prefix_caching=False,
                usage=0.5,
            ),
            id="0.6.6",
        ),
        pytest.param(
            [info(None, swap_space="4"), gauge("gpu_cache_usage_perc", 1 / 1001, engine="0")],
            Engine(
                engine="0",
                num_blocks=1001,
                block_size=16,
                cache_dtype="auto",
                gpu_memory_utilization=0.9,
                swap_space=4.0,
                usage=1 / 1001,
            ),
            id="0.8.5",
        ),
        pytest.param(
            [info("0"), gauge("gpu_cache_usage_perc", 0.75), gauge("kv_cache_usage_perc", 0.5)],
            Engine(
                engine="0",
                num_blocks=1001,
                block_size=16,
                cache_dtype="auto",
                gpu_memory_utilization=0.9,
                usage=0.5,
            ),
            id="0.10.2 with both usage families",
        ),
        pytest.param(
            [
                info(
                    "3",
                    cache_dtype="fp8_e4m3",
                    kv_cache_size_tokens="16000",
                    kv_cache_max_concurrency="1.95",
                    num_gpu_blocks_override="1001",
                    mamba_block_size="784",
                    mamba_cache_mode="align",
                    kv_cache_memory_bytes="1073741824",
                ),
                gauge("kv_cache_usage_perc", 0.5, engine="3"),
                gauge("engine_sleep_state", 0.0, engine="3", sleep_state="awake"),
                gauge("engine_sleep_state", 0.0, engine="3", sleep_state="weights_offloaded"),
                gauge("engine_sleep_state", 1.0, engine="3", sleep_state="discard_all"),
            ],
            Engine(
                engine="3",
                num_blocks=1001,
                block_size=16,
                cache_dtype="fp8_e4m3",
                gpu_memory_utilization=0.9,
                kv_cache_memory_bytes=1 << 30,
                num_blocks_override=1001,
                mamba_cache_mode="align",
                mamba_block_size=784,
                max_concurrency=1.95,
                size_tokens=16000,
                usage=0.5,
                sleep_state="discard_all",
            ),
            id="0.33, one rank behind an external load balancer, asleep",
        ),
    ],
)
def test_page_of_an_era(lines: list[str], expected: Engine) -> None:
    result = read_page(page(*lines))
    assert result.engines == (expected,)
    assert result.failures == ()


# --- several engines --------------------------------------------------------------------------------------


def test_the_sum_of_blocks_is_divided_among_engines() -> None:
    lines = [info(str(number), num_gpu_blocks="4000") for number in range(4)]
    assert [engine.num_blocks for engine in read_page(page(*lines)).engines] == [1000] * 4


def test_engines_are_in_the_order_of_their_numbers() -> None:
    lines = [info(number, num_gpu_blocks="12") for number in ("10", "2", "0")]
    assert [engine.engine for engine in read_page(page(*lines)).engines] == ["0", "2", "10"]


def test_one_row_serves_all_engines_of_0_9() -> None:
    result = read_page(page(info("0", num_gpu_blocks="2000"), gauge("gpu_cache_usage_perc", 0.5, engine="1")))
    assert [(engine.num_blocks, engine.block_size) for engine in result.engines] == [(1000, 16), (1000, 16)]
    assert result.failures == ()


def test_a_sum_that_does_not_divide_gives_no_number() -> None:
    result = read_page(page(info("0"), info("1")))
    assert [engine.num_blocks for engine in result.engines] == [None, None]
    assert reasons(result) == ["uneven_engines"]


def test_blocks_without_engine_label_belong_to_nobody_in_particular() -> None:
    lines = [info(None), gauge("gpu_cache_usage_perc", 0.5, "0"), gauge("gpu_cache_usage_perc", 0.25, "1")]
    result = read_page(page(*lines))
    assert [(engine.num_blocks, engine.block_size, engine.usage) for engine in result.engines] == [
        (None, 16, 0.5),
        (None, 16, 0.25),
    ]
    assert reasons(result) == ["ambiguous_engines"]


def test_a_gauge_without_engine_label_among_several_engines_is_left_out() -> None:
    lines = [
        info("0", num_gpu_blocks="4"),
        info("1", num_gpu_blocks="4"),
        gauge("num_requests_running", 7, None),
    ]
    result = read_page(page(*lines))
    assert [engine.running for engine in result.engines] == [None, None]
    assert reasons(result) == ["ambiguous_engines"]


def test_rows_that_disagree_on_the_sum_give_no_number() -> None:
    result = read_page(page(info("0", num_gpu_blocks="2000"), info("1", num_gpu_blocks="2002")))
    assert [engine.num_blocks for engine in result.engines] == [None, None]
    assert reasons(result) == ["conflicting_rows"]


def test_two_configurations_for_one_engine_give_none() -> None:
    result = read_page(page(info("0", block_size="16"), info("0", block_size="32")))
    assert only(result).block_size is None
    assert reasons(result) == ["conflicting_rows"]


def test_counters_and_histograms_add_up_over_models() -> None:
    lines = [
        info(),
        gauge("num_preemptions_total", 2, model="a"),
        gauge("num_preemptions_total", 3, model="b"),
        gauge("num_requests_running", 1, model="a"),
        gauge("num_requests_running", 4, model="b"),
        *histogram("request_prompt_tokens", {"1.0": 1, "10.0": 3, "+Inf": 4}, model="a"),
        *histogram("request_prompt_tokens", {"1.0": 0, "10.0": 2, "+Inf": 2}, model="b"),
    ]
    engine = only(read_page(page(*lines)))
    assert (engine.preemptions, engine.running) == (5.0, 5.0)
    assert engine.prompt_tokens is not None
    assert engine.prompt_tokens.buckets == ((1.0, 1.0), (10.0, 5.0), (math.inf, 6.0))
    assert (engine.prompt_tokens.sum, engine.prompt_tokens.count) == (1000.0, 6.0)


# --- what must not become a number ------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-0.1", "1.0001", "50"])
def test_usage_outside_its_range_is_left_out(value: str) -> None:
    result = read_page(page(info(), gauge("kv_cache_usage_perc", value)))
    assert only(result).usage is None
    assert reasons(result) == ["bad_value"]


def test_usage_rows_that_disagree_are_left_out() -> None:
    lines = [gauge("kv_cache_usage_perc", 0.5, model="a"), gauge("kv_cache_usage_perc", 0.6, model="b")]
    result = read_page(page(info(), *lines))
    assert only(result).usage is None
    assert reasons(result) == ["bad_value"]


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "2.5"])
@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("num_requests_running", "running"),
        ("num_requests_waiting", "waiting"),
        ("num_preemptions_total", "preemptions"),
    ],
)
def test_what_is_no_count_is_left_out(name: str, field: str, value: str) -> None:
    result = read_page(page(info(), gauge(name, value), gauge(name, 1, model="other")))
    assert getattr(only(result), field) is None
    assert reasons(result) == ["bad_value"]


@pytest.mark.parametrize(
    ("label", "field", "texts"),
    [
        ("num_gpu_blocks", "num_blocks", ["-5", "1e3", "many", "9" * 30, "٣"]),
        ("block_size", "block_size", ["16.0", "-16", "NaN", ""]),
        ("gpu_memory_utilization", "gpu_memory_utilization", ["nan", "inf", "1.2", "-0.9", "0", "92%"]),
        ("kv_cache_memory_bytes", "kv_cache_memory_bytes", ["-1", "8 GiB"]),
        ("kv_cache_size_tokens", "size_tokens", ["12.5", "-1"]),
        ("kv_cache_max_concurrency", "max_concurrency", ["inf", "nan", "-1", "1_0"]),
        ("enable_prefix_caching", "enable_prefix_caching", ["true", "1"]),
        ("cache_dtype", "cache_dtype", ["", "x" * 1000, "a b"]),
        ("sliding_window", "sliding_window", ["-1", "[4096]"]),
    ],
)
def test_a_label_of_the_wrong_type_is_left_out(label: str, field: str, texts: list[str]) -> None:
    for text in texts:
        result = read_page(page(info("0", **{label: text})))
        assert getattr(only(result), field) is None, text
        assert reasons(result) == ["bad_value"], text


@pytest.mark.parametrize("text", ["None", "0"])
def test_blocks_that_are_not_known_yet_are_absent(text: str) -> None:
    result = read_page(page(info("0", num_gpu_blocks=text)))
    assert only(result).num_blocks is None
    assert result.failures == ()


@pytest.mark.parametrize(
    "counts",
    [
        {"1.0": 5, "2.0": 4, "+Inf": 6},
        {"1.0": 1, "2.0": 2},
        {"1.0": 1, "x": 2, "+Inf": 3},
        {"1.0": 1, "9" * 100: 2, "+Inf": 3},
        {"1.0": 1, "+Inf": 1e308},
        {"1.0": 1, "+Inf": "+Inf"},
        {"1.0": 1, "1.00": 1, "+Inf": 3},
        {"1.0": -1, "+Inf": 3},
        {"1.0": 1.5, "+Inf": 3},
        {"1.0": "NaN", "+Inf": 3},
    ],
)
def test_a_histogram_that_cannot_be_is_left_out(counts: dict[str, float | str]) -> None:
    result = read_page(page(info(), *histogram("request_prompt_tokens", counts)))
    assert only(result).prompt_tokens is None
    assert "bad_histogram" in reasons(result)


def test_counts_that_no_server_reaches_are_left_out_before_their_sum_is_infinite() -> None:
    lines = [
        info(),
        *(gauge("num_requests_running", 1e308, model=model) for model in "ab"),
        *(gauge("num_requests_waiting_by_reason", 1e308, model=model, reason="capacity") for model in "ab"),
        *(
            line
            for model in "ab"
            for line in histogram("request_prompt_tokens", {"+Inf": 1e308}, model=model)
        ),
    ]
    engine = only(read_page(page(*lines)))
    assert (engine.running, engine.waiting_by_reason, engine.prompt_tokens) == (None, {}, None)


def test_a_count_of_minus_zero_is_zero() -> None:
    engine = only(read_page(page(info(), *histogram("request_prompt_tokens", {"+Inf": "-0"}))))
    assert engine.prompt_tokens is not None
    assert repr(engine.prompt_tokens.count) == "0.0"


def test_histograms_with_different_bounds_are_not_added() -> None:
    lines = [
        *histogram("request_prompt_tokens", {"1.0": 1, "+Inf": 2}, model="a"),
        *histogram("request_prompt_tokens", {"2.0": 1, "+Inf": 2}, model="b"),
    ]
    result = read_page(page(info(), *lines))
    assert only(result).prompt_tokens is None
    assert reasons(result) == ["bad_histogram"]


@pytest.mark.parametrize(
    "values",
    [
        {"awake": 1.0, "discard_all": 1.0},
        {"asleep": 1.0},
        {"awake": 0.5},
    ],
)
def test_a_sleep_state_that_cannot_be_is_left_out(values: dict[str, float]) -> None:
    lines = [gauge("engine_sleep_state", value, sleep_state=state) for state, value in values.items()]
    result = read_page(page(info(), *lines))
    assert only(result).sleep_state is None
    assert reasons(result) == ["bad_value"]


def test_a_waiting_reason_fit_for_no_label_is_left_out() -> None:
    result = read_page(page(info(), gauge("num_requests_waiting_by_reason", 1, reason="x" * 500)))
    assert only(result).waiting_by_reason == {}
    assert reasons(result) == ["bad_value"]


def test_an_info_row_that_is_not_one_gives_no_engine() -> None:
    result = read_page(page(info().replace(" 1.0", " 0.0")))
    assert result.engines == ()
    assert reasons(result) == ["bad_value"]


# --- pages that are no vLLM page --------------------------------------------------------------------------


def test_a_page_without_cache_information_has_no_engines() -> None:
    result = read_page(page("process_start_time_seconds 5.0", "http_requests_total 3.0"))
    assert result.engines == ()
    assert not result.has_vllm_families
    assert result.identity == 5.0
    assert reasons(result) == ["no_cache_config_info"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "empty_page"),
        (b"\n", "empty_page"),
        (b"<!DOCTYPE html><html></html>\n", "not_metrics"),
        (b'\n{"detail": "Not Found"}\n', "not_metrics"),
        (b"hello\nworld\n", "not_metrics"),
        (page(info(), gauge("kv_cache_usage_perc", 0.5))[:-1], "truncated"),
        (page(gauge("kv_cache_usage_perc", 0.5, "zero")), "bad_label"),
        (page(*(gauge("kv_cache_usage_perc", 0.5, str(number)) for number in range(300))), "too_many_series"),
        (
            page(*(gauge("kv_cache_usage_perc", 0.5, model=str(number)) for number in range(5001))),
            "too_many_series",
        ),
        (page(info("0", note="x" * 1_000_000)), "line_too_long"),
    ],
)
def test_refused_page(body: bytes, reason: str) -> None:
    with pytest.raises(MalformedPage) as caught:
        read_page(body)
    assert caught.value.reason == reason
