"""The decoding estimate against figures worked out by hand."""

from __future__ import annotations

import pytest

from kvwatch.blockmath.flags import Flags
from kvwatch.blockmath.gpus import find_gpu
from kvwatch.blockmath.releases import Release
from kvwatch.forecast.roofline import decode_estimates, largest_batch
from kvwatch.forecast.sizing import Scenario, Sizing, size_up
from tests.forecast.startups import MODELS

BANDWIDTH = 3.35e12


def sized(model: str) -> Sizing:
    return size_up(Scenario(MODELS[model], Flags(), find_gpu("H100").device(), Release.LATEST))


def test_dense_model() -> None:
    sizing = sized("Llama-3.1-8B")
    one, many = decode_estimates(sizing, BANDWIDTH, context=4096, batches=(1, 64))
    weights, kv = 16_060_522_496, 4096 * 131072
    assert one.tokens_per_second == pytest.approx(BANDWIDTH / (weights + kv), rel=1e-6)
    assert many.tokens_per_second == pytest.approx(64 * BANDWIDTH / (weights + 64 * kv), rel=1e-6)
    assert many.per_request == many.tokens_per_second / 64


def test_experts_are_read_as_the_batch_reaches_them() -> None:
    sizing = sized("Qwen1.5-MoE-A2.7B")
    one, all_ = decode_estimates(sizing, BANDWIDTH, context=16, batches=(1, 4096))
    weights = sizing.stages[0].weights
    assert weights is not None
    expert = 24 * 3 * 2048 * 1408 * 2
    kv = 24 * 16 * 2 * 16 * 128 * 2
    active = weights - 56 * expert + kv
    assert BANDWIDTH / one.tokens_per_second == pytest.approx(active, rel=0.002)
    assert 4096 * BANDWIDTH / all_.tokens_per_second == pytest.approx(weights + 4096 * kv, rel=0.001)


def test_windows_bound_what_is_read() -> None:
    sizing = sized("gemma-2-27b")
    (near,) = decode_estimates(sizing, BANDWIDTH, context=4096, batches=(1,))
    (far,) = decode_estimates(sizing, BANDWIDTH, context=8192, batches=(1,))
    grown = BANDWIDTH / far.tokens_per_second - BANDWIDTH / near.tokens_per_second
    full_layers = 23 * 4096 * 2 * 16 * 128 * 2
    assert grown == pytest.approx(full_layers, rel=0.01)


def test_batches_past_the_cache_are_marked() -> None:
    sizing = sized("Llama-3.1-8B")
    largest = largest_batch(sizing, 4096)
    assert largest == sizing.num_blocks // 256
    fitting, past = decode_estimates(sizing, BANDWIDTH, context=4096, batches=(largest, largest + 1))
    assert fitting.fits
    assert not past.fits
