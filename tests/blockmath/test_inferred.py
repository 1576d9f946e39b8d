"""Unknown architectures: read where the structure is plain, refused where it is not."""

from __future__ import annotations

from typing import Any

import pytest

from kvwatch.blockmath.device import Device
from kvwatch.blockmath.errors import Unsupported
from kvwatch.blockmath.flags import Flags
from kvwatch.blockmath.pool import Pool, plan_pool
from kvwatch.blockmath.releases import Release

PLAIN: dict[str, Any] = {
    "architectures": ["BrandNewForCausalLM"],
    "model_type": "brand_new",
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "vocab_size": 1000,
}


def plan(**fields: Any) -> Pool:
    """The pool of the plain model with some fields added."""
    device = Device("NVIDIA H100 80GB HBM3", 80 << 30, (9, 0))
    return plan_pool({**PLAIN, **fields}, Flags(), device=device, release=Release.parse("0.32.0"))


def test_plain_decoder_is_read_and_marked() -> None:
    pool = plan()
    assert (pool.layout, pool.basis) == ("full", "inferred")
    assert pool.bytes_per_block == (12 * 16 * 2 * 8 * 128 * 2,)


def test_named_layer_types_are_read() -> None:
    pool = plan(layer_types=["sliding_attention", "full_attention"] * 6, sliding_window=512)
    assert (pool.layout, pool.basis) == ("sliding+full", "inferred")


def test_latents_are_read() -> None:
    pool = plan(kv_lora_rank=512, qk_rope_head_dim=64)
    assert (pool.layout, pool.basis) == ("mla", "inferred")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"sliding_window": 512}, "ambiguous_layers"),
        ({"layer_types": ["gated_attention"] * 12}, "unknown_layer_types"),
        ({"mamba_d_state": 128}, "unknown_architecture"),
        ({"linear_num_key_heads": 16}, "unknown_architecture"),
        ({"index_topk": 2048}, "unknown_architecture"),
        ({"num_attention_heads": None}, "incomplete_config"),
        ({"model_type": None}, "incomplete_config"),
    ],
)
def test_doubt_is_no_answer(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unsupported) as unknown:
        plan(**fields)
    assert unknown.value.reason == reason


def test_known_architecture_without_rules_here_is_no_answer() -> None:
    with pytest.raises(Unsupported) as unknown:
        plan(architectures=["InklingForCausalLM"])
    assert unknown.value.reason == "unknown_architecture"
