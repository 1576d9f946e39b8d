from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest

from kvwatch.blockmath.flags import Flags
from kvwatch.blockmath.weights import weight_bytes
from kvwatch.config import GIB, Config, Plan
from kvwatch.forecast.plans import PlanForecast, forecast_plans
from kvwatch.forecast.restart import forecast_restart
from kvwatch.node import join
from kvwatch.observe.cycle import Observation
from kvwatch.observe.records import Failure, ModelConfig
from tests.nodes import LLAMA_8B, LLAMA_8B_BLOCK, PARENT, gpu, observation, process, server, vllm_page

# What an 8B in bf16 leaves of 0.92 of the card: 14.96 GiB of weights and some two GiB beside.
BLOCKS = 28_000


def node(gpus: int = 1, *, plan_models: dict[str, Any] | None = None) -> Observation:
    cards = [gpu({PARENT + 1: 73 * GIB})] + [gpu({}, index=str(index)) for index in range(1, gpus)]
    processes = (process(PARENT, "vllm"), process(PARENT + 1, "VLLM::EngineCore", ppid=PARENT))
    seen = observation(tuple(cards), processes, (server(num_blocks=BLOCKS),))
    return replace(seen, plan_models=plan_models or {})


def judge(seen: Observation, **flags: Any) -> PlanForecast:
    plan = Plan("p", None, Flags.from_mapping(flags))
    snapshot = join(seen, Config())
    restart = forecast_restart(snapshot.servers[0], snapshot, Config())
    (found,) = forecast_plans((plan,), restart, snapshot)
    return found


def available(found: PlanForecast) -> int:
    """Bytes for KV that the verdict rests on."""
    assert found.verdict is not None
    return next(
        check.margin_bytes + LLAMA_8B_BLOCK
        for check in found.verdict.checks
        if check.check == "kv_memory" and check.margin_bytes is not None
    )


def test_a_plan_that_leaves_all_but_the_cache_is_measured() -> None:
    found = judge(node(), max_model_len=65536, kv_cache_dtype="fp8")
    assert (found.feasible, found.basis) == (True, "measured")


@pytest.mark.parametrize(
    ("release", "flags"),
    [
        ("0.32.0", {"swap_space": 4}),
        ("0.32.0", {"swap_space": 4, "max_num_seqs": 16}),
        ("0.10.1", {"kv_cache_memory_bytes": "4G"}),
        ("0.13.0", {"max_model_len": "auto"}),
    ],
)
def test_a_flag_that_the_release_does_not_have(release: str, flags: dict[str, Any]) -> None:
    page = vllm_page(version=release, num_blocks=BLOCKS, max_concurrency=None, size_tokens=None)
    seen = node()
    found = judge(replace(seen, servers=(replace(seen.servers[0], vllm=page),)), **flags)
    assert found.verdict is not None, found.unknown
    assert found.verdict.blocking is not None
    assert found.verdict.blocking.check == "configuration"
    assert "argument" in (found.verdict.message or "")


def test_fewer_sequences_give_the_cache_what_the_sampler_took() -> None:
    found = judge(node(), max_num_seqs=16)
    assert (found.feasible, found.basis) == (True, "modelled")
    assert available(found) > BLOCKS * LLAMA_8B_BLOCK
    assert any("modelled" in text for text in found.assumptions)


def test_a_larger_batch_takes_from_the_cache() -> None:
    assert available(judge(node(), max_num_batched_tokens=65536)) < BLOCKS * LLAMA_8B_BLOCK


def test_quantized_weights_give_the_cache_half_of_the_weights() -> None:
    whole = weight_bytes(LLAMA_8B, Flags()).bytes_per_rank[0]
    found = judge(node(), quantization="fp8")
    gained = available(found) - BLOCKS * LLAMA_8B_BLOCK
    assert 0.35 * whole < gained < 0.5 * whole


def test_another_model_is_weighed_by_its_own_config() -> None:
    shallow = {**LLAMA_8B, "num_hidden_layers": 16}
    models = {"p": ModelConfig("/m/small/config.json", shallow, 1)}
    found = judge(node(plan_models=models), model="/m/small")
    assert (found.feasible, found.basis) == (True, "modelled")
    huge = {**LLAMA_8B, "num_hidden_layers": 320}
    found = judge(node(plan_models={"p": ModelConfig("/m/huge/config.json", huge, 1)}), model="/m/huge")
    assert found.feasible is False
    assert found.verdict is not None
    assert found.verdict.blocking is not None
    assert found.verdict.blocking.check == "kv_memory"


@pytest.mark.parametrize("models", [{}, {"p": Failure("models", "not_found", "no such folder")}])
def test_another_model_that_cannot_be_read_is_unknown(models: dict[str, Any]) -> None:
    found = judge(node(plan_models=models), model="/m/nowhere")
    assert found.feasible is None
    assert found.unknown is not None
    assert found.unknown.reason == "model_config_unreadable"


def test_more_cards_are_looked_for_on_the_node() -> None:
    found = judge(node(gpus=4), tensor_parallel_size=2)
    assert (found.feasible, found.basis) == (True, "modelled")
    assert any("GPU 1" in text for text in found.assumptions)
    alone = judge(node(gpus=1), tensor_parallel_size=2)
    assert alone.feasible is None
    assert alone.unknown is not None
    assert alone.unknown.reason == "gpu_unknown"


def test_heads_that_cannot_be_split_are_refused() -> None:
    found = judge(node(gpus=4), tensor_parallel_size=3)
    assert found.feasible is False
    assert found.verdict is not None
    assert found.verdict.blocking is not None
    assert found.verdict.blocking.check == "configuration"


def test_what_is_not_modelled_is_unknown() -> None:
    found = judge(node(gpus=4), data_parallel_size=2)
    assert found.feasible is None
    assert found.unknown is not None
    assert found.unknown.reason == "activation_unknown"


def test_a_margin_within_the_doubt_is_unknown() -> None:
    tight = replace(node(), servers=(server(num_blocks=40, max_model_len=512),))
    lengths = range(1024, 131072, 1024)
    verdicts = [judge(tight, max_num_seqs=512, max_model_len=length).feasible for length in lengths]
    order = [verdict for verdict, _ in groupby(verdicts)]
    assert order in ([True, None, False], [None, False], [True, None])
