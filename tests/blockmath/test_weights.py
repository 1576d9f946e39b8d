"""Parameter bytes against those that vLLM's own model classes allocate."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwatch.blockmath.errors import Refused, Unsupported
from kvwatch.blockmath.flags import Flags
from kvwatch.blockmath.weights import Weights, quantized, weight_bytes
from kvwatch.blockmath.weights.count import stage_layers
from tests.support import ROOT, shared_dir

VECTORS = ROOT / "tests" / "vectors"

EXCLUDED: Mapping[str, str] = {}
"""Rows that are not expected to agree, by name, with the reason. At present all do."""

QUANTIZED_TOLERANCE = 0.05
LOOSE = {
    "aic__nvidia__NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4": "its ignore list is in hf_quant_config.json only"
}
"""Quantized rows that agree within the tolerance, but not closely."""

DENSE = "known__Qwen2.5-7B"

Row = Mapping[str, Any]


def _folders() -> Iterator[Path]:
    yield VECTORS
    shared = shared_dir()
    if shared is not None:
        yield shared / "vectors"


@cache
def config(name: str) -> Mapping[str, Any]:
    for folder in _folders():
        path = folder / "configs" / f"{name}.json"
        if path.exists():
            loaded: dict[str, Any] = json.loads(path.read_text())
            return loaded
    raise FileNotFoundError(name)


@cache
def rows_by_name() -> Mapping[str, list[Row]]:
    rows: dict[str, dict[tuple[int, int, int], Row]] = {}
    for folder in _folders():
        with gzip.open(folder / "weights.jsonl.gz", "rt") as lines:
            for line in lines:
                row = json.loads(line)
                key = (row["tensor_parallel_size"], row["pipeline_parallel_size"], row["pp_stage"])
                rows.setdefault(row["name"], {})[key] = row
    return {name: list(by_key.values()) for name, by_key in rows.items()}


def computed(row: Row) -> Weights:
    content = config(row["name"])
    text = content.get("text_config") or {}
    described = content.get("quantization_config") or text.get("quantization_config")
    flags = Flags(
        tensor_parallel_size=row["tensor_parallel_size"],
        pipeline_parallel_size=row["pipeline_parallel_size"],
        quantization=None if described else row.get("quantization"),
    )
    return weight_bytes(content, flags)


def off(row: Row) -> float:
    """How far the computed bytes are from vLLM's, as a share of these."""
    truth: int = row["weight_bytes"]
    return computed(row).bytes_per_rank[row["pp_stage"]] / truth - 1


def names(*, quantization: bool) -> list[str]:
    return [
        name
        for name, rows in rows_by_name().items()
        if ("quantization" in rows[0]) is quantization and name not in EXCLUDED
    ]


@pytest.mark.parametrize("name", names(quantization=False))
def test_unquantized_bytes_are_exactly_those_of_vllm(name: str) -> None:
    for row in rows_by_name()[name]:
        weights = computed(row)
        assert weights.bytes_per_rank[row["pp_stage"]] == row["weight_bytes"], row
        assert weights.basis == "exact"
        assert weights.quantization is None
        assert weights.mla_absorbed_bytes[row["pp_stage"]] == row["mla_absorbed_bytes"]


@pytest.mark.parametrize("name", names(quantization=True))
def test_quantized_bytes_are_those_of_vllm_within_their_tolerance(name: str) -> None:
    for row in rows_by_name()[name]:
        weights = computed(row)
        assert abs(off(row)) < (QUANTIZED_TOLERANCE if name in LOOSE else 1e-3), row
        assert weights.basis == "modelled"
        assert weights.quantization is not None


def test_score_per_family() -> None:
    """Prints rows and the worst disagreement per model type; run with -s to read it."""
    worst: dict[str, list[float]] = defaultdict(list)
    for name, rows in rows_by_name().items():
        if name in EXCLUDED:
            print(f"excluded: {name}: {EXCLUDED[name]}")
            continue
        family = config(name)["model_type"] + ("" if "quantization" not in rows[0] else " (quantized)")
        worst[family] += [abs(off(row)) for row in rows]
    for family, misses in sorted(worst.items()):
        print(f"{family:32} {len(misses):4} rows, worst {max(misses):.4%}")
    exact = sum(miss == 0 for misses in worst.values() for miss in misses)
    total = sum(len(misses) for misses in worst.values())
    print(f"{exact} of {total} rows exact")
    assert exact >= 0.9 * total


