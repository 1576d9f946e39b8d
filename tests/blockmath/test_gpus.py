"""The table of cards: names, figures, and what is said about names that are not in it."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kvwatch.blockmath.errors import Unsupported
from kvwatch.blockmath.gpus import GPUS, LOGS, RESERVED, SHEET, Gpu, capability_of, find_gpu

GIB = 1 << 30

SEEN_GIB = {
    "H100": (79.18, 79.22),
    "H100-NVL": (93.0, 93.10),
    "H200": (139.79, 139.81),
    "B200": (178.34, 178.37),
    "GB200": (184.30, 184.32),
    "B300": (267.68, 267.70),
    "A100-80GB": (79.15, 79.33),
    "A100-40GB": (39.38, 39.56),
    "A10G": (22.05, 22.07),
    "L40S": (44.51, 44.53),
    "L4": (22.02, 22.04),
    "T4": (14.57, 14.76),
    "RTX-3090": (23.56, 23.70),
    "RTX-4090": (23.63, 23.65),
    "RTX-5090": (31.35, 31.37),
    "RTX-A6000": (47.53, 47.55),
    "RTX-PRO-6000": (94.96, 95.0),
}
"""What processes on these cards printed as their total."""


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.label)
def test_every_way_to_write_it_finds_it(gpu: Gpu) -> None:
    for name in (gpu.name, gpu.label, *gpu.aliases, gpu.label.lower(), gpu.label.replace("-", " ")):
        assert find_gpu(name) is gpu


def test_names_are_of_one_card_each() -> None:
    keys = sorted(key for gpu in GPUS for key in {gpu.name, gpu.label, *gpu.aliases})
    assert all(first != second for first, second in pairwise(keys))


@pytest.mark.parametrize(("label", "seen"), SEEN_GIB.items())
def test_totals_are_those_seen(label: str, seen: tuple[float, float]) -> None:
    gpu = find_gpu(label)
    assert gpu.total_source == LOGS
    assert seen[0] <= gpu.total_bytes / GIB <= seen[1]


def test_figures_have_sources_and_every_card_a_capability() -> None:
    for gpu in GPUS:
        assert gpu.total_source in (LOGS, RESERVED)
        assert gpu.bandwidth_source == SHEET
        assert (7, 0) <= gpu.capability <= (12, 0)


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("H100-80GB", (9, 0)),
        ("NVIDIA GeForce RTX 4090", (8, 9)),
        ("Tesla T4", (7, 5)),
        ("A10G-24GB", (8, 6)),
        ("A100", (8, 0)),
        ("RTX PRO 6000 Blackwell", (12, 0)),
        ("MI300X", None),
    ],
)
def test_a_name_begins_with_the_product(name: str, capability: tuple[int, int] | None) -> None:
    assert capability_of(name) == capability


@pytest.mark.parametrize(
    ("name", "labels"),
    [("A100", ("A100-40GB", "A100-80GB")), ("Tesla V100", ("V100-16GB", "V100-32GB"))],
)
def test_a_name_of_several_cards_asks_which(name: str, labels: tuple[str, ...]) -> None:
    with pytest.raises(Unsupported) as raised:
        find_gpu(name)
    assert raised.value.reason == "ambiguous_gpu"
    assert all(label in str(raised.value) for label in labels)


@pytest.mark.parametrize(("name", "near"), [("H110", "H100"), ("RTX 4900", "RTX-4090"), ("B20", "B200")])
def test_an_unknown_name_lists_the_near_ones(name: str, near: str) -> None:
    with pytest.raises(Unsupported, match=near) as raised:
        find_gpu(name)
    assert raised.value.reason == "unknown_gpu"


def test_a_name_like_none_lists_all() -> None:
    with pytest.raises(Unsupported) as raised:
        find_gpu("???")
    assert all(gpu.label in str(raised.value) for gpu in GPUS)


def test_device_can_have_a_better_known_total() -> None:
    gpu = find_gpu("L4")
    assert gpu.device().total_bytes == gpu.total_bytes
    assert gpu.device(5).total_bytes == 5
    assert gpu.device().name == "NVIDIA L4"


def test_which_cards_compute_with_8_bit_numbers() -> None:
    assert {gpu.label for gpu in GPUS if not gpu.has_fp8} == {
        "A100-80GB",
        "A100-80GB-PCIe",
        "A100-40GB",
        "A800",
        "A40",
        "A30",
        "A10G",
        "A10",
        "T4",
        "V100-16GB",
        "V100-32GB",
        "RTX-3090",
        "RTX-A6000",
    }
