"""What held the memory in public reports (vectors/public/foreign_cases.jsonl), each as records of a node.

The server that is judged beside it is a Llama 8B throughout: its verdict hangs on what others hold, and that
is what the reports tell. Sizes are the reports'; where one tells none, a round number stands in.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kvwatch.blockmath.flags import Flags
from kvwatch.config import GIB, MIB, Config, Holders, Restart, Rule
from kvwatch.forecast.restart import RestartForecast, forecast_restart
from kvwatch.forecast.wake import forecast_wake
from kvwatch.node import NodeSnapshot, join
from kvwatch.observe.cycle import ObservedServer
from kvwatch.observe.records import Failure, Gpu, GpuMemory, GpuProcess, Process
from kvwatch.ownership import Owner
from tests.nodes import observation, process, vllm_page
from tests.trees import INIT, SHELL, child, left, parent, serves, spawned

CASES: Mapping[str, Mapping[str, Any]] = {
    case["id"]: case
    for case in map(
        json.loads,
        (Path(__file__).parent / "vectors/public/foreign_cases.jsonl")
        .read_text(encoding="utf-8")
        .splitlines(),
    )
}

LEFT_OUT = {
    "f008": "tells neither sizes nor what the processes are called",
    "f020": "two start-ups at once: the harm is done between two looks and leaves no trace in what is held",
    "f025": "Windows: no /proc, and NVML does not tell what a process holds (f026 has the display's share)",
    "f030": "a container's own view of a slice of the card, of which the driver knows nothing",
    "f039": "neither the trainer's size nor what the wake-up needed is told (f022 has figures)",
    "f047": "a swap during one start's profile run: a matter of the moment, like f020",
    "f050": "Ascend: no NVML",
}

PLAIN = Config(restart=Restart(cuda_context=0, nccl=0))
"""The reports' free memory is what vLLM saw, with its own context already made."""

SERVER = parent(100)
CORE = child(101, "VLLM::EngineCore", SERVER)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What kvwatch makes of a node with the server "chat" on it."""

    snapshot: NodeSnapshot
    restart: RestartForecast

    def owners(self, index: int = 0) -> dict[int, Owner]:
        """Class by pid, without the judged server's processes."""
        return {
            holder.pid: holder.ownership.owner
            for holder in self.snapshot.gpus[index].holders
            if holder.ownership.server != "chat"
        }

    def margin(self, check: str, gpu: str = "0") -> int:
        """Bytes left at one check."""
        assert self.restart.verdict is not None
        [found] = [r for r in self.restart.verdict.checks if (r.check, r.gpu) == (check, gpu)]
        assert found.margin_bytes is not None
        return found.margin_bytes

    def stopping(self) -> set[int]:
        """Pids whose end makes the restart feasible, as the remedy says."""
        return {pid for remedy in self.restart.remedies for pid in remedy.pids}


def card(
    total: float, held: Mapping[int, float | None], *, index: int = 0, other: float = 0, **more: Any
) -> Gpu:
    """A card of that many GiB; what is held in GiB too."""
    sizes = {pid: None if size is None else round(size * GIB) for pid, size in held.items()}
    used = sum(size or 0 for size in sizes.values()) + round(other * GIB)
    whole = round(total * GIB)
    facts: dict[str, Any] = {
        "memory": GpuMemory(whole, whole - used, used, 0),
        "processes": {pid: GpuProcess(pid, size, frozenset({"compute"})) for pid, size in sizes.items()},
        **more,
    }
    return Gpu(str(index), f"GPU-{index}", "NVIDIA card", "", None, (9, 0), **facts)


def chat(utilization: float, *, version: str = "0.32.0", ranks: int = 1, **page: Any) -> ObservedServer:
    """The server that is judged: 600 blocks on each of its cards, 4096 tokens long."""
    facts = {"num_blocks": 600, "gpu_memory_utilization": utilization, **page}
    answer = vllm_page(name="chat", version=version, max_model_len=4096, **facts)
    flags = Flags(tensor_parallel_size=ranks, max_model_len=4096)
    pids = range(100, 102 + (ranks if ranks > 1 else 0))
    return replace(serves(SERVER, name="chat", flags=flags, page=answer), members=frozenset(pids))


