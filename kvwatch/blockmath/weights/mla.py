"""Multi-head latent attention: DeepSeek and its descendants."""

from __future__ import annotations

from dataclasses import dataclass

from kvwatch.blockmath.modelconfig import Section
from kvwatch.blockmath.weights.decoder import UNSPLIT, Decoder, Layer
from kvwatch.blockmath.weights.layers import Experts, Mlp, Norms, Switch, heads, hidden, norm, replicated
from kvwatch.blockmath.weights.moe import DEEPSEEK_SHARED, sparse_list
from kvwatch.blockmath.weights.parts import Linear, Part, Parts, Tensor
from kvwatch.blockmath.weights.shard import Shard


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Keys and values from one shared latent; queries direct, or from a latent where ``q_lora_rank`` is set.

    The down-projections are whole on each rank, the others divided by heads.

    Attributes:
        indexer: a sparse-attention indexer picks the tokens.
        absorbs: key and value projections are kept in an absorbed form as well.
    """

    indexer: bool = False
    absorbs: bool = True
    name: str = "self_attn"

    def __call__(self, f: Section, s: Shard) -> Parts:
        width, own = hidden(f), s.of(heads(f), "number of attention heads")
        rank, rope, nope = f.whole("kv_lora_rank"), f.whole("qk_rope_head_dim"), f.whole("qk_nope_head_dim")
        value = f.whole("v_head_dim")
        queries = own * (rope + nope)
        parts: list[Part] = []
        if q_rank := f.get("q_lora_rank"):
            parts += [
                replicated(f"{self.name}.fused_qkv_a_proj", width, q_rank + rank + rope),
                norm(f"{self.name}.q_a_layernorm", q_rank),
                Linear(f"{self.name}.q_b_proj", q_rank, queries),
            ]
        else:
            parts += [
                replicated(f"{self.name}.kv_a_proj_with_mqa", width, rank + rope),
                Linear(f"{self.name}.q_proj", width, queries),
            ]
        parts += [
            norm(f"{self.name}.kv_a_layernorm", rank),
            Linear(f"{self.name}.kv_b_proj", rank, own * (nope + value), absorbed=self.absorbs),
            Linear(f"{self.name}.o_proj", own * value, width),
        ]
        if self.indexer:
            parts += indexer(f, f"{self.name}.indexer")
        return tuple(parts)


def indexer(f: Section, name: str) -> Parts:
    """The sparse-attention indexer, whole on each rank."""
    count, dim = f.whole("index_n_heads"), f.whole("index_head_dim")
    return (
        replicated(f"{name}.wq_b", f.whole("q_lora_rank"), count * dim),
        Linear(f"{name}.wk_weights_proj", hidden(f), dim + count, kind="plain"),
        Tensor(f"{name}.k_norm", 2 * dim, "float32"),
    )


def deepseek(
    *, correction: Switch = True, router_dtype: str | None = None, sparse: bool = False, norms: int = 2
) -> Decoder:
    """Dense layers first, then experts with shared ones, under latent attention."""
    experts = Experts(
        correction=correction, router_dtype=router_dtype, shared=DEEPSEEK_SHARED, count=("n_routed_experts",)
    )
    attention = LatentAttention()
    if not sparse:
        return Decoder(sparse_list((Mlp(),), (experts,), (attention, Norms(norms))))

    def plan(f: Section, i: int) -> Layer:
        mixer = LatentAttention(indexer=picks_tokens(f, i))
        return sparse_list((Mlp(),), (experts,), (mixer, Norms(norms)))(f, i)

    return Decoder(plan)


def picks_tokens(f: Section, i: int) -> bool:
    """Whether layer ``i`` has an indexer of its own instead of sharing that of a layer before."""
    kinds, pattern = f.get("indexer_types"), f.get("index_topk_pattern")
    if kinds:
        return bool(kinds[i] == "full")
    if pattern:
        return bool(pattern[i] != "S")
    offset = f.whole("index_skip_topk_offset", 2)
    return max(i - offset + 1, 0) % f.whole("index_topk_freq", 1) == 0


YOUTU = Decoder(lambda _f, _i: (LatentAttention(), Mlp(), Norms()), tied=True)
MINICPM3 = Decoder(
    lambda _f, _i: (LatentAttention(absorbs=False), Mlp(), Norms()), tied=True, everywhere=UNSPLIT
)

LATENT = {
    "Mistral4ForCausalLM": deepseek(correction=False),
    "YoutuForCausalLM": YOUTU,
    "MiniCPM3ForCausalLM": MINICPM3,
    "DeepseekV2ForCausalLM": deepseek(correction="topk_method=noaux_tc"),
    "DeepseekV3ForCausalLM": deepseek(correction="topk_method=noaux_tc"),
    "Glm4MoeLiteForCausalLM": deepseek(router_dtype="float32"),
    "GlmMoeDsaForCausalLM": deepseek(sparse=True),
    "DeepseekV32ForCausalLM": deepseek(sparse=True),
    "AXK1ForCausalLM": deepseek(norms=3),
}
