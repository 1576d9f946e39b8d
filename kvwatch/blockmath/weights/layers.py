"""Blocks of decoder layers: attention, dense and expert feed-forward networks, norms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvwatch.blockmath.errors import Unsupported
from kvwatch.blockmath.modelconfig import Section
from kvwatch.blockmath.weights.parts import Block, Linear, Part, Parts, Tensor
from kvwatch.blockmath.weights.shard import WHOLE, Shard

Switch = bool | str
"""True, False, or a field of config.json: ``name``, ``one|or|another``, or ``name=value`` for one value."""

HIDDEN = ("hidden_size", "n_embd", "d_model")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")


def size(f: Section, *names: str) -> int:
    """The first of these fields that has a value, as a whole number; Unsupported where none has."""
    return f.whole(next((name for name in names if f.get(name) is not None), names[0]))


def required(f: Section, name: str) -> Any:
    """The value of a field that must be there; Unsupported where it is not."""
    value = f.get(name)
    if value is None:
        raise Unsupported("incomplete_config", f"config.json: {name} is missing")
    return value


def on(f: Section, switch: Switch) -> bool:
    """What a switch says for this configuration."""
    if isinstance(switch, bool):
        return switch
    name, equals, value = switch.partition("=")
    return f.get(name) == value if equals else any(f.get(either) for either in name.split("|"))


def hidden(f: Section) -> int:
    """Width of the residual stream."""
    return size(f, *HIDDEN)


def heads(f: Section) -> int:
    """Attention heads."""
    return size(f, *HEADS)


def kv_heads(f: Section) -> int:
    """KV heads; as many as attention heads where the file does not say."""
    stated = f.first(*KV_HEADS)
    return heads(f) if stated is None else size(f, *KV_HEADS)


def head_dim(f: Section) -> int:
    """Width of one attention head."""
    stated = f.get("head_dim")
    return hidden(f) // heads(f) if stated is None else f.whole("head_dim")


def column(name: str, inputs: int, *outputs: int, s: Shard, bias: bool = False) -> Linear:
    """A layer whose outputs are divided."""
    own = sum(s.of(output, name) for output in outputs)
    return Linear(name, inputs, own, own * bias, pieces=len(outputs))


def row(name: str, inputs: int, outputs: int, *, s: Shard, bias: bool = False) -> Linear:
    """A layer whose inputs are divided."""
    return Linear(name, s.of(inputs, name), outputs, outputs * bias)


def replicated(name: str, inputs: int, outputs: int, *, bias: bool = False) -> Linear:
    """A layer that each rank holds whole."""
    return Linear(name, inputs, outputs, outputs * bias)


def norm(name: str, width: int, *, bias: bool = False) -> Tensor:
    """A norm's scale, and its shift where it has one."""
    return Tensor(name, width * (1 + bias))


@dataclass(frozen=True, slots=True)
class Attention:
    """Softmax attention with merged query, key and value projections.

    Attributes:
        qkv_bias: the merged projection has a bias.
        out_bias: the output projection has one.
        qk_norm: norms of queries and keys: "" none; "head" over one head; "rank" over all heads of the rank;
            "all" over all heads, the scale whole on each rank. "head?field": only where that field is true.
        qk_norm_bias: these norms have a shift.
        gated: queries come with an output gate of the same size.
        sinks: one learned sink per head.
        value_dim: field that gives another width for values.
        whole: each rank holds it undivided.
    """

    qkv_bias: Switch = False
    out_bias: Switch = False
    qk_norm: str = ""
    qk_norm_bias: Switch = False
    gated: Switch = False
    sinks: Switch = False
    value_dim: str = "head_dim"
    whole: bool = False
    name: str = "self_attn"

    def __call__(self, f: Section, s: Shard) -> Parts:
        s = WHOLE if self.whole else s
        width, total, total_kv, dim = hidden(f), heads(f), kv_heads(f), head_dim(f)
        value = dim if f.get(self.value_dim) is None else f.whole(self.value_dim)
        own, own_kv = s.of(total, "number of attention heads"), s.kv_heads(total_kv)
        queries = own * dim * (1 + on(f, self.gated))
        merged = queries + own_kv * (dim + value)
        parts: list[Part] = [
            Linear(f"{self.name}.qkv_proj", width, merged, merged * on(f, self.qkv_bias), pieces=3),
            Linear(f"{self.name}.o_proj", own * value, width, width * on(f, self.out_bias)),
        ]
        if on_norm := self._norm(f):
            scale = {
                "head": 2 * dim,
                "rank": (own + own_kv) * dim,
                "all": (total + total_kv) * dim,
            }[on_norm]
            parts.append(norm(f"{self.name}.qk_norm", scale, bias=on(f, self.qk_norm_bias)))
        if on(f, self.sinks):
            parts.append(Tensor(f"{self.name}.sinks", own))
        return tuple(parts)

    def _norm(self, f: Section) -> str:
        kind, _, switch = self.qk_norm.partition("?")
        return kind if not switch or f.get(switch) else ""


