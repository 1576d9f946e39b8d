"""Audio towers, with the projectors that belong to them."""

from __future__ import annotations

from kvwatch.blockmath.modelconfig import Section
from kvwatch.blockmath.weights.layers import column, hidden, norm, replicated, row, size
from kvwatch.blockmath.weights.parts import Linear, Parts, Tensor
from kvwatch.blockmath.weights.shard import Shard
from kvwatch.blockmath.weights.towers import Encoder, patch_embedding, patches


def whisper_encoder(
    f: Section, *, divided: bool, positions: bool, s: Shard, qkv_bias: str | bool = "q_v"
) -> Parts:
    """Two convolutions over the spectrogram, then biased layers; keys without bias in the original."""
    width = size(f, "d_model", "hidden_size")
    inner = size(f, "encoder_ffn_dim", "intermediate_size")
    layers, heads = (
        size(f, "encoder_layers", "num_hidden_layers"),
        size(f, "encoder_attention_heads", "num_attention_heads"),
    )
    encoder = Encoder(qkv_bias=qkv_bias, whole="" if divided else "attention and mlp")
    parts: Parts = (
        Tensor("conv1", width * (3 * f.whole("num_mel_bins") + 1)),
        Tensor("conv2", width * (3 * width + 1)),
        *encoder(f, s, width=width, inner=inner, layers=layers, heads=heads),
        norm("layer_norm", width, bias=True),
    )
    return (
        (*parts, Tensor("embed_positions", f.whole("max_source_positions") * width)) if positions else parts
    )


def qwen2_audio(f: Section, text: Section, _root: Section, s: Shard) -> Parts:
    """Qwen2-Audio: Whisper's encoder, whole on each rank, and one projection."""
    width = f.whole("d_model")
    return (
        *whisper_encoder(f, divided=False, positions=True, s=s),
        replicated("multi_modal_projector.linear", width, hidden(text), bias=True),
    )


def qwen2_5_omni_audio(f: Section, _text: Section, _root: Section, s: Shard) -> Parts:
    """Qwen2.5-Omni's audio encoder: no learned positions; two tokens that mark begin and end."""
    out = f.whole("output_dim")
    return (
        *whisper_encoder(f, divided=False, positions=False, s=s),
        Tensor("audio_bos_eos_token", 2 * out),
        replicated("proj", f.whole("d_model"), out, bias=True),
    )


def glmasr(f: Section, text: Section, _root: Section, s: Shard) -> Parts:
    """GLM-ASR: Whisper's encoder with rotary positions, and a projector over four frames."""
    width, middle = f.whole("intermediate_size"), 2 * hidden(text)
    return (
        *whisper_encoder(f, divided=True, positions=False, s=s, qkv_bias=True),
        column("multi_modal_projector.linear_1", width, middle, s=s, bias=True),
        row("multi_modal_projector.linear_2", middle, hidden(text), s=s, bias=True),
    )


