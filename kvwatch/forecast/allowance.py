"""What a server takes beside its weights and its KV cache, estimated from its configuration.

Nothing of this can be worked out exactly without starting the server; each part is a formula whose constants
were fitted to public start-up logs. Bytes per GPU throughout.

Peak activation: the larger of the forward pass and the sampler's dummy run.
    forward    batched tokens x element size x (3 x intermediate / tp + 3.5 x hidden); 3 x hidden more with
               pipeline stages, which pass hidden states and residuals on
    sampler    max_num_seqs x vocabulary x (element size + 13 bytes) on the last stage, plus the forward
               pass's result (tokens x hidden). The whole vocabulary, whatever tp. 36.3 instead of 13 bytes
               before 0.17.0, when the dummy run sorted the logits.
    experts    16-bit and 8-bit kernels keep a workspace: tokens x experts per token x (the larger of hidden
               and twice the expert's width, plus the larger of hidden and the width). MXFP4 kernels: none.
Rotary tables: positions x rotated width of a head x element size, exact for most models. Logs count them
    among the weights.
Non-torch memory: 0.25 GiB (0.13 before 0.18.0). With tp > 1 mostly NCCL's: 2.1 GiB (0.55 before) on Hopper
    and data-centre Blackwell, where it keeps NVLink buffers, 0.55 GiB on others (few logs, so 0.5 GiB more is
    in doubt).
CUDA graphs: 0.3 GiB + the captured share of 51 batch sizes of (0.25 GiB + 8 MiB a layer, 0.2 GiB more with
    tp > 1). Taken out of the budget by default since 0.20.0, before that from what the utilization leaves.
CUDA context, gone before vLLM looks at free memory: 0.51 GiB. With tp > 1 NCCL's start as well: 1.5 GiB
    (0.95 before 0.18.0), 0.12 GiB on cards without NVLink buffers.

Calibration: 25 start-ups of 13 decoder models (0.6B to 70B, dense and mixture of experts, tp and pp up to 4,
vLLM 0.16 to 0.19, H100) whose public logs tell these parts; tests/forecast/startups.py lists them. Activation
and non-torch memory together are met with a median error of 0.03 GiB, at most 0.26 GiB; the logged graph
estimates within 0.23 GiB; what is left for the KV cache within 0.27 GiB, median 0.03. Image towers, latent
attention, state-space layers and releases before 0.15 are outside of it: more of the activation is in doubt.
The stated bound is 0.35 GiB + a share of the activation + half of the graphs where they count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvwatch.blockmath.device import Device
from kvwatch.blockmath.flags import Flags
from kvwatch.blockmath.pool import Pool
from kvwatch.blockmath.releases import Release
from kvwatch.blockmath.settings import DTYPE_BYTES, Settings
from kvwatch.blockmath.specs import Kind
from kvwatch.forecast.shape import Experts, Shape

GIB: Final = 1 << 30
MIB: Final = 1 << 20

CALIBRATED_SINCE: Final = (0, 15)
SORTED_SAMPLER_BEFORE: Final = (0, 17)
SAMPLER_BYTES: Final = 13.0
SORTED_SAMPLER_BYTES: Final = 36.3
FORWARD_HIDDEN: Final = 3.5
PIPELINE_HIDDEN: Final = 3.0

NON_TORCH_SINCE: Final = (0, 18)
NON_TORCH: Final = 0.25 * GIB
NON_TORCH_NCCL: Final = 2.1 * GIB
NON_TORCH_BEFORE: Final = 0.13 * GIB
NON_TORCH_NCCL_BEFORE: Final = 0.55 * GIB
NON_TORCH_NCCL_DOUBT: Final = 0.5 * GIB

CONTEXT: Final = 0.51 * GIB
CONTEXT_NCCL: Final = 1.5 * GIB
CONTEXT_NCCL_BEFORE: Final = 0.95 * GIB
CONTEXT_NCCL_PLAIN: Final = 0.12 * GIB
CONTEXT_DOUBT: Final = 0.2 * GIB

CAPTURE_SIZES: Final = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
"""Batch sizes that CUDA graphs are captured for by default, up to twice ``max_num_seqs``."""

BASE_DOUBT: Final = 0.35 * GIB
DOUBT_SHARE: Final = 0.10
WIDE_DOUBT_SHARE: Final = 0.50
GRAPH_DOUBT_SHARE: Final = 0.50

_UNMEASURED_KINDS: Final = frozenset({Kind.MLA, Kind.SLIDING_MLA, Kind.MAMBA, Kind.CROSS, Kind.RING})


@dataclass(frozen=True, slots=True)
class Allowance:
    """One GPU's memory beside weights and KV cache. Bytes.

    Attributes:
        rotary: tables of rotary position embeddings.
        activation: peak of the profiling run.
        non_torch: what libraries take outside of PyTorch, above the context.
        graphs: CUDA graphs; 0 with ``--enforce-eager``.
        graphs_in_budget: the release takes them out of the budget.
        context: gone before vLLM looks at free memory, to within CONTEXT_DOUBT.
        uncertainty: how far the sum that bears on the KV cache may be off.
    """

    rotary: int
    activation: int
    non_torch: int
    graphs: int
    graphs_in_budget: bool
    context: int
    uncertainty: int

    @property
    def in_budget(self) -> int:
        """What is taken out of the budget before the KV cache."""
        return self.rotary + self.activation + self.non_torch + (self.graphs if self.graphs_in_budget else 0)


def allowances(
    shape: Shape, pool: Pool, flags: Flags, device: Device, quantization: str | None
) -> tuple[Allowance, ...]:
    """The allowance of each pipeline stage's GPUs.

    Args:
        shape: the model's sizes.
        pool: its KV pool, for the settings in effect and the kinds of layers.
        flags: what the server is told.
        device: the card.
        quantization: the scheme of the weights, or None.
    """
    wide = pool.release.version < CALIBRATED_SINCE or shape.has_tower or _unmeasured(pool)
    share = WIDE_DOUBT_SHARE if wide else DOUBT_SHARE
    graphs = 0 if flags.enforce_eager else _graphs(shape, pool.settings)
    graphs_in_budget = pool.release.graph_estimate_default
    non_torch, non_torch_doubt = _non_torch(pool, device)
    stages = len(pool.stages)

    def one(stage: int) -> Allowance:
        activation = _activation(shape, pool, flags, quantization, last=stage == stages - 1)
        doubt = BASE_DOUBT + non_torch_doubt + share * activation
        doubt += GRAPH_DOUBT_SHARE * graphs if graphs_in_budget else 0
        return Allowance(
            rotary=shape.rotary_elements * DTYPE_BYTES[pool.settings.dtype],
            activation=activation,
            non_torch=int(non_torch),
            graphs=graphs,
            graphs_in_budget=graphs_in_budget,
            context=context_bytes(flags, device, pool.release),
            uncertainty=int(doubt),
        )

    return tuple(one(stage) for stage in range(stages))


def _unmeasured(pool: Pool) -> bool:
    return any(spec.kind in _UNMEASURED_KINDS for group in pool.groups for spec, _ in group.members)


def _activation(shape: Shape, pool: Pool, flags: Flags, quantization: str | None, *, last: bool) -> int:
    settings = pool.settings
    item = DTYPE_BYTES[settings.dtype]
    tokens = settings.max_num_batched_tokens
    hidden_parts = FORWARD_HIDDEN + (PIPELINE_HIDDEN if settings.pp > 1 else 0)
    row = 3 * _dense_width(shape) / settings.tp + hidden_parts * shape.hidden
    workspace = 0.0
    if shape.experts is not None and quantization != "mxfp4":
        workspace = tokens * item * _expert_row(shape.experts, shape.hidden, flags)
    forward = tokens * item * row + workspace
    if not last or shape.vocabulary is None:
        return int(forward)
    per_logit = SORTED_SAMPLER_BYTES if pool.release.version < SORTED_SAMPLER_BEFORE else SAMPLER_BYTES
    logits = settings.max_num_seqs * shape.vocabulary * (item + per_logit)
    return int(max(forward, logits + tokens * shape.hidden * item + workspace))


def _dense_width(shape: Shape) -> int:
    """Experts have their workspace; what is left for the dense part is at most an expert's size."""
    return shape.intermediate if shape.experts is None else min(shape.intermediate, shape.experts.width)


