"""Mixers with a state instead of a KV cache, and the hybrids that use them."""

from __future__ import annotations

from dataclasses import dataclass

from kvwatch.blockmath.errors import Refused
from kvwatch.blockmath.modelconfig import Section
from kvwatch.blockmath.weights.decoder import UNSPLIT, Decoder, Layer
from kvwatch.blockmath.weights.layers import Attention, Experts, Mlp, Norms, hidden, norm, on
from kvwatch.blockmath.weights.moe import every
from kvwatch.blockmath.weights.parts import Linear, Parts, Tensor
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
SHARED_EXPERT = Experts(
    shared_width="shared_expert_intermediate_size", shared_gate=True, shared_name="mlp.shared_expert"
)


def qwen_hybrid(f: Section, i: int) -> Layer:
    """Qwen3-Next and Qwen3.5: three delta-rule layers, then one of gated attention; dense or experts."""
    kinds = f.get("layer_types")
    interval = f.whole("full_attention_interval", 4)
    full = kinds[i] == "full_attention" if kinds else (i + 1) % interval == 0
    return every((Mlp(),), (SHARED_EXPERT,), ((GATED if full else GatedDelta()), Norms()))(f, i)


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


GRANITE_FFN = Experts(
    ("num_local_experts",),
    ("intermediate_size",),
    shared_width="shared_intermediate_size",
    shared_name="shared_mlp",
    name="block_sparse_moe",
)


def _granite_hybrid(f: Section, i: int) -> Layer:
    kinds = f.first("layers_block_type", "layer_types")
    mixer = Mamba2() if kinds[i] in ("mamba", "linear_attention") else Attention(qkv_bias="attention_bias")
    dense = Mlp(width=("shared_intermediate_size",), name="shared_mlp")
    return (mixer, GRANITE_FFN if f.get("num_local_experts") else dense, Norms())


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

RECURRENT = {
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
