"""Cards by name: memory as CUDA reports it, bandwidth, compute capability, each figure with its source."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvwatch.blockmath.device import Device
from kvwatch.blockmath.errors import Unsupported

MIB: Final = 1 << 20

LOGS: Final = "seen in public logs"
RESERVED: Final = "NVML's size less a typical reserve"
SHEET: Final = "vendor data sheet"

TYPICAL_RESERVE_MIB: Final = 480
"""What NVML's size has more than CUDA's total: 450 to 480 MiB on most cards with one."""


_CAPABILITIES: Final[Mapping[str, tuple[int, int]]] = {
    "V100": (7, 0),
    "T4": (7, 5),
    "RTX8000": (7, 5),
    "A100": (8, 0),
    "A800": (8, 0),
    "A30": (8, 0),
    "A10": (8, 6),
    "A10G": (8, 6),
    "A40": (8, 6),
    "A6000": (8, 6),
    "RTXA6000": (8, 6),
    "RTX3090": (8, 6),
    "3090": (8, 6),
    "RTX4090": (8, 9),
    "4090": (8, 9),
    "L4": (8, 9),
    "L20": (8, 9),
    "L40": (8, 9),
    "L40S": (8, 9),
    "RTX6000ADA": (8, 9),
    "H20": (9, 0),
    "H100": (9, 0),
    "H200": (9, 0),
    "H800": (9, 0),
    "GH200": (9, 0),
    "B100": (10, 0),
    "B200": (10, 0),
    "GB200": (10, 0),
    "B300": (10, 3),
    "GB300": (10, 3),
    "RTX5090": (12, 0),
    "5090": (12, 0),
    "RTXPRO6000": (12, 0),
}
"""CUDA compute capability by product name, as NVIDIA publishes it."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of card.

    Attributes:
        name: as the driver reports it; vLLM's batched-token default looks at it.
        label: short, for people and tables.
        aliases: other ways to write it; case, spaces, hyphens and a leading ``NVIDIA`` never matter.
        total_mib: memory that CUDA reports as total, in MiB.
        total_source: where that figure is from.
        bandwidth_gb_s: memory bandwidth, in 10^9 bytes per second.
        bandwidth_source: where the bandwidth is from.
    """

    name: str
    label: str
    aliases: tuple[str, ...]
    total_mib: int
    total_source: str
    bandwidth_gb_s: int
    bandwidth_source: str = SHEET

    @property
    def capability(self) -> tuple[int, int]:
        """CUDA compute capability."""
        found = capability_of(self.label)
        assert found is not None, self.label
        return found

    @property
    def total_bytes(self) -> int:
        """CUDA's total in bytes."""
        return self.total_mib * MIB

    @property
    def has_fp8(self) -> bool:
        """The card computes with 8-bit floating-point numbers."""
        return self.capability >= (8, 9)

    def device(self, total_bytes: int | None = None) -> Device:
        """The card as vLLM's defaults see it, with another total where one is known better."""
        return Device(self.name, total_bytes or self.total_bytes, self.capability)


def _reserved(nvml_mib: int) -> int:
    return nvml_mib - TYPICAL_RESERVE_MIB


