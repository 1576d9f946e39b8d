"""The checks that decide whether a server starts, in vLLM's order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kvwatch.blockmath import wording
from kvwatch.blockmath.flags import Flags
from kvwatch.blockmath.pool import Pool
from kvwatch.blockmath.releases import Release

CHECKS: Final = (
    "derived_length",
    "free_memory",
    "kv_memory",
    "one_request",
    "state_slots",
    "sampler_warmup",
    "graph_capture",
)
"""Names of the checks, in the order in which vLLM comes to them."""

FAILURE_KINDS: Final = {
    "derived_length": "max_model_len_gt_derived",
    "free_memory": "free_lt_desired",
    "kv_memory": "no_available_memory_for_blocks",
    "one_request": "kv_needed_gt_available",
    "state_slots": "mamba_blocks_lt_max_num_seqs",
    "sampler_warmup": "cuda_oom_sampler_warmup",
    "graph_capture": "cuda_oom_cudagraph_capture",
}
"""The kind of log line that a failed check leaves."""

_IN_RANK_ORDER: Final = frozenset({"kv_memory", "one_request"})
_PLENTY: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class RankMemory:
    """One GPU of the server. Absent figures make the checks that need them unknown.

    Attributes:
        gpu: a name for messages, for example ``cuda:0``.
        stage: the pipeline stage that it serves.
        total_bytes: CUDA's total.
        free_bytes: free when vLLM looks, its own context already gone.
        non_kv_bytes: weights, activations and everything else of this server that is not KV cache.
        foreign_bytes: held by others; by default what is neither free nor told.
        graph_bytes: what CUDA graphs will take outside of the budget; captured before the sampler warms up.
        uncertainty_bytes: a margin smaller than this decides nothing.
        free_uncertainty_bytes: the same for the checks that look at what is left of the whole card, where
            non-KV memory cancels out; by default the same figure.
    """

    gpu: str
    stage: int
    total_bytes: int
    free_bytes: int | None = None
    non_kv_bytes: int | None = None
    foreign_bytes: int | None = None
    graph_bytes: int | None = None
    uncertainty_bytes: int = 0
    free_uncertainty_bytes: int | None = None

    @property
    def free_doubt(self) -> int:
        """The uncertainty of checks that look at the whole card."""
        if self.free_uncertainty_bytes is None:
            return self.uncertainty_bytes
        return self.free_uncertainty_bytes


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check on one GPU, or on the whole server where ``gpu`` is None.

    Attributes:
        check: its name, one of CHECKS.
        gpu: the GPU.
        margin_bytes: bytes to spare; negative = missing; None where bytes do not measure it or are not known.
        passed: None where it cannot be said.
        margin_count: tokens or requests to spare, where that is the natural measure.
    """

    check: str
    gpu: str | None
    margin_bytes: int | None
    passed: bool | None
    margin_count: int | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the server starts.

    Attributes:
        feasible: None where a check that could fail cannot be made.
        blocking: the failed check that vLLM would report, on the GPU where most is missing.
        checks: all results, in vLLM's order.
        longest_length: the largest length whose checks all pass now, 0 if none; None where it cannot be said.
        message: vLLM's own words for the blocking check.
        unknown_reason: which figure is missing, where ``feasible`` is None.
    """

    feasible: bool | None
    blocking: CheckResult | None
    checks: tuple[CheckResult, ...]
    longest_length: int | None
    message: str | None
    unknown_reason: str | None

    @property
    def failure_kind(self) -> str | None:
        """The kind of log line that the failed start leaves."""
        return FAILURE_KINDS[self.blocking.check] if self.blocking else None


def requested_bytes(total_bytes: int, utilization: float, release: Release) -> int:
    """The budget of one GPU."""
    exact = total_bytes * utilization
    return math.ceil(exact) if release.ceil_budget else int(exact)


def judge(pool: Pool, flags: Flags, ranks: Sequence[RankMemory], *, release: Release) -> Verdict:
    """Make every check that a start goes through.

    Args:
        pool: the server's pool.
        flags: what the server was told.
        ranks: its GPUs, in rank order.
        release: the vLLM release.

    Raises:
        ValueError: no GPU is given, or a stage has none.
    """
    if {rank.stage for rank in ranks} != set(range(len(pool.stages))):
        raise ValueError(
            f"GPUs are given for stages {sorted({rank.stage for rank in ranks})} of {len(pool.stages)}"
        )
    judged = _Judged(pool, flags, tuple(ranks), release)
    checks = tuple(judged.all_checks())
    blocking = _blocking(checks)
    unknown = [result for result in checks if result.passed is None]
    feasible = False if blocking else None if unknown else True
    return Verdict(
        feasible=feasible,
        blocking=blocking,
        checks=checks,
        longest_length=judged.longest_length(checks),
        message=judged.message(_reported(checks, blocking)) if blocking else None,
        unknown_reason=judged.unknown_reason(unknown[0]) if unknown and not blocking else None,
    )


def _blocking(checks: Iterable[CheckResult]) -> CheckResult | None:
    failed = [result for result in checks if result.passed is False]
    if not failed:
        return None
    first = [result for result in failed if result.check == failed[0].check]
    return min(first, key=lambda result: result.margin_bytes or 0)


def _reported(checks: Iterable[CheckResult], blocking: CheckResult) -> CheckResult:
    """The failure that vLLM words: its planner goes from worker to worker and stops where one fails."""
    if blocking.check not in _IN_RANK_ORDER:
        return blocking
    return next(result for result in checks if result.check == blocking.check and result.passed is False)


@dataclass(frozen=True, slots=True)
class _Judged:
    pool: Pool
    flags: Flags
    ranks: tuple[RankMemory, ...]
    release: Release

    def all_checks(self) -> Iterable[CheckResult]:
        yield self._derived_length()
        per_gpu: tuple[Callable[[RankMemory], CheckResult | None], ...] = (
            self._free_memory,
            self._kv_memory,
            self._one_request,
        )
        for check in per_gpu:
            yield from self._on_every_gpu(check)
        if any(group.is_state for group in self.pool.groups):
            yield self._state_slots()
        yield from self._on_every_gpu(self._sampler_warmup)
        yield from self._on_every_gpu(self._graph_capture)

    def _on_every_gpu(self, check: Callable[[RankMemory], CheckResult | None]) -> Iterable[CheckResult]:
        return (result for rank in self.ranks if (result := check(rank)) is not None)

    @property
    def utilization(self) -> float:
        return self.flags.gpu_memory_utilization or self.release.default_utilization

    def requested(self, rank: RankMemory) -> int:
        return requested_bytes(rank.total_bytes, self.utilization, self.release)

    def available(self, rank: RankMemory) -> int | None:
        """Bytes for KV on one GPU."""
        if self.flags.kv_cache_memory_bytes and self.release.has_kv_cache_memory_bytes:
            return self.flags.kv_cache_memory_bytes
        if rank.non_kv_bytes is None:
            return None
        available = self.requested(rank) - rank.non_kv_bytes
        if not self.release.foreign_counts_as_non_torch:
            return available
        foreign = rank.foreign_bytes
        if foreign is None:
            if rank.free_bytes is None:
                return None
            foreign = rank.total_bytes - rank.free_bytes
        return available - foreign

    def available_by_stage(self) -> list[int] | None:
        """The least over each stage's GPUs; None where one is unknown."""
        stages: list[int] = []
        for stage in range(len(self.pool.stages)):
            figures = [self.available(rank) for rank in self.ranks if rank.stage == stage]
            known = [figure for figure in figures if figure is not None]
            if len(known) < len(figures):
                return None
            stages.append(min(known))
        return stages

    def checked(self, rank: RankMemory) -> int | None:
        """Bytes that the KV checks compare with on one GPU."""
        if self._overridden:
            return self.pool.check_bytes(0)[rank.stage]
        available = self.available(rank)
        return None if available is None else available - self.pool.kept_back_bytes[rank.stage]

    @property
    def _overridden(self) -> bool:
        return self.pool.blocks_override is not None and self.release.override_in_check

    @property
    def _exact(self) -> bool:
        """The memory for KV was told outright."""
        return self._overridden or bool(self.flags.kv_cache_memory_bytes)

    def _derived_length(self) -> CheckResult:
        settings = self.pool.settings
        spare = settings.derived_max_model_len - settings.max_model_len
        # Planning the pool already refused longer ones, save those that model_max_length allows.
        return CheckResult(
            "derived_length", gpu=None, margin_bytes=None, passed=True, margin_count=max(spare, 0)
        )

    def _free_memory(self, rank: RankMemory) -> CheckResult | None:
        if not self.release.has_free_memory_check:
            return None
        if rank.free_bytes is None:
            return CheckResult("free_memory", rank.gpu, None, None)
        return _bytes_check("free_memory", rank, rank.free_bytes - self.requested(rank), rank.free_doubt)

    def _kv_memory(self, rank: RankMemory) -> CheckResult | None:
        if not self.pool.groups:
            return None
        checked = self.checked(rank)
        if checked is None:
            return CheckResult("kv_memory", rank.gpu, None, None)
        # vLLM asks for more than nothing, so a margin of zero fails.
        return _bytes_check("kv_memory", rank, checked - 1, 0 if self._exact else rank.uncertainty_bytes)

    def _one_request(self, rank: RankMemory) -> CheckResult | None:
        if not self.pool.groups:
            return None
        checked = self.checked(rank)
        if checked is None:
            return CheckResult("one_request", rank.gpu, None, None)
        length = 1 if self.pool.settings.auto_length else self.pool.settings.max_model_len
        margin = checked - self.pool.need_bytes(length)[rank.stage]
        return _bytes_check("one_request", rank, margin, 0 if self._exact else rank.uncertainty_bytes)

    def num_blocks(self, more_bytes: int = 0) -> int | None:
        """Blocks of the pool, had each GPU so many more bytes for it."""
        available = self.available_by_stage()
        if self.pool.blocks_override is not None:
            return self.pool.blocks_override
        return None if available is None else self.pool.num_blocks([each + more_bytes for each in available])

    def _state_slots(self) -> CheckResult:
        if self.flags.enforce_eager:
            return CheckResult("state_slots", gpu=None, margin_bytes=None, passed=True)
        blocks = self.num_blocks()
        if blocks is None:
            return CheckResult("state_slots", None, None, None)
        asked = self.pool.settings.max_num_seqs
        doubt = 0 if self._exact else max(rank.uncertainty_bytes for rank in self.ranks)
        fewest, most = self.num_blocks(-doubt) or 0, self.num_blocks(doubt) or 0
        passed = True if fewest >= asked else False if most < asked else None
        return CheckResult("state_slots", None, None, passed, blocks - asked)

    def _left_of_card(self, rank: RankMemory) -> int | None:
        """Free bytes once weights and KV cache are in place; activations count as held."""
        if self.pool.blocks_override is None:
            cache = self.available(rank)
        else:
            cache = self.pool.blocks_override * self.pool.bytes_per_block[rank.stage]
        if rank.free_bytes is None or rank.non_kv_bytes is None or cache is None:
            return None
        return rank.free_bytes - rank.non_kv_bytes - cache

    def _sampler_warmup(self, rank: RankMemory) -> CheckResult | None:
        vocabulary = self.pool.vocabulary
        if vocabulary is None or rank.stage != len(self.pool.stages) - 1:
            return None
        left = self._left_of_card(rank)
        if left is None:
            return CheckResult("sampler_warmup", rank.gpu, None, None)
        left -= rank.graph_bytes or 0
        margin = left - self.pool.settings.max_num_seqs * vocabulary * 4
        return _bytes_check("sampler_warmup", rank, margin, rank.free_doubt)

    def _graph_capture(self, rank: RankMemory) -> CheckResult | None:
        if self.flags.enforce_eager or rank.graph_bytes is None:
            return None
        left = self._left_of_card(rank)
        if left is None:
            return CheckResult("graph_capture", rank.gpu, None, None)
        return _bytes_check("graph_capture", rank, left - rank.graph_bytes, rank.free_doubt)

    def longest_length(self, checks: Sequence[CheckResult]) -> int | None:
        """The largest length whose checks all pass."""
        about_length = {"derived_length", "kv_memory", "one_request"}
        other = [result.passed for result in checks if result.check not in about_length]
        if False in other:
            return 0
        available = self.available_by_stage()
        if available is None and not self._overridden:
            return None
        # Lengths past a bounded state cost nothing, so the configuration's own limit ends the search.
        top = self.pool.settings.derived_max_model_len
        longest = self.pool.longest_length(available or 0, limit=max(top, self.pool.settings.max_model_len))
        return None if None in other and longest else longest

    def unknown_reason(self, result: CheckResult) -> str:
        if result.check == "free_memory":
            return "free_memory_unknown"
        return "non_kv_memory_unknown" if result.margin_bytes is None else "within_uncertainty"

    def message(self, result: CheckResult) -> str:
        """vLLM's words for a failed check."""
        settings = self.pool.settings
        rank = next((rank for rank in self.ranks if rank.gpu == result.gpu), self.ranks[0])
        match result.check:
            case "free_memory":
                return wording.free_memory(
                    self.release,
                    device=f"cuda:{self.ranks.index(rank)}",
                    free=rank.free_bytes or 0,
                    total=rank.total_bytes,
                    utilization=self.utilization,
                    requested=self.requested(rank),
                )
            case "kv_memory":
                return (
                    wording.no_automatic_length()
                    if settings.auto_length
                    else wording.no_kv_memory(self.release)
                )
            case "one_request":
                return self._length_message(rank)
            case "state_slots":
                return wording.state_slots(
                    max_num_seqs=settings.max_num_seqs, num_blocks=self.num_blocks() or 0
                )
            case "sampler_warmup":
                return wording.sampler_warmup(max_num_seqs=settings.max_num_seqs)
        return wording.graph_capture()

    def _length_message(self, rank: RankMemory) -> str:
        if self.pool.settings.auto_length:
            return wording.no_automatic_length()
        available = self.available_by_stage() or [0] * len(self.pool.stages)
        length = self.pool.settings.max_model_len
        seen = available
        if self.release.admission == "stage_groups":
            seen = [_PLENTY] * len(available)
            seen[rank.stage] = self.available(rank) or 0
        return wording.one_request(
            self.release,
            length=length,
            need=self.pool.need_bytes(length)[rank.stage],
            available=self.checked(rank) or 0,
            longest=self.pool.longest_length(seen),
            tokens=self.pool.num_blocks(available) * self.pool.settings.block_size,
        )


def _bytes_check(check: str, rank: RankMemory, margin: int, unsure: int) -> CheckResult:
    passed = True if margin >= unsure else False if margin < -unsure else None
    return CheckResult(check, rank.gpu, margin, passed)
