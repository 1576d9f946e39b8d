"""Dense decoders with names, biases or norms of their own."""

from __future__ import annotations

from kvwatch.blockmath.errors import Unsupported
from kvwatch.blockmath.modelconfig import Section
from kvwatch.blockmath.weights.decoder import UNSPLIT, Decoder, Layer, uniform
from kvwatch.blockmath.weights.layers import Attention, Mlp, Norms, heads, hidden, norm, size
from kvwatch.blockmath.weights.parts import Parts, With
from kvwatch.blockmath.weights.shard import Shard

EITHER_BIAS = Attention(qkv_bias="attention_bias|bias", out_bias="attention_bias|bias")
EXAONE3 = Decoder(uniform(EITHER_BIAS, Mlp(bias="mlp_bias"), Norms()), tied=True)
SOLAR = Decoder(uniform(EITHER_BIAS, Mlp(bias="mlp_bias"), Norms()))
INTERNLM2 = Decoder(uniform(Attention(), Mlp(name="feed_forward"), Norms()), everywhere=UNSPLIT)
INTERNLM3 = Decoder(
    uniform(Attention(qkv_bias="qkv_bias", out_bias="attention_bias|bias"), Mlp(bias="mlp_bias"), Norms())
)
ORION = Decoder(uniform(Attention(), Mlp(), Norms(bias=True)), norm_bias=True, everywhere=UNSPLIT)
NEMOTRON = Decoder(
    uniform(
        Attention(qkv_bias="attention_bias|bias", out_bias="attention_bias|bias"),
        Mlp(gated=False, bias="mlp_bias"),
        Norms(bias=True),
    ),
    norm_bias=True,
)


def _bloom_embedding_norm(f: Section, _s: Shard) -> Parts:
    return (norm("word_embeddings_layernorm", hidden(f), bias=True),)


BLOOM = Decoder(
    uniform(
        Attention(qkv_bias=True, out_bias=True),
        Mlp(gated=False, bias=True, width=("n_inner",), default_ratio=4),
        Norms(bias=True),
    ),
    norm_bias=True,
    opening=(_bloom_embedding_norm,),
    tied=True,
    everywhere=UNSPLIT,
)


def _minicpm(f: Section, _i: int) -> Layer:
    if f.get("num_experts"):
        raise Unsupported("unknown_architecture", "weights of MiniCPM with experts are not modelled")
    return (Attention(), Mlp(), Norms())


MINICPM = Decoder(_minicpm, tied=True, everywhere=UNSPLIT)


def _chatglm(f: Section, _i: int) -> Layer:
    kv = f.whole("multi_query_group_num") if f.get("multi_query_attention") else heads(f)
    sizes = (("head_dim", f.whole("kv_channels", hidden(f) // heads(f))), ("num_key_value_heads", kv))
    attention = Attention(qkv_bias="add_bias_linear|add_qkv_bias", out_bias="add_bias_linear")
    plain_norm = f.get("rmsnorm", True) is False
    return (
        With(attention, sizes),
        Mlp(bias="add_bias_linear", width=("ffn_hidden_size",)),
        Norms(bias=plain_norm),
    )


CHATGLM = Decoder(
    _chatglm,
    count=lambda f: size(f, "num_layers", "num_hidden_layers"),
    vocabulary=("padded_vocab_size", "vocab_size"),
    everywhere=UNSPLIT,
)

UNUSUAL = {
    "BloomForCausalLM": BLOOM,
    "ChatGLMForConditionalGeneration": CHATGLM,
    "ChatGLMModel": CHATGLM,
    "ExaoneForCausalLM": EXAONE3,
    "InternLM2ForCausalLM": INTERNLM2,
    "InternLM3ForCausalLM": INTERNLM3,
    "MiniCPMForCausalLM": MINICPM,
    "NemotronForCausalLM": NEMOTRON,
    "OrionForCausalLM": ORION,
    "SolarForCausalLM": SOLAR,
}
