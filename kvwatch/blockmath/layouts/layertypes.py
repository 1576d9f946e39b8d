"""Which kind of attention each layer is: the file's own list, or the rule of the configuration class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from kvwatch.blockmath.layouts.base import values
from kvwatch.blockmath.modelconfig import Section, class_defaults

SLIDING: Final = "sliding_attention"
FULL: Final = "full_attention"
LINEAR: Final = "linear_attention"
CHUNKED: Final = "chunked_attention"

LEGACY_NAMES: Final[Mapping[str, str]] = {
    "attention": FULL,
    "mamba": LINEAR,
    "mamba2": LINEAR,
    "local_attention": SLIDING,
    "global_attention": FULL,
}

Rule = Callable[[Section, int], list[str]]


def _last_of_every(period: int, *, field: str | None = None) -> Rule:
    """Every period ends with a full-attention layer."""

    def rule(text: Section, count: int) -> list[str]:
        size = int((text.get(field) if field else None) or period)
        return [FULL if (index + 1) % size == 0 else SLIDING for index in range(count)]

    return rule


def _first_of_every(period: int) -> Rule:
    return lambda _, count: [SLIDING if index % period else FULL for index in range(count)]


def _last_is_full(rule: Rule) -> Rule:
    return lambda text, count: [*rule(text, count)[:-1], FULL]


def _from_some_layer_on(text: Section, count: int) -> list[str]:
    if window(text) is None:
        return [FULL] * count
    first = text.whole("max_window_layers", 0)
    return [SLIDING if index >= first else FULL for index in range(count)]


def _every_second_up_to(text: Section, count: int) -> list[str]:
    top = text.whole("max_window_layers", 0) if text.get("use_sliding_window") else 0
    return [SLIDING if index % 2 == 0 and index < top else FULL for index in range(count)]


def _all_sliding(text: Section, count: int) -> list[str]:
    return [SLIDING if window(text) else FULL] * count


def _all_full(_: Section, count: int) -> list[str]:
    return [FULL] * count


def _full_every_fourth_from_the_end(_: Section, count: int) -> list[str]:
    return [SLIDING if (count - 1 - index) % 4 else FULL for index in range(count)]


def _first_and_every_sixth(_: Section, count: int) -> list[str]:
    return [FULL if index == 0 or (index + 1) % 6 == 0 else SLIDING for index in range(count)]


def _dense_prefix_apart(text: Section, count: int) -> list[str]:
    dense = text.whole("first_k_dense_replace", 0)
    head = text.whole("prefix_dense_sliding_window_pattern", 1)
    tail = text.whole("sliding_window_pattern", 4)
    first = [SLIDING if (index + 1) % head else FULL for index in range(dense)]
    return first + [SLIDING if (index + 1) % tail else FULL for index in range(count - dense)]


_GEMMA4: Final = _last_is_full(_last_of_every(6))

RULES: Final[Mapping[str, Rule]] = {
    "afmoe": _last_of_every(4, field="global_attn_every_n_layers"),
    "cohere2": _last_of_every(4, field="sliding_window_pattern"),
    "cohere2_moe": _dense_prefix_apart,
    "cwm": _first_of_every(4),
    "diffusion_gemma_text": _GEMMA4,
    "dots1": _from_some_layer_on,
    "embedding_gemma2_text": _GEMMA4,
    "cohere_compass_text": _all_full,
    "exaone4": _last_of_every(4, field="sliding_window_pattern"),
    "exaone4_5_text": _last_of_every(4, field="sliding_window_pattern"),
    "exaone_moe": _last_of_every(4, field="sliding_window_pattern"),
    "gemma2": _last_of_every(2),
    "gemma3_text": _last_of_every(6, field="sliding_window_pattern"),
    "gemma3n_text": _last_of_every(5),
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "gpt_oss": _last_of_every(2),
    "granite_swa": _first_of_every(4),
    "granitemoe_swa": _first_of_every(4),
    "laguna": _all_full,
    "mellum": _all_full,
    "mimo_v2_flash": _first_and_every_sixth,
    "ministral": _all_sliding,
    "muse_glimmer_text": _full_every_fourth_from_the_end,
    "olmo3": _last_of_every(4),
    "qwen2": _from_some_layer_on,
    "qwen2_5_omni_text": _from_some_layer_on,
    "qwen2_5_vl_text": _from_some_layer_on,
    "qwen2_moe": _every_second_up_to,
    "qwen2_vl_text": _from_some_layer_on,
    "qwen3": _from_some_layer_on,
    "vaultgemma": _last_of_every(2),
}
"""Rules of the configuration classes of transformers 5, by the language model's model type."""


def window(text: Section) -> int | None:
    """The sliding window that the configuration class keeps, in tokens."""
    stated = text.get("sliding_window")
    if not isinstance(stated, int | float) or not stated:
        return None
    gated = "use_sliding_window" in text.own or "use_sliding_window" in class_defaults(text.model_type).fields
    if gated and not text.get("use_sliding_window"):
        return None
    return int(stated)


def layer_types(text: Section) -> list[str] | None:
    """The kind of each hidden layer; None where neither file nor class says."""
    stated = values(text, "layer_types")
    if stated is not None:
        return [LEGACY_NAMES.get(str(name), str(name)) for name in stated]
    rule = RULES.get(text.model_type)
    return None if rule is None else rule(text, text.whole("num_hidden_layers"))
