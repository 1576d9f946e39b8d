"""Encoders, encoder-decoders and other models that are no plain decoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvwatch.blockmath.modelconfig import Section
from kvwatch.blockmath.weights.audio import whisper_encoder
from kvwatch.blockmath.weights.layers import (
    Attention,
    Mlp,
    Norms,
    column,
    heads,
    hidden,
    norm,
    replicated,
    row,
    size,
)
from kvwatch.blockmath.weights.parts import Linear, Model, Parts, Tensor, section
from kvwatch.blockmath.weights.shard import Shard
from kvwatch.blockmath.weights.towers import Encoder, patch_embedding, patches

BIASED = Attention(qkv_bias=True, out_bias=True)
PLAIN_MLP = Mlp(gated=False, bias=True)


@dataclass(frozen=True, slots=True)
class Bert:
    """BERT and its kin: three embeddings, post-norm layers.

    Attributes:
        pooler: the class has a pooling layer.
        final_norm: a norm closes the stack.
        narrow: embeddings are ``embedding_size`` wide, with a projection where that is not the model's width.
    """

    pooler: bool = False
    final_norm: bool = False
    narrow: bool = False

    def __call__(self, _root: Section, f: Section, s: Shard) -> Model:
        width = hidden(f)
        wide = f.whole("embedding_size", width) if self.narrow else width
        types = f.whole("type_vocab_size", 0)
        embeddings: Parts = (
            Tensor("word_embeddings", s.vocab(f.whole("vocab_size")) * wide),
            Tensor("position_embeddings", f.whole("max_position_embeddings") * wide),
            Tensor("token_type_embeddings", s.vocab(types) * wide if types else 0),
            norm("LayerNorm", wide, bias=True),
        )
        if wide != width:
            embeddings += (replicated("embeddings_project", wide, width, bias=True),)
        layer = BIASED(f, s) + PLAIN_MLP(f, s) + Norms(bias=True)(f, s)
        closing: Parts = (norm("final_norm", width, bias=True),) if self.final_norm else ()
        if self.pooler:
            closing += (replicated("pooler.dense", width, width, bias=True),)
        return Model(embeddings, [layer] * f.whole("num_hidden_layers"), closing, pipeline=False)


def modernbert(_root: Section, f: Section, s: Shard) -> Model:
    """ModernBERT: rotary positions, gated networks, no attention norm in the first layer."""
    width = hidden(f)
    attention = Attention(qkv_bias="attention_bias", out_bias="attention_bias")(f, s)
    body = attention + Mlp(bias="mlp_bias")(f, s)
    bias = bool(f.get("norm_bias"))
    first, other = ((*body, norm("norms", count * width, bias=bias)) for count in (1, 2))
    embeddings = (
        Tensor("tok_embeddings", s.vocab(f.whole("vocab_size")) * width),
        norm("norm", width, bias=bias),
    )
    layers = [first] + [other] * (f.whole("num_hidden_layers") - 1)
    return Model(embeddings, layers, (norm("final_norm", width, bias=bias),), pipeline=False)


def whisper(_root: Section, f: Section, s: Shard) -> Model:
    """Whisper: an encoder over the spectrogram, a decoder with cross attention, tied embeddings."""
    width, total = f.whole("d_model"), f.whole("decoder_attention_heads")
    own = s.of(total, "decoder heads") * (width // total)
    inner = f.whole("decoder_ffn_dim")
    projections: Parts = (
        Linear("self_attn.qkv_proj", width, 3 * own, 3 * own, pieces=3),
        Linear("self_attn.out_proj", own, width, width),
        Linear("encoder_attn.q_proj", width, own, own),
        Linear("encoder_attn.kv_proj", width, 2 * own, 2 * own, pieces=2),
        Linear("encoder_attn.out_proj", own, width, width),
    )
    layer = (
        *projections,
        column("fc1", width, inner, s=s, bias=True),
        row("fc2", inner, width, s=s, bias=True),
        norm("norms", 3 * width, bias=True),
    )
    embeddings = (
        Tensor("embed_tokens", f.whole("vocab_size") * width),
        Tensor("embed_positions", f.whole("max_target_positions") * width),
    )
    encoder = whisper_encoder(f, divided=True, positions=True, s=s, qkv_bias=True)
    return Model(
        embeddings,
        [layer] * f.whole("decoder_layers"),
        (norm("layer_norm", width, bias=True),),
        encoder,
        layer_prefix="model.decoder.layers",
        pipeline=False,
    )


def siglip_pair(root: Section, text: Section, s: Shard) -> Model:
    """SigLIP: a text encoder with a head, and a vision encoder with an attention pool."""
    vision = section(root.own.get("vision_config") or {}, "siglip_vision_model")
    width, inner = hidden(text), text.whole("intermediate_size")
    text_layers = Encoder()(
        text, s, width=width, inner=inner, layers=text.whole("num_hidden_layers"), heads=heads(text)
    )
    opening: Parts = (
        Tensor("token_embedding", s.vocab(text.whole("vocab_size")) * width),
        Tensor("position_embedding", s.vocab(text.whole("max_position_embeddings")) * width),
    )
    closing: Parts = (
        norm("final_layer_norm", width, bias=True),
        replicated("head", width, text.whole("projection_size", width), bias=True),
    )
    return Model(opening, [], closing, text_layers + _pooled_vision(vision, s), pipeline=False)


def clip_pair(root: Section, text: Section, s: Shard) -> Model:
    """CLIP: a text and a vision encoder, and a projection of each to the common space."""
    vision = section(root.own.get("vision_config") or {}, "clip_vision_model")
    width, seen, common = hidden(text), hidden(vision), root.whole("projection_dim")
    stacks = tuple(
        part
        for f in (text, vision)
        for part in Encoder()(
            f,
            s,
            width=hidden(f),
            inner=f.whole("intermediate_size"),
            layers=f.whole("num_hidden_layers"),
            heads=heads(f),
        )
    )
    opening: Parts = (
        Tensor("token_embedding", s.vocab(text.whole("vocab_size")) * width),
        Tensor("position_embedding", s.vocab(text.whole("max_position_embeddings")) * width),
        patch_embedding(vision, seen, bias=False),
        Tensor("class_and_positions", (patches(vision) + 2) * seen),
    )
    closing: Parts = (
        norm("final_layer_norm", width, bias=True),
        norm("vision_norms", 2 * seen, bias=True),
        replicated("text_projection", width, common),
        replicated("visual_projection", seen, common),
    )
    return Model(opening, [], closing, stacks, pipeline=False)


def _pooled_vision(f: Section, s: Shard) -> Parts:
    width, inner = hidden(f), f.whole("intermediate_size")
    return (
        patch_embedding(f, width, bias=True),
        Tensor("position_embedding", patches(f) * width),
        *Encoder()(f, s, width=width, inner=inner, layers=f.whole("num_hidden_layers"), heads=heads(f)),
        norm("post_layernorm", width, bias=True),
        Tensor("head.probe", width),
        Tensor("head.attention", 4 * width * (width + 1)),
        norm("head.layernorm", width, bias=True),
        column("head.mlp.fc1", width, inner, s=s, bias=True),
        row("head.mlp.fc2", inner, width, s=s, bias=True),
    )


def hrm_text(_root: Section, f: Section, s: Shard) -> Model:
    """HRM: two stacks that take turns, norms without scales, gated attention."""
    layer = Attention(gated=True)(f, s) + Mlp()(f, s)
    rows = s.vocab(f.whole("vocab_size"))
    return Model(
        (Tensor("embed_tokens", rows * hidden(f)), Tensor("z_L_init", hidden(f))),
        [layer] * (2 * size(f, "num_layers_per_stack", "num_hidden_layers")),
        (Linear("lm_head", hidden(f), rows, kind="head"),),
        pipeline=False,
    )


ENCODERS: dict[str, Callable[[Section, Section, Shard], Model]] = {
    "BertModel": Bert(),
    "RobertaModel": Bert(),
    "XLMRobertaModel": Bert(),
    "CamembertModel": Bert(pooler=True),
    "Data2VecTextModel": Bert(pooler=True),
    "CLIPModel": clip_pair,
    "ElectraModel": Bert(narrow=True),
    "ErnieModel": Bert(pooler=True),
    "ModernBertModel": modernbert,
    "WhisperForConditionalGeneration": whisper,
    "RobertaPreLayerNormModel": Bert(pooler=True, final_norm=True),
    "SiglipModel": siglip_pair,
    "HrmTextForCausalLM": hrm_text,
}
