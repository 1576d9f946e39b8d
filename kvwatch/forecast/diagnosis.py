"""What a failed start is explained with: the records, and the quantities a log yields for one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvwatch.blockmath.flags import Flags
from kvwatch.blockmath.releases import Release
from kvwatch.forecast.explain_model import PoolPlanner
from kvwatch.observe.log_failures import size_gib
from kvwatch.observe.startlog import Finding, StartLog

HIGHEST_UTILIZATION = 0.98
"""More than this leaves no room for the CUDA context and what is allocated outside the budget."""

GRAPHS_ATE_THE_CARD = 0.10
"""Share of the card from which a CUDA-graph estimate, not the budget, is what to mend."""

LARGEST_GPU_GIB = 288
"""The most memory that a GPU on the market has."""

_ROUNDING_GIB = 0.005  # the log prints two decimals


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to do.

    Attributes:
        text: what it does and why it is enough, one sentence.
        arguments: to add to, or change on, the `vllm serve` command line.
        environment: variables to set for the server.
        command: a shell command, where the remedy is none of the server's own settings.
    """

    text: str
    arguments: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    command: str | None = None

    @property
    def to_type(self) -> str:
        """What to type, on one line; empty where the remedy has no such form."""
        return self.command or " ".join((*self.environment, *self.arguments))


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why the server did not start, and what to do, in order of preference.

    Attributes:
        kind: of the root cause; None where nothing failed.
        what: one sentence.
        why: sentences with the numbers.
        remedies: what helps, the most certain first.
        ruled_out: what looks as if it helped and cannot, each with its reason.
        checks: the log's numbers against the block arithmetic, where a model configuration was given.
    """

    kind: str | None
    what: str
    why: tuple[str, ...] = ()
    remedies: tuple[Advice, ...] = ()
    ruled_out: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()


def gib(value: float) -> str:
    """A size for people: two decimals, as vLLM prints."""
    return f"{value:.2f} GiB"


@dataclass(frozen=True, slots=True)
class FailedStart:
    """The failed start: its root cause, what the server was told, and the quantities around it.

    Sizes are GiB of the GPU the finding is about, as the log rounds them; None where the log does not say.

    Attributes:
        flags: from the log and from who asks.
        release: None where it is not known.
        planner: the arithmetic for the model; None where none was given, or it does not reproduce the log.
    """

    log: StartLog
    finding: Finding
    flags: Flags
    release: Release | None = None
    planner: PoolPlanner | None = None

    def before(self, *version: int) -> bool:
        """Whether the release is known and older than this one."""
        return self.release is not None and self.release.version < version

    def since(self, *version: int) -> bool:
        """Whether the release is known and this one or newer."""
        return self.release is not None and self.release.version >= version

    def same_kind(self) -> tuple[Finding, ...]:
        """The failures of the root cause's kind, one per rank that reports other numbers."""
        return tuple(finding for finding in self.log.failures if finding.kind == self.finding.kind)

    def _numbers(self, *places: tuple[str, str]) -> list[float]:
        return [
            value
            for kind, name in places
            for finding in self.log.info(kind)
            if (value := finding.number(name)) is not None
        ]

    @property
    def total_gib(self) -> float | None:
        """Memory of the GPU as CUDA reports it."""
        own = size_gib(self.finding.numbers, "total")
        if own is not None:
            return own
        seen = self._numbers(
            ("info_budget", "total"),
            ("info_init_snapshot", "total_gib"),
            ("info_startup_summary", "total_gib"),
            ("info_profile", "total_gib"),
        )
        seen += [
            size for finding in self.log.failures if (size := size_gib(finding.numbers, "total")) is not None
        ]
        return min(seen, default=None)

    @property
    def free_at_start_gib(self) -> float | None:
        """Free memory when the server took its first look, the least over the ranks."""
        return min(
            self._numbers(
                ("info_init_snapshot", "free_gib"),
                ("info_initial_free", "free_gib"),
                ("info_startup_summary", "free_gib"),
            ),
            default=None,
        )

    @property
    def utilization(self) -> float | None:
        """The share of the card the server was allowed: printed, given, or the release's default."""
        printed = self.finding.number("util")
        if printed is not None:
            return printed
        if self.flags.gpu_memory_utilization is not None:
            return self.flags.gpu_memory_utilization
        logged = self._numbers(
            ("info_budget", "util"),
            ("info_profile", "util"),
            ("info_initial_free", "util"),
            ("info_cudagraph_profiling", "util"),
            ("info_cudagraph_future", "util"),
        )
        if logged:
            return logged[0]
        return None if self.release is None else self.release.default_utilization

    @property
    def available_gib(self) -> float | None:
        """KV memory the profile left, the least over the ranks; can be negative."""
        own = self.finding.number("avail_gib")
        if own is not None:
            return own
        return min(
            self._numbers(("info_kv_avail", "gib"), ("info_breakdown", "kv"), ("info_profile", "kv_gib")),
            default=None,
        )

    @property
    def weights_gib(self) -> float | None:
        """What the weights take on one GPU."""
        return max(
            self._numbers(("info_load", "gib"), ("info_load", "gb"), ("info_breakdown", "weights")),
            default=None,
        )

    @property
    def graph_estimate_gib(self) -> float | None:
        """What the profile set aside for CUDA graphs."""
        return max(self._numbers(("info_graph_estimate", "gib")), default=None)

    @property
    def graphs_ate_the_card(self) -> bool:
        """Whether the CUDA-graph estimate is so large that it, and not the budget, keeps the server down."""
        estimate, total = self.graph_estimate_gib, self.total_gib
        if estimate is None:
            return False
        return estimate > GRAPHS_ATE_THE_CARD * total if total else estimate > 10

    @property
    def fp8_cache(self) -> bool:
        """Whether the KV cache is already narrower than 16 bits."""
        return (self.flags.kv_cache_dtype or "auto") not in ("auto", "float16", "bfloat16", "half")

    @property
    def hybrid_block_tokens(self) -> int | None:
        """Tokens per attention block of an attention and mamba hybrid; None where the log shows none."""
        tokens = self._numbers(("info_attn_block_size", "tokens"))
        return int(tokens[0]) if tokens else None

    @property
    def max_num_seqs(self) -> int:
        """Given, or what `vllm serve` takes for a card of this size."""
        if self.flags.max_num_seqs is not None:
            return self.flags.max_num_seqs
        return 1024 if (self.total_gib or 0) >= 70 else 256

    def raised_utilization(self, missing_gib: float) -> Advice | str:
        """The larger utilization that makes up for ``missing_gib``, or why none does."""
        other = self._budget_is_not_the_lever()
        if other is not None:
            return other
        if self.utilization is None or self.total_gib is None:
            return self._raised_by_an_unknown_share(missing_gib)
        needed = hundredth_up(self.utilization + (missing_gib + _ROUNDING_GIB) / self.total_gib)
        free = self.free_at_start_gib
        if needed > HIGHEST_UTILIZATION:
            return (
                f"Raising --gpu-memory-utilization: {gib(missing_gib)} are missing, which takes {needed:.2f} "
                f"of a {gib(self.total_gib)} card; more than {HIGHEST_UTILIZATION} leaves nothing for the "
                "CUDA context."
            )
        if free is not None and needed > share_down(free, self.total_gib):
            return (
                f"Raising --gpu-memory-utilization to {needed:.2f}: only {gib(free)} of "
                f"{gib(self.total_gib)} were free when the server started."
            )
        return Advice(
            f"Raises the budget by the missing {gib(missing_gib)} (from {self.utilization:g} of "
            f"{gib(self.total_gib)}); nothing else may hold that memory.",
            ("--gpu-memory-utilization", f"{needed:.2f}"),
        )

    def _budget_is_not_the_lever(self) -> str | None:
        """Why the utilization has no say in the size of the KV cache, or is not what to mend."""
        if self.flags.kv_cache_memory_bytes is not None:
            return "--gpu-memory-utilization does not size the KV cache here: --kv-cache-memory-bytes does."
        if self.flags.num_gpu_blocks_override is not None:
            return "--gpu-memory-utilization does not size the KV cache here: --num-gpu-blocks-override does."
        if self.graphs_ate_the_card:
            return (
                f"Raising --gpu-memory-utilization: {gib(self.graph_estimate_gib or 0)} were set aside for "
                "CUDA graphs; that estimate is what to mend."
            )
        return None

    def _raised_by_an_unknown_share(self, missing_gib: float) -> Advice | str:
        if self.utilization is not None:
            smallest = missing_gib / max(HIGHEST_UTILIZATION - self.utilization, 0.001)
            if smallest > LARGEST_GPU_GIB:
                return (
                    f"Raising --gpu-memory-utilization from {self.utilization:g}: {gib(missing_gib)} more "
                    f"would take a card of at least {smallest:.0f} GiB."
                )
        return Advice(
            f"Give the server {gib(missing_gib)} more per GPU: raise --gpu-memory-utilization by that share "
            "of the card's memory, as far as it is free."
        )


