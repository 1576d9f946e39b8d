"""What the next start would change, and the verdict on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from kvwatch.blockmath.flags import Flags
from kvwatch.config import GIB, Config
from kvwatch.forecast.bundle import forecast
from kvwatch.forecast.pending import Change, PendingForecast
from kvwatch.node import join
from kvwatch.observe.cycle import Observation, ObservedServer
from kvwatch.observe.records import Failure, ModelConfig, NextStart
from tests.nodes import LLAMA_8B, NOW, PARENT, gpu, observation, process, server, vllm_page

RUNNING = Flags(model="meta-llama/Llama-3.1-8B-Instruct", max_model_len=32768)
STARTED = ModelConfig("/m/config.json", LLAMA_8B, 1, 16 * GIB)


def node(one: ObservedServer, *, other: int = 0) -> Observation:
    held: dict[int, int | None] = {PARENT + 1: 73 * GIB}
    processes = (process(PARENT, "vllm"), process(PARENT + 1, "VLLM::EngineCore", ppid=PARENT))
    return observation((gpu(held, other=other),), processes, (one,))


def pending(
    coming: NextStart | Failure | Flags,
    *,
    running: Flags = RUNNING,
    launch: Mapping[str, Any] | None = None,
    other: int = 0,
    **page: Any,
) -> PendingForecast:
    """The forecast for a Llama 3.1 8B whose next start is `coming`."""
    if isinstance(coming, Flags):
        coming = start(coming)
    one = server(flags=running, **page)
    one = replace(one, launch=replace(one.launch, **(launch or {})), next_start=coming)
    seen = node(one, other=other)
    found = forecast(join(seen, Config()), Config()).pending
    return found["llama"]


def start(flags: Flags = RUNNING, **more: Any) -> NextStart:
    defaults: dict[str, Any] = {"model": STARTED, "first_model": STARTED, "version": "0.32.0"}
    return NextStart("systemd", ("/etc/chat.service",), flags, **{**defaults, **more})


def changes(found: PendingForecast) -> dict[str, tuple[str | None, str | None]]:
    return {change.setting: (change.running, change.coming) for change in found.changes}


def blocked_by(found: PendingForecast) -> str:
    assert found.verdict is not None, found.unknown
    assert found.verdict.feasible is False
    assert found.verdict.blocking is not None
    return found.verdict.blocking.check


def unknown(found: PendingForecast) -> str:
    assert found.verdict is None
    assert found.unknown is not None
    return found.unknown.reason


def test_nothing_is_pending_where_the_next_start_is_the_same() -> None:
    found = pending(RUNNING)
    assert (found.changes, found.verdict, found.unknown) == ((), None, None)
    assert found.feasible is None


def test_a_server_whose_next_start_was_not_looked_for_has_no_forecast() -> None:
    seen = node(server())
    assert forecast(join(seen, Config()), Config()).pending == {}


def test_a_launch_file_that_cannot_be_read_is_unknown() -> None:
    assert unknown(pending(Failure("launch", "dynamic_script", "depends on LEN"))) == "dynamic_script"


SAME = {
    "a default spelled out": (RUNNING, replace(RUNNING, tensor_parallel_size=1, kv_cache_dtype="auto")),
    "utilization at the default": (RUNNING, replace(RUNNING, gpu_memory_utilization=0.92)),
    "the running length spelled out": (replace(RUNNING, max_model_len=None), RUNNING),
}


@pytest.mark.parametrize("case", SAME)
def test_the_same_in_other_words_is_no_change(case: str) -> None:
    running, coming = SAME[case]
    assert changes(pending(coming, running=running)) == {}


def test_a_longer_length_that_fits() -> None:
    found = pending(replace(RUNNING, max_model_len=65536))
    assert changes(found) == {"max_model_len": ("32768", "65536")}
    assert found.feasible is True


def test_a_longer_length_that_does_not_fit() -> None:
    found = pending(replace(RUNNING, max_model_len=131072), num_blocks=5000)
    assert blocked_by(found) == "one_request"
    assert found.verdict is not None
    assert "To serve at least one request" in (found.verdict.message or "")


def test_a_length_that_is_given_no_more_is_the_models_own() -> None:
    found = pending(replace(RUNNING, max_model_len=None), num_blocks=5000)
    assert changes(found) == {"max_model_len": ("32768", None)}
    assert blocked_by(found) == "one_request"


def test_utilization_and_free_memory() -> None:
    found = pending(replace(RUNNING, gpu_memory_utilization=0.97), other=3 * GIB)
    assert changes(found) == {"gpu_memory_utilization": ("0.92 (default)", "0.97")}
    assert blocked_by(found) == "free_memory"
    assert pending(replace(RUNNING, gpu_memory_utilization=0.9)).feasible is True


def test_a_length_above_the_models_own_is_refused() -> None:
    assert blocked_by(pending(replace(RUNNING, max_model_len=200_000))) == "derived_length"
    allowed = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    found = pending(
        start(replace(RUNNING, max_model_len=200_000), environment=allowed), launch={"environment": allowed}
    )
    assert found.feasible is True


@pytest.mark.parametrize(
    ("setting", "value"),
    [("quantization", "fp8"), ("enforce_eager", True), ("max_num_batched_tokens", 65536)],
)
def test_what_was_not_measured_is_modelled(setting: str, value: Any) -> None:
    found = pending(replace(RUNNING, **{setting: value}))
    assert setting in changes(found)
    assert (found.feasible, found.basis) == (True, "modelled")
    assert any("modelled" in each for each in found.assumptions)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("tensor_parallel_size", 2),
        ("pipeline_parallel_size", 2),
        ("data_parallel_size", 2),
    ],
)
def test_what_was_not_measured_is_unknown(setting: str, value: Any) -> None:
    found = pending(replace(RUNNING, **{setting: value}))
    assert setting in changes(found)
    assert unknown(found) == "activation_unknown"


def test_what_was_not_measured_can_still_fail_for_certain() -> None:
    found = pending(replace(RUNNING, quantization="fp8"), other=10 * GIB)
    assert blocked_by(found) == "free_memory"
    ranks = pending(replace(RUNNING, tensor_parallel_size=2), other=10 * GIB)
    assert unknown(ranks) == "activation_unknown"


def test_batch_sizes_bound_from_one_side() -> None:
    fewer, more = (replace(RUNNING, max_num_batched_tokens=tokens) for tokens in (512, 65536))
    assert pending(fewer).feasible is True
    assert pending(fewer).basis == "measured"
    longer = [replace(one, max_model_len=131072) for one in (more, fewer)]
    assert blocked_by(pending(longer[0], num_blocks=5000)) == "one_request"
    assert pending(longer[0], num_blocks=5000).basis == "measured"
    assert pending(longer[1], num_blocks=5000).basis == "modelled"
    assert pending(replace(more, max_num_seqs=1)).basis == "modelled"


# --- the release ---------------------------------------------------------------------------------------


def of_release(version: str, **more: Any) -> dict[str, Any]:
    return {"page": vllm_page(version=version, gpu_memory_utilization=0.9, **more)}


def test_a_release_that_moves_the_defaults() -> None:
    found = pending(start(version="0.20.0"), **of_release("0.19.1"))
    assert changes(found) == {
        "vllm_version": ("0.19.1", "0.20.0"),
        "gpu_memory_utilization": ("0.9 (default)", "0.92 (default)"),
        "graph_memory_estimate": ("off (default)", "on (default)"),
    }
    assert unknown(found) == "release_changed"
    pinned = replace(RUNNING, gpu_memory_utilization=0.9)
    assert changes(
        pending(start(pinned, version="0.20.0"), running=pinned, **of_release("0.19.1"))
    ).keys() == {
        "vllm_version",
        "graph_memory_estimate",
    }


def test_the_default_of_the_next_release_can_ask_for_too_much() -> None:
    assert (
        blocked_by(pending(start(version="0.20.0"), other=6 * GIB, **of_release("0.19.1"))) == "free_memory"
    )
    assert pending(start(version="0.19.1"), other=6 * GIB, **of_release("0.19.1")).verdict is None


@pytest.mark.parametrize(("running", "coming"), [("0.32.0", "0.32.0+cu129"), ("0.32.0+cpu", "0.32.0")])
def test_a_build_of_the_same_release_is_no_change(running: str, coming: str) -> None:
    assert changes(pending(start(version=coming), page=vllm_page(version=running))) == {}


def test_swap_space_is_refused_since_0_18() -> None:
    swapping = replace(RUNNING, swap_space=4.0)
    found = pending(start(swapping, version="0.18.0"), running=swapping, **of_release("0.17.1"))
    assert changes(found)["vllm_version"] == ("0.17.1", "0.18.0")
    assert blocked_by(found) == "configuration"
    assert found.verdict is not None
    assert found.verdict.message == "vllm: error: unrecognized arguments: --swap-space 4"
    assert blocked_by(pending(swapping)) == "configuration"
    assert unknown(pending(start(swapping, version="0.17.2"), running=swapping, **of_release("0.17.1")))


def test_cache_bytes_are_refused_before_0_10_2_to_the_last_digit() -> None:
    told = replace(RUNNING, kv_cache_memory_bytes=10 * GIB)
    found = pending(start(told, version="0.10.0"))
    assert found.verdict is not None
    assert found.verdict.message == (
        "vllm: error: unrecognized arguments: --kv-cache-memory-bytes 10737418240"
    )


def test_flags_that_the_known_parser_does_not_have() -> None:
    found = pending(start(unknown_flags=("--max-modle-len",)))
    assert changes(found) == {"unknown_flags": (None, "--max-modle-len")}
    assert blocked_by(found) == "configuration"
    accepted = {"unknown_flags": ("--of-a-plugin",)}
    both = start(replace(RUNNING, max_model_len=16384), **accepted)
    assert pending(both, launch=accepted).feasible is True
    elsewhere = start(unknown_flags=("--new-flag",), version="0.33.0")
    assert unknown(pending(elsewhere)) == "release_changed"


def test_flags_whose_memory_nothing_here_follows() -> None:
    lora = {"enable_lora": "true", "max_lora_rank": "256"}
    found = pending(start(beside=lora))
    assert changes(found) == {"enable_lora": (None, "true"), "max_lora_rank": (None, "256")}
    assert unknown(found) == "flags_not_modelled"
    assert changes(pending(start(beside=lora), launch={"beside": lora})) == {}
    assert changes(pending(start(beside={"enable_lora": "false"}))) == {}
    longer = start(replace(RUNNING, max_model_len=131072), beside=lora)
    assert unknown(pending(longer)) == "flags_not_modelled"
    assert blocked_by(pending(start(beside=lora), other=20 * GIB)) == "free_memory"


# --- environment and files -----------------------------------------------------------------------------


def test_variables_that_the_source_sets() -> None:
    found = pending(start(environment={"VLLM_USE_V1": "0"}))
    assert changes(found) == {"VLLM_USE_V1": (None, "0")}
    assert unknown(found) == "environment_changed"


def test_other_devices() -> None:
    found = pending(start(visible_devices=("1", "2")), other=20 * GIB)
    assert changes(found) == {"visible_devices": (None, "1,2")}
    assert unknown(found) == "environment_changed"


def test_a_variable_that_goes_is_known_to_go_only_where_the_source_tells_all() -> None:
    set_now = {"environment": {"VLLM_USE_V1": "1", "HOME": "/root"}}
    assert changes(pending(start(), launch=set_now)) == {}
    assert changes(pending(start(whole_environment=True), launch=set_now)) == {"VLLM_USE_V1": ("1", None)}
    unread = {"failures": (Failure("launch", "environment_unreadable", "eacces"),)}
    assert changes(pending(start(environment={"VLLM_USE_V1": "0"}), launch=unread)) == {}


def test_a_model_directory_that_changed() -> None:
    shorter = replace(STARTED, config={**LLAMA_8B, "max_position_embeddings": 16384})
    found = pending(start(model=shorter))
    assert changes(found) == {
        "model_config": ('{"max_position_embeddings": 131072}', '{"max_position_embeddings": 16384}')
    }
    assert blocked_by(found) == "derived_length"
    longer = replace(STARTED, config={**LLAMA_8B, "max_position_embeddings": 262144})
    assert pending(start(model=longer)).basis == "modelled"
    heavier = replace(STARTED, weight_bytes=30 * GIB)
    assert unknown(pending(start(model=heavier))) == "model_changed"


def test_the_running_server_is_measured_with_the_model_it_started_with() -> None:
    other_layout = {**LLAMA_8B, "num_hidden_layers": 16}
    shorter = {**other_layout, "max_position_embeddings": 16384}
    found = pending(
        start(model=ModelConfig("/m/config.json", shorter, 2, 16 * GIB)),
        model=shorter,
    )
    assert blocked_by(found) == "derived_length"


def test_a_model_directory_that_is_gone() -> None:
    found = pending(start(model=Failure("models", "not_found", "model directory /m does not exist")))
    assert changes(found) == {"model_config": ("/m/config.json", "model directory /m does not exist")}
    assert unknown(found) == "model_config_unreadable"


def test_another_commit_with_the_same_figures_is_judged_as_measured() -> None:
    found = pending(start(model=replace(STARTED, path="/hub/snapshots/b/config.json")))
    assert changes(found).keys() == {"model_path"}
    assert found.feasible is True


def test_a_config_written_after_the_start() -> None:
    late = replace(STARTED, mtime_ns=int((NOW - 60) * 1e9))
    found = pending(start(model=late, first_model=late))
    assert changes(found).keys() == {"model_config"}
    hub = replace(late, path="/hub/snapshots/a/config.json")
    assert changes(pending(start(model=hub, first_model=hub))) == {}
    downloading = replace(hub, weight_bytes=GIB)
    assert changes(pending(start(model=hub, first_model=downloading))) == {}


def test_another_model() -> None:
    found = pending(start(replace(RUNNING, model="/models/other"), model=replace(STARTED, path="/o")))
    assert changes(found) == {"model": (RUNNING.model, "/models/other")}
    assert found.basis == "modelled"
    absent = start(replace(RUNNING, model="/models/other"), model=Failure("models", "not_found", "x"))
    assert unknown(pending(absent)) == "model_config_unreadable"


def test_a_config_file_edited_before_it_was_first_seen() -> None:
    edited = {"failures": (Failure("launch", "config_changed", "x"),), "config_file": "/etc/vllm.yaml"}
    found = pending(start(), launch=edited)
    assert found.changes == (Change("config_file", "as the server read it", "/etc/vllm.yaml, changed since"),)
    assert unknown(found) == "config_changed"
    assert blocked_by(pending(start(), launch=edited, other=20 * GIB)) == "free_memory"


def test_a_next_start_that_could_be_read_in_part_only() -> None:
    broken = (Failure("launch", "bad_flag", "--max-num-seqs: 'x' is not a whole number"),)
    assert unknown(pending(start(failures=broken))) == "bad_flag"
    assert pending(start(failures=broken), launch={"failures": broken}).unknown is None


def test_a_server_that_only_the_configuration_knows_is_compared_by_what_its_page_tells() -> None:
    coming = start(replace(RUNNING, max_model_len=65536, quantization="fp8", tensor_parallel_size=2))
    found = pending(coming, running=Flags(), launch={"pid": None})
    assert changes(found) == {"max_model_len": ("32768", "65536")}
    assert found.feasible is True
