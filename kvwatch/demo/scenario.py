"""The demo's script: who holds what at which minute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np
import yaml

from kvwatch.config import GIB

Points = tuple[tuple[float, float], ...]


def at(points: Points, minute: float) -> float:
    """Piecewise linear through ``(minute, value)`` points, constant outside them."""
    minutes, values = zip(*points, strict=True)
    return float(np.interp(minute, minutes, values))


@dataclass(frozen=True, slots=True)
class ScriptedHolder:
    """A process beside the server: there from minute `start` until minute `end` of each round."""

    name: str
    user: str
    unit: str
    gpu: int
    start: float
    end: float
    gib: Points

    def bytes_at(self, minute: float) -> int | None:
        """What it holds; None while it does not run."""
        return int(at(self.gib, minute) * GIB) if self.start <= minute < self.end else None


@dataclass(frozen=True, slots=True)
class ScriptedServer:
    """The vLLM server of the demo."""

    model: str
    served_name: str
    user: str
    unit: str
    utilization: float
    max_model_len: int
    block_size: int
    tensor_parallel_size: int
    num_blocks: int
    worker_gib_beside_pool: float
    usage: Points
    start: float = 0.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """The whole script."""

    round_minutes: float
    gpu_name: str
    gpu_count: int
    total_bytes: int
    reserved_bytes: int
    capability: tuple[int, int]
    server: ScriptedServer
    holders: tuple[ScriptedHolder, ...]


def data(name: str) -> str:
    """One of the files packaged with the demo."""
    return (files("kvwatch.demo") / "data" / name).read_text(encoding="utf-8")


def load_scenario() -> Scenario:
    """The packaged script."""
    raw: Mapping[str, Any] = yaml.safe_load(data("scenario.yaml"))
    gpu, server = raw["gpu"], raw["server"]
    return Scenario(
        round_minutes=raw["round_minutes"],
        gpu_name=gpu["name"],
        gpu_count=gpu["count"],
        total_bytes=gpu["total_bytes"],
        reserved_bytes=gpu["reserved_bytes"],
        capability=(gpu["capability"][0], gpu["capability"][1]),
        server=ScriptedServer(**{**server, "usage": _points(server["usage"])}),
        holders=tuple(
            ScriptedHolder(
                name=holder["name"],
                user=holder["user"],
                unit=holder["unit"],
                gpu=holder["gpu"],
                start=holder["from"],
                end=holder["to"],
                gib=_points(holder["gib"]),
            )
            for holder in raw["holders"]
        ),
    )


def _points(raw: Sequence[Sequence[float]]) -> Points:
    return tuple((float(minute), float(value)) for minute, value in raw)
