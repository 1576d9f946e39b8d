"""What a rank holds, piece by piece: matrices that a scheme may quantize, and tensors that stay as is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvwatch.blockmath.modelconfig import Section
from kvwatch.blockmath.weights.field_defaults import FIELD_DEFAULTS
from kvwatch.blockmath.weights.shard import Shard


@dataclass(frozen=True, slots=True)
class Linear:
    """The matrices of one linear layer on one rank.

    Attributes:
        name: module name inside its layer, for example ``self_attn.qkv_proj``.
        inputs: input features on this rank.
        outputs: output features on this rank.
        bias: bias elements on this rank.
        copies: how many such matrices (experts of a fused layer).
        kind: ``linear``, ``experts``, ``head`` (the output projection) or ``plain`` (no scheme touches it).
        pieces: merged projections in one matrix, each with its own scale.
        dtype: fixed by the model class, for example ``float32``; None = the model's.
        absorbed: MLA keeps a second form of it after loading.
    """

    name: str
    inputs: int
    outputs: int
    bias: int = 0
    copies: int = 1
    kind: str = "linear"
    pieces: int = 1
    dtype: str | None = None
    absorbed: bool = False

    @property
    def elements(self) -> int:
        """Weights without biases, all copies."""
        return self.inputs * self.outputs * self.copies


@dataclass(frozen=True, slots=True)
class Tensor:
    """A parameter that is no matrix product: a norm, an embedding, a convolution, a state.

    Attributes:
        name: parameter name inside its layer.
        elements: elements on this rank.
        dtype: as in Linear.
    """

    name: str
    elements: int
    dtype: str | None = None


Part = Linear | Tensor
Parts = tuple[Part, ...]


class Block(Protocol):
    """Something that a model is built of: says which parts one rank holds of it."""

    def __call__(self, f: Section, s: Shard, /) -> Parts:
        """Parts on one rank, given the part of config.json that describes the block."""
        ...


@dataclass(frozen=True, slots=True)
class With:
    """A block built from a configuration in which some fields are replaced (sizes that differ by layer)."""

    block: Block
    changes: tuple[tuple[str, object], ...]

    def __call__(self, f: Section, s: Shard) -> Parts:
        return self.block(changed(f, dict(self.changes)), s)


@dataclass(frozen=True, slots=True)
class Model:
    """All parts of a model, by where the pipeline puts them.

    Attributes:
        opening: the first stage: embeddings.
        layers: one entry per decoder layer; equal layers share one tuple.
        closing: the last stage: final norm, and the output projection unless tied.
        resident: every stage: towers, projectors, shared blocks.
        tied: what the last stage repeats of the first one, where there are several (tied embeddings).
        layer_prefix: module path of the layers, for quantization ignore lists.
        pipeline: False where vLLM's class cannot be split into stages.
    """

    opening: Parts
    layers: Sequence[Parts]
    closing: Parts
    resident: Parts = ()
    tied: Parts = ()
    layer_prefix: str = "model.layers"
    pipeline: bool = True


def section(own: Mapping[str, object], model_type: str) -> Section:
    """A part of config.json with what its class assumes, fields that only weights depend on included."""
    return Section({**FIELD_DEFAULTS.get(model_type, {}), **own}, model_type)


def changed(f: Section, changes: Mapping[str, object]) -> Section:
    """The same section with some of its own fields replaced."""
    return Section({**f.own, **changes}, f.model_type)
