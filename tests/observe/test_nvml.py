"""NvmlSource over unmodified nvidia-ml-py and the C library of tests/fakenvml, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakenvml import H100_RESERVED, H100_TOTAL, Gpu, Process, Scenario, environment, fail

ROOT = Path(__file__).parents[2]
GIB = 1 << 30


class Probe:
    """A process that reads NVML when told to, under the scenario of the moment."""

    def __init__(self, path: Path, driver: int = 570) -> None:
        self.path = path
        Scenario().write(path)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.observe.nvml_probe"],
            cwd=ROOT,
            env=environment(path, driver),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def read(self, scenario: Scenario | None = None, at: float = 0.0) -> Any:
        if scenario:
            scenario.write(self.path)
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{at}\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probe]:
    probe = Probe(tmp_path_factory.mktemp("nvml") / "scenario")
    yield probe
    probe.close()


def test_a_gpu_with_its_memory_and_processes(probe: Probe) -> None:
    gpus = (
        Gpu(processes=(Process(4242, 17 * GIB), Process(17, GIB), Process(17, GIB // 2, "graphics"))),
        Gpu(name="NVIDIA L4", capability=(8, 9), total=24152899584, reserved=493879296),
    )
    record = probe.read(Scenario(gpus))
    first, second = record["gpus"]
    assert record["driver_version"] == "570.86.15"
    assert record["failures"] == first["failures"] == second["failures"] == []
    assert first["memory"] == {
        "total": H100_TOTAL,
        "free": H100_TOTAL - H100_RESERVED - 18 * GIB,
        "used": 18 * GIB,
        "reserved": H100_RESERVED,
    }
    assert first["processes"] == {
        "4242": {"pid": 4242, "used_bytes": 17 * GIB, "kinds": ["compute"]},
        "17": {"pid": 17, "used_bytes": GIB, "kinds": ["compute", "graphics"]},
    }
    assert (second["index"], second["name"], second["capability"]) == ("1", "NVIDIA L4", [8, 9])
    assert (second["processes"], second["mig_profile"]) == ({}, None)
    assert second["uuid"] == "GPU-00000000-0000-0000-0000-000000000001"
    assert second["pci_bus_id"] == "00000000:1C:00.0"


def test_one_failing_call_costs_its_own_value(probe: Probe) -> None:
    gpu = probe.read(Scenario(rules=(fail("nvmlDeviceGetMemoryInfo*", 4),)))["gpus"][0]
    assert gpu["memory"] is None
    assert gpu["processes"] == {}
    assert [f["reason"] for f in gpu["failures"]] == ["no_permission"]
    assert "memory of GPU 0" in gpu["failures"][0]["detail"]
