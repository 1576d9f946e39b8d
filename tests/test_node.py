from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwatch.blockmath.flags import Flags
from kvwatch.config import GIB, Config, Holders, Rule, ServerConfig
from kvwatch.node import join
from kvwatch.observe.cycle import ObservedServer
from kvwatch.observe.records import Failure, Process
from kvwatch.ownership import Owner
from tests.nodes import PARENT, gpu, observation, process, server, serving_node, vllm_page


def owners(*extra: tuple[Process, int], config: Config | None = None) -> dict[int, Owner]:
    snapshot = join(serving_node(*extra), config or Config())
    return {holder.pid: holder.ownership.owner for holder in snapshot.gpus[0].holders}


def test_each_class_of_holder() -> None:
    config = Config(
        holders=Holders(
            allowed=(Rule(program="Xorg"),), neighbours=(Rule(workload="ollama.service", user="o*"),)
        )
    )
    found = owners(
        (process(11, "VLLM::Worker_TP0"), GIB),
        (process(12, "chat::EngineCore_DP1"), GIB),
        (process(13, "ipykernel_launcher", user="dana"), GIB),
        (process(14, "Xorg", user="root"), GIB),
        (process(15, "ollama", user="ollama", unit="ollama.service"), GIB),
        (process(16, "ollama", user="dana", unit="ollama.service"), GIB),
        config=config,
    )
    assert found == {
        PARENT + 1: Owner.SERVER,
        11: Owner.ORPHAN,
        12: Owner.ORPHAN,
        13: Owner.FOREIGN,
        14: Owner.ALLOWED,
        15: Owner.NEIGHBOUR,
        16: Owner.FOREIGN,
    }


def test_memory_without_a_visible_process_is_unattributed() -> None:
    snapshot = join(observation((gpu({1: GIB, 2: GIB}, other=5),), (process(1, "x"),)), Config())
    state = snapshot.gpus[0]
    assert state.held() == {(Owner.FOREIGN, ""): GIB, (Owner.UNATTRIBUTED, ""): GIB + 5}
    assert state.visibility == 0.5


@given(st.lists(st.integers(0, 10 * GIB), max_size=7), st.integers(0, GIB), st.data())
def test_every_byte_has_one_owner(sizes: list[int], other: int, data: st.DataObject) -> None:
    visible = data.draw(st.sets(st.integers(1, len(sizes)), max_size=len(sizes)) if sizes else st.just(set()))
    state = join(
        observation(
            (gpu(dict(enumerate(sizes, 1)), other=other),),
            tuple(process(pid, "VLLM::Worker" if pid % 2 else "python") for pid in visible),
        ),
        Config(),
    ).gpus[0]
    assert state.gpu.memory is not None
    assert sum(state.held().values()) == state.gpu.memory.used == sum(sizes) + other
    assert not state.inconsistent


def test_unknown_process_memory_leaves_its_class_and_the_rest_out() -> None:
    state = join(
        observation((gpu({1: None, 2: GIB}),), (process(1, "a"), process(2, "Xorg"))), Config()
    ).gpus[0]
    assert state.held() == {}
    assert state.residue is None


def test_more_held_than_used_is_marked() -> None:
    card = gpu({1: GIB}, other=-5)
    state = join(observation((card,), (process(1, "x"),)), Config()).gpus[0]
    assert state.inconsistent
    assert state.held()[Owner.UNATTRIBUTED, ""] == 0


def test_servers_of_one_model_are_told_apart_by_port_then_pid() -> None:
    servers: tuple[ObservedServer, ...] = (
        server(port=8000),
        server(port=8001, pid=200),
        server(port=8001, pid=201),
        server(port=9, name="other"),
    )
    snapshot = join(observation((), (), servers), Config())
    assert [one.name for one in snapshot.servers] == [
        "llama:8000",
        "llama:8001#200",
        "llama:8001#201",
        "other",
    ]


