"""Families of dense decoders, as data."""

from __future__ import annotations

from kvwatch.blockmath.modelconfig import Section
from kvwatch.blockmath.weights.decoder import UNSPLIT, Decoder, Layer, Plan, uniform
from kvwatch.blockmath.weights.layers import (
    Attention,
    Mlp,
    Norms,
    column,
    head_dim,
    heads,
    hidden,
    kv_heads,
    norm,
    required,
    row,
)
from kvwatch.blockmath.weights.parts import Parts, Tensor, With
from kvwatch.blockmath.weights.shard import Shard

LLAMA = Decoder(
    uniform(
        Attention(qkv_bias="attention_bias|bias", out_bias="attention_bias|bias"),
        Mlp(bias="mlp_bias"),
        Norms(),
    )
)
QWEN2 = Decoder(uniform(Attention(qkv_bias=True), Mlp(), Norms()))
QWEN3 = Decoder(uniform(Attention(qkv_bias="attention_bias", qk_norm="head"), Mlp(), Norms()))
BIASED = Attention(qkv_bias="attention_bias", out_bias="attention_bias")
GEMMA = Decoder(uniform(BIASED, Mlp(), Norms()), tied=True, everywhere=UNSPLIT)
GEMMA2 = Decoder(uniform(BIASED, Mlp(), Norms(4)), tied=True, everywhere=UNSPLIT)
GEMMA3 = Decoder(
    uniform(Attention(qkv_bias="attention_bias", out_bias="attention_bias", qk_norm="head"), Mlp(), Norms(4)),
    tied=True,
    everywhere=UNSPLIT,
)
OLMO2 = Decoder(uniform(Attention(qkv_bias="attention_bias", qk_norm="all"), Mlp(), Norms()))
PLAIN = Decoder(uniform(Attention(), Mlp(), Norms()))


def _learned_positions(f: Section, _s: Shard) -> Parts:
    offset = 2 if f.model_type == "opt" else 0
    return (Tensor("embed_positions", (f.whole("max_position_embeddings") + offset) * hidden(f)),)


GPT2 = Decoder(
    uniform(
        Attention(qkv_bias=True, out_bias=True),
        Mlp(gated=False, bias=True, default_ratio=4),
        Norms(bias=True),
    ),
    norm_bias=True,
    opening=(_learned_positions,),
    tied=True,
    everywhere=UNSPLIT,
)
OPT = Decoder(
    uniform(Attention(qkv_bias=True, out_bias=True), Mlp(gated=False, bias=True), Norms(bias=True)),
    norm_bias=True,
    opening=(_learned_positions,),
    tied=True,
    everywhere=UNSPLIT,
)
GPTJ = Decoder(
    uniform(Attention(), Mlp(gated=False, bias=True, default_ratio=4), Norms(1, bias=True)),
    norm_bias=True,
    head_bias=True,
    everywhere=UNSPLIT,
)
GPT_NEOX = Decoder(
    uniform(
        Attention(qkv_bias="attention_bias", out_bias="attention_bias"),
        Mlp(gated=False, bias=True),
        Norms(bias=True),
    ),
    norm_bias=True,
)
STARCODER2 = Decoder(
    uniform(
        Attention(qkv_bias="use_bias", out_bias="use_bias"),
        Mlp(gated=False, bias="use_bias"),
        Norms(bias=True),
    ),
    norm_bias=True,
)
COHERE = Decoder(
    uniform(
        Attention(qkv_bias="attention_bias", out_bias="attention_bias"),
        Mlp(),
        Norms(1),
    ),
    tied=True,
    everywhere=UNSPLIT,
)


FALCON_NEW = Attention(qkv_bias="bias", out_bias="bias")


def _falcon(f: Section, _i: int) -> Layer:
    """Falcon: old models share one KV head or none; new ones have groups and a norm for each branch."""
    new = bool(f.get("new_decoder_architecture"))
    kv = f.whole("num_kv_heads", heads(f)) if new else 1 if f.get("multi_query") else heads(f)
    norms = f.whole("num_ln_in_parallel_attn", 2) if new else 1 if f.get("parallel_attn") else 2
    attention = With(FALCON_NEW, (("num_key_value_heads", kv),))
    mlp = Mlp(gated=False, bias="bias", default_ratio=4, width=("ffn_hidden_size",))
    return (attention, mlp, Norms(norms, bias=True))


def granite_attention(f: Section) -> Attention:
    """Granite's attention: models that list layer types have sinks unless they say otherwise."""
    sinks = bool(f.get("attention_sinks", f.get("layer_types") is not None))
    return Attention(qkv_bias="attention_bias", out_bias="attention_bias", sinks=sinks)