def outcome(
    cards: tuple[Gpu, ...],
    *processes: Process,
    server: ObservedServer,
    others: tuple[ObservedServer, ...] = (),
    config: Config = PLAIN,
) -> Outcome:
    tree = (INIT, SHELL, SERVER, CORE, *processes)
    snapshot = join(observation(cards, tree, (server, *others)), config)
    judged = next(one for one in snapshot.servers if one.name == "chat")
    return Outcome(snapshot, forecast_restart(judged, snapshot, config))


def ranks_of(count: int) -> tuple[Process, ...]:
    return tuple(child(102 + rank, f"VLLM::Worker_TP{rank}", CORE) for rank in range(count))


def assert_in_the_way(found: Outcome, pids: set[int]) -> None:
    """The restart fails for their memory, and would not without them."""
    assert found.restart.feasible is False
    assert found.stopping() == pids


# --- orphans --------------------------------------------------------------------------------------------


def workers_under_a_shell(case: Mapping[str, Any]) -> None:
    """f001: the port is free at once, and the next engine meets what the dead one's workers hold."""
    dead = child(301, "VLLM::EngineCore", parent(300))
    workers = [child(302 + rank, f"VLLM::Worker_TP{rank}", dead) for rank in range(2)]
    own = ranks_of(2)
    cards = tuple(card(15.5, {workers[i].pid: 6, own[i].pid: 8}, index=i) for i in range(2))
    found = outcome(cards, *own, left(dead, to=SHELL), *workers, server=chat(0.9, ranks=2))
    assert found.owners(0) == {302: Owner.ORPHAN}
    assert found.owners(1) == {303: Owner.ORPHAN}
    assert_in_the_way(found, {302, 303})


def workers_of_a_removed_container(case: Mapping[str, Any]) -> None:
    held = case["nvidia_smi"]["held_gb_approx"] / case["nvidia_smi"]["orphans"]
    gone = parent(300, container="3f" * 32)
    workers = [left(child(301 + n, "VLLM::Worker", gone)) for n in range(2)]
    found = outcome((card(44.4, {301: held, 302: held, 101: 20}),), *workers, server=chat(0.9))
    assert found.owners() == {301: Owner.ORPHAN, 302: Owner.ORPHAN}
    assert_in_the_way(found, {301, 302})


def ray_workers_after_ray_stop(case: Mapping[str, Any]) -> None:
    held = case["nvidia_smi"]["per_gpu_used_gb"]
    raylet = process(80, "raylet")
    pids = range(301, 301 + case["nvidia_smi"]["processes"])
    workers = [left(child(pid, "ray::RayWorkerWrapper", raylet)) for pid in pids]
    cards = tuple(
        card(79.1, {pid: held, **({101: 5} if n == 0 else {})}, index=n) for n, pid in enumerate(pids)
    )
    found = outcome(cards, *workers, server=chat(0.9))
    assert [set(found.owners(n).values()) for n in range(8)] == [{Owner.ORPHAN}] * 8
    assert_in_the_way(found, {301})


def an_engine_that_cannot_be_killed(case: Mapping[str, Any]) -> None:
    share = case["flags"]["gpu_memory_utilization"]
    stuck = replace(left(child(301, "VLLM::EngineCore", parent(300))), state="R")
    found = outcome((card(79.2, {301: 79.2 * share, 101: 20}),), stuck, server=chat(share))
    assert found.owners() == {301: Owner.ORPHAN}
    assert_in_the_way(found, {301})