def test_a_configured_name_goes_first() -> None:
    one = server()
    settings = ServerConfig(url="http://127.0.0.1:8000", name="chat", gpus=("3",))
    named = ObservedServer(one.launch, settings, one.members, one.vllm, one.model)
    found = join(observation((), (), (named,)), Config()).servers[0]
    assert (found.name, found.gpus) == ("chat", ("3",))


def test_ranks_with_small_contexts_elsewhere_are_not_ranks_there() -> None:
    members = frozenset({10, 11})
    cards = (
        gpu({10: 400 * 2**20, 11: 400 * 2**20}, index="0"),
        gpu({10: 70 * GIB}, index="2"),
        gpu({11: 70 * GIB}, index="3"),
    )
    one = server(members=members, flags=Flags(tensor_parallel_size=2))
    snapshot = join(observation(cards, (process(10, "VLLM::Worker_TP0"),), (one,)), Config())
    assert snapshot.servers[0].gpus == ("2", "3")
    assert snapshot.gpus[0].held_by_server("llama") == 800 * 2**20


@pytest.mark.parametrize(
    ("visible", "ranks"),
    [(None, "0123"), (("3", "1", "0", "2"), "3102"), (("GPU-2", "GPU-0", "GPU-3", "GPU-1"), "2031")],
)
def test_ranks_take_cards_in_the_order_in_which_the_server_sees_them(
    visible: tuple[str, ...] | None, ranks: str
) -> None:
    """Under pipeline parallelism each rank has other layers."""
    cards = tuple(gpu({200 + number: 60 * GIB}, index=str(number)) for number in range(4))
    one = server(members=frozenset(range(200, 204)), flags=Flags(pipeline_parallel_size=4))
    one = replace(one, launch=replace(one.launch, visible_devices=visible))
    workers = tuple(process(200 + number, f"VLLM::Worker_PP{number}") for number in range(4))
    snapshot = join(observation(cards, workers, (one,)), Config())
    assert "".join(snapshot.servers[0].gpus) == ranks


def test_a_containers_list_of_cards_has_no_order() -> None:
    cards = tuple(gpu({200 + number: 60 * GIB}, index=str(number)) for number in range(2))
    one = server(members=frozenset({200, 201}), flags=Flags(pipeline_parallel_size=2))
    listed: dict[str, Any] = {
        "visible_devices": ("GPU-1", "GPU-0"),
        "environment": {"NVIDIA_VISIBLE_DEVICES": "GPU-1,GPU-0"},
    }
    one = replace(one, launch=replace(one.launch, **listed))
    workers = tuple(process(200 + number, f"VLLM::Worker_PP{number}") for number in range(2))
    assert join(observation(cards, workers, (one,)), Config()).servers[0].gpus == ("0", "1")


def test_failures_of_every_source_are_collected() -> None:
    down = Failure("vllm", "timeout", "no answer")
    unreadable = Failure("models", "not_found", "no config.json")
    lost = gpu({}, memory=False, failures=(Failure("nvml", "gpu_lost", "lost"),))
    snapshot = join(
        observation((lost,), Failure("processes", "error", "x"), (server(page=down, model=unreadable),)),
        Config(),
    )
    assert [failure.reason for failure in snapshot.failures] == ["error", "gpu_lost", "timeout", "not_found"]
    assert [failure.detail for failure in snapshot.failures[2:]] == [
        "http://127.0.0.1:8000: no answer",
        "http://127.0.0.1:8000: no config.json",
    ]
    assert not snapshot.servers[0].up
    assert snapshot.servers[0].release is None


def test_no_nvml_means_no_gpus_and_servers_all_the_same() -> None:
    snapshot = join(observation(Failure("nvml", "driver_mismatch", "18"), (), (server(),)), Config())
    assert snapshot.gpus == ()
    assert snapshot.servers[0].up
    assert snapshot.servers[0].gpus == ()


def test_a_version_that_is_none_of_vllms_is_unknown() -> None:
    snapshot = join(observation((), (), (server(page=vllm_page(version="main")),)), Config())
    assert snapshot.servers[0].release is None
