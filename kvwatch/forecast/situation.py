"""What a server's next start will find, measured on the running one, and the judging of any set of flags."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvwatch.blockmath.device import Device
from kvwatch.blockmath.errors import Refused, Unsupported
from kvwatch.blockmath.flags import Flags
from kvwatch.blockmath.pool import Pool, plan_pool
from kvwatch.blockmath.releases import Release
from kvwatch.blockmath.settings import check_flags_exist
from kvwatch.blockmath.startup import CheckResult, RankMemory, Verdict, judge, requested_bytes
from kvwatch.config import Restart
from kvwatch.forecast.wake import reserved_for_sleepers
from kvwatch.node import NodeSnapshot, ServerState
from kvwatch.observe.records import Engine, Failure, GpuMemory, VllmRecord
from kvwatch.units import bytes_text

CONFIGURATION = "configuration"
"""Name of the check that fails when vLLM refuses the flags themselves (heads, block size)."""

ACTIVATION_FLAGS = frozenset(
    {
        "attention_backend",
        "cpu_offload_gb",
        "data_parallel_size",
        "decode_context_parallel_size",
        "dtype",
        "enable_chunked_prefill",
        "enable_expert_parallel",
        "enforce_eager",
        "hf_overrides",
        "load_format",
        "max_num_batched_tokens",
        "max_num_seqs",
        "model",
        "performance_mode",
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "quantization",
        "speculative_config",
        "tensor_parallel_size",
    }
)
"""Flags that move weights, activations or graphs: what was measured says nothing once they change."""


NOT_IN_THE_POOL = frozenset({"gpu_memory_utilization"})
"""Flags that move the budget only: the block arithmetic stays as it is."""


_ANY_LENGTH = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"


@dataclass(frozen=True, slots=True)
class RankSite:
    """Where one rank of the server runs, and what was measured there. Bytes.

    Attributes:
        total: as CUDA will report it.
        free_next: free once this server's own memory is back, before the start takes any; None where unknown.
        non_kv: weights, activations, graphs and the rest beside the KV cache; None where unknown.
        own: what the server's processes hold there now; None where unknown.
        kept: kept free for others that sleep, by server, and no part of ``free_next``.
    """

    gpu: str
    stage: int
    total: int
    free_next: int | None
    non_kv: int | None
    own: int | None = None
    kept: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Situation:
    """One server with everything that a verdict on its next start needs.

    Attributes:
        flags: those of the next start as things stand.
        pool: the block arithmetic of the running server.
        basis: ``measured`` where non-KV bytes come from the running server.
    """

    server: str
    config: Mapping[str, Any] = field(repr=False)
    flags: Flags
    release: Release
    device: Device
    pool: Pool
    sites: tuple[RankSite, ...]
    effective_block_size: int | None
    basis: str
    assumptions: tuple[str, ...]
    costs: Restart

    def has_pool_of(
        self,
        config: Mapping[str, Any],
        flags: Flags,
        device: Device,
        release: Release,
        effective_block_size: int | None,
    ) -> bool:
        """Whether the pool was planned from just these; a file that was read again counts as another."""
        planned = (self.flags, self.device, self.release, self.effective_block_size)
        return self.config is config and planned == (flags, device, release, effective_block_size)

    def start_cost(self, flags: Flags) -> int:
        """Bytes per GPU that a start takes before vLLM compares free memory with its budget."""
        return self.costs.cuda_context + (self.costs.nccl if flags.tp * flags.pp > 1 else 0)

    def judge(
        self,
        changes: Flags | None = None,
        freed: Mapping[str, int] | None = None,
        charged: Mapping[str, int] | None = None,
    ) -> Verdict:
        """The verdict on a start with some flags changed and some bytes per GPU freed first.

        Args:
            charged: bytes by GPU that others take while this server profiles itself; vLLM takes their growth
                for its own.

        Raises:
            Unsupported: the arithmetic has no answer for these flags.
        """
        given = changes.given() if changes else {}
        moved = self.moved_by(changes) if changes else []
        if moved:
            raise Unsupported(
                "activation_unknown",
                f"with another {', '.join(moved)} the measured non-KV memory no longer holds",
            )
        flags = self.flags.with_changes(**given)
        try:
            if changes:
                check_flags_exist(changes, self.release)
            pool = self.pool if given.keys() <= NOT_IN_THE_POOL else self._plan(flags)
        except Refused as refusal:
            return refused(refusal)
        freed, charged, cost = freed or {}, charged or {}, self.start_cost(flags)
        ranks = [
            RankMemory(
                gpu=site.gpu,
                stage=site.stage,
                total_bytes=site.total,
                free_bytes=None if site.free_next is None else site.free_next + freed.get(site.gpu, 0) - cost,
                non_kv_bytes=None if site.non_kv is None else site.non_kv + charged.get(site.gpu, 0),
            )
            for site in self.sites
        ]
        return judge(pool, flags, ranks, release=self.release)

    def moved_by(self, changes: Flags) -> list[str]:
        """The changed flags that move more than the KV cache and the budget."""
        given = changes.given()
        return sorted(
            name for name in ACTIVATION_FLAGS & given.keys() if given[name] != getattr(self.flags, name)
        )

    def budgets(self) -> list[tuple[RankSite, int]]:
        """Each rank's site with the bytes that the next start will ask for there."""
        share = self.flags.gpu_memory_utilization or self.release.default_utilization
        return [(site, requested_bytes(site.total, share, self.release)) for site in self.sites]

    def _plan(self, flags: Flags) -> Pool:
        block_size = None if flags.block_size else self.effective_block_size
        return plan_pool(
            self.config,
            flags,
            device=self.device,
            release=self.release,
            effective_block_size=block_size,
        )