def untitled_workers_of_an_old_release(case: Mapping[str, Any]) -> None:
    """f034: 0.8 gave no titles; no sizes told."""
    dead = parent(300, argv=("python3", "-m", "vllm.entrypoints.openai.api_server"))
    core = left(spawned(301, dead))
    workers = [spawned(302 + rank, core) for rank in range(2)]
    cards = (card(79.2, {302: 70, 101: 8}), card(79.2, {303: 70}, index=1))
    found = outcome(cards, core, *workers, server=chat(0.9, version="0.8.5"))
    assert {**found.owners(0), **found.owners(1)} == {302: Owner.ORPHAN, 303: Owner.ORPHAN}
    assert_in_the_way(found, {302})


def workers_stuck_in_teardown(case: Mapping[str, Any]) -> None:
    """f035: engine and API server ended as told. The card was a Hygon; the processes look the same."""
    gone = child(301, "VLLM::EngineCore", parent(300))
    workers = [
        replace(left(child(302 + rank, f"VLLM::Worker_TP{rank}", gone)), state="D") for rank in range(2)
    ]
    cards = (card(64, {302: 50, 101: 8}), card(64, {303: 50}, index=1))
    found = outcome(cards, *workers, server=chat(0.9))
    assert {**found.owners(0), **found.owners(1)} == {302: Owner.ORPHAN, 303: Owner.ORPHAN}
    assert_in_the_way(found, {302})


def a_worker_of_a_start_that_timed_out(case: Mapping[str, Any]) -> None:
    worker = left(child(302, "VLLM::Worker", child(301, "VLLM::EngineCore", parent(300))))
    found = outcome((card(79.2, {302: 70, 101: 8}),), worker, server=chat(0.9))
    assert found.owners() == {302: Owner.ORPHAN}
    assert_in_the_way(found, {302})


# --- other people's processes ---------------------------------------------------------------------------


def an_unknown_process(case: Mapping[str, Any]) -> None:
    told = case["nvidia_smi"]
    taken = told["total_gib"] - told["free_gib"]
    other = process(300, "python3", user="dana", argv=("python3", "x.py"))
    found = outcome((card(told["total_gib"], {300: taken, 101: 6}),), other, server=chat(0.9))
    assert found.owners() == {300: Owner.FOREIGN}
    assert found.restart.blocking_check == "free_memory"
    assert found.restart.verdict is not None
    message = found.restart.verdict.message or ""
    assert "(6.44/11.63 GiB)" in message
    assert f"{told['desired_gib']} GiB" in message
    assert found.stopping() == {300}


def five_processes(case: Mapping[str, Any]) -> None:
    told = case["nvidia_smi"]
    others = {300 + n: mib / 1024 for n, mib in enumerate(told["others_mib"])}
    processes = [process(pid, f"job{pid}.py", user="dana") for pid in others]
    found = outcome(
        (card(told["total_gib"], {**others, 101: told["own_gib"]}),),
        *processes,
        server=chat(0.9, version="0.7.3"),
    )
    assert set(found.owners().values()) == {Owner.FOREIGN}
    held = found.snapshot.gpus[0].held()
    assert held[Owner.FOREIGN, ""] == pytest.approx(sum(told["others_mib"]) * MIB, abs=8)
    assert found.restart.feasible is False


def a_tenant_on_one_card_of_two(case: Mapping[str, Any]) -> None:
    """f043: the sum over the cards, or the first card, would have looked well."""
    told = case["nvidia_smi"]
    total = case["gpu_mem_gib"]
    tenant = process(300, "python3", user="nobody", unit="pod 0b1c", container="9a" * 32)
    own = ranks_of(2)
    taken = [total - told["free_rank0_gib"], total - told["free_rank1_gib"]]
    cards = (
        card(total, {102: 40}, other=taken[0]),
        card(total, {103: 40, 300: taken[1]}, index=1),
    )
    found = outcome(cards, tenant, *own, server=chat(case["flags"]["gpu_memory_utilization"], ranks=2))
    assert found.owners(1) == {300: Owner.FOREIGN}
    assert found.margin("free_memory", "0") > 0
    assert found.margin("free_memory", "1") / GIB == pytest.approx(60.87 - 0.95 * 79.19, abs=0.01)
    assert_in_the_way(found, {300})