def granite_conformer(f: Section, _text: Section, _root: Section, s: Shard) -> Parts:
    """Granite Speech's conformer."""
    width, inner = f.whole("hidden_dim"), f.whole("hidden_dim") * f.whole("feedforward_mult")
    conv = width * f.whole("conv_expansion_factor")
    dim = f.whole("dim_head", width // f.whole("num_heads"))
    attention = dim * f.whole("num_heads")
    out = f.whole("output_dim")
    feed_forward = (
        norm("ff.pre_norm", width, bias=True),
        column("ff.up_proj", width, inner, s=s, bias=True),
        row("ff.down_proj", inner, width, s=s, bias=True),
    )
    layer: Parts = (
        *feed_forward,
        *feed_forward,
        norm("attn.pre_norm", width, bias=True),
        replicated("attn.to_q", width, attention),
        replicated("attn.to_kv", width, 2 * attention),
        replicated("attn.to_out", attention, width, bias=True),
        Tensor("attn.rel_pos_emb", (2 * f.whole("max_pos_emb") + 1) * dim),
        norm("conv.norms", width, bias=True),
        Tensor("conv.up_conv", 2 * conv * (width + 1)),
        Tensor("conv.depth_conv", conv * f.whole("conv_kernel_size")),
        norm("conv.batch_norm", conv, bias=True),
        Tensor("conv.down_conv", width * (conv + 1)),
        norm("post_norm", width, bias=True),
    )
    return (
        replicated("encoder.input_linear", f.whole("input_dim"), width, bias=True),
        *layer * f.whole("num_layers"),
        column("encoder.out", width, out, s=s, bias=True),
        row("encoder.out_mid", out, width, s=s, bias=True),
    )


def qformer(f: Section, text: Section, root: Section, _s: Shard) -> Parts:
    """A BLIP-2 query transformer between encoder and decoder, whole on each rank."""
    width, inner = hidden(f), f.whole("intermediate_size")
    layers, source = f.whole("num_hidden_layers"), f.whole("encoder_hidden_size")
    crossed = -(-layers // f.whole("cross_attention_frequency"))
    queries = root.whole("window_size") // root.whole("downsample_rate")

    def attention(inputs: int) -> Parts:
        return (
            replicated("query", width, width, bias=True),
            replicated("key", inputs, width, bias=True),
            replicated("value", inputs, width, bias=True),
            replicated("output.dense", width, width, bias=True),
            norm("output.LayerNorm", width, bias=True),
        )

    feed_forward: Parts = (
        replicated("intermediate_query.dense", width, inner, bias=True),
        replicated("output_query.dense", inner, width, bias=True),
        norm("output_query.LayerNorm", width, bias=True),
    )
    return (
        Tensor("query", queries * width),
        norm("qformer.layernorm", width, bias=True),
        *(attention(width) + feed_forward) * layers,
        *attention(source) * crossed,
        replicated("projector.linear", width, hidden(text), bias=True),
    )


def phi4_audio(f: Section, text: Section, _root: Section, s: Shard) -> Parts:
    """Phi-4-multimodal's conformer; attention divided by heads, the rest whole on each rank."""
    width, inner, channels = hidden(f), f.whole("intermediate_size"), f.whole("nemo_conv_channels")
    own, kernel = s.of(f.whole("num_attention_heads"), "audio heads"), f.whole("kernel_size")
    queries = own * (width // f.whole("num_attention_heads"))
    wide, separable = f.whole("ext_pw_out_channel"), f.whole("depthwise_separable_out_channel")
    feed_forward: Parts = (
        norm("layer_norm", width, bias=True),
        replicated("gate_up_proj", width, 2 * inner, bias=True),
        replicated("down_proj", inner, width, bias=True),
    )
    layer: Parts = (
        *feed_forward,
        *feed_forward,
        Linear("self_attn.qkv_proj", width, 3 * queries, 3 * queries, pieces=3),
        Linear("self_attn.o_proj", queries, width, width),
        norm("norms", 3 * width, bias=True),
        Tensor("conv.glu", 2 * wide + 2 * wide * (width + 1)),
        Tensor("conv.dw_conv", width * (kernel + 1)),
        Tensor("conv.pw_conv", separable * (width + 1)),
        Tensor("conv.ext_pw_conv_1d", width * (separable + 1)),
    )
    strided = channels * (kernel**2 + 1)
    to_text: Parts = (
        replicated("up_proj", width, hidden(text), bias=True),
        replicated("down_proj", hidden(text), hidden(text), bias=True),
    )
    return (
        Tensor("embed.conv", strided + 2 * (strided + channels * (channels + 1))),
        replicated("embed.out", channels * f.whole("nemo_final_size"), width, bias=True),
        Tensor("relative_attention_bias", 2 * f.whole("bias_max_distance") * f.whole("num_attention_heads")),
        *layer * f.whole("num_blocks"),
        *to_text * 2,
    )


def phi4_vision(f: Section, text: Section, _root: Section, s: Shard) -> Parts:
    """Phi-4-multimodal's SigLIP with its attention pool; attention divided, the rest whole."""
    width, inner = hidden(f), f.whole("intermediate_size")
    encoder = Encoder(whole="mlp")
    return (
        patch_embedding(f, width, bias=True),
        Tensor("position_embedding", patches(f) * width),
        *encoder(
            f,
            s,
            width=width,
            inner=inner,
            layers=f.whole("num_hidden_layers"),
            heads=f.whole("num_attention_heads"),
        ),
        norm("post_layernorm", width, bias=True),
        Tensor("head.probe_and_separators", 3 * width),
        Tensor("head.attention", 4 * width * (width + 1)),
        norm("head.layernorm", width, bias=True),
        replicated("head.mlp.fc1", width, inner, bias=True),
        replicated("head.mlp.fc2", inner, width, bias=True),
        replicated("img_projection_up", width, hidden(text), bias=True),
        replicated("img_projection_down", hidden(text), hidden(text), bias=True),
    )


def qwen3_asr(f: Section, _text: Section, _root: Section, s: Shard) -> Parts:
    """Qwen3-ASR's encoder: three strided convolutions, then Whisper-like layers."""
    width, channels = f.whole("d_model"), f.whole("downsample_hidden_size")
    mels = f.whole("num_mel_bins")
    for _ in range(3):
        mels = (mels + 1) // 2
    return (
        Tensor("conv2d1", channels * (9 + 1)),
        Tensor("conv2d23", 2 * channels * (9 * channels + 1)),
        replicated("conv_out", channels * mels, width),
        *Encoder()(
            f,
            s,
            width=width,
            inner=f.whole("encoder_ffn_dim"),
            layers=f.whole("encoder_layers"),
            heads=f.whole("encoder_attention_heads"),
        ),
        norm("ln_post", width, bias=True),
        replicated("proj1", width, width, bias=True),
        replicated("proj2", width, f.whole("output_dim"), bias=True),
    )
