"""Real processes in real PID and network namespaces, on a node whose NVML names them by the host's pids."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.kvwatch_daemon import FAST, KvwatchDaemon, Page
from tests.e2e.lookalike import Lookalike, Namespaces, may_unshare
from tests.fakenvml import Gpu, Process, Scenario, environment

GIB = 1 << 30
PORT = 8123
CONFIG = f"{FAST}holders: {{release_grace: 10m}}\n"

pytestmark = pytest.mark.skipif(not may_unshare(), reason="this machine does not let us make namespaces")


@dataclass(frozen=True, slots=True)
class Node:
    """A look-alike whose engine holds 9 GiB of the only card, and a daemon that was told nothing of it."""

    tree: Lookalike
    scenario: Path
    daemon: KvwatchDaemon

    def owners(self, page: Page | None = None) -> dict[str, float]:
        """Bytes by class."""
        held = (page or self.daemon.page()).having("kvwatch_gpu_memory_held_bytes")
        return {sample.labels["owner"]: sample.value for sample in held if sample.value}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with Namespaces(tmp_path, port=PORT) as namespaces:
        tree = namespaces.wait_started()
        scenario = tmp_path / "node.scenario"
        Scenario((Gpu(processes=(Process(tree.engine, 9 * GIB),)),)).write(scenario)
        with KvwatchDaemon.run(tmp_path, environment(scenario), CONFIG) as daemon:
            yield Node(tree, scenario, daemon.wait_ready())


def test_from_server_to_orphan_to_nothing(node: Node) -> None:
    assert node.owners() == {"server": 9 * GIB}
    assert node.daemon.page().get("kvwatch_process_visibility", gpu="0") == 1

    os.kill(node.tree.parent, signal.SIGKILL)
    page = node.daemon.page_after(cycles=2)
    assert node.owners(page) == {"orphan": 9 * GIB}
    [holder] = page.having("kvwatch_holder_memory_bytes")
    assert (holder.labels["pid"], holder.labels["process"]) == (str(node.tree.engine), "VLLM::EngineCore")
    assert page.having("kvwatch_server_info", endpoint="") == []

    os.kill(node.tree.engine, signal.SIGKILL)
    assert node.owners(node.daemon.page_after()) == {"releasing": 9 * GIB}
    Scenario((Gpu(used=2 * GIB),)).write(node.scenario)
    assert node.owners(node.daemon.page_after()) == {"releasing": 2 * GIB}
    Scenario((Gpu(),)).write(node.scenario)
    assert node.owners(node.daemon.page_after()) == {}


def test_an_orphan_is_known_without_having_been_seen_before(node: Node, tmp_path: Path) -> None:
    os.kill(node.tree.parent, signal.SIGKILL)
    with KvwatchDaemon.run(tmp_path / "later", environment(node.scenario), CONFIG) as later:
        assert node.owners(later.wait_ready().page_after()) == {"orphan": 9 * GIB}


def ip(*words: str, inside: int | None = None) -> None:
    enter: Sequence[str] = () if inside is None else ("nsenter", "--target", str(inside), "--net")
    done = subprocess.run([*enter, "ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"ip {' '.join(words)}: {done.stderr.strip()}")


@pytest.mark.skipif(os.geteuid() != 0, reason="a pair of network interfaces needs root")
def test_a_server_is_reached_by_an_address_of_its_own_network_namespace(node: Node) -> None:
    assert node.daemon.page().having("kvwatch_server_info", endpoint=""), "no interface, no address"
    outer = f"kvw{os.getpid()}"
    ip("link", "add", outer, "type", "veth", "peer", "name", "inner", "netns", str(node.tree.first))
    ip("address", "add", "198.18.213.1/30", "dev", outer)
    ip("link", "set", outer, "up")
    ip("address", "add", "198.18.213.2/30", "dev", "inner", inside=node.tree.first)
    ip("link", "set", "inner", "up", inside=node.tree.first)
    with KvwatchDaemon.run(node.scenario.parent / "later", environment(node.scenario), CONFIG) as later:
        page = later.wait_ready().page()
    # Whatever else serves on this machine stands beside it.
    [info] = page.having("kvwatch_server_info", endpoint=f"http://198.18.213.2:{PORT}")
    assert page.get("kvwatch_server_up", server=info.labels["server"]) == 1