def _granite(f: Section, _i: int) -> Layer:
    return (granite_attention(f), Mlp(bias="mlp_bias"), Norms())


def _apertus_activation(_f: Section, _s: Shard) -> Parts:
    return (Tensor("mlp.act_fn.alphas", 2),)


def _muse_gate(f: Section, s: Shard) -> Parts:
    return (column("self_attn.output_gate_proj", hidden(f), heads(f) * head_dim(f), s=s),)


def _deci(f: Section, i: int) -> Layer:
    """NAS models: each layer may lack its attention or its feed-forward network, or have another width."""
    block = required(f, "block_configs")[i]
    parts: Layer = ()
    if not block["attention"].get("no_op"):
        kv = heads(f) // block["attention"]["n_heads_in_group"]
        attention = Attention(qkv_bias="attention_bias", out_bias="attention_bias")
        parts += (With(attention, (("num_key_value_heads", kv),)), Norms(1))
    if not block["ffn"].get("no_op"):
        ratio = block["ffn"].get("ffn_mult")
        stated = block["ffn"].get("intermediate_size")
        inner = stated if ratio is None else -(-int(2 * ratio * hidden(f) / 3) // 256) * 256
        parts += (With(Mlp(bias="mlp_bias"), (("intermediate_size", inner),)), Norms(1))
    return parts


FALCON = Decoder(_falcon, norm_bias=True, tied=True, everywhere=UNSPLIT)
APERTUS = Decoder(
    uniform(
        Attention(qkv_bias="attention_bias", out_bias="attention_bias", qk_norm="head"),
        Mlp(gated=False, bias="mlp_bias"),
        Norms(),
        _apertus_activation,
    )
)
MUSE_GLIMMER = Decoder(uniform(Attention(), _muse_gate, Mlp(), Norms(4)), everywhere=UNSPLIT)
GLM = Decoder(uniform(Attention(qkv_bias="attention_bias"), Mlp(), Norms()))
GLM4 = Decoder(uniform(Attention(qkv_bias="attention_bias"), Mlp(), Norms(4)))
SEED_OSS = Decoder(
    uniform(
        Attention(qkv_bias="attention_bias", out_bias="attention_out_bias"), Mlp(bias="mlp_bias"), Norms()
    )
)
HYPERCLOVAX = Decoder(lambda f, _i: (BIASED, Mlp(bias="mlp_bias"), Norms(4 if f.get("use_post_norm") else 2)))
ERNIE45 = Decoder(uniform(Attention(qkv_bias="use_bias", out_bias="use_bias"), Mlp(bias="use_bias"), Norms()))
EXAONE4 = Decoder(uniform(Attention(qk_norm="head"), Mlp(), Norms()))
HUNYUAN_DENSE = Decoder(
    uniform(Attention(qkv_bias="attention_bias", out_bias="attention_bias", qk_norm="head"), Mlp(), Norms())
)
JAIS2 = Decoder(
    uniform(
        Attention(qkv_bias="attention_bias", out_bias="attention_bias"),
        Mlp(gated=False, bias="mlp_bias"),
        Norms(bias=True),
    ),
    norm_bias=True,
)
VAULT_GEMMA = Decoder(uniform(BIASED, Mlp(), Norms()), tied=True)
ARCEE = Decoder(uniform(BIASED, Mlp(gated=False, bias="mlp_bias"), Norms()))

PHI = Decoder(
    uniform(Attention(qkv_bias=True, out_bias=True), Mlp(gated=False, bias=True), Norms(1, bias=True)),
    norm_bias=True,
)
PERSIMMON = Decoder(
    uniform(
        Attention(qkv_bias=True, out_bias=True, qk_norm="head?qk_layernorm", qk_norm_bias=True, whole=True),
        Mlp(gated=False, bias=True, whole=True),
        Norms(bias=True),
    ),
    norm_bias=True,
)
OLMO = Decoder(uniform(BIASED, Mlp(), Norms(0)), final_norms=0)
NANOCHAT = Decoder(uniform(BIASED, Mlp(gated=False), Norms(0)), final_norms=0)
STABLELM = Decoder(
    uniform(Attention(qkv_bias="use_qkv_bias"), Mlp(), Norms(bias=True)), norm_bias=True, everywhere=UNSPLIT
)


def _kv_shared(block: Attention) -> Plan:
    """Old multi-query models say so with a switch instead of a number."""

    def plan(f: Section, _i: int) -> Layer:
        kv = 1 if f.get("multi_query", True) else heads(f)
        return (With(block, (("num_key_value_heads", kv),)), WHOLE_MLP, Norms(bias=True))

    return plan


WHOLE_MLP = Mlp(gated=False, bias=True, default_ratio=4, whole=True)
GPT_BIGCODE = Decoder(
    _kv_shared(Attention(qkv_bias=True, out_bias=True)),
    norm_bias=True,
    opening=(_learned_positions,),
    tied=True,
    repeats_opening=True,
)


def _sub_norms(f: Section, _s: Shard) -> Parts:
    return (norm("sub_norms", hidden(f) + f.whole("intermediate_size")),)


def _doge_mask(f: Section, s: Shard) -> Parts:
    """Doge's learned residual scales and dynamic mask."""
    kv = kv_heads(f)
    return (
        Tensor("residuals", 2 * hidden(f)),
        Tensor("self_attn.A", kv),
        row("self_attn.dt_proj", kv * head_dim(f), kv, s=s),
    )


def _modernbert_decoder(_f: Section, i: int) -> Layer:
    """No attention norm in the first layer; the merged up-projection is whole on each rank."""
    return (BIASED, Mlp(bias="mlp_bias", whole=True), Norms(1 if i == 0 else 2, bias="norm_bias"))


def _embedding_norm(f: Section, _s: Shard) -> Parts:
    return (norm("embeddings.norm", hidden(f), bias=bool(f.get("norm_bias"))),)


MODERNBERT_DECODER = Decoder(
    _modernbert_decoder,
    norm_bias="norm_bias",
    opening=(_embedding_norm,),
    tied=True,
    repeats_opening=True,
)
BITNET = Decoder(uniform(BIASED, Mlp(), Norms(), _sub_norms), tied=True)
DOGE = Decoder(
    uniform(
        Attention(qkv_bias="attention_bias", out_bias="attention_bias", qk_norm="head"),
        _doge_mask,
        Mlp(bias="mlp_bias"),
        Norms(),
    )
)

DENSE = {
    "ModernBertDecoderForCausalLM": MODERNBERT_DECODER,
    "BitNetForCausalLM": BITNET,
    "DogeForCausalLM": DOGE,
    "PhiForCausalLM": PHI,
    "PersimmonForCausalLM": PERSIMMON,
    "OlmoForCausalLM": OLMO,
    "NanoChatForCausalLM": NANOCHAT,
    "StableLmForCausalLM": STABLELM,
    "GPTBigCodeForCausalLM": GPT_BIGCODE,
    "SmolLM3ForCausalLM": LLAMA,
    "LlamaModel": Decoder(LLAMA.plan, has_head=False),
    "MinistralForCausalLM": LLAMA,
    "Gemma3TextModel": Decoder(GEMMA3.plan, has_head=False, everywhere=UNSPLIT),
    "CwmForCausalLM": LLAMA,
    "IQuestCoderForCausalLM": LLAMA,
    "LLaMAForCausalLM": LLAMA,
    "TeleChat3ForCausalLM": LLAMA,
    "HeliumForCausalLM": LLAMA,
    "Ministral3ForCausalLM": LLAMA,
    "MiMoForCausalLM": QWEN2,
    "Cohere2ForCausalLM": COHERE,
    "FalconForCausalLM": FALCON,
    "ApertusForCausalLM": APERTUS,
    "MuseGlimmerForCausalLM": MUSE_GLIMMER,
    "GlmForCausalLM": GLM,
    "Glm4ForCausalLM": GLM4,
    "SeedOssForCausalLM": SEED_OSS,
    "HyperCLOVAXForCausalLM": HYPERCLOVAX,
    "Ernie4_5ForCausalLM": ERNIE45,
    "Exaone4ForCausalLM": EXAONE4,
    "HunYuanDenseV1ForCausalLM": HUNYUAN_DENSE,
    "Jais2ForCausalLM": JAIS2,
    "VaultGemmaForCausalLM": VAULT_GEMMA,
    "ArceeForCausalLM": ARCEE,
    "GPTNeoXForCausalLM": GPT_NEOX,
    "DeciLMForCausalLM": Decoder(_deci),
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": LLAMA,
    "GraniteForCausalLM": Decoder(_granite),
    "GraniteSWAForCausalLM": Decoder(_granite),
    "Qwen2ForCausalLM": QWEN2,
    "Qwen3ForCausalLM": QWEN3,
    "GemmaForCausalLM": GEMMA,
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": GEMMA3,
    "OPTForCausalLM": OPT,
    "GPT2LMHeadModel": GPT2,
    "GPTJForCausalLM": GPTJ,
    "Starcoder2ForCausalLM": STARCODER2,
    "CohereForCausalLM": COHERE,
    "Phi3ForCausalLM": PLAIN,
    "Olmo2ForCausalLM": OLMO2,
    "Olmo3ForCausalLM": OLMO2,
}
