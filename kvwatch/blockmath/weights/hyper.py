"""Decoders with hyper-connections: several residual streams, mixed before and after each block."""

from __future__ import annotations

from dataclasses import dataclass

from kvwatch.blockmath.modelconfig import Section
from kvwatch.blockmath.weights.decoder import Decoder, Layer
from kvwatch.blockmath.weights.layers import (
    Experts,
    Mlp,
    Norms,
    column,
    heads,
    hidden,
    norm,
    replicated,
    required,
)
from kvwatch.blockmath.weights.mla import LatentAttention, picks_tokens
from kvwatch.blockmath.weights.parts import Linear, Part, Parts, Tensor
from kvwatch.blockmath.weights.shard import Shard

SINK_HEADS = 64
"""The attention kernels take heads in multiples of this; sinks are padded to it."""


def _mixing(f: Section, mixes: int, scales: int) -> int:
    """Elements of one mixing step: a matrix over all streams, a base and scales."""
    return mixes * (f.whole("hc_mult") * hidden(f) + 1) + scales


@dataclass(frozen=True, slots=True)
class CompressedAttention:
    """DeepSeek-V4's attention: one shared KV head, grouped output projections, compressed far tokens.

    Attributes:
        ratio: how many tokens one compressed entry stands for; 0 = all tokens are near.
    """

    ratio: int

    def __call__(self, f: Section, s: Shard) -> Parts:
        width, dim = hidden(f), f.whole("head_dim")
        total, q_rank = heads(f), f.whole("q_lora_rank")
        own = s.of(total, "number of attention heads")
        groups, o_rank = f.whole("o_groups"), f.whole("o_lora_rank")
        parts: list[Part] = [
            Tensor("attn.attn_sink", -(-own // SINK_HEADS) * SINK_HEADS, "float32"),
            Linear("attn.fused_wqa_wkv", width, q_rank + dim, pieces=2),
            norm("attn.norms", q_rank + dim),
            Linear("attn.wq_b", q_rank, own * dim),
            Linear("attn.wo_a", total * dim // groups, s.of(groups * o_rank, "output groups")),
            Linear("attn.wo_b", s.of(groups * o_rank, "output groups"), width),
        ]
        if self.ratio > 1:
            parts += self._compressor(f, dim)
        if self.ratio == 4:
            count, index_dim = f.whole("index_n_heads"), f.whole("index_head_dim")
            parts += [
                replicated("attn.indexer.wq_b", q_rank, count * index_dim),
                Linear("attn.indexer.weights_proj", width, count, kind="plain"),
                *self._compressor(f, index_dim),
            ]
        return tuple(parts)

    def _compressor(self, f: Section, dim: int) -> Parts:
        wide = dim * (2 if self.ratio == 4 else 1)
        return (
            Tensor("attn.compressor.ape", self.ratio * wide, "float32"),
            Linear("attn.compressor.fused_wkv_wgate", hidden(f), 2 * wide, kind="plain"),
            norm("attn.compressor.norm", dim),
        )


def _v4_mixing(f: Section, _s: Shard) -> Parts:
    streams = f.whole("hc_mult")
    return (Tensor("hc", 2 * _mixing(f, (2 + streams) * streams, 3), "float32"),)


def _v4_head(f: Section, _s: Shard) -> Parts:
    return (Tensor("hc_head", _mixing(f, f.whole("hc_mult"), 1), "float32"),)


def _hash_table(f: Section, _s: Shard) -> Parts:
    return (Tensor("ffn.gate.tid2eid", f.whole("vocab_size") * f.whole("num_experts_per_tok"), "int32"),)


ROUTED = Experts(
    ("n_routed_experts",),
    ("moe_intermediate_size",),
    correction="topk_method=noaux_tc",
    shared="n_shared_experts",
    shared_name="ffn.shared_experts",
    name="ffn",
)
HASHED = Experts(
    ("n_routed_experts",),
    ("moe_intermediate_size",),
    shared="n_shared_experts",
    shared_name="ffn.shared_experts",
    name="ffn",
)


def _deepseek_v4(f: Section, i: int) -> Layer:
    attention = CompressedAttention(max(0, int(required(f, "compress_ratios")[i])))
    experts: Layer = (HASHED, _hash_table) if i < f.whole("num_hash_layers", 0) else (ROUTED,)
    return (attention, *experts, Norms(), _v4_mixing)


@dataclass(frozen=True, slots=True)
class GatedLatent:
    """HY-V4's latent attention: an output gate and a sink per head."""

    indexer: bool

    def __call__(self, f: Section, s: Shard) -> Parts:
        parts: list[Part] = [*LatentAttention(indexer=self.indexer)(f, s)]
        if f.get("gated_mla", True):
            each = f.whole("v_head_dim") if f.get("gating_type", "elementwise") == "elementwise" else 1
            parts.append(column("self_attn.linear_gate", hidden(f), heads(f) * each, s=s))
        if f.get("learnable_sink", True):
            parts.append(Tensor("self_attn.learnable_sink", s.of(heads(f), "attention heads"), "float32"))
        return tuple(parts)


def _hy4_mixing(f: Section, _s: Shard) -> Parts:
    return (Tensor("hc", 2 * _mixing(f, 2 * f.whole("hc_mult"), 2), "float32"),)


HY4_EXPERTS = Experts(
    ("n_routed_experts",),
    ("moe_intermediate_size",),
    router_dtype="float32",
    correction=True,
    shared="n_shared_experts",
)


def _hy4(f: Section, i: int) -> Layer:
    kinds = f.get("mlp_layer_types")
    dense = kinds[i] == "dense" if kinds else i == 0
    full = picks_tokens(f, i) if f.get("indexer_types") else i == 0 or (i - 1) % 4 == 0
    return (GatedLatent(full), Mlp() if dense else HY4_EXPERTS, Norms(), _hy4_mixing)


HYPER = {
    "DeepseekV4ForCausalLM": Decoder(_deepseek_v4, resident=(_v4_head,)),
    "HYV4ForCausalLM": Decoder(_hy4, closing=(_v4_head,)),
}
