"""What must hold of every model, card and set of flags."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvwatch.blockmath.batch import device_named
from kvwatch.blockmath.errors import Refused
from kvwatch.blockmath.flags import Flags
from kvwatch.blockmath.pool import Pool, plan_pool
from kvwatch.blockmath.releases import Release
from kvwatch.blockmath.startup import RankMemory, judge
from tests.blockmath.vectors import FOLDER, config_named

GIB = 1 << 30
CONFIGS = sorted(
    path.name
    for path in (FOLDER / "configs").iterdir()
    if not path.name.startswith(("tf__bert", "tf__ernie.", "tf__modernbert", "tf__roberta", "tf__siglip"))
    and "embedding" not in path.name
)
GPUS = ["H100-80GB", "A100-40GB", "L4-24GB"]
RELEASES = ["0.12.0", "0.16.0", "0.19.0", "0.25.0", "0.32.0"]

quick = settings(max_examples=60, deadline=None, derandomize=True)
configs = st.sampled_from(CONFIGS)
gpus = st.sampled_from(GPUS)
releases = st.sampled_from(RELEASES)
memory = st.integers(min_value=1 << 20, max_value=200 * GIB)


def plan(name: str, gpu: str, release: str = "0.32.0", **flags: Any) -> Pool | None:
    """The pool, or None where vLLM refuses."""
    try:
        return plan_pool(
            config_named(name), Flags(**flags), device=device_named(gpu), release=Release.parse(release)
        )
    except Refused:
        return None


@quick
@given(configs, gpus, releases, memory, memory)
def test_more_memory_never_holds_less(name: str, gpu: str, release: str, one: int, other: int) -> None:
    pool = plan(name, gpu, release)
    if pool is None:
        return
    low, high = sorted((one, other))
    assert pool.num_blocks(low) <= pool.num_blocks(high)
    assert pool.longest_length(low) <= pool.longest_length(high)


@quick
@given(configs, gpus, releases, memory)
def test_longest_length_is_the_longest(name: str, gpu: str, release: str, available: int) -> None:
    pool = plan(name, gpu, release)
    if pool is None:
        return
    top = pool.settings.max_model_len
    longest = pool.longest_length(available)
    assert longest == 0 or pool.fits(longest, available)
    assert longest == top or not pool.fits(longest + 1, available)


@quick
@given(configs, gpus, st.integers(min_value=1, max_value=1 << 20))
def test_need_fits_and_a_byte_less_does_not(name: str, gpu: str, length: int) -> None:
    pool = plan(name, gpu)
    if pool is None:
        return
    exact = max(need + kept for need, kept in zip(pool.need_bytes(length), pool.kept_back_bytes, strict=True))
    assert pool.fits(length, exact)
    assert not pool.fits(length, exact - 1)


@quick
@given(configs, gpus, st.integers(min_value=0, max_value=5))
def test_tensor_parallelism_never_grows_a_block(name: str, gpu: str, power: int) -> None:
    alone, split = plan(name, gpu), plan(name, gpu, tensor_parallel_size=1 << power)
    if alone is None or split is None or alone.settings.block_size != split.settings.block_size:
        return
    assert max(split.bytes_per_block) <= max(alone.bytes_per_block)


def shuffled(value: Any, order: random.Random) -> Any:
    """The same JSON with its keys in another order."""
    if isinstance(value, dict):
        keys = list(value)
        order.shuffle(keys)
        return {key: shuffled(value[key], order) for key in keys}
    return [shuffled(item, order) for item in value] if isinstance(value, list) else value


@quick
@given(configs, gpus, memory, st.randoms(use_true_random=False))
def test_verdict_does_not_depend_on_the_order_of_keys(
    name: str, gpu: str, non_kv: int, order: random.Random
) -> None:
    release = Release.parse("0.32.0")
    config = config_named(name)
    ranks = [RankMemory("cuda:0", 0, 80 * GIB, 79 * GIB, non_kv)]
    try:
        pools = [
            plan_pool(form, Flags(), device=device_named(gpu), release=release)
            for form in (config, shuffled(config, order))
        ]
    except Refused:
        return
    first, second = (judge(pool, Flags(), ranks, release=release) for pool in pools)
    assert first == second