def refused(refusal: Refused) -> Verdict:
    """The verdict when vLLM refuses the configuration before it looks at any memory."""
    check = "derived_length" if refusal.kind == "max_model_len_gt_derived" else CONFIGURATION
    failed = CheckResult(check=check, gpu=None, margin_bytes=None, passed=False)
    return Verdict(
        feasible=False,
        blocking=failed,
        checks=(failed,),
        longest_length=None,
        message=str(refusal),
        unknown_reason=None,
    )


def situation(
    server: ServerState, snapshot: NodeSnapshot, settings: Restart, before: Situation | None = None
) -> Situation:
    """Measure a running server.

    Args:
        before: of the same server one cycle ago, whose pool still holds where its inputs do.

    Raises:
        Unsupported: an input is missing or contradicts another; the reason is fit for a label.
        Refused: vLLM would not take the flags that the server runs with.
    """
    page = _page(server)
    release = _release(server)
    config = _model_config(server)
    engines = _engines(page)
    flags, assumptions = _next_flags(server, engines[0])
    device = _device(server, snapshot)
    block_size = engines[0].block_size
    if before is not None and before.has_pool_of(config, flags, device, release, block_size):
        pool = before.pool
    else:
        pool = plan_pool(
            config,
            flags,
            device=device,
            release=release,
            effective_block_size=None if flags.block_size else block_size,
        )
    _check_against_server(pool, server, engines)
    sites = _sites(server, snapshot, flags, pool, engines, release)
    if any(site.free_next is None for site in sites):
        raise Unsupported("own_memory_unknown", "the memory that the server itself holds cannot be read")
    return Situation(
        server=server.name,
        config=config,
        flags=flags,
        release=release,
        device=device,
        pool=pool,
        sites=sites,
        effective_block_size=block_size,
        basis="measured",
        assumptions=(
            *assumptions,
            *_sleeper_assumptions(server, snapshot),
            *_release_assumptions(server, snapshot),
        ),
        costs=settings,
    )


def _sleeper_assumptions(server: ServerState, snapshot: NodeSnapshot) -> tuple[str, ...]:
    return tuple(
        f"{bytes_text(wanted)} on GPU {gpu} kept free for {name}, which sleeps"
        for (name, gpu), wanted in reserved_for_sleepers(snapshot).items()
        if name != server.name and gpu in server.gpus and wanted
    )


def _release_assumptions(server: ServerState, snapshot: NodeSnapshot) -> tuple[str, ...]:
    states = (snapshot.gpu(index) for index in server.gpus)
    return tuple(
        f"{bytes_text(state.coming_back)} on GPU {state.gpu.index} counted as free: processes that held them"
        " have ended"
        for state in states
        if state is not None and state.coming_back
    )


def _page(server: ServerState) -> VllmRecord:
    if isinstance(server.page, Failure):
        raise Unsupported("server_down", server.page.detail)
    return server.page


def _release(server: ServerState) -> Release:
    if server.release is None:
        raise Unsupported("version_unknown", "the server's /version gave no release that kvwatch can read")
    return server.release


def _model_config(server: ServerState) -> Mapping[str, Any]:
    if isinstance(server.model_config, Failure):
        raise Unsupported("model_config_unreadable", server.model_config.detail)
    return server.model_config.config


def _engines(page: VllmRecord) -> tuple[Engine, ...]:
    if not page.engines or any(engine.num_blocks is None for engine in page.engines):
        raise Unsupported("no_cache_info", "the server's page does not tell its number of KV blocks")
    return page.engines


