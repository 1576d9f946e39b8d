"""Families with experts, as data."""

from __future__ import annotations

from kvwatch.blockmath.modelconfig import Section
from kvwatch.blockmath.weights.decoder import UNSPLIT, Decoder, Layer, Plan, dense_first, uniform
from kvwatch.blockmath.weights.dense import BIASED, granite_attention
from kvwatch.blockmath.weights.layers import (
    Attention,
    Experts,
    Mlp,
    Norms,
    column,
    head_dim,
    heads,
    hidden,
)
from kvwatch.blockmath.weights.parts import Block, Parts, With
from kvwatch.blockmath.weights.shard import Shard

PER_HEAD = Attention(qkv_bias="attention_bias", qk_norm="head")
SHARED_EXPERT = Experts(
    shared_width="shared_expert_intermediate_size", shared_gate=True, shared_name="mlp.shared_expert"
)
DEEPSEEK_SHARED = "n_shared_experts"


def every(dense: Layer, sparse: Layer, always: Layer, *, optional: bool = False) -> Plan:
    """Experts on every ``decoder_sparse_step``-th layer, except those in ``mlp_only_layers``.

    With ``optional``, a file that names no experts describes a dense model.
    """

    def plan(f: Section, i: int) -> Layer:
        step = f.whole("decoder_sparse_step", 1)
        experts = f.get("num_experts", 0 if optional else 1)
        is_dense = i in (f.get("mlp_only_layers") or ()) or not experts or (i + 1) % step
        return (*always, *(dense if is_dense else sparse))

    return plan


def sparse_list(dense: Layer, sparse: Layer, always: Layer) -> Plan:
    """Layers told apart by ``mlp_layer_types``, or where absent by ``first_k_dense_replace``."""

    def plan(f: Section, i: int) -> Layer:
        kinds = f.get("mlp_layer_types")
        is_dense = kinds[i] == "dense" if kinds else i < f.whole("first_k_dense_replace", 0)
        return (*always, *(dense if is_dense else sparse))

    return plan


def _ernie(f: Section, i: int) -> Layer:
    start, end = f.whole("moe_layer_start_index", 0), f.whole("moe_layer_end_index", -1)
    last = f.whole("num_hidden_layers") - 1 if end < 0 else end
    attention = Attention(qkv_bias="use_bias", out_bias="use_bias")
    if start <= i <= last and (i + 1) % f.whole("moe_layer_interval", 1) == 0 and f.get("moe_num_experts"):
        experts = Experts(
            ("moe_num_experts",), router_dtype="float32", correction=True, shared="moe_num_shared_experts"
        )
        return (attention, experts, Norms())
    return (attention, Mlp(bias="use_bias"), Norms())


def _llama4(f: Section, i: int) -> Layer:
    step = f.whole("interleave_moe_layer_step", 1)
    stated = f.get("moe_layers")
    is_sparse = i in stated if stated else step > 0 and (i + 1) % step == 0
    if is_sparse:
        experts = Experts(
            ("num_local_experts",),
            ("intermediate_size",),
            shared_width="intermediate_size",
            shared_name="feed_forward.shared_expert",
            name="feed_forward",
        )
        return (BIASED, experts, Norms())
    return (BIASED, Mlp(width=("intermediate_size_mlp",), name="feed_forward"), Norms())


MIXTRAL = Decoder(
    uniform(
        Attention(), Experts(("num_local_experts",), ("intermediate_size",), name="block_sparse_moe"), Norms()
    ),
    everywhere=UNSPLIT,
)


def _granite_moe(f: Section, _i: int) -> Layer:
    return (granite_attention(f), GRANITE_EXPERTS, Norms())


GRANITE_EXPERTS = Experts(
    ("num_local_experts",),
    ("intermediate_size",),
    shared_width="shared_intermediate_size",
    shared_name="shared_mlp",
    name="block_sparse_moe",
)
GRANITE_MOE = Decoder(_granite_moe, everywhere=UNSPLIT)
GPT_OSS = Decoder(
    uniform(
        Attention(qkv_bias=True, out_bias=True, sinks=True),
        Experts(("num_local_experts",), ("intermediate_size",), router_bias=True, bias=True),
        Norms(),
    ),
    everywhere=UNSPLIT,
)
QWEN2_MOE = Decoder(
    every((Mlp(),), (SHARED_EXPERT,), (Attention(qkv_bias="qkv_bias"), Norms())),
    everywhere=UNSPLIT,
)
QWEN3_MOE = Decoder(every((Mlp(),), (Experts(),), (PER_HEAD, Norms())), everywhere=UNSPLIT)
QWEN3_MOE_SPLIT = Decoder(QWEN3_MOE.plan)
OLMOE = Decoder(
    uniform(
        Attention(qkv_bias="attention_bias", qk_norm="all"),
        Experts(("num_experts",), ("intermediate_size",)),
        Norms(),
    ),
    everywhere=UNSPLIT,
)
GLM4_MOE = Decoder(
    dense_first(
        (Attention(qkv_bias="attention_bias", qk_norm="head?use_qk_norm"), Mlp(), Norms()),
        (
            Attention(qkv_bias="attention_bias", qk_norm="head?use_qk_norm"),
            Experts(router_dtype="float32", correction=True, shared=DEEPSEEK_SHARED),
            Norms(),
        ),
    )
)
FLEX_OLMO = Decoder(
    uniform(
        Attention(qkv_bias="attention_bias", qk_norm="all"),
        Experts(("num_experts",), ("intermediate_size",)),
        Norms(),
    )
)
MINIMAX_M2 = Decoder(
    uniform(
        Attention(qk_norm="rank"),
        Experts(("num_local_experts",), ("intermediate_size",), router_dtype="float32", correction=True),
        Norms(),
    )
)
COHERE2_MOE = Decoder(
    uniform(BIASED, Experts(("num_experts",), ("intermediate_size",)), Norms(1)),
    everywhere=UNSPLIT,
)
EXAONE_MOE = Decoder(
    sparse_list(
        (Mlp(),),
        (Experts(correction=True, shared="num_shared_experts"),),
        (Attention(qk_norm="head"), Norms()),
    )
)

