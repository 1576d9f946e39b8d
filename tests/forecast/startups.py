"""Start-ups whose public logs tell what was taken beside the KV cache. Sizes in GiB per GPU, as logged."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvwatch.blockmath.flags import Flags
from tests.support import ROOT


@dataclass(frozen=True, slots=True)
class Start:
    """One logged start on H100 80GB cards of 79.19 GiB.

    Attributes:
        model: a key of MODELS.
        release: as logged, or the last one that behaves like the log.
        flags: beside the maximum length, which bears on none of the figures.
        weights, activation, non_torch: as logged.
        graphs: the estimate that was logged, where one was.
        available: for the KV cache, where it was logged.
        other_weights: the checkpoint had a vision tower, or was quantized, which the model here is not.
    """

    model: str
    release: str
    flags: Flags
    weights: float
    activation: float
    non_torch: float
    graphs: float | None = None
    available: float | None = None
    other_weights: bool = False


def _sizes(architecture: str, model_type: str, **fields: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": model_type, "torch_dtype": "bfloat16", **fields}


def _llama(**fields: Any) -> dict[str, Any]:
    return _sizes(
        "LlamaForCausalLM",
        "llama",
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
        **fields,
    )


def _qwen3(**fields: Any) -> dict[str, Any]:
    return _sizes(
        "Qwen3ForCausalLM",
        "qwen3",
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=40960,
        **fields,
    )


def _known(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((ROOT / "tests/vectors/configs" / f"known__{name}.json").read_text())
    return config


MODELS: Mapping[str, Mapping[str, Any]] = {
    "Llama-3.1-8B": _llama(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32
    ),
    "Llama-3.3-70B": _llama(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64
    ),
    "Qwen3-0.6B": _qwen3(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        tie_word_embeddings=True,
    ),
    "Qwen3-8B": _qwen3(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32
    ),
    "Qwen3-32B": _qwen3(
        hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64
    ),
    "Qwen1.5-MoE-A2.7B": _sizes(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        hidden_size=2048,
        intermediate_size=5632,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
        num_experts=60,
        num_experts_per_tok=4,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=151936,
        max_position_embeddings=8192,
    ),
    "gpt-oss-20b": _sizes(
        "GptOssForCausalLM",
        "gpt_oss",
        hidden_size=2880,
        intermediate_size=2880,
        num_hidden_layers=24,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        num_local_experts=32,
        num_experts_per_tok=4,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 12,
        vocab_size=201088,
        max_position_embeddings=131072,
        quantization_config={"quant_method": "mxfp4"},
    ),
    "Qwen2.5-7B": _known("Qwen2.5-7B"),
    "Qwen3-14B": _known("Qwen3-14B"),
    "gemma-2-27b": _known("gemma-2-27b"),
    "gemma-3-12b": _known("gemma-3-12b-text"),
    "gemma-3-27b": _known("gemma-3-27b-text"),
    "granite-3.1-8b": _known("granite-3.1-8b"),
}


def _at(utilization: float, **flags: Any) -> Flags:
    return Flags(gpu_memory_utilization=utilization, **flags)


_TP2, _TP4 = _at(0.95, tensor_parallel_size=2), _at(0.95, tensor_parallel_size=4)

STARTS = (
    Start("gemma-3-27b", "0.19.0", _at(0.95), 51.45, 3.99, 0.26, 1.05, 19.53, other_weights=True),
    Start("gemma-2-27b", "0.19.0", _at(0.95), 50.72, 3.66, 0.26, 1.13, 20.59),
    Start("gemma-3-12b", "0.19.0", _at(0.95), 23.31, 3.94, 0.25, 1.02, 47.72, other_weights=True),
    Start("Qwen1.5-MoE-A2.7B", "0.19.0", _at(0.95), 26.67, 2.47, 0.25, 0.82, 45.83),
    Start("Llama-3.1-8B", "0.19.0", _at(0.95), 14.99, 1.89, 0.25, 0.84, 58.11),
    Start("Llama-3.1-8B", "0.19.0", _at(0.95, dtype="float32"), 29.98, 2.21, 0.25, 0.80, 42.80),
    Start("granite-3.1-8b", "0.19.0", _at(0.95), 15.25, 0.85, 0.46, 0.74, 58.66),
    Start("gpt-oss-20b", "0.19.0", _at(0.90, tensor_parallel_size=2), 7.01, 2.87, 2.07, 1.09, 59.32),
    Start("Llama-3.1-8B", "0.19.0", _TP2, 7.51, 1.89, 2.07),
    Start("Llama-3.1-8B", "0.19.0", _TP4, 3.77, 1.89, 2.13),
    Start("Qwen2.5-7B", "0.19.0", _TP2, 7.12, 2.21, 2.06),
    Start("Qwen2.5-7B", "0.19.0", _TP4, 3.55, 2.21, 2.13),
    Start("Llama-3.1-8B", "0.19.0", _at(0.95, pipeline_parallel_size=2), 7.51, 1.10, 0.07),
    Start("Llama-3.1-8B", "0.19.0", _at(0.95, pipeline_parallel_size=4), 4.26, 1.05, 0.07),
    Start("Qwen3-8B", "0.19.0", _at(0.95, pipeline_parallel_size=3), 5.48, 0.96, 0.07),
    Start("Qwen3-8B", "0.19.0", _at(0.95), 15.27, 2.21, 0.25),
    Start("Qwen2.5-7B", "0.19.0", _at(0.95), 14.25, 2.21, 0.24, None, 58.53),
    Start("Qwen3-14B", "0.16.0", _at(0.95), 27.52, 5.64, 0.13, None, 41.94),
    Start("Qwen3-14B", "0.17.0", _at(0.95), 27.52, 2.23, 0.13, None, 45.34),
    Start("Qwen3-14B", "0.18.0", _at(0.95), 27.52, 2.23, 0.25, None, 45.23),
    Start("gpt-oss-20b", "0.16.0", _at(0.90), 13.47, 7.38, 0.13, None, 50.28),
    Start(
        "Llama-3.3-70B",
        "0.16.0",
        _at(0.90, tensor_parallel_size=2),
        33.88,
        4.84,
        0.55,
        None,
        32.00,
        other_weights=True,
    ),
    Start("Llama-3.1-8B", "0.16.0", _at(0.90), 14.99, 4.76, 0.13, None, 51.38),
    Start("Qwen3-0.6B", "0.16.0", _at(0.90), 1.12, 5.56, 0.13, None, 64.45),
    Start("Qwen3-32B", "0.16.0", _at(0.90), 61.03, 5.64, 0.14, None, 4.45),
)