def test_unknown_architectures_are_refused_not_guessed() -> None:
    with pytest.raises(Unsupported) as caught:
        weight_bytes({"model_type": "llama", "architectures": ["NobodyForCausalLM"]}, Flags())
    assert caught.value.reason == "unknown_architecture"
    assert "NobodyForCausalLM" in str(caught.value)


def test_a_tower_that_is_not_modelled_is_refused_not_left_out() -> None:
    model = {
        "model_type": "gemma4",
        "architectures": ["Gemma4ForConditionalGeneration"],
        "text_config": config("tf__gemma4_text"),
        "audio_config": {"model_type": "gemma4_audio"},
    }
    with pytest.raises(Unsupported) as caught:
        weight_bytes(model, Flags())
    assert caught.value.reason == "unknown_tower"


@pytest.mark.parametrize("flags", [Flags(speculative_config={"method": "ngram"}), Flags(cpu_offload_gb=4.0)])
def test_what_flags_add_or_take_is_said_where_it_is_not_counted(flags: Flags) -> None:
    weights = weight_bytes(config(DENSE), flags)
    assert weights.bytes_per_rank == weight_bytes(config(DENSE), Flags()).bytes_per_rank
    assert weights.assumptions


def test_a_missing_field_is_named() -> None:
    known = {**config("known__granite-4.0-h-tiny"), "model_type": "nobody"}
    del known["vocab_size"]
    with pytest.raises(Unsupported, match="vocab_size"):
        weight_bytes(known, Flags())


@cache
def more_models() -> Mapping[str, Row]:
    """Further architectures, with what vLLM 0.32.0's classes allocate for them, built without memory.

    A row holds a config.json, without what weights do not depend on, and of each case the tensor-parallel
    size, pipeline-parallel size, stage and bytes.
    """
    with gzip.open(VECTORS / "weights_more.jsonl.gz", "rt") as lines:
        return {row["name"]: row for row in map(json.loads, lines)}


@pytest.mark.parametrize("name", more_models())
def test_further_architectures_are_exact(name: str) -> None:
    model = more_models()[name]
    for tensor, pipeline, stage, truth in model["stages"]:
        flags = Flags(tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)
        assert weight_bytes(model["config"], flags).bytes_per_rank[stage] == truth


LEFT_OUT_MATTERS = {
    "tf__aria": "a mapping of the projector has no plain default",
    "tf__cohere2_vision": "its class gives the tower other sizes than the tower's own class",
    "tf__glmasr": "its class gives the decoder other sizes than the decoder's own class",
    "tf__granite_swa": "layer_types, whose presence turns sinks on, is worked out",
    "tf__llava": "its class gives the tower other sizes than the tower's own class",
    "tf__llava_next_video": "its class gives the tower other sizes than the tower's own class",
    "tf__muse_glimmer": "the projector's width is worked out",
    "tf__olmo_hybrid": "layer_types is worked out",
    "tf__phi4_multimodal": "the encoder's final size is worked out",
    "tf__zamba2": "the hybrid layers are worked out",
}
"""Class defaults that a file cannot leave out here, with the reason."""


