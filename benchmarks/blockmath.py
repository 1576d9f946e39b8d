"""How long the block arithmetic takes, next to vLLM's own planner in the same process.

Runs with the Python of a vLLM 0.32, from the repository's root; it plans Gemma 3 27B: 52 sliding-window
layers, 10 full ones.

    $KVWATCH_VLLM_VENV/bin/python -m benchmarks.blockmath

vLLM gets its layers ready-made and only groups them, sizes the pool and searches the longest length; kvwatch
starts from config.json. Exit status 1 where a target is missed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

from kvwatch.blockmath.device import Device
from kvwatch.blockmath.flags import Flags
from kvwatch.blockmath.pool import Planner, plan_pool
from kvwatch.blockmath.releases import Release
from tests.support import ROOT
from tools import vllm_plan

CONFIG = ROOT / "tests" / "vectors" / "configs" / "known__gemma-3-27b-text.json"
CARD = Device("NVIDIA H100 80GB HBM3", 85_000_000_000, (9, 0))
RELEASE = Release.parse("0.32.0")
AVAILABLE = 4 << 30
LENGTH = 32768
WHAT_IF_TARGET_S = 0.001
SWEEP_TARGET_S = 0.1


def what_if(config: dict[str, Any]) -> tuple[int, int, int, int]:
    """One question, from nothing."""
    pool = plan_pool(config, Flags(max_model_len=LENGTH), device=CARD, release=RELEASE)
    blocks = pool.num_blocks(AVAILABLE)
    return (
        blocks,
        pool.need_bytes(LENGTH)[0],
        pool.longest_length(AVAILABLE),
        pool.capacity_tokens(blocks),
    )


def flags_to_sweep() -> Iterator[Flags]:
    """A thousand settings: lengths, cache types and parallel sizes."""
    for tp in (1, 2, 4, 8):
        for cache in ("auto", "fp8"):
            for length in range(1024, 1024 * 126, 1024):
                yield Flags(tensor_parallel_size=tp, kv_cache_dtype=cache, max_model_len=length)


def sweep(config: dict[str, Any], settings: list[Flags]) -> int:
    """A thousand questions about one model."""
    planner = Planner(config, device=CARD, release=RELEASE)
    feasible = 0
    for flags in settings:
        pool = planner.plan(flags)
        pool.capacity_tokens(pool.num_blocks(AVAILABLE))
        feasible += pool.longest_length(AVAILABLE) == pool.settings.max_model_len
    return feasible


def vllm_what_if(engine: Any, specs: dict[str, Any]) -> None:
    """The same question of vLLM's planner."""
    vllm_plan.plan(engine, specs, AVAILABLE)


def seconds(work: Callable[[], object], times: int) -> float:
    """Processor seconds of the fastest of so many runs."""
    best = float("inf")
    for _ in range(times):
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return best


def main() -> int:
    """Print one line per measurement."""
    config = json.loads(CONFIG.read_text(encoding="utf-8"))
    vllm_plan.start()
    engine = vllm_plan.engine_config(config, {"max_model_len": LENGTH})
    specs = vllm_plan.layer_specs(engine)
    settings = list(flags_to_sweep())
    theirs = seconds(lambda: vllm_what_if(engine, specs), 20)
    one = seconds(lambda: what_if(config), 200)
    many = seconds(lambda: sweep(config, settings), 10)
    print(f"vLLM's planner, one plan        {theirs * 1e3:8.2f} ms   1")
    print(f"kvwatch, one plan from nothing  {one * 1e3:8.2f} ms   {one / theirs:.4f}")
    print(f"kvwatch, {len(settings)} plans            {many * 1e3:8.2f} ms   {many / theirs:.4f}")
    return int(one > WHAT_IF_TARGET_S or many > SWEEP_TARGET_S)


if __name__ == "__main__":
    raise SystemExit(main())
