"""Mixers with a state instead of a KV cache, and the hybrids that use them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvwatch.blockmath.errors import Refused, Unsupported
from kvwatch.blockmath.modelconfig import Section
from kvwatch.blockmath.weights.decoder import UNSPLIT, Decoder, Layer
from kvwatch.blockmath.weights.layers import (
    Attention,
    Experts,
    Mlp,
    Norms,
    hidden,
    norm,
    on,
    replicated,
    required,
    size,
)
from kvwatch.blockmath.weights.mla import LatentAttention
from kvwatch.blockmath.weights.moe import GRANITE_EXPERTS, SHARED_EXPERT, every
from kvwatch.blockmath.weights.parts import Linear, Parts, Tensor, With
from kvwatch.blockmath.weights.shard import Shard


def mamba1(f: Section, s: Shard) -> Parts:
    """A Mamba mixer, divided by channels."""
    width, state = hidden(f), f.first("mamba_d_state", "state_size")
    expand, kernel = f.first("mamba_expand", "expand"), f.first("mamba_d_conv", "conv_kernel")
    stated = None if f.get("mamba_expand") else f.get("intermediate_size")
    inner = s.of(int(stated or expand * width), "mamba channels")
    rank = f.first("mamba_dt_rank", "time_step_rank")
    rank = -(-width // 16) if rank in (None, "auto") else int(rank)
    bias = bool(f.first("mamba_proj_bias", "use_bias"))
    conv_bias = bool(f.first("mamba_conv_bias", "use_conv_bias"))
    parts = (
        Tensor("mamba.A", inner * state, "float32"),
        Tensor("mamba.D", inner),
        Tensor("mamba.conv1d", inner * (kernel + conv_bias)),
        Linear("mamba.in_proj", width, 2 * inner, 2 * inner * bias, kind="plain"),
        Linear("mamba.x_proj", inner, rank + 2 * state, kind="plain"),
        Linear("mamba.dt_proj", rank, inner, inner, kind="plain"),
        Linear("mamba.out_proj", inner, width, width * bias, kind="plain"),
    )
    if f.model_type == "jamba":
        return (*parts, norm("mamba.norms", rank + 2 * state))
    return parts


@dataclass(frozen=True, slots=True)
class Mamba2:
    """A Mamba-2 mixer, divided by heads; its groups are divided too, or replicated where there is one."""

    name: str = "mamba"
    has_norm: str | bool = True

    def __call__(self, f: Section, s: Shard) -> Parts:
        width = hidden(f)
        count = int(f.first("mamba_n_heads", "n_mamba_heads", "mamba_num_heads", "num_heads"))
        dim = f.first("mamba_d_head", "mamba_headdim", "mamba_head_dim", "head_dim")
        groups = int(f.first("mamba_n_groups", "mamba_ngroups", "n_groups"))
        state = int(f.first("mamba_d_state", "ssm_state_size", "state_size"))
        kernel = int(f.first("mamba_d_conv", "conv_kernel"))
        inner = self.inner(f, count, dim)
        bias = bool(f.first("mamba_proj_bias", "add_bias_linear", "use_bias"))
        conv_bias = bool(f.first("mamba_conv_bias", "use_conv_bias"))
        if groups % s.tp and groups != 1:
            raise Refused(
                "indivisible", f"tensor_parallel_size ({s.tp}) does not divide {groups} mamba groups"
            )
        own_groups = max(1, groups // s.tp)
        own, own_count = s.of(inner, "mamba channels"), s.of(count, "mamba heads")
        conv = own + 2 * own_groups * state
        projected = own + conv + own_count
        parts: Parts = (
            Tensor(f"{self.name}.A", own_count, "float32"),
            Tensor(f"{self.name}.D_dt_bias", 2 * own_count),
            Tensor(f"{self.name}.conv1d", conv * (kernel + conv_bias)),
            Linear(f"{self.name}.in_proj", width, projected, projected * bias, pieces=5),
            Linear(f"{self.name}.out_proj", own, width, width * bias),
        )
        return (*parts, norm(f"{self.name}.norm", own)) if on(f, self.has_norm) else parts

    @staticmethod
    def inner(f: Section, count: int, dim: object) -> int:
        """Channels of the mixer."""
        stated = f.get("mamba_d_ssm")
        if isinstance(stated, int):
            return stated
        if isinstance(dim, int) and f.model_type not in ("zamba2", "granitemoehybrid", "bamba"):
            return count * dim
        return int(f.first("mamba_expand", "expand") * hidden(f))


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """A gated delta-rule mixer (Qwen3-Next, Qwen3.5), divided by key heads."""

    name: str = "linear_attn"

    def __call__(self, f: Section, s: Shard) -> Parts:
        width = hidden(f)
        own_k = s.of(f.whole("linear_num_key_heads"), "linear key heads")
        own_v = s.of(f.whole("linear_num_value_heads"), "linear value heads")
        keys, values = own_k * f.whole("linear_key_head_dim"), own_v * f.whole("linear_value_head_dim")
        return (
            Tensor(f"{self.name}.dt_bias", own_v),
            Tensor(f"{self.name}.A_log", own_v, "float32"),
            Tensor(f"{self.name}.conv1d", (2 * keys + values) * f.whole("linear_conv_kernel_dim")),
            Linear(f"{self.name}.in_proj_qkvz", width, 2 * keys + 2 * values, pieces=4),
            Linear(f"{self.name}.in_proj_ba", width, 2 * own_v, pieces=2),
            norm(f"{self.name}.norm", f.whole("linear_value_head_dim")),
            Linear(f"{self.name}.out_proj", values, width),
        )


GATED = Attention(qkv_bias="attention_bias", qk_norm="head", gated=True)


def qwen_hybrid(f: Section, i: int) -> Layer:
    """Qwen3-Next and Qwen3.5: three delta-rule layers, then one of gated attention; dense or experts."""
    kinds = f.get("layer_types")
    interval = f.whole("full_attention_interval", 4)
    full = kinds[i] == "full_attention" if kinds else (i + 1) % interval == 0
    return every((Mlp(),), (SHARED_EXPERT,), ((GATED if full else GatedDelta()), Norms()), optional=True)(
        f, i
    )


def _jamba(f: Section, i: int) -> Layer:
    attention = i % f.whole("attn_layer_period") == f.whole("attn_layer_offset")
    sparse = (
        i % f.whole("expert_layer_period") == f.whole("expert_layer_offset") and f.whole("num_experts") > 1
    )
    experts = Experts(("num_experts",), ("intermediate_size",), name="feed_forward")
    return (
        Attention() if attention else mamba1,
        experts if sparse else Mlp(name="feed_forward"),
        Norms(),
    )


def _granite_hybrid(f: Section, i: int) -> Layer:
    kinds = f.first("layers_block_type", "layer_types")
    mixer = Mamba2() if kinds[i] in ("mamba", "linear_attention") else Attention(qkv_bias="attention_bias")
    dense = Mlp(width=("shared_intermediate_size",), name="shared_mlp")
    return (mixer, GRANITE_EXPERTS if f.get("num_local_experts") else dense, Norms())


FALCON_H1 = Decoder(
    lambda _f, _i: (
        Attention(qkv_bias="attention_bias"),
        Mamba2(has_norm="mamba_rms_norm"),
        Mlp(bias="mlp_bias", name="feed_forward"),
        Norms(),
    )
)
MAMBA = Decoder(lambda _f, _i: (mamba1, Norms(1)), tied=True, everywhere=UNSPLIT)
MAMBA2 = Decoder(lambda _f, _i: (Mamba2(name="mixer"), Norms(1)), everywhere=UNSPLIT)


@dataclass(frozen=True, slots=True)
class OlmoDelta:
    """OLMo's gated delta-rule mixer: as Qwen's, with its two scalar projections apart."""

    name: str = "linear_attn"

    def __call__(self, f: Section, s: Shard) -> Parts:
        parts = GatedDelta(self.name)(f, s)
        own = s.of(f.whole("linear_num_value_heads"), "linear value heads")
        return tuple(
            Tensor(f"{self.name}.A_log", own) if part.name.endswith(".A_log") else part for part in parts
        )


@dataclass(frozen=True, slots=True)
class KimiDelta:
    """Kimi's delta attention, divided by heads; its low-rank gates are whole on each rank."""

    name: str = "self_attn"

    def __call__(self, f: Section, s: Shard) -> Parts:
        sizes = required(f, "linear_attn_config")
        width, dim = hidden(f), int(sizes["head_dim"])
        own = s.of(int(sizes["num_heads"]), "linear heads")
        inner, full_gate = own * dim, bool(sizes.get("use_full_rank_gate"))
        merged = (4 if full_gate else 3) * inner + own + dim
        merged += -merged % 16 if full_gate else 0
        parts: Parts = (
            Linear(f"{self.name}.in_proj_qkvgfab", width, merged, pieces=5),
            Linear(f"{self.name}.f_b_proj", dim, inner),
            Tensor(f"{self.name}.dt_bias", inner, "float32"),
            Tensor(f"{self.name}.conv1d", 3 * inner * int(sizes["short_conv_kernel_size"]), "float32"),
            Tensor(f"{self.name}.A_log", own, "float32"),
            norm(f"{self.name}.o_norm", dim),
            Linear(f"{self.name}.o_proj", inner, width),
        )
        if full_gate:
            return parts
        return (
            *parts,
            replicated(f"{self.name}.g_a_proj", width, dim),
            Linear(f"{self.name}.g_b_proj", dim, inner),
        )