def a_display(case: Mapping[str, Any]) -> None:
    """f026: WSL does not tell what a process holds, only that the memory is used."""
    told = case["nvidia_smi"]
    used = [told["gpu0_used_mib"] / 1024, told["gpu1_used_mib"] / 1024]
    own = ranks_of(2)
    cards = tuple(card(24, {own[n].pid: 20}, index=n, other=used[n]) for n in range(2))
    found = outcome(cards, *own, server=chat(0.97, ranks=2))
    assert found.snapshot.gpus[0].held()[Owner.UNATTRIBUTED, ""] == told["gpu0_used_mib"] * MIB
    assert found.margin("free_memory", "0") < 0 < found.margin("free_memory", "1")
    assert found.stopping() == set(), "nobody is named who could be stopped"


# --- other vLLM servers ---------------------------------------------------------------------------------


def second_server(pid: int, share: float, version: str) -> tuple[tuple[Process, ...], ObservedServer]:
    server = parent(pid)
    core = spawned(pid + 1, server)
    page = vllm_page(
        name="other", version=version, max_model_len=4096, gpu_memory_utilization=share, num_blocks=600
    )
    made = serves(server, name="other", port=8001, page=page, flags=Flags(max_model_len=4096))
    return (server, core), replace(made, members=frozenset({pid, pid + 1}))


def beside_another_server(
    case: Mapping[str, Any], total: float, share: float, others_share: float
) -> Outcome:
    version = case["vllm_version"].split(" ")[0]
    tree, other = second_server(300, others_share, version)
    cards = (card(total, {301: others_share * total, 101: share * total}),)
    return outcome(cards, *tree, server=chat(share, version=version), others=(other,))


def a_larger_server_first(case: Mapping[str, Any]) -> None:
    """f015: up to 0.9.0 the share has to cover what the other server holds too."""
    found = beside_another_server(case, case["gpu_mem_gib"], case["flags"]["gpu_memory_utilization"], 0.75)
    assert found.owners() == {301: Owner.SERVER}
    assert found.restart.feasible is False
    assert found.restart.blocking_check == "kv_memory"


def two_equal_servers(case: Mapping[str, Any]) -> None:
    shares = case["flags"]["gpu_memory_utilization"]
    found = beside_another_server(case, case["gpu_mem_gib"], shares[0], shares[1])
    assert found.owners() == {301: Owner.SERVER}
    assert found.restart.feasible is False


def two_small_servers(case: Mapping[str, Any]) -> None:
    share = case["flags"]["gpu_memory_utilization"]
    others_share = case["nvidia_smi"]["used_mib"] / 1024 / case["gpu_mem_gib"]
    found = beside_another_server(case, case["gpu_mem_gib"], share, others_share)
    assert found.owners() == {301: Owner.SERVER}
    assert found.restart.feasible is False


def a_sleeper(case: Mapping[str, Any]) -> None:
    """f022: a sleeping server's context is its own, and the other took the room that it will want back."""
    told = case["nvidia_smi"]
    context = told["instance1_initial_free_gib"] - told["instance2_initial_free_gib"]
    tree, other = second_server(300, 0.9, "0.26.0")
    sleeping = chat(0.9, version="0.26.0", sleep_state="weights_offloaded")
    found = outcome((card(79.2, {101: context, 301: 40}),), *tree, server=sleeping, others=(other,))
    assert found.owners() == {301: Owner.SERVER}
    judged = next(one for one in found.snapshot.servers if one.name == "chat")
    assert found.snapshot.gpus[0].held_by_server("chat") == round(context * GIB)
    wake = forecast_wake(judged, found.snapshot)
    assert wake is not None
    assert wake.feasible is False


