"""What differs from one vLLM release to the next, as data.

Facts: the Python sources of 36 releases from 0.3.3 to 0.33.0. Each entry of the history says from which
    version on a
value holds; the V0 engine (default before 0.8.0, gone in 0.11.0) has its own rules where it never followed
V1's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache, total_ordering
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal

Engine = Literal["V0", "V1"]
Capacity = Literal["blocks_times_size", "blocks_per_group", "concurrency"]
Admission = Literal["tokens", "layers", "whole_model_groups", "stage_groups"]
MambaNeed = Literal["one", "length", "mode"]
LengthWording = Literal["v0_tokens", "gb", "estimate_lost", "estimate", "estimate_rounded", "cpu_clause"]

V1_DEFAULT_SINCE: Final = (0, 8, 0)
V0_REMOVED_IN: Final = (0, 11, 0)
V0_COUNTED_OTHERS_IN: Final = (0, 6, 4)

_HISTORY: Final[dict[str, tuple[tuple[tuple[int, ...], Any], ...]]] = {
    "default_utilization": (((0,), 0.90), ((0, 20), 0.92)),
    "default_swap_space_gib": (((0,), 4.0), ((0, 18), 0.0)),
    "graph_estimate_default": (((0,), False), ((0, 20), True)),
    "free_memory_check": (((0,), False), ((0, 9, 2), True)),
    "free_memory_names_device": (((0,), False), ((0, 14), True)),
    "ceil_budget": (((0,), False), ((0, 14), True)),
    "reserves_null_block": (((0,), False), ((0, 29), True)),
    "usage_excludes_null_block": (((0,), False), ((0, 10, 2), True)),
    "override_in_check": (((0,), False), ((0, 21), True)),
    "auto_length": (((0,), False), ((0, 14), True)),
    "kv_cache_memory_bytes": (((0,), False), ((0, 10, 2), True)),
    "hybrid_groups": (((0,), False), ((0, 9, 2), True)),
    "chunked_hybrid_manager": (((0,), False), ((0, 19), True)),
    "sums_groups": (((0,), True), ((0, 14), False), ((0, 19), True)),
    "in_flight_batches": (((0,), False), ((0, 26), True)),
    "async_scheduling_default": (((0,), False), ((0, 14), True)),
    "documentation_link": (((0,), False), ((0, 13), True)),
    "cpu_clause": (((0,), False), ((0, 22), True)),
    "backend_block_size": (((0,), False), ((0, 18), True)),
    "capacity_in_metrics": (((0,), False), ((0, 24), True)),
    "prefill_context_shards_kv": (((0,), False), ((0, 12), True), ((0, 26), False)),
    "batched_tokens_by_card": (((0,), False), ((0, 8, 5), True)),
    "capacity": (((0,), "blocks_times_size"), ((0, 9, 2), "blocks_per_group"), ((0, 21), "concurrency")),
    "admission": (((0,), "layers"), ((0, 14), "whole_model_groups"), ((0, 17), "stage_groups")),
    "mamba_need": (((0,), "one"), ((0, 11, 1), "length"), ((0, 15), "mode")),
    "length_wording": (
        ((0,), "gb"),
        ((0, 8, 5), "estimate_lost"),
        ((0, 9, 2), "estimate"),
        ((0, 14), "estimate_rounded"),
        ((0, 22), "cpu_clause"),
    ),
}

_V0: Final[dict[str, Any]] = {
    "free_memory_check": False,
    "ceil_budget": False,
    "hybrid_groups": False,
    "usage_excludes_null_block": False,
    "batched_tokens_by_card": False,
    "capacity": "blocks_times_size",
    "admission": "tokens",
    "length_wording": "v0_tokens",
}
"""Where the V0 engine differs from V1 of the same version."""

_NOT_DEV: Final = 1 << 30
_PHASES: Final = {"dev": 0, "a": 1, "b": 2, "rc": 3, "": 4, "post": 5}
_VERSION = re.compile(
    r"v?(?P<numbers>\d+(?:\.\d+)*)(?:\.?(?P<phase>rc|a|b|post)\.?(?P<serial>\d+))?(?:\.?dev(?P<dev>\d+))?(?:\+\S*)?"
)


def _rules(version: tuple[int, ...], engine: Engine) -> Mapping[str, Any]:
    found = {
        name: next(value for since, value in reversed(history) if version >= since)
        for name, history in _HISTORY.items()
    }
    return MappingProxyType(found | _V0 if engine == "V0" else found)


@total_ordering
@dataclass(frozen=True, slots=True)
class Release:
    """One vLLM release, and how its start-up arithmetic behaves.

    Attributes:
        version: the numbers, for example ``(0, 32, 0)``; a development or candidate build counts as the
            release it leads to.
        rank: orders candidates, finals and post releases of one version.
        engine: ``V0`` or ``V1``.
        text: the version as it was given.
        rules: the values of the history that hold for this release and engine.
    """

    version: tuple[int, ...]
    rank: tuple[int, int, int]
    engine: Engine
    text: str
    rules: Mapping[str, Any] = field(repr=False, compare=False)

    LATEST: ClassVar[Release]
    """The newest release whose sources are known."""

    @classmethod
    def parse(cls, text: str, *, engine: Engine | None = None) -> Release:
        """Read a version as vLLM prints it, for example ``0.6.4.post1`` or ``0.32.0+cpu``.

        Args:
            text: the version.
            engine: the engine generation where the server says which; by default V1 from 0.8.0 on.

        Raises:
            ValueError: not a version.
        """
        return _parsed(text, engine)

    def __lt__(self, other: Release) -> bool:
        return (self.version, self.rank) < (other.version, other.rank)

    @property
    def default_utilization(self) -> float:
        """``--gpu-memory-utilization`` where it is not given."""
        return float(self.rules["default_utilization"])

    @property
    def has_swap_space(self) -> bool:
        """``--swap-space`` exists (4 GiB of host memory per GPU by default)."""
        return bool(self.rules["default_swap_space_gib"])

    @property
    def default_swap_space_gib(self) -> float:
        """GiB of host memory per GPU where ``--swap-space`` is not given; 0 once the flag is gone."""
        return float(self.rules["default_swap_space_gib"])

    @property
    def graph_estimate_default(self) -> bool:
        """An estimate of CUDA graph memory is taken out of the budget by default."""
        return bool(self.rules["graph_estimate_default"])

    @property
    def has_free_memory_check(self) -> bool:
        """A start fails when less memory is free than the budget asks for."""
        return bool(self.rules["free_memory_check"])

    @property
    def free_memory_names_device(self) -> bool:
        """The free-memory message says ``device cuda:0`` instead of ``device``."""
        return bool(self.rules["free_memory_names_device"])

    @property
    def foreign_counts_as_non_torch(self) -> bool:
        """Memory of other processes is taken out of this server's KV cache.

        V0 did so in 0.6.4 only, whose users reported it (vllm-project/vllm#10533, #10643).
        """
        if self.engine == "V0":
            return self.version == V0_COUNTED_OTHERS_IN
        return not self.has_free_memory_check

    @property
    def ceil_budget(self) -> bool:
        """The budget is ``ceil(total x utilization)`` bytes; before, it was not rounded."""
        return bool(self.rules["ceil_budget"])

    @property
    def reserves_null_block(self) -> bool:
        """One block is kept out of the admission check."""
        return bool(self.rules["reserves_null_block"])

    @property
    def usage_excludes_null_block(self) -> bool:
        """KV usage is a share of ``num_gpu_blocks - 1``."""
        return bool(self.rules["usage_excludes_null_block"])

    @property
    def override_in_check(self) -> bool:
        """``--num-gpu-blocks-override`` also replaces the memory in the admission check."""
        return bool(self.rules["override_in_check"])

    @property
    def has_auto_length(self) -> bool:
        """``--max-model-len auto`` searches for the largest length that fits."""
        return bool(self.rules["auto_length"])

    @property
    def has_kv_cache_memory_bytes(self) -> bool:
        """``--kv-cache-memory-bytes`` exists."""
        return bool(self.rules["kv_cache_memory_bytes"])

    @property
    def hybrid_groups(self) -> bool:
        """Layers of several kinds form several groups; before, every layer kept the whole length."""
        return bool(self.rules["hybrid_groups"])

    @property
    def chunked_hybrid_manager(self) -> bool:
        """Layers that attend in chunks have a block table of their own by default.

        Known from the sources of 0.32 and a public log of 0.19; earlier releases left it off for its latency.
        """
        return bool(self.rules["chunked_hybrid_manager"])

    @property
    def sums_groups(self) -> bool:
        """The admission check counts the blocks of all groups, not only the first one's."""
        return bool(self.rules["sums_groups"])

    @property
    def in_flight_batches(self) -> bool:
        """Window layers hold every batch in flight, not one."""
        return bool(self.rules["in_flight_batches"])

    @property
    def async_scheduling_default(self) -> bool:
        """Asynchronous scheduling is on unless something forbids it."""
        return bool(self.rules["async_scheduling_default"])

    @property
    def backend_block_size(self) -> bool:
        """The attention backend's preferred block size is the default."""
        return bool(self.rules["backend_block_size"])

    @property
    def capacity_in_metrics(self) -> bool:
        """``cache_config_info`` carries ``kv_cache_size_tokens`` and ``kv_cache_max_concurrency``."""
        return bool(self.rules["capacity_in_metrics"])

    @property
    def prefill_context_shards_kv(self) -> bool:
        """``--prefill-context-parallel-size`` divides the KV cache."""
        return bool(self.rules["prefill_context_shards_kv"])

    @property
    def batched_tokens_by_card(self) -> bool:
        """The default of ``--max-num-batched-tokens`` depends on the card."""
        return bool(self.rules["batched_tokens_by_card"])

    @property
    def capacity(self) -> Capacity:
        """What the log calls the KV cache size in tokens."""
        value: Capacity = self.rules["capacity"]
        return value

    @property
    def admission(self) -> Admission:
        """What the check for one full request compares."""
        value: Admission = self.rules["admission"]
        return value

    @property
    def mamba_need(self) -> MambaNeed:
        """How many state blocks a request is said to need."""
        value: MambaNeed = self.rules["mamba_need"]
        return value

    @property
    def length_wording(self) -> LengthWording:
        """Which text says that one full request does not fit."""
        value: LengthWording = self.rules["length_wording"]
        return value

    @property
    def documentation_link(self) -> bool:
        """Memory messages end with a link to the documentation."""
        return bool(self.rules["documentation_link"])

    @property
    def cpu_clause(self) -> bool:
        """Memory messages say that the utilization also controls CPU memory."""
        return bool(self.rules["cpu_clause"])


@lru_cache(maxsize=64)
def _parsed(text: str, engine: Engine | None) -> Release:
    match = _VERSION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a vLLM version such as 0.32.0 or 0.6.4.post1")
    numbers = tuple(int(part) for part in match["numbers"].split("."))
    version = numbers + (0,) * (3 - len(numbers))
    dev = int(match["dev"]) if match["dev"] else None
    phase = match["phase"] or ("dev" if dev is not None else "")
    rank = (_PHASES[phase], int(match["serial"] or 0), _NOT_DEV if dev is None else dev)
    if engine is None:
        engine = "V1" if version >= V1_DEFAULT_SINCE else "V0"
    elif engine == "V0" and version >= V0_REMOVED_IN:
        raise ValueError(f"{text}: the V0 engine was removed in 0.11.0")
    return Release(version, rank, engine, text.strip(), _rules(version, engine))


Release.LATEST = Release.parse("0.33.0")
