"""Multimodal models: a decoder, and towers that each pipeline stage holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvwatch.blockmath.errors import Unsupported
from kvwatch.blockmath.modelconfig import Section
from kvwatch.blockmath.weights.audio import (
    glmasr,
    granite_conformer,
    phi4_audio,
    phi4_vision,
    qformer,
    qwen2_5_omni_audio,
    qwen2_audio,
    qwen3_asr,
)
from kvwatch.blockmath.weights.decoders import DECODERS, TEXT_ARCHITECTURES
from kvwatch.blockmath.weights.layers import column, hidden, norm, replicated, required, row
from kvwatch.blockmath.weights.parts import Model, Parts, Tensor
from kvwatch.blockmath.weights.shard import WHOLE, Shard
from kvwatch.blockmath.weights.towers import (
    Tower,
    gemma4_vision,
    glm4v,
    intern_vit,
    internvl,
    llama4_vision,
    minicpm_vision,
    moonvit,
    muse_vision,
    qwen2_5_vl,
    qwen2_vl,
    qwen3_vl,
    siglip,
    siglip_features,
    vision_model,
)


@dataclass(frozen=True, slots=True)
class Composite:
    """A multimodal model.

    Attributes:
        towers: towers and projectors.
        text: architecture of the decoder; "" = as its own section says.
        pipeline: whether vLLM can split it into stages.
    """

    towers: tuple[Tower, ...]
    text: str = ""
    layer_prefix: str = "language_model.model.layers"
    pipeline: bool = True

    def __call__(self, root: Section, f: Section, s: Shard) -> Model:
        model = DECODERS[self.text or _text_architecture(f)](root, f, s)
        towers = tuple(part for tower in self.towers for part in tower(root, f, s))
        return replace(
            model,
            resident=model.resident + towers,
            layer_prefix=self.layer_prefix,
            pipeline=self.pipeline and model.pipeline,
        )


def _text_architecture(f: Section) -> str:
    stated = f.get("architectures")
    name = stated[0] if stated else TEXT_ARCHITECTURES.get(f.model_type, "")
    if name not in DECODERS:
        raise Unsupported(
            "unknown_architecture", f"weights of a {name or f.model_type} decoder are not modelled"
        )
    return str(name)


def two_layers(*, divided: bool = True, newline: bool = False) -> Callable[..., Parts]:
    """LLaVA's projector: two linear layers to the decoder's width, divided or whole on each rank."""

    def build(f: Section, text: Section, root: Section, s: Shard) -> Parts:
        bias, share = bool(root.get("multimodal_projector_bias", True)), s if divided else WHOLE
        parts: Parts = (
            column("multi_modal_projector.linear_1", hidden(f), hidden(text), s=share, bias=bias),
            row("multi_modal_projector.linear_2", hidden(text), hidden(text), s=share, bias=bias),
        )
        return (*parts, Tensor("image_newline", hidden(text))) if newline else parts

    return build


def _one_layer(f: Section, text: Section, _root: Section, _s: Shard) -> Parts:
    return (replicated("multi_modal_projector.linear", hidden(f), hidden(text), bias=True),)


def _gemma3_projector(f: Section, text: Section, _root: Section, _s: Shard) -> Parts:
    return (
        Tensor("multi_modal_projector.mm_input_projection_weight", hidden(f) * hidden(text)),
        norm("multi_modal_projector.mm_soft_emb_norm", hidden(f)),
    )


def _mistral3_projector(f: Section, text: Section, root: Section, s: Shard) -> Parts:
    merged = hidden(f) * root.whole("spatial_merge_size") ** 2
    bias = bool(root.get("multimodal_projector_bias"))
    return (
        norm("multi_modal_projector.norm", hidden(f)),
        replicated("multi_modal_projector.patch_merger.merging_layer", merged, hidden(f)),
        column("multi_modal_projector.linear_1", hidden(f), hidden(text), s=s, bias=bias),
        row("multi_modal_projector.linear_2", hidden(text), hidden(text), s=s, bias=bias),
    )


def _cohere_projector(f: Section, text: Section, root: Section, s: Shard) -> Parts:
    merged = hidden(f) * root.whole("downsample_factor") ** 2
    inner = root.whole("alignment_intermediate_size")
    return (
        column("multi_modal_projector.linear_1", merged, inner, s=s, bias=True),
        row("multi_modal_projector.linear_2", inner // 2, hidden(text), s=s, bias=True),
    )


def _idefics_projector(f: Section, text: Section, root: Section, _s: Shard) -> Parts:
    merged = hidden(f) * root.whole("scale_factor") ** 2
    return (replicated("connector.modality_projection.proj", merged, hidden(text)),)


def _internvl_projector(f: Section, text: Section, root: Section, _s: Shard) -> Parts:
    merged = round(hidden(f) / required(root, "downsample_ratio") ** 2)
    return (
        norm("multi_modal_projector.layer_norm", merged, bias=True),
        replicated("multi_modal_projector.linear_1", merged, hidden(text), bias=True),
        replicated("multi_modal_projector.linear_2", hidden(text), hidden(text), bias=True),
    )


def _paddle_projector(f: Section, text: Section, _root: Section, _s: Shard) -> Parts:
    merged = hidden(f) * f.whole("spatial_merge_size") ** 2
    return (
        norm("mlp_AR.pre_norm", hidden(f), bias=True),
        replicated("mlp_AR.linear_1", merged, merged, bias=True),
        replicated("mlp_AR.linear_2", merged, hidden(text), bias=True),
    )


def _aria_projector(f: Section, text: Section, root: Section, s: Shard) -> Parts:
    width = hidden(f)
    queries = max(int(count) for count in required(root, "projector_patch_to_query_dict").values())
    return (
        Tensor("multi_modal_projector.query", queries * width),
        *(replicated(f"multi_modal_projector.cross_attn.{name}_proj", width, width) for name in "qkv"),
        Tensor("multi_modal_projector.cross_attn.multihead_attn.in_proj", 3 * width * (width + 1)),
        replicated("multi_modal_projector.cross_attn.multihead_attn.out_proj", width, width, bias=True),
        replicated("multi_modal_projector.cross_attn.linear", width, width, bias=True),
        norm("multi_modal_projector.norms", 3 * width, bias=True),
        column("multi_modal_projector.feed_forward.linear_in", width, hidden(text), s=s),
        row("multi_modal_projector.feed_forward.linear_out", hidden(text), hidden(text), s=s),
    )


SIGLIP = Tower("vision_config", "siglip_vision_model", siglip)
FEATURES = Tower("vision_config", "siglip_vision_model", vision_model)
CLIP = Tower("vision_config", "clip_vision_model", vision_model)


def _vision(kind: str, build: Callable[..., Parts]) -> Tower:
    return Tower("vision_config", kind, build)


LLAVA = Composite((CLIP, _vision("clip_vision_model", two_layers())))
LLAVA_NEXT = Composite((CLIP, _vision("clip_vision_model", two_layers(newline=True))))
IDEFICS3 = Composite((_vision("idefics3_vision", siglip), _vision("idefics3_vision", _idefics_projector)))
QWEN3_VL_TOWER = (_vision("qwen3_vl_vision", qwen3_vl),)
GRANITE_SPEECH = Composite(
    (
        Tower("encoder_config", "granite_speech_encoder", granite_conformer),
        Tower("projector_config", "blip_2_qformer", qformer),
    )
)
MINICPM = Composite((_vision("minicpmv4_6_vision", minicpm_vision),), "Qwen3_5ForCausalLM")

QWEN2_5_OMNI = Composite(
    (
        Tower("thinker_config.audio_config", "qwen2_5_omni_audio_encoder", qwen2_5_omni_audio),
        Tower("thinker_config.vision_config", "qwen2_5_omni_vision_encoder", qwen2_5_vl),
    ),
    "Qwen2ForCausalLM",
)

MULTIMODAL = {
    "AriaForConditionalGeneration": Composite(
        (_vision("idefics3_vision", siglip_features), _vision("idefics3_vision", _aria_projector)),
        "AriaTextModel",
        pipeline=False,
    ),
    "Cohere2VisionForConditionalGeneration": Composite(
        (SIGLIP, _vision("siglip_vision_model", _cohere_projector)), "CohereForCausalLM"
    ),
    "Exaone4_5_ForConditionalGeneration": Composite(
        (_vision("exaone4_5_vision", qwen2_5_vl),), "Exaone4ForCausalLM"
    ),
    "Gemma3ForConditionalGeneration": Composite(
        (SIGLIP, _vision("siglip_vision_model", _gemma3_projector)), "Gemma3ForCausalLM"
    ),
    "Gemma4ForConditionalGeneration": Composite(
        (Tower("vision_config", "gemma4_vision", gemma4_vision, optional=True),), "Gemma4ForCausalLM"
    ),
    "Glm4vForConditionalGeneration": Composite((_vision("glm4v_vision", glm4v),), "Glm4ForCausalLM"),
    "GlmOcrForConditionalGeneration": Composite((_vision("glm_ocr_vision", glm4v),), "Glm4ForCausalLM"),
    "Glm4vMoeForConditionalGeneration": Composite((_vision("glm4v_vision", glm4v),), "Glm4MoeForCausalLM"),
    "GlmAsrForConditionalGeneration": Composite((Tower("audio_config", "glmasr_encoder", glmasr),)),
    "GraniteSpeechForConditionalGeneration": GRANITE_SPEECH,
    "GraniteSpeechPlusForConditionalGeneration": GRANITE_SPEECH,
    "Idefics3ForConditionalGeneration": IDEFICS3,
    "SmolVLMForConditionalGeneration": IDEFICS3,
    "InternVLForConditionalGeneration": Composite(
        (_vision("internvl_vision", internvl), _vision("internvl_vision", _internvl_projector))
    ),
    "Llama4ForConditionalGeneration": Composite(
        (_vision("llama4_vision_model", llama4_vision),), "Llama4ForCausalLM"
    ),
    "InternVLChatModel": Composite((_vision("intern_vit_6b", intern_vit),)),
    "KimiK25ForConditionalGeneration": Composite(
        (_vision("kimi_k25_vision", moonvit),), "DeepseekV3ForCausalLM"
    ),
    "LlavaForConditionalGeneration": LLAVA,
    "LlavaNextForConditionalGeneration": LLAVA_NEXT,
    "LlavaNextVideoForConditionalGeneration": Composite(
        (CLIP, _vision("clip_vision_model", two_layers(divided=False)))
    ),
    "LlavaOnevisionForConditionalGeneration": Composite(
        (FEATURES, _vision("siglip_vision_model", two_layers(divided=False, newline=True)))
    ),
    "MiniCPMV4_6ForConditionalGeneration": MINICPM,
    "MiniCPMV4_7ForConditionalGeneration": MINICPM,
    "Mistral3ForConditionalGeneration": Composite(
        (_vision("pixtral", vision_model), _vision("pixtral", _mistral3_projector))
    ),
    "MuseGlimmerForConditionalGeneration": Composite(
        (_vision("muse_glimmer_vision", muse_vision),), "MuseGlimmerForCausalLM", layer_prefix="model.layers"
    ),
    "PaddleOCRVLForConditionalGeneration": Composite(
        (
            _vision("paddleocr_vl_vision", siglip),
            _vision("paddleocr_vl_vision", _paddle_projector),
        ),
        "Ernie4_5ForCausalLM",
        pipeline=False,
    ),
    "PaliGemmaForConditionalGeneration": Composite((SIGLIP, _vision("siglip_vision_model", _one_layer))),
    "Phi4MultimodalForCausalLM": Composite(
        (
            _vision("phi4_multimodal_vision", phi4_vision),
            Tower("audio_config", "phi4_multimodal_audio", phi4_audio),
        ),
        "Phi3ForCausalLM",
        layer_prefix="model.layers",
    ),
    "Qwen3OmniMoeForConditionalGeneration": Composite(
        (
            Tower("thinker_config.audio_config", "qwen3_omni_moe_audio_encoder", qwen3_asr),
            Tower("thinker_config.vision_config", "qwen3_omni_moe_vision_encoder", qwen3_vl),
        ),
        "Qwen3MoeForCausalLM",
    ),
    "Qwen3ASRForConditionalGeneration": Composite(
        (Tower("thinker_config.audio_config", "qwen3_asr_encoder", qwen3_asr),), "Qwen3ForCausalLM"
    ),
    "Qwen2_5OmniForConditionalGeneration": QWEN2_5_OMNI,
    "Qwen2_5OmniModel": QWEN2_5_OMNI,
    "Qwen2_5_VLForConditionalGeneration": Composite(
        (_vision("qwen2_5_vl_vision", qwen2_5_vl),), "Qwen2ForCausalLM"
    ),
    "Qwen2AudioForConditionalGeneration": Composite(
        (Tower("audio_config", "qwen2_audio_encoder", qwen2_audio),)
    ),
    "Qwen2VLForConditionalGeneration": Composite((_vision("qwen2_vl_vision", qwen2_vl),), "Qwen2ForCausalLM"),
    "Qwen3VLForConditionalGeneration": Composite(QWEN3_VL_TOWER, "Qwen3ForCausalLM"),
    "Qwen3VLMoeForConditionalGeneration": Composite(QWEN3_VL_TOWER, "Qwen3MoeForCausalLM"),
    "Qwen3_5ForConditionalGeneration": Composite(QWEN3_VL_TOWER, "Qwen3_5ForCausalLM"),
    "Qwen3_5MoeForConditionalGeneration": Composite(QWEN3_VL_TOWER, "Qwen3_5MoeForCausalLM"),
}
