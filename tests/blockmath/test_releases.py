"""Releases: how versions are read, and a case of each era."""

from __future__ import annotations

from typing import Any

import pytest

from kvwatch.blockmath.device import Device
from kvwatch.blockmath.errors import Unsupported
from kvwatch.blockmath.flags import Flags
from kvwatch.blockmath.pool import Pool, plan_pool
from kvwatch.blockmath.releases import Release
from tests.blockmath.vectors import config_named

GIB = 1 << 30
H100 = Device("NVIDIA H100 80GB HBM3", 80 * GIB, (9, 0))


@pytest.mark.parametrize(
    ("text", "version", "engine"),
    [
        ("0.32.0", (0, 32, 0), "V1"),
        ("0.32.0+cpu", (0, 32, 0), "V1"),
        ("v0.15.2rc1.dev93+g0a1b2c3", (0, 15, 2), "V1"),
        ("0.6.4.post1", (0, 6, 4), "V0"),
        ("0.9.0.1", (0, 9, 0, 1), "V1"),
    ],
)
def test_versions_as_vllm_prints_them(text: str, version: tuple[int, ...], engine: str) -> None:
    release = Release.parse(text)
    assert (release.version, release.engine) == (version, engine)


@pytest.mark.parametrize("text", ["", "latest", "0.32.x", "32"])
def test_other_text_is_no_version(text: str) -> None:
    if text == "32":
        assert Release.parse(text).version == (32, 0, 0)
        return
    with pytest.raises(ValueError, match="not a vLLM version"):
        Release.parse(text)


def test_releases_are_ordered() -> None:
    texts = [
        "0.6.4",
        "0.6.4.post1",
        "0.9.0",
        "0.9.0.1",
        "0.15.2.dev1",
        "0.15.2rc1.dev93",
        "0.15.2rc1",
        "0.15.2",
    ]
    releases = [Release.parse(text) for text in texts]
    assert sorted(releases, reverse=True) == releases[::-1]
    assert max(releases) < Release.LATEST


def test_v0_is_gone_from_0_11() -> None:
    assert Release.parse("0.8.5", engine="V0").engine == "V0"
    with pytest.raises(ValueError, match=r"removed in 0\.11\.0"):
        Release.parse("0.11.0", engine="V0")


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("0.6.3", {"foreign_counts_as_non_torch": False}),
        ("0.6.4.post1", {"foreign_counts_as_non_torch": True}),
        ("0.7.3", {"default_utilization": 0.9, "has_swap_space": True, "has_free_memory_check": False}),
        ("0.8.5", {"foreign_counts_as_non_torch": True, "length_wording": "estimate_lost"}),
        (
            "0.9.2",
            {"foreign_counts_as_non_torch": False, "has_free_memory_check": True, "ceil_budget": False},
        ),
        ("0.14.0", {"ceil_budget": True, "has_auto_length": True, "length_wording": "estimate_rounded"}),
        ("0.19.0", {"default_utilization": 0.9, "capacity": "blocks_per_group", "has_swap_space": False}),
        ("0.20.0", {"default_utilization": 0.92, "graph_estimate_default": True}),
        ("0.28.0", {"reserves_null_block": False, "capacity": "concurrency", "in_flight_batches": True}),
        ("0.29.0", {"reserves_null_block": True}),
    ],
)
def test_rules_of_each_era(text: str, rules: dict[str, Any]) -> None:
    release = Release.parse(text)
    assert {name: getattr(release, name) for name in rules} == rules


def plan(name: str, release: str, **flags: Any) -> Pool:
    """The pool of a model under a release."""
    return plan_pool(config_named(name), Flags(**flags), device=H100, release=Release.parse(release))


GEMMA = "known__gemma-3-27b-text.json"


def test_tokens_of_a_mixed_model_depend_on_the_era() -> None:
    blocks = {release: plan(GEMMA, release, max_model_len=8192) for release in ("0.19.0", "0.21.0")}
    assert blocks["0.19.0"].capacity_tokens(15997) == 15997 // 7 * 16
    assert blocks["0.21.0"].capacity_tokens(15997) == int(15997 / (6 * 513 + 512) * 8192)


def test_only_the_first_group_was_counted_for_a_while() -> None:
    assert plan(GEMMA, "0.14.0").demand.bytes(8192) == (plan(GEMMA, "0.14.0").bytes_per_block[0] * 513,)
    whole = plan(GEMMA, "0.19.0", max_model_len=8192)
    assert whole.need_bytes(8192) == (whole.bytes_per_block[0] * (6 * 513 + 512),)


def test_windows_held_one_batch_before_0_26() -> None:
    assert plan(GEMMA, "0.25.0").blocks_per_request(131072)[0] == -(-(1023 + 8192) // 16) + 1
    assert plan(GEMMA, "0.26.0").blocks_per_request(131072)[0] == -(-(1023 + 16384) // 16) + 1


def test_whole_model_was_charged_to_each_stage_for_a_while() -> None:
    charged = plan("known__Llama-2-7B.json", "0.15.0", pipeline_parallel_size=2)
    shared = plan("known__Llama-2-7B.json", "0.17.0", pipeline_parallel_size=2)
    assert charged.need_bytes(4096) == (2 * GIB, 2 * GIB)
    assert shared.need_bytes(4096) == (GIB, GIB)


def test_layers_were_summed_without_padding_before_groups() -> None:
    pool = plan(GEMMA, "0.12.0", max_model_len=8192)
    page = 16 * 2 * 16 * 128 * 2
    assert pool.need_bytes(8192) == (page * (52 * 513 + 10 * 512),)


def test_v0_kept_every_token_of_every_layer() -> None:
    pool = plan(GEMMA, "0.7.3")
    assert len(pool.groups) == 1
    assert pool.longest_length(1000 * pool.bytes_per_block[0]) == 16000
    assert pool.capacity_tokens(1000) == 16000


def test_states_before_the_block_pool_are_not_known() -> None:
    with pytest.raises(Unsupported) as unknown:
        plan("known__granite-4.0-h-tiny.json", "0.8.5")
    assert unknown.value.reason == "release"