KIMI_EXPERTS = Experts(correction=True, shared="num_shared_experts", least_width=256)


def _kimi(f: Section, i: int) -> Layer:
    linear = i + 1 in required(f, "linear_attn_config")["kda_layers"]
    sparse = i >= f.whole("first_k_dense_replace", 0) and i % f.whole("moe_layer_freq", 1) == 0
    return (
        KimiDelta() if linear else LatentAttention(absorbs=False),
        KIMI_EXPERTS if sparse else Mlp(),
        Norms(),
    )


def _nemotron(f: Section, i: int) -> Layer:
    kind = NEMOTRON_KINDS[_nemotron_pattern(f)[i]]
    if kind == "mamba":
        return (Mamba2(name="mixer"), Norms(1))
    if kind == "attention":
        return (Attention(name="mixer"), Norms(1))
    if kind == "moe":
        return (NEMOTRON_EXPERTS, Norms(1))
    sizes = required(f, "intermediate_size")
    mlp = Mlp(gated=False, bias="mlp_bias", name="mixer")
    if not isinstance(sizes, list):
        return (mlp, Norms(1))
    place = sum(NEMOTRON_KINDS[code] == "mlp" for code in _nemotron_pattern(f)[:i])
    return (With(mlp, (("intermediate_size", sizes[place] if len(sizes) > 1 else sizes[0]),)), Norms(1))


