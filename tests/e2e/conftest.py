"""The expensive things that several tests share: one Prometheus, one set of models, one real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.prometheus import Prometheus
from tests.e2e.vllm_server import VllmServer
from tools.make_tiny_model import PRESETS, make_model

SHARED_FLAGS = ("--max-model-len", "1024", "--kv-cache-memory-bytes", "64M")


@pytest.fixture(scope="session")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A running Prometheus without targets. Its tests share one worker: see their xdist_group."""
    with Prometheus(tmp_path_factory.mktemp("prometheus")) as server:
        yield server


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of small models, one per preset of tools/make_tiny_model.py."""
    folder = tmp_path_factory.mktemp("models")
    for name, preset in PRESETS.items():
        make_model(folder / name, preset)
    return folder


@pytest.fixture(scope="session")
def server(vllm_venv: Path, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """A real server that is up, for tests that only look at it."""
    directory = tmp_path_factory.mktemp("server")
    with VllmServer(vllm_venv, models / "big-kv", directory, SHARED_FLAGS) as shared:
        yield shared.wait_ready()
