"""Which family an architecture belongs to."""

from __future__ import annotations

from typing import Final

from kvwatch.blockmath.errors import Unsupported
from kvwatch.blockmath.layouts import dense
from kvwatch.blockmath.layouts.base import Family, plain
from kvwatch.blockmath.modelconfig import ModelConfig

_DENSE: Final = Family(dense.layers, plain)

FAMILIES: Final[dict[str, Family]] = dict.fromkeys(
    (
        "LlamaForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "MixtralForCausalLM",
        "OPTForCausalLM",
        "GPTJForCausalLM",
    ),
    _DENSE,
)


def family_of(config: ModelConfig) -> Family:
    """The family of a model.

    Raises:
        Unsupported: the architecture is not known.
    """
    family = FAMILIES.get(config.architecture)
    if family is None:
        raise Unsupported("unknown_architecture", f"architecture {config.architecture!r} is not known")
    return family
