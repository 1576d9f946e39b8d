"""The sizes of a model that activations and the reading of weights depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvwatch.blockmath.modelconfig import ModelConfig, Section
from kvwatch.blockmath.settings import ropes

HIDDEN: Final = ("hidden_size", "n_embd", "d_model")
INTERMEDIATE: Final = ("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim")
EXPERT_WIDTH: Final = ("moe_intermediate_size", "expert_ffn_hidden_size", *INTERMEDIATE)
EXPERT_COUNT: Final = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
EXPERTS_PER_TOKEN: Final = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "top_k_experts",
    "moe_topk",
    "moe_k",
)
LAYERS: Final = ("num_hidden_layers", "n_layer", "num_layers")
HEADS: Final = ("num_attention_heads", "n_head", "num_heads")
POSITIONS: Final = ("max_position_embeddings", "n_positions", "max_seq_len")
ROTARY_WIDTH: Final = ("qk_rope_head_dim", "head_dim")
TOWERS: Final = ("vision_config", "audio_config", "vision_encoder", "visual")


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts.

    Attributes:
        field: the field of config.json that holds the count.
        count: routed experts of a layer.
        active: experts that one token goes to.
        width: intermediate size of one expert.
    """

    field: str
    count: int
    active: int
    width: int


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the language model, whole, not per rank.

    Attributes:
        hidden: width of the residual stream.
        intermediate: width of a dense feed-forward network.
        vocabulary: tokens of the vocabulary; None where config.json does not say.
        layers: hidden layers.
        experts: None for a dense model.
        has_tower: images or sound go through an encoder of their own.
        rotary_elements: of the tables of rotary position embeddings, which each GPU holds whole.
    """

    hidden: int
    intermediate: int
    vocabulary: int | None
    layers: int
    experts: Experts | None
    has_tower: bool
    rotary_elements: int


def shape_of(config: ModelConfig) -> Shape | None:
    """The sizes of a model; None where config.json does not tell them."""
    text = config.text
    hidden, layers = _whole(text, HIDDEN), _whole(text, LAYERS)
    if hidden is None or layers is None:
        return None
    return Shape(
        hidden=hidden,
        intermediate=_whole(text, INTERMEDIATE) or 4 * hidden,
        vocabulary=_whole(text, ("vocab_size",)),
        layers=layers,
        experts=_experts(text),
        has_tower=any(isinstance(config.root.get(name), Mapping) for name in TOWERS),
        rotary_elements=_rotary_elements(text, hidden),
    )


def _rotary_elements(text: Section, hidden: int) -> int:
    """One row of a head's rotated width for each position; one table for each kind of layer that differs."""
    positions, heads = _whole(text, POSITIONS), _whole(text, HEADS)
    if positions is None or heads is None:
        return 0
    width = _whole(text, ROTARY_WIDTH) or hidden // heads
    tables = list(ropes(text)) or [{}]
    return sum(int(positions * width * _rotated_share(text, table)) for table in tables)


def _rotated_share(text: Section, table: Mapping[str, Any]) -> float:
    stated = text.get("partial_rotary_factor") or table.get("partial_rotary_factor")
    return float(stated) if isinstance(stated, int | float) else 1.0


def _experts(text: Section) -> Experts | None:
    field = next((name for name in EXPERT_COUNT if _whole(text, (name,))), None)
    active, width = _whole(text, EXPERTS_PER_TOKEN), _whole(text, EXPERT_WIDTH)
    if field is None or active is None or width is None:
        return None
    count = text.whole(field)
    return Experts(field, count, min(active, count), width) if count > 1 else None


def _whole(text: Section, names: tuple[str, ...]) -> int | None:
    value = text.first(*names)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def with_experts(config: Mapping[str, Any], text: Section, field: str, count: int) -> dict[str, Any]:
    """The same config.json with another number of experts in its language model's part."""
    changed = dict(config)
    if config is text.own:
        changed[field] = count
        return changed
    for name, part in config.items():
        if isinstance(part, Mapping):
            changed[name] = with_experts(part, text, field, count)
    return changed