def bare(content: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json that says nothing but which classes it is for."""
    kept = {name: content[name] for name in ("architectures", "model_type") if name in content}
    sections = {
        name: value for name, value in content.items() if isinstance(value, dict) and "model_type" in value
    }
    return kept | {name: bare(value) for name, value in sections.items()}


@pytest.mark.parametrize("name", [name for name in rows_by_name() if name.startswith("tf__")])
def test_fields_left_out_take_the_defaults_of_their_class(name: str) -> None:
    if name in LEFT_OUT_MATTERS:
        with suppress(Unsupported):
            assert weight_bytes(bare(config(name)), Flags()) != weight_bytes(config(name), Flags())
        return
    assert weight_bytes(bare(config(name)), Flags()) == weight_bytes(config(name), Flags())


def test_sizes_that_do_not_divide_are_refused_as_vllm_does() -> None:
    with pytest.raises(Refused) as caught:
        weight_bytes(config("known__Qwen2.5-7B"), Flags(tensor_parallel_size=8))
    assert caught.value.kind == "indivisible"


def test_models_without_stages_are_refused_as_vllm_does() -> None:
    with pytest.raises(Refused) as caught:
        weight_bytes(config("known__whisper-large-v3"), Flags(pipeline_parallel_size=2))
    assert caught.value.kind == "no_pipeline"


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [(32, 1, (32,)), (61, 2, (31, 30)), (62, 4, (15, 16, 16, 15)), (30, 4, (7, 8, 8, 7)), (3, 3, (1, 1, 1))],
)
def test_layers_are_split_as_vllm_splits_them(layers: int, stages: int, expected: tuple[int, ...]) -> None:
    assert stage_layers(layers, stages) == expected


def test_parameters_are_those_of_the_whole_model_on_any_number_of_ranks() -> None:
    one = weight_bytes(config("known__Llama-2-7B"), Flags())
    many = weight_bytes(config("known__Llama-2-7B"), Flags(tensor_parallel_size=8, pipeline_parallel_size=4))
    assert one.parameters == many.parameters == 6_738_415_616


def test_float32_doubles_what_is_in_the_models_dtype() -> None:
    half = weight_bytes(config("known__Llama-2-7B"), Flags(dtype="bfloat16"))
    full = weight_bytes(config("known__Llama-2-7B"), Flags(dtype="float32"))
    assert full.bytes_per_rank[0] == 2 * half.bytes_per_rank[0]


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(Unsupported, match="int3"):
        weight_bytes(config("known__Llama-2-7B"), Flags(dtype="int3"))


def test_expert_parallelism_spreads_whole_experts_over_all_engines() -> None:
    model = config("tf__mixtral")
    cut = weight_bytes(model, Flags(tensor_parallel_size=4))
    spread = weight_bytes(model, Flags(tensor_parallel_size=4, enable_expert_parallel=True))
    assert spread.bytes_per_rank == cut.bytes_per_rank
    wider = Flags(tensor_parallel_size=4, data_parallel_size=2, enable_expert_parallel=True)
    assert weight_bytes(model, wider).bytes_per_rank[0] < cut.bytes_per_rank[0]


def test_fewer_bits_take_fewer_bytes() -> None:
    sizes = [weight_bytes(config(DENSE), Flags()).bytes_per_rank[0]]
    sizes += [quantized(config(DENSE), Flags(), scheme).bytes_per_rank[0] for scheme in ("fp8", "w4a16")]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[1] == computed(rows_by_name()["known__Qwen2.5-7B-FP8-dynamic"][0]).bytes_per_rank[0]


def test_the_hypothetical_scheme_is_an_assumption() -> None:
    weights = quantized(config(DENSE), Flags(), "w4a16")
    assert weights.basis == "modelled"
    assert any("w4a16" in assumption for assumption in weights.assumptions)


def test_a_quantized_model_is_not_quantized_again() -> None:
    with pytest.raises(Unsupported) as caught:
        quantized(config("known__Qwen2.5-7B-AWQ"), Flags(), "fp8")
    assert caught.value.reason == "already_quantized"


@pytest.mark.parametrize("where", ["flag", "config"])
def test_an_unknown_scheme_is_refused(where: str) -> None:
    model = dict(config(DENSE))
    if where == "config":
        model["quantization_config"] = {"quant_method": "twobits"}
    flags = Flags(quantization="twobits") if where == "flag" else Flags()
    with pytest.raises(Unsupported) as caught:
        weight_bytes(model, flags)
    assert caught.value.reason == "unknown_quantization"


def test_a_quantization_without_a_method_is_no_quantization_and_said_so() -> None:
    model = {**config(DENSE), "quantization_config": {"quant_algo": "FP8"}}
    weights = weight_bytes(model, Flags())
    assert weights.basis == "exact"
    assert weights.assumptions


@pytest.mark.parametrize(
    "ignored",
    [
        [
            "model.layers.0.self_attn.q_proj",
            "model.layers.0.self_attn.k_proj",
            "model.layers.0.self_attn.v_proj",
        ],
        ["model.layers.0.self_attn.qkv_proj"],
        ["re:.*layers\\.0\\.self_attn\\.(q|k|v|qkv)_proj$"],
        ["*layers.0.self_attn.q*"],
    ],
)
def test_ignored_layers_keep_the_models_dtype(ignored: list[str]) -> None:
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    all_layers = weight_bytes({**config(DENSE), "quantization_config": fp8}, Flags()).bytes_per_rank[0]
    some = {**config(DENSE), "quantization_config": {**fp8, "modules_to_not_convert": ignored}}
    hidden, heads, kv_heads, head = 3584, 28, 4, 128
    merged = hidden * (heads + 2 * kv_heads) * head
    scales = 3 * 4
    assert weight_bytes(some, Flags()).bytes_per_rank[0] == all_layers + merged - scales


PER_WEIGHT = {
    "w8a8": ({"num_bits": 8, "type": "int", "strategy": "channel"}, {"num_bits": 8}, 1.0),
    "w8a16": ({"num_bits": 8, "type": "int", "strategy": "channel"}, None, 1.0),
    "fp8": ({"num_bits": 8, "type": "float", "strategy": "channel"}, {"num_bits": 8, "dynamic": True}, 1.0),
    "fp8 blocks": (
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
        {"num_bits": 8, "dynamic": True},
        1.0,
    ),
    "w4a16": ({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}, None, 0.5 + 2 / 128),
    "w4a16 with zeros": (
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": False},
        None,
        0.5 + 2.5 / 128,
    ),
    "nvfp4": ({"num_bits": 4, "type": "float", "group_size": 16}, {"num_bits": 4}, 0.5 + 1 / 16),
    "mxfp4": ({"num_bits": 4, "type": "float", "group_size": 32}, {"num_bits": 4}, 0.5 + 1 / 32),
}
"""compressed-tensors groups: weights, activations, and the bytes that one weight takes with its scale."""


@pytest.mark.parametrize("name", PER_WEIGHT)
def test_compressed_tensors_store_weights_at_their_width(name: str) -> None:
    weights, activations, per_weight = PER_WEIGHT[name]
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    described = {"quant_method": "compressed-tensors", "config_groups": {"a": group}, "ignore": ["lm_head"]}
    stored = weight_bytes({**config(DENSE), "quantization_config": described}, Flags()).bytes_per_rank[0]
    linear = rows_by_name()["known__Qwen2.5-7B-FP8-dynamic"][0]["by_dtype"]["float8_e4m3fn"]
    plain = weight_bytes(config(DENSE), Flags()).bytes_per_rank[0] - 2 * linear
    assert stored == pytest.approx(plain + per_weight * linear, rel=2e-3)


def test_gpt_oss_20b_takes_what_a_real_server_logged() -> None:
    model = {
        **more_models()["tf__gpt_oss"]["config"],
        "num_hidden_layers": 24,
        "num_local_experts": 32,
        "quantization_config": {"quant_method": "mxfp4"},
    }
    assert weight_bytes(model, Flags()).bytes_per_rank[0] == pytest.approx(14.68e9, rel=1e-3)


def test_gptq_rules_that_leave_layers_out_are_followed() -> None:
    described = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    rules = {**described, "dynamic": {"-:.*mlp.*": {}, "+:.*attn.*": {"bits": 4}}}
    every = weight_bytes({**config(DENSE), "quantization_config": described}, Flags()).bytes_per_rank[0]
    some = weight_bytes({**config(DENSE), "quantization_config": rules}, Flags()).bytes_per_rank[0]
    assert every < some < weight_bytes(config(DENSE), Flags()).bytes_per_rank[0]


MODELS = sorted(name for name in rows_by_name() if name.startswith(("known__", "more__")))


@settings(deadline=None, max_examples=50)
@given(st.sampled_from(MODELS), st.sampled_from([2, 4, 8]))
def test_ranks_together_hold_the_model_and_none_holds_more(name: str, ranks: int) -> None:
    """What is replicated or padded does not shrink: never below a fair share, never above the whole."""
    alone = weight_bytes(config(name), Flags()).bytes_per_rank[0]
    try:
        shared = weight_bytes(config(name), Flags(tensor_parallel_size=ranks)).bytes_per_rank[0]
    except Refused:
        return
    assert alone / ranks <= shared <= alone


@settings(deadline=None, max_examples=50)
@given(st.sampled_from(MODELS), st.integers(2, 6), st.sampled_from([1, 2]))
def test_stages_together_hold_the_model_at_least_once(name: str, stages: int, ranks: int) -> None:
    """Tied embeddings, towers and classes with ends on every stage make the sum larger."""
    try:
        whole = weight_bytes(config(name), Flags(tensor_parallel_size=ranks)).bytes_per_rank
        split = weight_bytes(
            config(name), Flags(tensor_parallel_size=ranks, pipeline_parallel_size=stages)
        ).bytes_per_rank
    except Refused:
        return
    assert len(split) == stages
    assert sum(split) >= whole[0]
    assert max(split) <= whole[0]