def contexts_of_siblings(case: Mapping[str, Any]) -> None:
    """f049: seven ranks hold a context on the first card beside the one whose card it is."""
    sizes = sorted(case["nvidia_smi"]["process_gib"][1:])
    own = ranks_of(8)
    pids = [one.pid for one in own]
    launcher = case["nvidia_smi"]["process_gib"][0]
    first = {101: launcher, pids[0]: sizes[-1], **dict(zip(pids[1:], sizes[:-1], strict=False))}
    cards = [card(case["gpu_mem_gib"], first)]
    cards += [card(case["gpu_mem_gib"], {pids[n]: 8}, index=n) for n in range(1, 8)]
    found = outcome(tuple(cards), *own, server=chat(0.5, ranks=8))
    assert found.owners(0) == {}
    assert found.snapshot.servers[0].gpus == tuple(map(str, range(8)))
    assert found.snapshot.gpus[0].held_by_server("chat") == pytest.approx(sum(first.values()) * GIB, abs=8)


# --- what cannot be seen --------------------------------------------------------------------------------


def pids_of_the_host(case: Mapping[str, Any]) -> None:
    used = case["nvidia_smi"]["host_used_mib"] / 1024
    found = outcome((card(16, {28290: used}),), server=chat(0.9))
    state = found.snapshot.gpus[0]
    assert (found.owners(), state.visibility) == ({28290: Owner.UNATTRIBUTED}, 0)
    assert found.restart.feasible is None


def sizes_that_nvml_does_not_tell(case: Mapping[str, Any]) -> None:
    found = outcome((card(24, {101: None, 300: None}, other=20),), process(300, "x"), server=chat(0.9))
    assert found.snapshot.gpus[0].held() == {}
    assert found.restart.unknown is not None
    assert found.restart.unknown.reason == "own_memory_unknown"


def a_card_in_error(case: Mapping[str, Any]) -> None:
    failed = (Failure("nvml", "unknown", "memory of GPU 0: Unknown Error"),)
    broken = card(80, {}, memory=None, processes={}, failures=failed)
    found = outcome((broken,), server=chat(0.9))
    assert found.snapshot.gpus[0].held() == {}
    assert found.snapshot.failures == failed
    assert found.restart.feasible is None


SCENARIOS: Mapping[str, Callable[[Mapping[str, Any]], None]] = {
    "f001": workers_under_a_shell,
    "f004": workers_of_a_removed_container,
    "f009": ray_workers_after_ray_stop,
    "f011": an_engine_that_cannot_be_killed,
    "f013": an_unknown_process,
    "f014": five_processes,
    "f015": a_larger_server_first,
    "f017": two_equal_servers,
    "f018": two_small_servers,
    "f022": a_sleeper,
    "f026": a_display,
    "f027": pids_of_the_host,
    "f034": untitled_workers_of_an_old_release,
    "f035": workers_stuck_in_teardown,
    "f036": a_worker_of_a_start_that_timed_out,
    "f042": a_card_in_error,
    "f043": a_tenant_on_one_card_of_two,
    "f048": sizes_that_nvml_does_not_tell,
    "f049": contexts_of_siblings,
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_reported_case(name: str) -> None:
    SCENARIOS[name](CASES[name])


def test_every_case_is_played_or_left_out_for_a_reason() -> None:
    assert SCENARIOS.keys() | LEFT_OUT.keys() == CASES.keys()
    assert not SCENARIOS.keys() & LEFT_OUT.keys()


def test_a_desktop_can_be_allowed() -> None:
    """It still counts: `allowed` quiets an alert, it frees no memory."""
    config = replace(PLAIN, holders=Holders(allowed=(Rule(program="Xorg"),)))
    screen = process(300, "Xorg", user="root")
    found = outcome((card(24, {300: 4, 101: 18}),), screen, server=chat(0.9), config=config)
    assert found.owners() == {300: Owner.ALLOWED}
    assert_in_the_way(found, {300})