GPUS: Final = (
    Gpu("NVIDIA H100 80GB HBM3", "H100", ("h100sxm", "h10080gb"), 81086, LOGS, 3350),
    Gpu("NVIDIA H100 PCIe", "H100-PCIe", (), _reserved(81559), RESERVED, 2000),
    Gpu("NVIDIA H100 NVL", "H100-NVL", ("h10094gb",), 95334, LOGS, 3900),
    Gpu("NVIDIA H20", "H20", ("h2096gb",), _reserved(97871), RESERVED, 4000),
    Gpu("NVIDIA H800", "H800", ("h80080gb",), _reserved(81559), RESERVED, 3350),
    Gpu("NVIDIA H200", "H200", ("h200sxm", "h200141gb"), 143156, LOGS, 4800),
    Gpu("NVIDIA GH200 480GB", "GH200-96GB", ("gh200",), 96768, LOGS, 4000),
    Gpu("NVIDIA B200", "B200", ("b200sxm", "b200180gb"), 182636, LOGS, 8000),
    Gpu("NVIDIA GB200", "GB200", ("gb200186gb",), 188733, LOGS, 8000),
    Gpu("NVIDIA B300 SXM6 AC", "B300", ("b300sxm", "b300288gb"), 274114, LOGS, 8000),
    Gpu("NVIDIA A100-SXM4-80GB", "A100-80GB", ("a100sxm80gb",), 81152, LOGS, 2039),
    Gpu("NVIDIA A100 80GB PCIe", "A100-80GB-PCIe", ("a100pcie80gb",), 81152, LOGS, 1935),
    Gpu("NVIDIA A100-SXM4-40GB", "A100-40GB", ("a100sxm40gb", "a100pcie40gb"), 40438, LOGS, 1555),
    Gpu("NVIDIA A800-SXM4-80GB", "A800", ("a80080gb",), _reserved(81920), RESERVED, 2039),
    Gpu("NVIDIA A40", "A40", ("a4048gb",), _reserved(46068), RESERVED, 696),
    Gpu("NVIDIA A30", "A30", ("a3024gb",), _reserved(24576), RESERVED, 933),
    Gpu("NVIDIA A10G", "A10G", ("a10g24gb",), 22587, LOGS, 600),
    Gpu("NVIDIA A10", "A10", ("a1024gb",), _reserved(23028), RESERVED, 600),
    Gpu("NVIDIA L40S", "L40S", ("l40s48gb",), 45589, LOGS, 864),
    Gpu("NVIDIA L40", "L40", ("l4048gb",), _reserved(46068), RESERVED, 864),
    Gpu("NVIDIA L20", "L20", ("l2048gb",), _reserved(46068), RESERVED, 864),
    Gpu("NVIDIA L4", "L4", ("l424gb",), 22559, LOGS, 300),
    Gpu("Tesla T4", "T4", ("t416gb",), 14930, LOGS, 300),
    Gpu("Tesla V100-SXM2-16GB", "V100-16GB", ("v100sxm216gb", "v100pcie16gb"), 16151, LOGS, 900),
    Gpu("Tesla V100-SXM2-32GB", "V100-32GB", ("v100sxm232gb", "v100pcie32gb"), 32502, LOGS, 900),
    Gpu("NVIDIA GeForce RTX 3090", "RTX-3090", ("3090", "rtx309024gb"), 24146, LOGS, 936),
    Gpu("NVIDIA GeForce RTX 4090", "RTX-4090", ("4090", "rtx409024gb"), 24207, LOGS, 1008),
    Gpu("NVIDIA GeForce RTX 5090", "RTX-5090", ("5090", "rtx509032gb"), 32113, LOGS, 1792),
    Gpu("NVIDIA RTX A6000", "RTX-A6000", ("a6000", "a600048gb"), 48676, LOGS, 768),
    Gpu(
        "NVIDIA RTX 6000 Ada Generation",
        "RTX-6000-Ada",
        ("rtx6000ada48gb", "6000ada"),
        _reserved(49140),
        RESERVED,
        960,
    ),
    Gpu(
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        "RTX-PRO-6000",
        ("rtxpro6000blackwell", "pro6000", "rtxpro600096gb", "rtxpro6000blackwellserveredition"),
        97249,
        LOGS,
        1792,
    ),
)
"""The cards. Of a product with several memory types or boards, the label says which one is meant."""

_SEVERAL: Final = {
    "a100": ("A100-40GB", "A100-80GB"),
    "a100sxm": ("A100-40GB", "A100-80GB"),
    "v100": ("V100-16GB", "V100-32GB"),
    "rtx6000": ("RTX-6000-Ada", "RTX-PRO-6000"),
}
"""Names that do not say which of several cards is meant."""


def find_gpu(name: str) -> Gpu:
    """The card that a name or alias means.

    Raises:
        Unsupported: none, or several; the message lists the nearest labels.
    """
    key = _key(name)
    if key in _SEVERAL:
        raise Unsupported("ambiguous_gpu", f"{name!r} can be {' or '.join(_SEVERAL[key])}: say which one")
    if key in _BY_KEY:
        return _BY_KEY[key]
    close = difflib.get_close_matches(key, _BY_KEY, n=4, cutoff=0.5)
    labels = dict.fromkeys(_BY_KEY[each].label for each in close) or [gpu.label for gpu in GPUS]
    raise Unsupported("unknown_gpu", f"no card {name!r} in the table; near it: {', '.join(labels)}")


def capability_of(name: str) -> tuple[int, int] | None:
    """CUDA compute capability of the product that a name begins with; None for one not in the table."""
    key = _key(name).upper()
    known = max((product for product in _CAPABILITIES if key.startswith(product)), key=len, default=None)
    return None if known is None else _CAPABILITIES[known]


def _key(name: str) -> str:
    return re.sub(r"^(nvidia)?(geforce|tesla|quadro)?", "", re.sub(r"[^a-z0-9]", "", name.lower()))


_BY_KEY: Final = {_key(known): gpu for gpu in GPUS for known in (gpu.name, gpu.label, *gpu.aliases)}