NEMOTRON_KINDS = {
    "M": "mamba",
    "*": "attention",
    "-": "mlp",
    "E": "moe",
    "mamba": "mamba",
    "attention": "attention",
    "mlp": "mlp",
    "moe": "moe",
}
NEMOTRON_EXPERTS = Experts(
    ("n_routed_experts",),
    ("moe_intermediate_size",),
    correction=True,
    shared="n_shared_experts",
    shared_width="moe_shared_expert_intermediate_size",
    shared_name="mixer.shared_experts",
    gated=False,
    latent="moe_latent_size",
    name="mixer",
)


def _nemotron_pattern(f: Section) -> Sequence[str]:
    pattern: Sequence[str] | None = f.first("hybrid_override_pattern", "layers_block_type")
    if pattern is None:
        raise Unsupported("incomplete_config", "config.json: hybrid_override_pattern is missing")
    return pattern


def _olmo_hybrid(f: Section, i: int) -> Layer:
    linear = required(f, "layer_types")[i] == "linear_attention"
    return (OlmoDelta() if linear else Attention(qk_norm="all"), Mlp(), Norms())


def _hybrid_layers(f: Section) -> Sequence[int]:
    stated: Sequence[int] | None = f.get("hybrid_layer_ids")
    if stated is not None:
        return stated
    return [i for i, kind in enumerate(required(f, "layers_block_type")) if kind == "hybrid"]


def _zamba2_shared(f: Section, s: Shard) -> Parts:
    """One of the transformer blocks that hybrid layers share, with a low-rank adapter for each use."""
    width, inner = hidden(f), f.whole("attention_hidden_size", 2 * hidden(f))
    own = s.of(inner, "attention width")
    ffn, bias = s.of(f.whole("intermediate_size"), "intermediate size"), on(f, "add_bias_linear")
    rank, uses = f.whole("adapter_rank"), len(_hybrid_layers(f))
    own_rank = s.of(rank, "adapter rank")
    adapters = [(width, 2 * ffn)]
    if f.get("use_shared_attention_adapter"):
        adapters += [(inner, own)] * 3
    blocks = f.whole("num_mem_blocks", 1)
    shared: Parts = (
        Linear("self_attn.qkv_proj", inner, 3 * own, pieces=3),
        Linear("self_attn.o_proj", own, width),
        Linear("feed_forward.gate_up_proj", width, 2 * ffn, 2 * ffn * bias, pieces=2),
        Linear("feed_forward.down_proj", ffn, width, width * bias),
        norm("norms", 2 * width + width),
    )
    low_rank = tuple(
        part
        for inputs, outputs in adapters
        for part in (Linear("adapter.A", inputs, own_rank), Linear("adapter.B", rank, outputs))
    )
    return shared * blocks + low_rank * uses


