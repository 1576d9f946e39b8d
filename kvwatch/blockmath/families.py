"""Which family an architecture belongs to, as vLLM 0.32's model registry has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from kvwatch.blockmath.errors import Unsupported
from kvwatch.blockmath.layouts import decoder, deepseek_v4, hybrid, inferred, mla, special
from kvwatch.blockmath.layouts.base import Context, Family, Layout, plain
from kvwatch.blockmath.modelconfig import ModelConfig
from kvwatch.blockmath.releases import Release
from kvwatch.blockmath.settings import Traits

TraitsOf = Callable[[ModelConfig], Traits]

UNSPLIT: Final = frozenset(
    [
        "AriaForConditionalGeneration",
        "DiffusionGemmaForBlockDiffusion",
        "FireRedASR2ForConditionalGeneration",
        "Gemma3nForCausalLM",
        "Gemma3nForConditionalGeneration",
        "HrmTextForCausalLM",
        "IQuestLoopCoderForCausalLM",
        "Idefics3ForConditionalGeneration",
        "Mamba2ForCausalLM",
        "NemotronH_Nano_Omni_Reasoning_V3",
        "NemotronH_Nano_VL_V2",
        "NemotronH_Omni_Reasoning_V3",
        "NemotronH_Super_Omni_Reasoning_V3",
        "NemotronParseForConditionalGeneration",
        "PaddleOCRVLForConditionalGeneration",
        "Phi4MMForCausalLM",
        "SmolVLMForConditionalGeneration",
        "WhisperForConditionalGeneration",
        "Zamba2ForCausalLM",
    ]
)
"""Architectures that vLLM does not split over pipeline stages."""


def _latent(_: ModelConfig) -> Traits:
    return Traits(mla=True)


def _pooling(_: ModelConfig) -> Traits:
    return Traits(pooling=True)


def _encoder(_: ModelConfig) -> Traits:
    return Traits(pooling=True, encoder_only=True)


_GROUPS: Final[tuple[tuple[Callable[[Context], Layout], TraitsOf, str], ...]] = (
    (
        decoder.layers,
        plain,
        """
        AfmoeForCausalLM ApertusForCausalLM ArceeForCausalLM AriaForConditionalGeneration
        AudioFlamingo3ForConditionalGeneration BagelForConditionalGeneration BailingMoeForCausalLM
        BailingMoeV2ForCausalLM BeeForConditionalGeneration Blip2ForConditionalGeneration BloomForCausalLM
        ChatGLMForConditionalGeneration CohereForCausalLM Cosmos3EdgeForConditionalGeneration
        Cosmos3ForConditionalGeneration CwmForCausalLM DeepseekForCausalLM DotsOCRForCausalLM
        Eagle2_5_VLForConditionalGeneration Emu3ForConditionalGeneration Ernie4_5ForCausalLM
        Ernie4_5_MoeForCausalLM Ernie4_5_VLMoeForConditionalGeneration Exaone4ForCausalLM
        Exaone4_5_ForConditionalGeneration ExaoneForCausalLM ExaoneMoEForCausalLM ExaoneMoeForCausalLM
        FireRedASR2ForConditionalGeneration FlexOlmoForCausalLM FunAudioChatForConditionalGeneration
        FunASRForConditionalGeneration GLM4VForCausalLM GPT2LMHeadModel GPTJForCausalLM
        GPTNeoXForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM GemmaForCausalLM Glm4ForCausalLM
        Glm4MoeForCausalLM Glm4vForConditionalGeneration Glm4vMoeForConditionalGeneration
        GlmAsrForConditionalGeneration GlmForCausalLM GlmOcrForConditionalGeneration
        Granite4VisionForConditionalGeneration GraniteForCausalLM GraniteMoeForCausalLM
        GraniteMoeSWAForCausalLM GraniteMoeSharedForCausalLM GraniteSWAForCausalLM
        GraniteSpeechForConditionalGeneration GraniteSpeechPlusForConditionalGeneration H2OVLChatModel
        HCXVisionV2ForCausalLM HYV3ForCausalLM HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM
        HunYuanVLForConditionalGeneration HyperCLOVAXForCausalLM IQuestCoderForCausalLM
        Idefics3ForConditionalGeneration InternLM2ForCausalLM InternLM3ForCausalLM
        InternS1ForConditionalGeneration InternVLChatModel InternVLForConditionalGeneration
        IsaacForConditionalGeneration Jais2ForCausalLM KananaVForConditionalGeneration
        KeyeForConditionalGeneration KeyeVL1_5ForConditionalGeneration LLaMAForCausalLM LagunaForCausalLM
        LightOnOCRForConditionalGeneration LlamaForCausalLM Llama_Nemotron_Nano_VL
        LlavaForConditionalGeneration LlavaNextForConditionalGeneration
        LlavaNextVideoForConditionalGeneration LlavaOnevision2ForConditionalGeneration
        LlavaOnevisionForConditionalGeneration MellumForCausalLM MiDashengLMModel MiMoForCausalLM
        MiniCPMForCausalLM MiniCPMO MiniCPMV MiniMaxM2ForCausalLM Ministral3ForCausalLM
        Mistral3ForConditionalGeneration MistralForCausalLM MixtralForCausalLM Molmo2ForConditionalGeneration
        MolmoForCausalLM MoonshotKimiaForCausalLM MossTranscribeDiarizeForConditionalGeneration
        MuseGlimmerForCausalLM MuseGlimmerForConditionalGeneration NVLM_D NanbeigeForCausalLM
        NemotronForCausalLM OPTForCausalLM Olmo2ForCausalLM Olmo3ForCausalLM OlmoForCausalLM OlmoeForCausalLM
        OpenCUAForConditionalGeneration OrionForCausalLM Ovis Ovis2_5 Ovis2_6ForCausalLM
        Ovis2_6_MoeForCausalLM PaddleOCRVLForConditionalGeneration PanguEmbeddedForCausalLM
        Param2MoEForCausalLM Phi3ForCausalLM Phi3VForCausalLM Phi4ForCausalLMV Phi4MMForCausalLM
        PhiForCausalLM PhiMoEForCausalLM PixtralForConditionalGeneration QianfanOCRForConditionalGeneration
        Qwen2AudioForConditionalGeneration Qwen2ForCausalLM Qwen2MoeForCausalLM
        Qwen2VLForConditionalGeneration Qwen2_5OmniForConditionalGeneration Qwen2_5OmniModel
        Qwen2_5_VLForConditionalGeneration Qwen3ASRForConditionalGeneration Qwen3ASRRealtimeGeneration
        Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3OmniMoeForConditionalGeneration
        Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration RForConditionalGeneration
        SarvamMoEForCausalLM SeedOssForCausalLM SkyworkR1VChatModel SmolLM3ForCausalLM
        SmolVLMForConditionalGeneration SolarForCausalLM StableLmForCausalLM Starcoder2ForCausalLM
        Step1ForCausalLM StepVLForConditionalGeneration TeleChat2ForCausalLM TeleChat3ForCausalLM
        TeleFLMForCausalLM TransformersForCausalLM TransformersMoEForCausalLM
        TransformersMultiModalForCausalLM TransformersMultiModalMoEForCausalLM UltravoxModel
        VaultGemmaForCausalLM VibeVoiceAsrForConditionalGeneration VoxtralForConditionalGeneration
        Phi4MultimodalForCausalLM
        """,
    ),
    (
        decoder.layers,
        _pooling,
        """
        GPT2ForSequenceClassification Gemma2Model InternLM2ForRewardModel LlamaModel MistralModel
        JinaForRanking Qwen2ForProcessRewardModel Qwen2ForRewardModel Qwen2Model
        """,
    ),
    (
        decoder.no_cache,
        _encoder,
        """
        BertForMaskedLM BertForSequenceClassification BertForTokenClassification BertModel
        BertSpladeSparseEmbeddingModel BgeM3EmbeddingModel CLIPModel ColBERTJinaRobertaModel
        ColBERTModernBertModel ColModernVBertForRetrieval EmbeddingGemma2Model GteModel
        GteNewForSequenceClassification GteNewModel HF_ColBERT ModernBertForSequenceClassification
        ModernBertForTokenClassification ModernBertModel NomicBertModel RobertaForMaskedLM
        RobertaForSequenceClassification RobertaForTokenClassification RobertaModel SiglipModel
        TransformersEmbeddingModel XLMRobertaForSequenceClassification XLMRobertaForTokenClassification
        XLMRobertaModel ErnieModel
        """,
    ),
    (decoder.with_sinks, plain, "GptOssForCausalLM"),
    (
        decoder.layers,
        special.image_prefix_traits,
        "Gemma3ForConditionalGeneration PaliGemmaForConditionalGeneration",
    ),
    (
        decoder.one_token_wider,
        plain,
        """
        Cohere2ForCausalLM Cohere2MoeForCausalLM Cohere2VisionForConditionalGeneration
        CohereCompassForConditionalGeneration
        """,
    ),
    (special.gemma3n, plain, "Gemma3nForCausalLM Gemma3nForConditionalGeneration"),
    (special.gemma4, plain, "Gemma4ForCausalLM"),
    (
        special.gemma4,
        special.gemma4_image_traits,
        "Gemma4ForConditionalGeneration Gemma4UnifiedForConditionalGeneration",
    ),
    (special.llama4, special.llama4_traits, "Llama4ForCausalLM Llama4ForConditionalGeneration"),
    (special.nemotron_nas, plain, "DeciLMForCausalLM"),
    (special.whisper, special.encoder_decoder_traits, "WhisperForConditionalGeneration"),
    (special.falcon, plain, "FalconForCausalLM RWForCausalLM"),
    (special.gpt_bigcode, plain, "GPTBigCodeForCausalLM"),
    (special.dbrx, plain, "DbrxForCausalLM"),
    (special.chatglm, plain, "ChatGLMModel"),
    (special.every_head_by_its_parts, plain, "MiniCPM3ForCausalLM"),
    (special.one_kv_head, plain, "Step3TextForCausalLM Step3VLForConditionalGeneration"),
    (special.two_shapes, plain, "MiMoV2FlashForCausalLM MiMoV2ForCausalLM MiMoV2OmniForCausalLM"),
    (special.step, plain, "Step3p5ForCausalLM Step3p7ForConditionalGeneration"),
    (special.chunks_as_windows, plain, "Rnj1ForCausalLM"),
    (special.loops, plain, "IQuestLoopCoderForCausalLM"),
    (special.hrm, plain, "HrmTextForCausalLM"),
    (
        mla.layers,
        _latent,
        """
        AXK1ForCausalLM DeepseekOCR2ForCausalLM DeepseekOCRForCausalLM DeepseekV2ForCausalLM
        DeepseekV3ForCausalLM DeepseekVLV2ForCausalLM Glm4MoeLiteForCausalLM KimiK25ForConditionalGeneration
        KimiVLForConditionalGeneration MistralLarge3ForCausalLM PanguUltraMoEForCausalLM SarvamMLAForCausalLM
        """,
    ),
    (mla.two_per_layer, _latent, "LongcatFlashForCausalLM LongcatFlashNgramForCausalLM"),
    (mla.sparse_layers, _latent, "DeepseekV32ForCausalLM GlmMoeDsaForCausalLM"),
    (mla.sparse_layers_with_sinks, _latent, "HYV4ForCausalLM"),
    (deepseek_v4.layers, deepseek_v4.traits, "DeepseekV4ForCausalLM"),
    (hybrid.jamba, hybrid.traits, "JambaForCausalLM"),
    (hybrid.falcon_h1, hybrid.traits, "FalconH1ForCausalLM"),
    (hybrid.granite, hybrid.traits_by_layer_types, "GraniteMoeHybridForCausalLM"),
    (hybrid.lfm2, hybrid.traits, "Lfm2ForCausalLM Lfm2MoeForCausalLM Lfm2VlForConditionalGeneration"),
    (hybrid.mamba, hybrid.free_traits, "FalconMambaForCausalLM MambaForCausalLM"),
    (hybrid.mamba2, hybrid.free_traits, "Mamba2ForCausalLM"),
    (
        hybrid.nemotron,
        hybrid.traits,
        """
        NemotronHForCausalLM NemotronHPuzzleForCausalLM NemotronH_Nano_Omni_Reasoning_V3 NemotronH_Nano_VL_V2
        NemotronH_Omni_Reasoning_V3 NemotronH_Super_Omni_Reasoning_V3
        """,
    ),
    (
        hybrid.gated_delta,
        hybrid.traits,
        """
        InternS2MobiusForConditionalGeneration InternS2PreviewForConditionalGeneration
        MiniCPMV4_6ForConditionalGeneration MiniCPMV4_7ForConditionalGeneration Qwen3NextForCausalLM
        Qwen3_5ForCausalLM Qwen3_5ForConditionalGeneration Qwen3_5MoeForCausalLM
        Qwen3_5MoeForConditionalGeneration
        """,
    ),
    (hybrid.olmo, hybrid.traits, "OlmoHybridForCausalLM"),
    (hybrid.zamba2, hybrid.traits, "Zamba2ForCausalLM"),
    (hybrid.kimi_linear, hybrid.latent_traits, "KimiK3ForConditionalGeneration KimiLinearForCausalLM"),
    (hybrid.bailing_linear, hybrid.latent_traits, "BailingMoeV2_5ForCausalLM"),
)

FAMILIES: Final[Mapping[str, Family]] = {
    name: Family(layers, traits) for layers, traits, names in _GROUPS for name in names.split()
}


TIED_UNSPLIT: Final = frozenset({"Ernie4_5_MoeForCausalLM"})
"""Architectures that cannot be split over pipeline stages where input and output embeddings are one
matrix.
"""


def traits_of(config: ModelConfig, family: Family) -> Traits:
    """What the model is."""
    traits = family.traits(config)
    tied = config.architecture in TIED_UNSPLIT and config.text.get("tie_word_embeddings")
    return replace(traits, pipeline=False) if config.architecture in UNSPLIT or tied else traits


def check_release(traits: Traits, release: Release) -> None:
    """Stop where a release planned such models in a way that is not known here.

    Raises:
        Unsupported: the release is too old for the model's kind of layers.
    """
    if release.version < traits.known_since:
        since = ".".join(map(str, traits.known_since))
        raise Unsupported("release", f"how vLLM before {since} planned this kind of model is not known here")


NOT_COVERED: Final = frozenset(
    [
        "BailingMoeV3ForCausalLM",
        "BailingMoeV3VLForConditionalGeneration",
        "CohereAsrForConditionalGeneration",
        "DeepseekV41ForCausalLM",
        "DeepseekV4ForConditionalGeneration",
        "DiffusionGemmaForBlockDiffusion",
        "Dots3NoteForCausalLM",
        "Glm5NextForCausalLM",
        "Glm5NextForConditionalGeneration",
        "HfMoondream",
        "InklingForCausalLM",
        "InklingForConditionalGeneration",
        "InternS1ProForConditionalGeneration",
        "K2HorizonForCausalLM",
        "MiniMaxM3SparseForCausalLM",
        "MiniMaxM3SparseForConditionalGeneration",
        "Moondream3ForCausalLM",
        "MossAudioModel",
        "NemotronParseForConditionalGeneration",
        "OpenPanguVLForConditionalGeneration",
        "OpenVLAForActionPrediction",
        "PanguProMoEV2ForCausalLM",
        "Qwen4ExpForCausalLM",
        "Qwen4ExpForConditionalGeneration",
        "Terratorch",
        "UnlimitedOCRForCausalLM",
        "VoxtralRealtimeGeneration",
    ]
)
"""Architectures that vLLM serves with caches that are not worked out here."""

_INFERRED: Final = Family(inferred.layers, inferred.traits)


def family_of(config: ModelConfig) -> Family:
    """The family of a model; one that reads the structure for an unknown architecture.

    Raises:
        Unsupported: the architecture is known to keep caches that are not worked out here.
    """
    if config.architecture in NOT_COVERED:
        raise Unsupported(
            "unknown_architecture", f"the caches of {config.architecture} are not worked out here"
        )
    return FAMILIES.get(config.architecture, _INFERRED)
