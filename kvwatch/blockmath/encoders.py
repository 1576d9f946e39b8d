"""Image and audio encoders, as far as tensor parallelism must divide them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from kvwatch.blockmath.errors import Refused
from kvwatch.blockmath.modelconfig import ModelConfig, Section

_HEADS_AND_WIDTH: Final = ("num_attention_heads", "intermediate_size")
_QWEN: Final = ("num_heads", "intermediate_size")

DIVIDED_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "clip_vision_model": _HEADS_AND_WIDTH,
    "exaone4_5_vision": _QWEN,
    "glmasr_encoder": _HEADS_AND_WIDTH,
    "granite_speech_encoder": ("output_dim",),
    "granite_speech_plus_encoder": ("output_dim",),
    "llama4_vision_model": _HEADS_AND_WIDTH,
    "minicpmv4_6_vision": _HEADS_AND_WIDTH,
    "minicpmv4_7_vision": _HEADS_AND_WIDTH,
    "pixtral": _HEADS_AND_WIDTH,
    "qwen2_5_vl": _QWEN,
    "qwen2_5_vl_vision": _QWEN,
    "qwen2_vl": ("num_heads",),
    "qwen2_vl_vision": ("num_heads",),
    "qwen3_5_moe_vision": _QWEN,
    "qwen3_5_vision": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "siglip_vision_model": _HEADS_AND_WIDTH,
}
"""Fields of an encoder's part that vLLM splits over ranks, by its model type. Encoders that fall back to a
copy on each rank, or always run so, are not here."""

PARTS: Final = ("vision_config", "audio_config", "encoder_config")


def check_encoders(config: ModelConfig, tp: int) -> None:
    """Refuse what vLLM refuses while it builds the encoders.

    Raises:
        Refused: a head count or width does not divide.
    """
    for section in _sections(config.root.own):
        for field in DIVIDED_FIELDS.get(section.model_type, ()):
            value = section.get(field)
            if isinstance(value, int) and value % tp:
                raise Refused(
                    "indivisible_heads",
                    f"{value} is not divisible by {tp} ({section.model_type}: {field})",
                )


def _sections(config: Mapping[str, Any]) -> Iterator[Section]:
    for name in PARTS:
        part = config.get(name)
        if isinstance(part, Mapping):
            yield Section(part, str(part.get("model_type") or ""))