def _zamba2(f: Section, i: int) -> Layer:
    layer: Layer = (Mamba2(), Norms(1))
    return (*layer, _zamba2_linear) if i in _hybrid_layers(f) else layer


def _zamba2_linear(f: Section, _s: Shard) -> Parts:
    return (replicated("linear", hidden(f), hidden(f)),)


ZAMBA2 = Decoder(_zamba2, resident=(_zamba2_shared,), tied=True, pipeline=False)


def short_conv(f: Section, s: Shard) -> Parts:
    """LFM2's gated short convolution, divided by channels."""
    width = hidden(f)
    inner = s.of(f.whole("conv_dim", width), "convolution channels")
    out = f.whole("conv_dim_out", width)
    bias = bool(f.get("conv_bias"))
    return (
        Tensor("short_conv.conv", inner * (f.whole("conv_L_cache") + bias)),
        Linear("short_conv.in_proj", width, 3 * inner, 3 * inner * bias, pieces=3),
        Linear("short_conv.out_proj", inner, out, out * bias),
    )


def _lfm2(f: Section, i: int) -> Layer:
    full = f.get("full_attn_idxs")
    attends = required(f, "layer_types")[i] == "full_attention" if full is None else i in full
    mixer = Attention(qk_norm="head") if attends else short_conv
    sparse = f.get("num_experts") and i >= f.whole("num_dense_layers", 0)
    if sparse:
        return (mixer, LFM2_EXPERTS, Norms())
    inner = f.whole("intermediate_size") if f.get("num_experts") else _lfm2_width(f)
    return (mixer, With(Mlp(name="feed_forward"), (("intermediate_size", inner),)), Norms())


def _lfm2_width(f: Section) -> int:
    inner = size(f, "block_ff_dim", "intermediate_size")
    if not f.get("block_auto_adjust_ff_dim", True):
        return inner
    inner = int(f.get("block_ffn_dim_multiplier", 1.0) * int(2 * inner / 3))
    multiple = f.whole("block_multiple_of", 256)
    return -(-inner // multiple) * multiple


LFM2_EXPERTS = Experts(
    ("num_experts",), ("moe_intermediate_size",), correction="use_expert_bias", name="feed_forward"
)
LFM2 = Decoder(_lfm2, tied=True)

NEMOTRON_H = Decoder(_nemotron, count=lambda f: len(_nemotron_pattern(f)), everywhere=UNSPLIT)

RECURRENT = {
    "Lfm2ForCausalLM": LFM2,
    "Lfm2MoeForCausalLM": LFM2,
    "KimiLinearForCausalLM": Decoder(_kimi),
    "NemotronHForCausalLM": NEMOTRON_H,
    "NemotronHPuzzleForCausalLM": NEMOTRON_H,
    "OlmoHybridForCausalLM": Decoder(_olmo_hybrid, everywhere=UNSPLIT),
    "Zamba2ForCausalLM": ZAMBA2,
    "MambaForCausalLM": MAMBA,
    "FalconMambaForCausalLM": MAMBA,
    "Mamba2ForCausalLM": MAMBA2,
    "JambaForCausalLM": Decoder(_jamba, everywhere=UNSPLIT),
    "GraniteMoeHybridForCausalLM": Decoder(_granite_hybrid, everywhere=UNSPLIT),
    "FalconH1ForCausalLM": FALCON_H1,
    "Qwen3NextForCausalLM": Decoder(qwen_hybrid, everywhere=frozenset({"embed", "head"})),
    "Qwen3_5ForCausalLM": Decoder(qwen_hybrid, everywhere=frozenset({"embed"})),
    "Qwen3_5MoeForCausalLM": Decoder(qwen_hybrid, everywhere=frozenset({"embed"})),
}
