"""Vision towers, with the projectors that belong to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvwatch.blockmath.errors import Unsupported
from kvwatch.blockmath.modelconfig import Section
from kvwatch.blockmath.weights.field_defaults import FIELD_DEFAULTS
from kvwatch.blockmath.weights.layers import Switch, column, hidden, norm, on, replicated, required, row, size
from kvwatch.blockmath.weights.parts import Linear, Part, Parts, Tensor, section
from kvwatch.blockmath.weights.shard import WHOLE, Shard

TowerBuilder = Callable[[Section, Section, Section, Shard], Parts]
"""From the tower's own section, the decoder's, the whole file and a rank's share to parts."""


@dataclass(frozen=True, slots=True)
class Tower:
    """A tower or projector of a multimodal model.

    Attributes:
        section: where config.json describes it; the last name may also stand at the top.
        kind: the model type that gives its defaults.
        build: its builder.
        optional: absent from config.json means absent from the model.
    """

    section: str
    kind: str
    build: TowerBuilder
    optional: bool = False

    def __call__(self, root: Section, text: Section, s: Shard) -> Parts:
        own = root.own
        *wrappers, last = self.section.split(".")
        for name in wrappers:
            own = own.get(name, own)
        value = own.get(last)
        if self.optional and value is None:
            return ()
        own = value if isinstance(value, Mapping) else {}
        kind = str(own.get("model_type") or self.kind)
        return self.build(section(own, kind if kind in FIELD_DEFAULTS else self.kind), text, root, s)


