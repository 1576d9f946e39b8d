"""Which builder knows which architecture."""

from __future__ import annotations

from kvwatch.blockmath.errors import Unsupported
from kvwatch.blockmath.modelconfig import ModelConfig
from kvwatch.blockmath.weights.dense import DENSE
from kvwatch.blockmath.weights.mla import LATENT
from kvwatch.blockmath.weights.moe import SPARSE
from kvwatch.blockmath.weights.parts import Model
from kvwatch.blockmath.weights.recurrent import RECURRENT
from kvwatch.blockmath.weights.shard import Shard

BUILDERS = {**DENSE, **SPARSE, **LATENT, **RECURRENT}


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
    return builder(config.root, config.text, shard)
