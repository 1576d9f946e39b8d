"""Which builder knows which architecture."""

from __future__ import annotations

from collections.abc import Mapping

from kvwatch.blockmath.errors import Unsupported
from kvwatch.blockmath.modelconfig import ModelConfig
from kvwatch.blockmath.weights.decoders import DECODERS, Builder
from kvwatch.blockmath.weights.encoders import ENCODERS
from kvwatch.blockmath.weights.multimodal import MULTIMODAL
from kvwatch.blockmath.weights.parts import Model
from kvwatch.blockmath.weights.shard import Shard

UNCOUNTED: Mapping[str, tuple[str, ...]] = {
    "DeepseekV4ForCausalLM": ("vision_n_layers",),
    "EmbeddingGemma2Model": ("vision_config", "audio_config"),
    "Gemma4ForConditionalGeneration": ("audio_config",),
}
"""Fields whose presence adds a tower that no builder knows."""

BUILDERS: Mapping[str, Builder] = {**DECODERS, **MULTIMODAL, **ENCODERS}


def build(config: ModelConfig, shard: Shard) -> Model:
    """The parts of a model on one rank.

    Raises:
        Unsupported: no builder knows the architecture.
        Refused: sizes that vLLM would refuse.
    """
    builder = BUILDERS.get(config.architecture)
    if builder is None:
        raise Unsupported(
            "unknown_architecture", f"weights of {config.architecture or '(none)'} are not modelled"
        )
    for field in UNCOUNTED.get(config.architecture, ()):
        if config.root.get(field):
            raise Unsupported(
                "unknown_tower", f"{config.architecture} with {field}: that tower is not modelled"
            )
    return builder(config.root, config.text, shard)