@dataclass(frozen=True, slots=True)
class Encoder:
    """A stack of encoder layers, divided by heads.

    Attributes:
        qkv_bias, out_bias, mlp_bias: which projections have biases; "q_v" biases queries and values only.
        gated: the feed-forward network has a gate.
        norm_bias: norms have a shift.
        head_norm: queries and keys have norms over one head.
        extra: further elements per layer, as a multiple of the width (layer scales).
        whole: what each rank holds undivided: "attention", "mlp", or both; "" = nothing.
    """

    qkv_bias: Switch | str = True
    out_bias: Switch = True
    mlp_bias: Switch = True
    gated: bool = False
    norm_bias: bool = True
    norms: int = 2
    head_norm: bool = False
    extra: int = 0
    whole: str = ""

    def __call__(
        self,
        f: Section,
        s: Shard,
        *,
        width: int,
        inner: int,
        layers: int,
        heads: int,
        kv_heads: int | None = None,
    ) -> Parts:
        share = WHOLE if "mlp" in self.whole else s
        attention = WHOLE if "attention" in self.whole else s
        dim = f.whole("head_dim", width // heads)
        queries = attention.of(heads, "tower heads") * dim
        merged = queries + 2 * attention.kv_heads(kv_heads or heads) * dim
        bias = 2 * queries if self.qkv_bias == "q_v" else merged * on(f, self.qkv_bias)
        up = (inner, inner) if self.gated else (inner,)
        mlp_bias = on(f, self.mlp_bias)
        layer: list[Part] = [
            Linear("attn.qkv", width, merged, bias, pieces=3),
            Linear("attn.proj", queries, width, width * on(f, self.out_bias)),
            column("mlp.up", width, *up, s=share, bias=mlp_bias),
            row("mlp.down", inner, width, s=share, bias=mlp_bias),
            norm("norms", self.norms * width, bias=self.norm_bias),
        ]
        if self.head_norm:
            layer.append(norm("qk_norm", 2 * dim))
        if self.extra:
            layer.append(Tensor("scales", self.extra * width))
        return tuple(layer) * layers


def square(value: object) -> tuple[int, int]:
    """A size given as one number or as two."""
    if isinstance(value, list | tuple):
        return int(value[0]), int(value[-1])
    return int(str(value)), int(str(value))


def patches(f: Section) -> int:
    """Patches of one image."""
    (height, width), (rows, columns) = square(required(f, "image_size")), square(required(f, "patch_size"))
    return (height // rows) * (width // columns)


def patch_embedding(f: Section, width: int, *, bias: bool, channels: str = "num_channels") -> Tensor:
    """The convolution that turns patches into tokens."""
    rows, columns = square(required(f, "patch_size"))
    depth = f.whole("temporal_patch_size", 1)
    return Tensor("patch_embed", width * (f.whole(channels, 3) * depth * rows * columns + bias))


def kept_layers(f: Section, root: Section) -> int:
    """Layers up to the one whose output is used; vLLM drops the rest."""
    total = f.whole("num_hidden_layers")
    chosen = root.get("vision_feature_layer")
    if isinstance(chosen, list | tuple):
        chosen = max(index if index >= 0 else total + 1 + index for index in chosen)
    if not isinstance(chosen, int):
        return total
    return min(total, total + chosen + 1 if chosen < 0 else chosen)


def siglip(f: Section, _text: Section, _root: Section, s: Shard) -> Parts:
    """SigLIP whole: patches with a bias, positions, biased layers, a last norm."""
    return (*_siglip_layers(f, s, f.whole("num_hidden_layers")), norm("post_layernorm", hidden(f), bias=True))


def siglip_features(f: Section, _text: Section, root: Section, s: Shard) -> Parts:
    """SigLIP up to the layer whose output is used, without a last norm."""
    return _siglip_layers(f, s, kept_layers(f, root))


def _siglip_layers(f: Section, s: Shard, layers: int) -> Parts:
    width = hidden(f)
    return (
        patch_embedding(f, width, bias=True),
        Tensor("position_embedding", patches(f) * width),
        *Encoder()(f, s, width=width, inner=f.whole("intermediate_size"), layers=layers, heads=_heads(f)),
    )


def clip(f: Section, _text: Section, root: Section, s: Shard) -> Parts:
    """CLIP up to the layer whose output is used: a class token, patches without bias, a first norm."""
    width, layers = hidden(f), kept_layers(f, root)
    return (
        patch_embedding(f, width, bias=False),
        Tensor("class_and_positions", (patches(f) + 2) * width),
        norm("pre_layrnorm", width, bias=True),
        *Encoder()(f, s, width=width, inner=f.whole("intermediate_size"), layers=layers, heads=_heads(f)),
    )


def _heads(f: Section) -> int:
    return size(f, "num_attention_heads", "num_heads")


def vision_model(f: Section, text: Section, root: Section, s: Shard) -> Parts:
    """The tower that the section's model type names, up to the layer whose output is used."""
    builder = VISION_BY_TYPE.get(f.model_type)
    if builder is None:
        raise Unsupported("unknown_tower", f"weights of a {f.model_type} tower are not modelled")
    return builder(f, text, root, s)


def pixtral(f: Section, _text: Section, root: Section, s: Shard) -> Parts:
    """Pixtral: RMS norms, gated networks, no biases."""
    width = hidden(f)
    encoder = Encoder(qkv_bias=False, out_bias=False, mlp_bias=False, gated=True, norm_bias=False)
    return (
        patch_embedding(f, width, bias=False),
        norm("ln_pre", width),
        *encoder(
            f,
            s,
            width=width,
            inner=f.whole("intermediate_size"),
            layers=kept_layers(f, root),
            heads=_heads(f),
        ),
    )


def qwen2_vl(f: Section, _text: Section, _root: Section, s: Shard) -> Parts:
    """Qwen2-VL: layer norms, plain networks; patches merge four to one."""
    width, merge = f.whole("embed_dim"), f.whole("spatial_merge_size") ** 2
    inner = int(width * required(f, "mlp_ratio"))
    return (
        patch_embedding(f, width, bias=False, channels="in_channels"),
        *Encoder()(f, s, width=width, inner=inner, layers=f.whole("depth"), heads=f.whole("num_heads")),
        norm("merger.ln_q", width, bias=True),
        column("merger.mlp.0", merge * width, merge * width, s=s, bias=True),
        row("merger.mlp.2", merge * width, hidden(f), s=s, bias=True),
    )


def qwen2_5_vl(f: Section, _text: Section, _root: Section, s: Shard) -> Parts:
    """Qwen2.5-VL: RMS norms, gated networks; also EXAONE 4.5's, with grouped KV heads."""
    width, merge = hidden(f), f.whole("spatial_merge_size") ** 2
    encoder = Encoder(gated=True, norm_bias=False)
    return (
        patch_embedding(f, width, bias=False, channels="in_channels"),
        *encoder(
            f,
            s,
            width=width,
            inner=f.whole("intermediate_size"),
            layers=f.whole("depth"),
            heads=f.whole("num_heads"),
            kv_heads=f.get("num_key_value_heads"),
        ),
        norm("merger.ln_q", width),
        column("merger.mlp.0", merge * width, merge * width, s=s, bias=True),
        row("merger.mlp.2", merge * width, f.whole("out_hidden_size"), s=s, bias=True),
    )


def qwen3_vl(f: Section, _text: Section, _root: Section, s: Shard) -> Parts:
    """Qwen3-VL and Qwen3.5: learned positions, and a merger for each layer whose output is also used."""
    width, merged = hidden(f), hidden(f) * f.whole("spatial_merge_size") ** 2
    deep = len(f.get("deepstack_visual_indexes") or ())
    merger = (
        column("merger.linear_fc1", merged, merged, s=s, bias=True),
        row("merger.linear_fc2", merged, f.whole("out_hidden_size"), s=s, bias=True),
    )
    return (
        patch_embedding(f, width, bias=True, channels="in_channels"),
        Tensor("pos_embed", f.whole("num_position_embeddings") * width),
        *Encoder()(
            f,
            s,
            width=width,
            inner=f.whole("intermediate_size"),
            layers=f.whole("depth"),
            heads=f.whole("num_heads"),
        ),
        norm("merger.norm", width, bias=True),
        *merger * (1 + deep),
        norm("deepstack.norms", deep * merged, bias=True),
    )


def glm4v(f: Section, text: Section, _root: Section, s: Shard) -> Parts:
    """GLM-4V and GLM-OCR: RMS norms, gated networks, a convolution that merges patches, a gated merger."""
    width, out = hidden(f), f.whole("out_hidden_size")
    ocr = f.model_type.startswith("glm_ocr")
    merge = f.whole("spatial_merge_size") ** 2
    inner = f.whole("intermediate_size")
    encoder = Encoder(
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        mlp_bias="attention_bias" if ocr else False,
        gated=True,
        norm_bias=False,
        head_norm=ocr,
    )
    blocks = inner if ocr else out
    context = text.whole("intermediate_size") if ocr else inner
    parts: Parts = (
        patch_embedding(f, width, bias=True, channels="in_channels"),
        *encoder(f, s, width=width, inner=blocks, layers=f.whole("depth"), heads=f.whole("num_heads")),
        column("merger.proj", out, out, s=s),
        norm("merger.post_projection_norm", out, bias=True),
        column("merger.gate_up_proj", out, context, context, s=s),
        row("merger.down_proj", context, out, s=s),
        Tensor("downsample", out * (width * merge + 1)),
        norm("post_layernorm", width),
    )
    if ocr:
        return parts
    return (*parts, Tensor("position_embedding", patches(f) * width), norm("post_conv_layernorm", width))


def internvl(f: Section, _text: Section, _root: Section, s: Shard) -> Parts:
    """InternVL's ViT: a class token, layer scales, whole attention on each rank."""
    width = hidden(f)
    encoder = Encoder(qkv_bias="attention_bias", extra=2, whole="attention")
    return (
        patch_embedding(f, width, bias=True),
        Tensor("class_and_positions", (patches(f) + 2) * width),
        *encoder(
            f,
            s,
            width=width,
            inner=f.whole("intermediate_size"),
            layers=f.whole("num_hidden_layers"),
            heads=_heads(f),
        ),
    )


def intern_vit(f: Section, text: Section, root: Section, s: Shard) -> Parts:
    """InternViT of InternVLChat, up to the layer whose output is used, and its projector."""
    width, count = hidden(f), f.whole("num_hidden_layers")
    chosen = root.whole("select_layer", -1)
    layers = count + chosen + 1 if chosen < 0 else chosen + 1
    total = _heads(f)
    encoder = Encoder(
        qkv_bias="qkv_bias",
        norm_bias=f.get("norm_type", "rms_norm") == "layer_norm",
        extra=4 if f.get("qk_normalization") else 2,
        whole="attention" if total % s.tp else "",
    )
    merged = width * int(1 / root.get("downsample_ratio", 0.5)) ** 2
    return (
        patch_embedding(f, width, bias=True),
        Tensor("class_and_positions", (patches(f) + 2) * width),
        *encoder(f, s, width=width, inner=f.whole("intermediate_size"), layers=layers, heads=total),
        norm("mlp1.0", merged, bias=True),
        replicated("mlp1.1", merged, hidden(text), bias=True),
        replicated("mlp1.3", hidden(text), hidden(text), bias=True),
    )


def llama4_vision(f: Section, text: Section, _root: Section, s: Shard) -> Parts:
    """Llama 4's ViT, its pixel-shuffle adapter and the projection to the decoder."""
    width, merged = hidden(f), f.whole("intermediate_size")
    inner, out = f.whole("projector_input_dim"), f.whole("projector_output_dim")
    rows, columns = square(required(f, "patch_size"))
    return (
        Tensor("class_and_positions", (patches(f) + 2) * width),
        column("patch_embedding.linear", f.whole("num_channels", 3) * rows * columns, width, s=s),
        norm("layernorms", 2 * width, bias=True),
        *Encoder()(
            f,
            s,
            width=width,
            inner=f.whole("intermediate_size"),
            layers=f.whole("num_hidden_layers"),
            heads=_heads(f),
        ),
        column("vision_adapter.mlp.fc1", merged, inner, s=s),
        row("vision_adapter.mlp.fc2", inner, out, s=s),
        column("multi_modal_projector.linear_1", f.whole("vision_output_dim"), hidden(text), s=s),
    )


def gemma4_vision(f: Section, text: Section, _root: Section, s: Shard) -> Parts:
    """Gemma 4's ViT: tables of positions for both axes, four norms, norms of queries and keys."""
    width = hidden(f)
    rows, columns = square(required(f, "patch_size"))
    encoder = Encoder(
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        gated=True,
        norm_bias=False,
        norms=4,
        head_norm=True,
        whole="attention and mlp",
    )
    return (
        Tensor("position_embedding_table", 2 * f.whole("position_embedding_size") * width),
        replicated("patch_embedder.input_proj", 3 * rows * columns, width),
        *encoder(
            f,
            s,
            width=width,
            inner=f.whole("intermediate_size"),
            layers=f.whole("num_hidden_layers"),
            heads=_heads(f),
        ),
        replicated("embed_vision.embedding_projection", width, hidden(text)),
    )


def muse_vision(f: Section, text: Section, root: Section, s: Shard) -> Parts:
    """Muse Glimmer's ViT, its adapter and the projection to the decoder."""
    width, inner = hidden(f), root.whole("projector_hidden_size")
    rows, columns = square(required(f, "patch_size"))
    merged = width * f.whole("merge_size") ** 2
    return (
        Tensor("positional_embedding_vlm", f.whole("pos_emb_height") * f.whole("pos_emb_width") * width),
        Tensor("conv1_linear", width * 3 * f.whole("patch_temporal") * rows * columns),
        norm("ln_pre_post", 2 * width, bias=True),
        *Encoder(whole="mlp")(
            f,
            s,
            width=width,
            inner=f.whole("intermediate_size"),
            layers=f.whole("num_hidden_layers"),
            heads=_heads(f),
        ),
        replicated("vision_adapter.c_fc", merged, inner),
        replicated("vision_adapter.c_proj", inner, inner),
        replicated("vision_projection", inner, hidden(text)),
    )


def moonvit(f: Section, _text: Section, _root: Section, s: Shard) -> Parts:
    """Kimi's MoonViT, its table of positions, and the merger to the decoder."""
    width, out = f.whole("vt_hidden_size"), f.whole("text_hidden_size")
    rows, columns = square(required(f, "merge_kernel_size"))
    merged = f.whole("mm_hidden_size") * rows * columns
    return (
        patch_embedding(f, width, bias=True),
        Tensor("pos_emb", f.whole("init_pos_emb_height") * f.whole("init_pos_emb_width") * width),
        *Encoder()(
            f,
            s,
            width=width,
            inner=f.whole("vt_intermediate_size"),
            layers=f.whole("vt_num_hidden_layers"),
            heads=f.whole("vt_num_attention_heads"),
        ),
        norm("final_layernorm", width, bias=True),
        norm("mm_projector.pre_norm", f.whole("mm_hidden_size"), bias=True),
        replicated("mm_projector.linear_1", merged, merged, bias=True),
        replicated("mm_projector.linear_2", merged, out, bias=True),
    )


def minicpm_vision(f: Section, text: Section, root: Section, s: Shard) -> Parts:
    """MiniCPM-V's SigLIP with a merger in the middle of the stack and one at its end."""
    width = hidden(f)
    area = square(required(f, "window_kernel_size"))[0] ** 2
    merged = width * area
    once = Encoder()(f, s, width=width, inner=f.whole("intermediate_size"), layers=1, heads=_heads(f))[:2]
    final = width * square(required(root, "merge_kernel_size"))[0] ** 2
    return (
        *siglip(f, text, root, s),
        *once,
        norm("vit_merger.layer_norm1", width, bias=True),
        norm("vit_merger.pre_norm", merged, bias=True),
        replicated("vit_merger.linear_1", merged, area * f.whole("intermediate_size"), bias=True),
        replicated("vit_merger.linear_2", area * f.whole("intermediate_size"), width, bias=True),
        norm("merger.pre_norm", final, bias=True),
        replicated("merger.linear_1", final, final, bias=True),
        replicated("merger.linear_2", final, hidden(text), bias=True),
    )


VISION_BY_TYPE: dict[str, TowerBuilder] = {
    "clip_vision_model": clip,
    "siglip_vision_model": siglip_features,
    "pixtral": pixtral,
}
