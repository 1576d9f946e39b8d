"""A decoder: embeddings, a list of layers made of blocks, a final norm and an output projection."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvwatch.blockmath.errors import Unsupported
from kvwatch.blockmath.modelconfig import Section
from kvwatch.blockmath.weights.layers import Switch, hidden, norm, on, required, size
from kvwatch.blockmath.weights.parts import Block, Linear, Model, Parts, Tensor
from kvwatch.blockmath.weights.shard import Shard

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")

UNSPLIT = frozenset({"embed", "norm", "head"})
"""A class that puts all ends of the model on every pipeline stage."""

Layer = tuple[Block, ...]
Plan = Callable[[Section, int], Layer]
"""Which blocks layer ``i`` is made of."""


def uniform(*blocks: Block) -> Plan:
    """All layers alike."""
    return lambda _f, _i: blocks


def by_type(field: str, kinds: Mapping[str, Layer], always: Layer = ()) -> Plan:
    """Layers told apart by a list in config.json, such as ``layer_types``."""

    def plan(f: Section, i: int) -> Layer:
        kind = required(f, field)[i]
        if kind not in kinds:
            raise Unsupported("unknown_layer_type", f"config.json: {field}[{i}] is {kind!r}")
        return (*kinds[kind], *always)

    return plan


def dense_first(dense: Layer, sparse: Layer, field: str = "first_k_dense_replace") -> Plan:
    """The first layers have a dense feed-forward network, the others experts."""
    return lambda f, i: dense if i < f.whole(field, 0) else sparse


@dataclass(frozen=True, slots=True)
class Decoder:
    """A family of decoders.

    Attributes:
        plan: blocks of each layer.
        count: how many layers.
        vocabulary: fields that may hold the size of the vocabulary.
        norm_bias: the final norm has a shift.
        final_norms: how many norms close the model.
        head_bias: the output projection has a bias.
        opening: blocks of the first stage besides the token embeddings.
        tied: whether embeddings are tied where config.json does not say.
        has_head: False for models without an output projection (embedders).
        everywhere: which of ``embed``, ``norm`` and ``head`` vLLM's class puts on every stage.
        repeats_opening: with tied embeddings the last stage holds all that opens the first.
        layer_prefix: module path of the layers.
        pipeline: whether vLLM can split it into stages.
    """

    plan: Plan
    count: Callable[[Section], int] = lambda f: size(f, *LAYERS)
    vocabulary: tuple[str, ...] = ("vocab_size",)
    norm_bias: Switch = False
    final_norms: int = 1
    head_bias: Switch = False
    opening: Layer = ()
    closing: Layer = ()
    resident: Layer = ()
    tied: bool = False
    has_head: bool = True
    everywhere: frozenset[str] = frozenset()
    repeats_opening: bool = False
    layer_prefix: str = "model.layers"
    pipeline: bool = True

    def __call__(self, root: Section, f: Section, s: Shard) -> Model:
        """The parts of rank 0 of this family, for the configuration ``root`` whose decoder is ``f``."""
        built: dict[Layer, Parts] = {}
        layers = []
        for i in range(self.count(f)):
            layer = self.plan(f, i)
            if layer not in built:
                built[layer] = parts_of(layer, f, s)
            layers.append(built[layer])
        tied = self.tied_in(root, f)
        rows = s.vocab(size(f, *self.vocabulary))
        table = Tensor("embed_tokens", rows * hidden(f))
        ends: dict[str, Parts] = {
            "embed": (table, *parts_of(self.opening, f, s)),
            "norm": (
                norm("norm", self.final_norms * hidden(f), bias=on(f, self.norm_bias)),
                *parts_of(self.closing, f, s),
            ),
            "head": () if tied or not self.has_head else (Linear("lm_head", hidden(f), rows, kind="head"),),
        }
        if self.has_head and on(f, self.head_bias):
            ends["head"] += (Tensor("lm_head.bias", rows),)
        repeated = tied and "embed" not in self.everywhere
        at = {end: () if end in self.everywhere else parts for end, parts in ends.items()}
        resident = tuple(part for end in sorted(self.everywhere) for part in ends[end])
        return Model(
            opening=at["embed"],
            layers=layers,
            closing=at["norm"] + at["head"],
            resident=resident + parts_of(self.resident, f, s),
            tied=(ends["embed"] if self.repeats_opening else (table,)) if repeated else (),
            layer_prefix=self.layer_prefix,
            pipeline=self.pipeline,
        )

    def tied_in(self, root: Section, f: Section) -> bool:
        """Whether the output projection is the embedding matrix."""
        return bool(root.get("tie_word_embeddings", f.get("tie_word_embeddings", self.tied)))


def parts_of(blocks: Layer, f: Section, s: Shard) -> Parts:
    """The parts of several blocks."""
    return tuple(part for block in blocks for part in block(f, s))
