from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvwatch.blockmath.flags import Flags
from kvwatch.config import GIB, Config
from kvwatch.forecast.advice import Facts, advise
from kvwatch.forecast.context import RequestLengths
from kvwatch.forecast.history import Outlook
from kvwatch.forecast.restart import forecast_restart
from kvwatch.node import join
from kvwatch.observe.cycle import Observation
from kvwatch.observe.records import Failure, NvmlRecord
from tests.nodes import PARENT, gpu, process, serving_node, vllm_page

QUIET = Outlook(None, {}, ())
GOOD = Flags(max_model_len=32768, gpu_memory_utilization=0.92)


def with_flags(flags: Flags, *extra: Any, **more: Any) -> Observation:
    seen = serving_node(*extra, **more)
    one = seen.servers[0]
    return replace(seen, servers=(replace(one, launch=replace(one.launch, flags=flags)),))


def rules(
    seen: Observation, lengths: RequestLengths | None = None, outlook: Outlook = QUIET
) -> dict[str, str]:
    snapshot = join(seen, Config())
    facts = Facts(
        snapshot.servers[0],
        forecast_restart(snapshot.servers[0], snapshot, Config()),
        None,
        lengths,
        outlook,
    )
    return {one.rule: one.text for one in advise(facts)}


def test_a_server_that_keeps_every_rule_gets_no_advice() -> None:
    assert rules(with_flags(GOOD)) == {}


def test_what_was_never_set() -> None:
    found = rules(with_flags(Flags()))
    assert found.keys() == {"length_not_set", "utilization_not_pinned"}
    assert "--max-model-len 32768" in found["length_not_set"]
    assert "--gpu-memory-utilization 0.92" in found["utilization_not_pinned"]


def test_what_to_type_is_what_would_start() -> None:
    notebook = process(900, "python", user="dana")
    found = rules(with_flags(Flags(), (notebook, 8 * GIB), own=70 * GIB))
    assert "--gpu-memory-utilization 0.88" in found["utilization_not_pinned"]
    short = rules(with_flags(Flags(), num_blocks=1500, max_concurrency=None, size_tokens=None))
    assert "--max-model-len 23984" in short["length_not_set"]


def test_an_unknown_command_line_is_not_blamed() -> None:
    seen = with_flags(Flags())
    one = seen.servers[0]
    unread = replace(one.launch, failures=(Failure("launch", "config_unreadable", "x"),))
    assert rules(replace(seen, servers=(replace(one, launch=unread),))) == {}
    unseen = replace(one.launch, pid=None)
    assert rules(replace(seen, servers=(replace(one, launch=unseen),))) == {}


def test_offload_room_zero_counts_where_the_release_has_it() -> None:
    flags = replace(GOOD, swap_space=0.0)
    assert "swap_space_zero" not in rules(with_flags(flags))
    old = with_flags(flags)
    page = vllm_page(version="0.10.2", max_concurrency=None, size_tokens=None)
    old = replace(old, servers=(replace(old.servers[0], vllm=page),))
    assert "--swap-space 4" in rules(old)["swap_space_zero"]


def test_fp8_and_auto_are_named_where_they_would_help() -> None:
    # 1,500 blocks hold 24,000 tokens: enough for 32,768 in fp8, not in bf16.
    found = rules(with_flags(GOOD, num_blocks=1500, max_concurrency=None, size_tokens=None))
    assert "--kv-cache-dtype fp8" in found["kv_fp8_would_fit"]
    assert "23984" in found["auto_would_help"]


def test_hardware_is_named_only_where_nothing_else_helps() -> None:
    notebook = process(900, "python", user="dana")
    assert "hardware_needed" not in rules(with_flags(GOOD, (notebook, 8 * GIB), own=70 * GIB))
    full = replace(GOOD, max_model_len=131072)
    assert set(rules(with_flags(full, num_blocks=1, max_concurrency=None))) == {"hardware_needed"}


def test_hardware_is_not_to_blame_for_memory_that_others_hold() -> None:
    """No process can be named, and the budget cannot shrink; an empty card would do."""
    seen = with_flags(GOOD, num_blocks=2100, max_concurrency=None)
    assert rules(seen) == {}
    held = gpu({PARENT + 1: 71 * GIB}, other=8 * GIB)
    blocked = rules(replace(seen, nvml=NvmlRecord((held,))))
    assert "hardware_needed" not in blocked


def test_nor_for_a_configuration_that_vllm_refuses() -> None:
    assert "hardware_needed" not in rules(with_flags(replace(GOOD, max_model_len=200_000)))


@pytest.mark.parametrize(
    ("lengths", "rule"),
    [
        (RequestLengths(5000, 100, 900, 2000, 0.0), "length_far_above_use"),
        (RequestLengths(5000, 9000, 30000, 32768, 0.03), "length_near_limit"),
        (RequestLengths(10, 100, 900, 2000, 0.5), None),
        (RequestLengths(5000, 5000, 9000, 20000, 0.001), None),
        (None, None),
    ],
)
def test_lengths_against_the_limit(lengths: RequestLengths | None, rule: str | None) -> None:
    assert set(rules(with_flags(GOOD), lengths)) == ({rule} if rule else set())


def test_a_moving_neighbour_is_named() -> None:
    found = rules(with_flags(GOOD), outlook=Outlook(None, {}, ("0",)))
    assert "GPU 0" in found["unstable_neighbour"]