def _expert_row(experts: Experts, hidden: int, flags: Flags) -> int:
    width = experts.width if flags.enable_expert_parallel else experts.width // flags.tp
    return experts.active * (max(2 * width, hidden) + max(width, hidden))


def _non_torch(pool: Pool, device: Device) -> tuple[float, float]:
    """Bytes, and by how much more they may be off than the base says."""
    recent = pool.release.version >= NON_TORCH_SINCE
    if pool.settings.tp == 1:
        return (NON_TORCH if recent else NON_TORCH_BEFORE), 0
    if not has_nvlink_buffers(device):
        return NON_TORCH_NCCL_BEFORE, NON_TORCH_NCCL_DOUBT
    return (NON_TORCH_NCCL if recent else NON_TORCH_NCCL_BEFORE), 0


def context_bytes(flags: Flags, device: Device, release: Release) -> int:
    """What is gone on an idle card when vLLM looks at its free memory."""
    if flags.tp == 1:
        return int(CONTEXT)
    if not has_nvlink_buffers(device):
        return int(CONTEXT + CONTEXT_NCCL_PLAIN)
    return int(CONTEXT + (CONTEXT_NCCL if release.version >= NON_TORCH_SINCE else CONTEXT_NCCL_BEFORE))


def has_nvlink_buffers(device: Device) -> bool:
    """NCCL keeps large buffers there; taken for granted where the card is not known."""
    return device.capability is None or device.capability[0] in (9, 10)


def _graphs(shape: Shape, settings: Settings) -> int:
    captured = sum(size <= 2 * settings.max_num_seqs for size in CAPTURE_SIZES)
    several = 0.25 * GIB + shape.layers * 8 * MIB + (0.2 * GIB if settings.tp > 1 else 0)
    return int(0.3 * GIB + several * captured / len(CAPTURE_SIZES))
