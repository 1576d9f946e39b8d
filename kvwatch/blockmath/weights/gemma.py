"""The later Gemma families: layers of different heads, per-layer inputs, shared KV."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvwatch.blockmath.modelconfig import Section
from kvwatch.blockmath.weights.decoder import UNSPLIT, Decoder, Layer
from kvwatch.blockmath.weights.layers import (
    Attention,
    Experts,
    Mlp,
    Norms,
    column,
    head_dim,
    heads,
    hidden,
    norm,
    on,
    replicated,
    required,
    row,
)
from kvwatch.blockmath.weights.parts import Block, Linear, Part, Parts, Tensor, With
from kvwatch.blockmath.weights.shard import Shard

GLOBAL_HEAD_DIM = 512
"""Width of a global layer's heads where config.json does not say."""

BIASED = Attention(qkv_bias="attention_bias", out_bias="attention_bias", qk_norm="head")


def queries_only(f: Section, s: Shard) -> Parts:
    """Attention of a layer that reads the KV cache of a layer before: no keys and values of its own."""
    own, width, dim = s.of(heads(f), "number of attention heads"), hidden(f), head_dim(f)
    bias = on(f, "attention_bias")
    return (
        Linear("self_attn.q_proj", width, own * dim, own * dim * bias),
        Linear("self_attn.o_proj", own * dim, width, width * bias),
        norm("self_attn.q_norm", dim),
    )


def shares_kv(f: Section, i: int) -> bool:
    """Whether layer ``i`` is one of the last ones, which share KV."""
    shared = f.whole("num_kv_shared_layers", 0)
    return shared > 0 and i >= f.whole("num_hidden_layers") - shared


def own_sizes(f: Section, i: int, global_kv_heads: int | None = None) -> tuple[tuple[str, object], ...]:
    """Fields that layer ``i`` overrides: its heads differ where it attends globally."""
    stated = f.get("per_layer_config")
    if isinstance(stated, Mapping):
        found: Mapping[str, object] = next((sizes for key, sizes in stated.items() if int(key) == i), {})
        return tuple(sorted(found.items()))
    if not _attends_globally(f, i):
        return ()
    sizes: tuple[tuple[str, object], ...] = (("head_dim", f.whole("global_head_dim", GLOBAL_HEAD_DIM)),)
    kv = f.get("num_global_key_value_heads", global_kv_heads) if f.get("attention_k_eq_v", True) else None
    return sizes if kv is None else (*sizes, ("num_key_value_heads", kv))


def _attends_globally(f: Section, i: int) -> bool:
    kinds = f.get("layer_types")
    if i == f.whole("num_hidden_layers") - 1:
        return True
    if kinds:
        return bool(kinds[i] == "full_attention")
    return (i + 1) % f.whole("sliding_window_pattern", 6) == 0


@dataclass(frozen=True, slots=True)
class PerLayerInput:
    """The gate and projection through which a layer reads its own input embedding."""

    def __call__(self, f: Section, _s: Shard) -> Parts:
        width, own = hidden(f), f.whole("hidden_size_per_layer_input", 0)
        if not own:
            return ()
        return (
            replicated("per_layer_input_gate", width, own),
            replicated("per_layer_projection", own, width),
            norm("post_per_layer_input_norm", width),
        )


@dataclass(frozen=True, slots=True)
class PerLayerTables:
    """The embeddings that feed all layers, and the projection of the main embedding to as many inputs."""

    has_table: bool = True

    def __call__(self, f: Section, s: Shard) -> Parts:
        own = f.whole("hidden_size_per_layer_input", 0)
        if not own:
            return ()
        total = own * f.whole("num_hidden_layers")
        parts: list[Part] = [
            column("per_layer_model_projection", hidden(f), total, s=s),
            norm("per_layer_projection_norm", own),
        ]
        if self.has_table:
            rows = s.vocab(f.whole("vocab_size_per_layer_input", f.whole("vocab_size")))
            parts.append(Tensor("embed_tokens_per_layer", rows * total))
        return tuple(parts)


def gemma4_experts(f: Section, s: Shard) -> Parts:
    """The router with its scales, the experts beside the dense network, and three more norms."""
    total = f.whole("num_experts")
    return (
        Tensor("router.scales", hidden(f) + total),
        *Experts(("num_experts",), ("moe_intermediate_size", "expert_intermediate_size"), name="")(f, s),
        norm("expert_norms", 3 * hidden(f)),
    )


def _gemma4(f: Section, i: int) -> Layer:
    changes = own_sizes(f, i)
    shared = shares_kv(f, i)
    attention: Block = queries_only if shared else BIASED
    mlp: Block = Mlp()
    if shared and f.get("use_double_wide_mlp"):
        mlp = With(mlp, (("intermediate_size", 2 * f.whole("intermediate_size")),))
    blocks: Layer = (With(attention, changes) if changes else attention, mlp, Norms(4), PerLayerInput())
    return (*blocks, gemma4_experts) if f.get("num_experts") else blocks


def _altup(f: Section, s: Shard) -> Parts:
    width, inputs = hidden(f), f.whole("altup_num_inputs")
    rank = f.whole("laurel_rank")
    return (
        Tensor("altup.correct_output_scale", width, "float32"),
        replicated("altup.correction_coefs", inputs, inputs),
        replicated("altup.prediction_coefs", inputs, inputs**2),
        replicated("altup.modality_router", width, inputs),
        norm("altup.router_norm", width),
        column("laurel.linear_left", width, rank, s=s),
        row("laurel.linear_right", rank, width, s=s),
        norm("laurel.post_laurel_norm", width),
    )


def _altup_projections(f: Section, s: Shard) -> Parts:
    width, others = hidden(f), f.whole("altup_num_inputs") - 1
    return tuple(column("altup_projections", width, width, s=s) for _ in range(2 * others))


def _gemma3n(f: Section, i: int) -> Layer:
    sizes = required(f, "intermediate_size")
    inner = sizes[i] if isinstance(sizes, list | tuple) else sizes
    mlp = With(Mlp(), (("intermediate_size", inner),))
    attention: Block = queries_only if shares_kv(f, i) else BIASED
    return (attention, mlp, Norms(4), PerLayerInput(), _altup)


def _embedding_gemma(f: Section, i: int) -> Layer:
    changes = own_sizes(f, i, global_kv_heads=1)
    return (With(BIASED, changes) if changes else BIASED, Mlp(), Norms(4), PerLayerInput())


def _embedding_projection(f: Section, _s: Shard) -> Parts:
    return (replicated("embedding_projection", hidden(f), f.whole("embedding_dim")),)


GEMMA4 = Decoder(_gemma4, opening=(PerLayerTables(),), tied=True, everywhere=UNSPLIT)
GEMMA3N = Decoder(
    _gemma3n, opening=(PerLayerTables(), _altup_projections), tied=True, everywhere=UNSPLIT, pipeline=False
)
EMBEDDING_GEMMA2 = Decoder(
    _embedding_gemma,
    opening=(PerLayerTables(has_table=False),),
    closing=(_embedding_projection,),
    has_head=False,
    pipeline=False,
)

GEMMA = {
    "Gemma3nForCausalLM": GEMMA3N,
    "Gemma4ForCausalLM": GEMMA4,
    "Gemma4UnifiedForCausalLM": Decoder(_gemma4, opening=(PerLayerTables(),), tied=True),
    "EmbeddingGemma2Model": EMBEDDING_GEMMA2,
}
