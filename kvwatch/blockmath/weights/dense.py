"""Families of dense decoders, as data."""

from __future__ import annotations

from kvwatch.blockmath.modelconfig import Section
from kvwatch.blockmath.weights.decoder import UNSPLIT, Decoder, uniform
from kvwatch.blockmath.weights.layers import Attention, Mlp, Norms, hidden
from kvwatch.blockmath.weights.parts import Parts, Tensor
from kvwatch.blockmath.weights.shard import Shard

LLAMA = Decoder(
    uniform(Attention(qkv_bias="attention_bias", out_bias="attention_bias"), Mlp(bias="mlp_bias"), Norms())
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

DENSE = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": LLAMA,
    "GraniteForCausalLM": LLAMA,
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