def _next_flags(server: ServerState, engine: Engine) -> tuple[Flags, tuple[str, ...]]:
    """The flags of the next start: the command line's, and where it is silent what the server runs with."""
    given = server.launch.flags
    running: dict[str, Any] = {
        "gpu_memory_utilization": engine.gpu_memory_utilization,
        "max_model_len": server.max_model_len,
        "kv_cache_dtype": engine.cache_dtype,
    }
    if server.launch.pid is None:
        running["kv_cache_memory_bytes"] = engine.kv_cache_memory_bytes
        running["num_gpu_blocks_override"] = engine.num_blocks_override
    if server.launch.environment.get(_ANY_LENGTH, "0").strip().lower() in ("1", "true"):
        running["allow_long_max_model_len"] = True
    filled = {
        name: value for name, value in running.items() if value is not None and getattr(given, name) is None
    }
    assumptions = tuple(f"{name} {value}: read from the running server" for name, value in filled.items())
    return given.with_changes(**filled), assumptions


def _device(server: ServerState, snapshot: NodeSnapshot) -> Device:
    if not server.gpus:
        raise Unsupported("gpu_unknown", "no GPU memory held by this server was seen")
    state = snapshot.gpu(server.gpus[0])
    if state is None or state.gpu.memory is None:
        raise Unsupported("gpu_memory_unknown", f"GPU {server.gpus[0]} does not tell its memory")
    memory = state.gpu.memory
    return Device(state.gpu.name, cuda_total(memory), state.gpu.capability)


def _check_against_server(pool: Pool, server: ServerState, engines: tuple[Engine, ...]) -> None:
    """The server's own max_concurrency must be what this arithmetic gives for its number of blocks.

    Raises:
        Unsupported: it is not, so the layout worked out from config.json is not the server's.
    """
    length = server.max_model_len
    if length is None:
        return
    per_request = sum(pool.blocks_per_request(length))
    for engine in engines:
        told, blocks = engine.max_concurrency, engine.num_blocks
        if told is None or blocks is None or not per_request:
            continue
        if not math.isclose(told, blocks / per_request, rel_tol=1e-6):
            raise Unsupported(
                "layout_mismatch",
                f"the server reports room for {told:g} requests of {length} tokens, "
                f"the arithmetic for this model gives {blocks / per_request:g}",
            )


def _sites(
    server: ServerState,
    snapshot: NodeSnapshot,
    flags: Flags,
    pool: Pool,
    engines: tuple[Engine, ...],
    release: Release,
) -> tuple[RankSite, ...]:
    per_engine = flags.tp * flags.pp
    expected = per_engine * len(engines)
    if len(server.gpus) != expected:
        raise Unsupported(
            "ranks_mismatch",
            f"the server has {expected} ranks, memory of it was seen on {len(server.gpus)} GPUs",
        )
    reserved = reserved_for_sleepers(snapshot)
    sites = []
    for rank, index in enumerate(server.gpus):
        state = snapshot.gpu(index)
        if state is None or state.gpu.memory is None:
            raise Unsupported("gpu_memory_unknown", f"GPU {index} does not tell its memory")
        stage = rank % per_engine // flags.tp
        total, own = cuda_total(state.gpu.memory), state.held_by_server(server.name)
        kept = {
            name: wanted for (name, gpu), wanted in reserved.items() if gpu == index and name != server.name
        }
        sites.append(
            RankSite(
                gpu=index,
                stage=stage,
                total=total,
                free_next=None
                if own is None
                else state.gpu.memory.free + state.coming_back + own - sum(kept.values()),
                non_kv=_non_kv(total, own, pool.bytes_per_block[stage], engines[rank // per_engine], release),
                own=own,
                kept=kept,
            )
        )
    return tuple(sites)


def cuda_total(memory: GpuMemory) -> int:
    """What CUDA calls total, to within some hundred MiB."""
    return memory.total - (memory.reserved or 0)


def _non_kv(
    total: int, own: int | None, bytes_per_block: int, engine: Engine, release: Release
) -> int | None:
    """Bytes beside the KV cache, to within a block.

    What the budget left after the pool. Where the budget does not tell, what the processes hold beside the
    pool stands in: the pool's size was told outright (``--kv-cache-memory-bytes``,
    ``--num-gpu-blocks-override``), or the release counted others' memory of that time, which nobody knows any
    more, as the server's own.
    """
    if engine.num_blocks is None:
        return None
    pool_bytes = engine.num_blocks * bytes_per_block
    told_outright = engine.kv_cache_memory_bytes or engine.num_blocks_override
    if told_outright or release.foreign_counts_as_non_torch:
        return None if own is None else max(0, own - pool_bytes)
    if engine.gpu_memory_utilization is None:
        return None
    return max(0, requested_bytes(total, engine.gpu_memory_utilization, release) - pool_bytes)