ARIA = Decoder(
    uniform(
        Attention(qkv_bias="attention_bias"),
        Experts(("moe_num_experts",), ("intermediate_size",), shared="moe_num_shared_experts"),
        Norms(),
    )
)


def _laguna(f: Section, i: int) -> Layer:
    """Laguna: a gate per head or channel on attention, heads that may differ by layer."""
    stated = f.get("num_attention_heads_per_layer")
    attention: Block = _laguna_attention
    if stated:
        attention = With(attention, (("num_attention_heads", stated[i]),))
    kinds = f.get("mlp_layer_types")
    dense = kinds[i] == "dense" if kinds else i in (f.get("mlp_only_layers") or (0,))
    return (attention, Mlp() if dense else LAGUNA_EXPERTS, Norms())


def _laguna_attention(f: Section, s: Shard) -> Parts:
    parts = Attention(qkv_bias="attention_bias", qk_norm="head")(f, s)
    gating = f.get("gating")
    if not gating:
        return parts
    each = 1 if gating is True or gating == "per-head" else head_dim(f)
    return (*parts, column("self_attn.g_proj", hidden(f), heads(f) * each, s=s))


LAGUNA_EXPERTS = Experts(
    ("num_experts",),
    ("moe_intermediate_size",),
    correction=True,
    shared_width="shared_expert_intermediate_size",
    shared_name="mlp.shared_expert",
)

HUNYUAN_MOE = Decoder(
    uniform(
        Attention(qkv_bias="attention_bias", out_bias="attention_bias", qk_norm="head"),
        Experts(
            ("num_experts",),
            ("intermediate_size",),
            shared_width="intermediate_size",
            shared_name="mlp.shared_mlp",
        ),
        Norms(),
    )
)
PHIMOE = Decoder(
    uniform(BIASED, Experts(("num_local_experts",), ("intermediate_size",)), Norms(bias=True)),
    norm_bias=True,
    head_bias="lm_head_bias",
)
SOLAR_OPEN = Decoder(
    uniform(
        Attention(qkv_bias="attention_bias", qk_norm="head?use_qk_norm"),
        Experts(("n_routed_experts",), ("moe_intermediate_size",), shared=DEEPSEEK_SHARED),
        Norms(),
    )
)

DEEPSEEK_V1 = Decoder(
    dense_first(
        (Attention(), Mlp(), Norms()),
        (
            Attention(),
            Experts(("n_routed_experts",), correction="topk_method=noaux_tc", shared=DEEPSEEK_SHARED),
            Norms(),
        ),
    )
)

SPARSE = {
    "DeepseekForCausalLM": DEEPSEEK_V1,
    "HunYuanMoEV1ForCausalLM": HUNYUAN_MOE,
    "PhimoeForCausalLM": PHIMOE,
    "SolarOpenForCausalLM": SOLAR_OPEN,
    "MellumForCausalLM": QWEN3_MOE_SPLIT,
    "LagunaForCausalLM": Decoder(_laguna),
    "AriaTextModel": ARIA,
    "MixtralForCausalLM": MIXTRAL,
    "GraniteMoeForCausalLM": GRANITE_MOE,
    "GraniteMoeSharedForCausalLM": GRANITE_MOE,
    "GraniteMoeSWAForCausalLM": GRANITE_MOE,
    "GptOssForCausalLM": GPT_OSS,
    "Qwen2MoeForCausalLM": QWEN2_MOE,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
    "OlmoeForCausalLM": OLMOE,
    "FlexOlmoForCausalLM": FLEX_OLMO,
    "Glm4MoeForCausalLM": GLM4_MOE,
    "Ernie4_5_MoeForCausalLM": Decoder(_ernie),
    "Llama4ForCausalLM": Decoder(_llama4),
    "MiniMaxM2ForCausalLM": MINIMAX_M2,
    "Cohere2MoeForCausalLM": COHERE2_MOE,
    "ExaoneMoeForCausalLM": EXAONE_MOE,
}
