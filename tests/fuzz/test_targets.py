"""The targets take their own seeds and a few inputs that once were found; `make fuzz` looks for more."""

from __future__ import annotations

import pytest

from tests.fuzz.run import NAMES
from tests.fuzz.targets import TARGETS


def test_every_target_is_run() -> None:
    assert tuple(TARGETS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_target_takes_its_seeds(name: str) -> None:
    target = TARGETS[name]
    seeds = list(target.seeds())
    assert seeds
    for seed in seeds:
        target.run(seed)


ODD = (
    b"",
    b"\0",
    b"\xff\xfe",
    b"[" * 3000,
    b"{a: " * 1000,
    b"\n" * 100,
    b"{{a: b}: c}",
    b'poll: {interval: !!int ""}',
    b"poll: {interval: !!timestamp 0-1-1}",
    b"web: {listen_address: &a [*a]}",
    b"plans: {p: {max_model_len: !!python/none x}}",
    b'\x1fvllm:kv_cache_usage_perc{engine="0"} 0.0\n',
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("data", ODD)
def test_a_target_takes_odd_inputs(name: str, data: bytes) -> None:
    TARGETS[name].run(data)
