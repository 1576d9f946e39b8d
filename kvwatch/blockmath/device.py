"""The card, as far as vLLM's defaults depend on it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU (or the host, for the CPU backend).

    Attributes:
        name: product name, for example ``NVIDIA H100 80GB HBM3``; vLLM's batched-token default looks at it.
        total_bytes: memory that CUDA reports as total (NVML total less reserved).
        capability: CUDA compute capability, for example ``(9, 0)``; None where unknown.
        kind: ``cuda`` or ``cpu``.
    """

    name: str
    total_bytes: int
    capability: tuple[int, int] | None = None
    kind: str = "cuda"