def hundredth_up(share: float) -> float:
    """Rounded up to 0.01."""
    return math.ceil(round(share * 100, 6)) / 100


def share_down(part_gib: float, total_gib: float) -> float:
    """The largest utilization, in steps of 0.01, that fits into ``part_gib`` however the log rounded it."""
    return math.floor((part_gib - _ROUNDING_GIB) / (total_gib + _ROUNDING_GIB) * 100) / 100


Rule = Callable[[FailedStart], Diagnosis]


class Draft:
    """Collects remedies and refusals in order; the two are told apart by type."""

    def __init__(self, start: FailedStart, what: str, *why: str | bool | None) -> None:
        self._kind = start.finding.kind
        self._what = what
        self._why = tuple(sentence for sentence in why if isinstance(sentence, str))
        self._remedies: list[Advice] = []
        self._ruled_out: list[str] = []

    def add(self, *outcomes: Advice | str | None) -> Draft:
        """Take remedies (as such), reasons against one (text), or nothing."""
        for outcome in outcomes:
            if isinstance(outcome, Advice):
                self._remedies.append(outcome)
            elif outcome is not None:
                self._ruled_out.append(outcome)
        return self

    def done(self, **extra: Any) -> Diagnosis:
        return Diagnosis(
            self._kind, self._what, self._why, tuple(self._remedies), tuple(self._ruled_out), **extra
        )


