"""All decoders by architecture, and which one a multimodal model's text section means."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvwatch.blockmath.modelconfig import Section
from kvwatch.blockmath.weights.dense import DENSE
from kvwatch.blockmath.weights.gemma import GEMMA
from kvwatch.blockmath.weights.hyper import HYPER
from kvwatch.blockmath.weights.mla import LATENT
from kvwatch.blockmath.weights.moe import SPARSE
from kvwatch.blockmath.weights.parts import Model
from kvwatch.blockmath.weights.recurrent import RECURRENT
from kvwatch.blockmath.weights.shard import Shard
from kvwatch.blockmath.weights.unusual import UNUSUAL

Builder = Callable[[Section, Section, Shard], Model]

DECODERS: Mapping[str, Builder] = {**DENSE, **UNUSUAL, **SPARSE, **LATENT, **RECURRENT, **GEMMA, **HYPER}

TEXT_ARCHITECTURES: Mapping[str, str] = {
    "cohere2": "Cohere2ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "internlm2": "InternLM2ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "llama": "LlamaForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "opt": "OPTForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
"""Model type of a text section that names no architecture."""