@dataclass(frozen=True, slots=True)
class Mlp:
    """A dense feed-forward network: gated (two merged projections up, one down) or plain (one of each)."""

    gated: bool = True
    bias: Switch = False
    width: tuple[str, ...] = ("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim")
    default_ratio: int = 0
    name: str = "mlp"
    whole: bool = False

    def __call__(self, f: Section, s: Shard) -> Parts:
        model, bias = hidden(f), on(f, self.bias)
        share = WHOLE if self.whole else s
        if self.default_ratio and f.first(*self.width) is None:
            inner = self.default_ratio * model
        else:
            inner = size(f, *self.width)
        up = (inner, inner) if self.gated else (inner,)
        return (
            column(
                f"{self.name}.{'gate_up_proj' if self.gated else 'up_proj'}", model, *up, s=share, bias=bias
            ),
            row(f"{self.name}.down_proj", inner, model, s=share, bias=bias),
        )


@dataclass(frozen=True, slots=True)
class Norms:
    """The norms of the residual stream in one layer, all as wide as the model."""

    count: int = 2
    bias: Switch = False

    def __call__(self, f: Section, _s: Shard) -> Parts:
        return (norm("norms", self.count * hidden(f), bias=on(f, self.bias)),)


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts, with its router and its shared experts.

    Attributes:
        count: fields that may hold the number of experts.
        width: fields that may hold one expert's intermediate size.
        router_dtype: dtype of the router's weights; None = the model's.
        router_bias: the router has a bias.
        correction: dtype of a score correction per expert; "" = none.
        shared: field with the number of shared experts of the same width; "" = none.
        shared_width: field with the width of the shared expert; "" = that of the routed ones.
        shared_gate: the shared expert has a gate.
        gated: experts have a gate projection.
        bias: experts have biases.
        least_width: to which a slice of an expert is padded when experts are cut.
        latent: field with the width of a latent that the experts work in, with projections to and from it.
    """

    count: tuple[str, ...] = ("num_experts", "n_routed_experts", "num_local_experts")
    width: tuple[str, ...] = ("moe_intermediate_size", "intermediate_size")
    router_dtype: str | None = None
    router_bias: Switch = False
    correction: Switch | None = None
    correction_dtype: str | None = "float32"
    shared: str = ""
    shared_width: str = ""
    shared_gate: bool = False
    shared_name: str = "mlp.shared_experts"
    gated: bool = True
    bias: Switch = False
    least_width: int = 0
    latent: str = ""
    name: str = "mlp"

    def __call__(self, f: Section, s: Shard) -> Parts:
        model, total = hidden(f), size(f, *self.count)
        own, inner = s.experts(total), s.expert_width(size(f, *self.width))
        if s.expert_tp > 1:
            inner = max(inner, self.least_width)
        bias, up = on(f, self.bias), inner * (1 + self.gated)
        inside = f.whole(self.latent, model) if self.latent else model
        parts: list[Part] = [
            Linear(
                f"{self.name}.gate",
                model,
                total,
                total * on(f, self.router_bias),
                1,
                "plain",
                1,
                self.router_dtype,
            ),
            Linear(f"{self.name}.experts.w13", inside, up, own * up * bias, own, "experts", 1 + self.gated),
            Linear(f"{self.name}.experts.w2", inner, inside, own * inside * bias, own, "experts"),
        ]
        if inside != model:
            parts += [
                replicated(f"{self.name}.fc1_latent_proj", model, inside),
                replicated(f"{self.name}.fc2_latent_proj", inside, model),
            ]
        if self.correction is not None and on(f, self.correction):
            parts.append(Tensor(f"{self.name}.gate.e_score_correction_bias", total, self.correction_dtype))
        if shared := self._shared(f):
            parts += Mlp(self.gated, width=("shared",), name=self.shared_name)(
                Section({**f.own, "shared": shared}, f.model_type), s
            )
            if self.shared_gate:
                parts.append(Linear(f"{self.shared_name}_gate", model, 1, kind="plain"))
        return tuple(parts)

    def _shared(self, f: Section) -> int:
        number = f.whole(self.shared, 0) if self.shared else 1
        if self.shared_width:
            return number * f.whole(self.shared_width, 0)
        return number * size(f, *self.width) if self.shared else 0


@dataclass(frozen=True, slots=True)
class Together:
    """Several blocks as one."""

    blocks: tuple[Block, ...]

    def __call__(self, f: Section, s: Shard) -> Parts:
        return tuple(part for block in self.blocks for part in block(f, s))