SHOW_HOLDERS = "nvidia-smi --query-compute-apps=pid,used_memory,process_name --format=csv"

_MORE_GPUS = (
    "Spread the model over more GPUs: each holds less of the weights and, down to one head, of the KV cache."
)


def more_gpus(s: FailedStart) -> Advice:
    return Advice(_MORE_GPUS, ("--tensor-parallel-size", str(2 * s.flags.tp)))


def quantized_weights() -> Advice:
    return Advice(
        "Serve a quantized checkpoint of the model (FP8 or 4 bit): the weights take a half or a quarter."
    )


def length_flag(tokens: float) -> tuple[str, str]:
    return "--max-model-len", str(int(tokens))


def smallest_useful_cache(s: FailedStart) -> float:
    """GiB of KV cache worth starting with: 1, or a twentieth of a small card."""
    return min(1.0, (s.total_gib or 20) / 20)


def smaller_batches(s: FailedStart) -> Advice:
    """Half of what was asked for, at most 2048 tokens and 64 sequences."""
    tokens = min((s.flags.max_num_batched_tokens or 4096) // 2, 2048)
    seqs = min((s.flags.max_num_seqs or 128) // 2, 64)
    return Advice(
        "Smaller batches, so a smaller activation peak.",
        ("--max-num-batched-tokens", str(max(tokens, 1)), "--max-num-seqs", str(max(seqs, 1))),
    )


def fewer_graphs() -> tuple[Advice, ...]:
    """Less memory for CUDA graphs, or none."""
    return (
        Advice("Captures graphs for fewer batch sizes.", ("--max-cudagraph-capture-size", "64")),
        Advice("Captures no CUDA graphs at all (slower decoding).", ("--enforce-eager",)),
    )
