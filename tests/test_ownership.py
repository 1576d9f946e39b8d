from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvwatch.blockmath.flags import Flags
from kvwatch.config import GIB, Config, Holders, Rule
from kvwatch.node import join
from kvwatch.observe.records import Failure, Process
from kvwatch.ownership import STARTING_SECONDS, Owner
from tests.nodes import NOW, gpu, observation, process, vllm_page
from tests.trees import (
    INIT,
    OLD_SERVE,
    REFUSED,
    SCRIPT,
    SERVE,
    SHELL,
    child,
    left,
    look,
    parent,
    serves,
    spawned,
)

SERVER = parent(100)
CORE = child(101, "VLLM::EngineCore", SERVER)
WORKER = child(102, "VLLM::Worker_TP0", CORE)

ID = "3f" * 32
OTHER_ID = "9a" * 32


# --- orphans: a title, and nobody above -----------------------------------------------------------------


@pytest.mark.parametrize(
    "adopter",
    [
        INIT,
        SHELL,
        process(60, "containerd-shim-runc-v2", argv=("/usr/bin/containerd-shim-runc-v2", "-id", "x")),
        process(61, "s6-supervise", argv=("s6-supervise", "vllm")),
        process(62, "supervisord", session=62, argv=("python3", "/usr/bin/supervisord")),
        process(65, "supervisord", session=SHELL.pid, argv=("python3", "/usr/bin/supervisord", "-n")),
        process(66, "start.sh", session=SHELL.pid, argv=("/bin/bash", "./start.sh")),
        process(67, "Relay(70)", session=SHELL.pid, argv=("/init",)),
        process(63, "systemd", session=63),
        process(64, "tmux: server", session=SHELL.pid),
    ],
    ids=lambda one: f"{one.name}-{one.pid}",
)
def test_engines_whose_parent_was_killed(adopter: Process) -> None:
    """The survivors go to the nearest subreaper: anything, in their session or another."""
    core = left(CORE, to=adopter)
    found = look(INIT, SHELL, adopter, core, WORKER, holding=(101, 102))
    assert found.owners == {101: Owner.ORPHAN, 102: Owner.ORPHAN}
    assert adopter.name in found.ownerships[101].reason


@pytest.mark.parametrize(
    "title",
    [
        "VLLM::EngineCore",
        "VLLM::EngineCore_DP1",
        "VLLM::DPEngineCore_1",
        "VLLM::Worker",
        "VLLM::Worker_DP0_PP1_TP3_EP3",
        "VLLM::APIServer_0",
        "VLLM::DPCoordinator",
        "team-a.chat::EngineCore",
        "team/a:chat::EngineCore",
        "VLLM::EngineCor",
    ],
)
def test_titles(title: str) -> None:
    assert look(INIT, child(5, title, INIT), holding=(5,)).owners == {5: Owner.ORPHAN}


@pytest.mark.parametrize(
    "title",
    ["sglang::scheduler", "postgres: writer", "EngineCore", "VLLM::", "a b::Worker", "ray::Worker"],
)
def test_other_titles(title: str) -> None:
    assert look(INIT, child(5, title, INIT), holding=(5,)).owners == {5: Owner.FOREIGN}


def test_workers_may_be_the_only_survivors() -> None:
    found = look(INIT, left(WORKER), holding=(102,))
    assert found.owners == {102: Owner.ORPHAN}


def test_a_parent_whose_pid_was_used_again_is_no_parent() -> None:
    newer = replace(parent(100, argv=SCRIPT, name="rag.py"), start_time=NOW - 5)
    assert look(INIT, newer, CORE, holding=(101,)).owners == {101: Owner.ORPHAN}


def test_a_parent_that_only_waits_to_be_buried_is_none() -> None:
    assert look(replace(SERVER, state="Z"), CORE, holding=(101,)).owners == {101: Owner.ORPHAN}


def test_the_container_may_be_gone() -> None:
    """`docker rm -f` can leave workers behind: the cgroup still names the container."""
    contained = parent(100, container=ID)
    worker = left(child(101, "VLLM::Worker", contained))
    found = look(INIT, worker, holding=(101,))
    assert found.owners == {101: Owner.ORPHAN}
    assert worker.container == ID


def test_a_worker_under_another_container_of_the_node_is_an_orphan_all_the_same() -> None:
    live = parent(200, container=OTHER_ID)
    worker = left(child(101, "VLLM::Worker", parent(100, container=ID)))
    found = look(INIT, live, worker, holding=(101,), serving=(live,))
    assert found.owners == {101: Owner.ORPHAN}


# --- orphans without a title ----------------------------------------------------------------------------


def test_spawned_children_whose_parent_is_gone() -> None:
    old = parent(100, argv=OLD_SERVE, name="vllm.entrypoints.openai.api_server")
    engine = left(spawned(101, old), to=SHELL)
    worker = spawned(102, engine)
    assert look(SHELL, engine, worker, holding=(101, 102)).owners == {101: Owner.ORPHAN, 102: Owner.ORPHAN}
    named = replace(engine, name="pt_main_thread")
    assert look(SHELL, named, holding=(101,)).owners == {101: Owner.ORPHAN}


def test_a_running_program_of_that_name_is_none() -> None:
    """PyTorch renames every program's main thread, a notebook's or a prompt's too."""
    prompt = process(5, "pt_main_thread", ppid=SHELL.pid, session=SHELL.pid, argv=("python3",))
    assert look(SHELL, prompt, holding=(5,)).owners == {5: Owner.FOREIGN}


def test_spawned_children_of_a_running_program_are_its() -> None:
    trainer = parent(100, argv=("python3", "train.py"), name="train.py")
    assert look(SHELL, trainer, spawned(101, trainer), holding=(100, 101)).owners == {
        100: Owner.FOREIGN,
        101: Owner.FOREIGN,
    }


@pytest.mark.parametrize("name", ["pt_main_thread", "python3"])
def test_what_shares_the_session_of_a_dead_server(name: str) -> None:
    server = parent(100, session=100)
    core = left(child(101, "VLLM::EngineCore", server))
    plain = process(102, name, session=100, argv=("python3",))
    assert look(INIT, core, plain, holding=(101, 102)).owners == {101: Owner.ORPHAN, 102: Owner.ORPHAN}
    elsewhere = replace(plain, session=300)
    assert look(INIT, core, elsewhere, holding=(102,)).owners == {102: Owner.FOREIGN}
    leader = process(100, "bash", session=100, argv=("bash",))
    assert look(INIT, leader, core, plain, holding=(102,)).owners == {102: Owner.FOREIGN}


def test_anything_that_belonged_to_a_server_is_known_by_it() -> None:
    """Whatever its name, and whoever took it over."""
    helper = process(103, "nvcc", ppid=101, session=300, argv=("nvcc",))
    before = look(SHELL, SERVER, CORE, helper, holding=(101, 103), serving=(SERVER,))
    assert set(before.owners.values()) == {Owner.SERVER}
    supervisor = process(62, "supervisord", session=SHELL.pid, argv=("python3", "/usr/bin/supervisord"))
    after = look(
        SHELL,
        supervisor,
        left(CORE, to=supervisor),
        helper,
        holding=(101, 103),
        after=before.ledger,
        at=NOW + 600,
    )
    assert after.owners == {101: Owner.ORPHAN, 103: Owner.ORPHAN}
    assert {one.origin for one in after.ownerships.values()} == {"llama"}


# --- servers of old releases fork -----------------------------------------------------------------------

LONG_AGO = NOW - 2 * STARTING_SECONDS
FORKING = replace(parent(100, argv=OLD_SERVE, name="api_server"), start_time=LONG_AGO)
FORKED = replace(child(101, "api_server", FORKING, argv=OLD_SERVE), start_time=LONG_AGO + 5)


def test_a_forked_engine_that_was_seen_under_its_server() -> None:
    before = look(SHELL, FORKING, FORKED, holding=(101,), serving=(FORKING,))
    assert before.owners == {101: Owner.SERVER}
    alone = left(FORKED, to=SHELL)
    after = look(SHELL, alone, holding=(101,), serving=(serves(alone, page=REFUSED),), after=before.ledger)
    assert after.owners == {101: Owner.ORPHAN}
    assert after.snapshot.servers == ()
    again = look(SHELL, alone, holding=(101,), serving=(serves(alone, page=REFUSED),), after=after.ledger)
    assert again.ownerships[101].origin == "llama"


def test_a_forked_engine_that_was_never_seen_before() -> None:
    alone = left(FORKED, to=SHELL)
    worker = spawned(102, alone)
    found = look(SHELL, alone, worker, holding=(101, 102), serving=(serves(alone, page=REFUSED),))
    assert found.owners == {101: Owner.ORPHAN, 102: Owner.ORPHAN}
    assert found.snapshot.servers == ()


@pytest.mark.parametrize(
    ("server", "page"),
    [
        (replace(FORKING, start_time=NOW - 600), REFUSED),
        (FORKING, Failure("vllm", "timeout", "it hangs")),
        (replace(FORKING, ppid=90), REFUSED),
    ],
    ids=["loading", "hanging", "under its launcher"],
)
def test_a_server_that_does_not_answer_is_no_orphan(server: Process, page: Failure) -> None:
    launcher = process(90, "start.py", session=SHELL.pid, argv=("python3", "start.py"))
    launcher = replace(launcher, start_time=LONG_AGO - 1)
    found = look(SHELL, launcher, server, holding=(100,), serving=(serves(server, page=page),))
    assert found.owners == {100: Owner.SERVER}


def test_a_server_may_load_for_hours() -> None:
    """Hundreds of gigabytes over a network: its engine has a title, as no release's left-behinds have."""
    core = child(101, "VLLM::EngineCore", FORKING)
    found = look(SHELL, FORKING, core, holding=(101,), serving=(serves(FORKING, page=REFUSED),))
    assert found.owners == {101: Owner.SERVER}


# --- Ray ------------------------------------------------------------------------------------------------

RAYLET = process(80, "raylet", argv=("/ray/core/src/ray/raylet/raylet", "--x"))
ACTORS = ("ray::RayWorkerWrapper", "ray::RayWorkerWrapper.execute_method", "VLLM::Worker_TP1")


@pytest.mark.parametrize("name", ACTORS)
def test_ray_workers_of_the_only_server_under_ray(name: str) -> None:
    actor = child(102, name, RAYLET)
    other = parent(200)
    servers = (serves(SERVER, ray=True), serves(other, name="other", port=8001))
    found = look(RAYLET, SERVER, other, actor, holding=(102,), serving=servers)
    assert found.ownerships[102].server == "llama"


@pytest.mark.parametrize("name", ACTORS)
def test_which_of_two_servers_a_ray_worker_is_of_is_not_known(name: str) -> None:
    second = parent(200)
    actor = child(102, name, RAYLET)
    servers = (serves(SERVER, ray=True), serves(second, name="other", port=8001, ray=True))
    found = look(RAYLET, SERVER, second, actor, holding=(102,), serving=servers)
    assert found.owners == {102: Owner.NEIGHBOUR}


@pytest.mark.parametrize("name", ACTORS)
def test_a_ray_worker_without_a_server_here_may_have_one_elsewhere(name: str) -> None:
    assert look(RAYLET, child(102, name, RAYLET), holding=(102,)).owners == {102: Owner.NEIGHBOUR}


@pytest.mark.parametrize("name", ACTORS)
def test_a_ray_worker_whose_raylet_is_gone(name: str) -> None:
    actor = left(child(102, name, RAYLET))
    assert look(INIT, actor, holding=(102,)).owners == {102: Owner.ORPHAN}


@pytest.mark.parametrize("name", ACTORS)
def test_a_ray_worker_that_outlives_its_server(name: str) -> None:
    actor = child(102, name, RAYLET)
    before = look(RAYLET, SERVER, actor, holding=(102,), serving=(serves(SERVER, ray=True),))
    assert look(RAYLET, actor, holding=(102,), after=before.ledger).owners == {102: Owner.ORPHAN}
    newer = replace(parent(300), start_time=NOW)
    servers = (serves(newer, ray=True),)
    again = look(RAYLET, newer, actor, holding=(102,), serving=servers, after=before.ledger)
    assert again.owners == {102: Owner.ORPHAN}


# --- no orphans -----------------------------------------------------------------------------------------


def test_an_engine_of_somebodys_script() -> None:
    """LLM() keeps its engine in a child; the script itself holds a context."""
    script = parent(100, argv=SCRIPT, name="rag.py")
    core = child(101, "VLLM::EngineCore", script)
    found = look(SHELL, script, core, child(102, "VLLM::Worker_TP0", core), holding=(100, 101, 102))
    assert set(found.owners.values()) == {Owner.NEIGHBOUR}
    assert "rag.py (pid 100)" in found.ownerships[101].reason


@pytest.mark.parametrize(
    ("name", "argv"),
    [
        ("triton_python_backend_stub", ("/opt/triton_python_backend_stub", "/m")),
        ("gunicorn: worke", ("gunicorn: worker [app:app]",)),
        ("celery", ("[celeryd: celery@node:ForkPoolWorker-1]",)),
        ("rag-server", ("/opt/rag/rag-server",)),
    ],
)
def test_an_engine_of_a_program_that_does_not_look_like_python(name: str, argv: tuple[str, ...]) -> None:
    outer = process(99, "main", container=ID, argv=("/opt/main",))
    program = parent(100, name=name, argv=argv, ppid=99, container=ID)
    core = child(101, "VLLM::EngineCore", program)
    found = look(INIT, SHELL, outer, program, core, holding=(101,))
    assert found.owners == {101: Owner.NEIGHBOUR}
    assert name in found.ownerships[101].reason


@pytest.mark.parametrize("name", ["sleep", "node", "my-init"])
def test_what_a_container_runs_first_takes_over_its_orphans(name: str) -> None:
    first = parent(100, name=name, argv=(f"/bin/{name}",), ppid=INIT.pid, container=ID)
    core = child(101, "VLLM::EngineCore", first)
    assert look(INIT, SHELL, first, core, holding=(101,)).owners == {101: Owner.ORPHAN}


def test_a_server_that_is_not_to_be_watched() -> None:
    found = look(SHELL, SERVER, CORE, WORKER, holding=(100, 101, 102))
    assert set(found.owners.values()) == {Owner.NEIGHBOUR}


@pytest.mark.parametrize(
    "argv", [("vllm", "preload", "--model", "m"), (*SERVE[:2], "preload", "--model", "m")]
)
def test_weights_that_servers_share(argv: tuple[str, ...]) -> None:
    holder = parent(100, argv=argv)
    found = look(SHELL, holder, spawned(101, holder), holding=(100, 101))
    assert set(found.owners.values()) == {Owner.NEIGHBOUR}
    alone = look(SHELL, left(spawned(101, holder)), holding=(101,))
    assert alone.owners == {101: Owner.ORPHAN}


@pytest.mark.parametrize("where", [{"container": ID}, {"unit": "pod 0b1c"}])
def test_a_worker_in_the_container_or_pod_of_a_live_server(where: dict[str, Any]) -> None:
    server = parent(100, session=100, **where)
    worker = replace(left(child(102, "VLLM::Worker_TP0", server)), session=900, start_time=NOW - 3500)
    found = look(INIT, server, worker, holding=(102,), serving=(server,))
    assert found.ownerships[102].server == "llama"


def test_what_an_earlier_server_left_in_the_same_container_is_an_orphan() -> None:
    server = replace(parent(100, session=100, container=ID), start_time=NOW - 60)
    worker = replace(left(child(102, "VLLM::Worker", server)), session=900, start_time=NOW - 3500)
    assert look(INIT, server, worker, holding=(102,), serving=(server,)).owners == {102: Owner.ORPHAN}


def test_two_servers_in_one_container() -> None:
    first, second = parent(100, session=100, container=ID), parent(200, session=200, container=ID)
    worker = replace(left(child(102, "VLLM::Worker", first)), session=900)
    servers = (first, serves(second, name="other", port=8001))
    found = look(INIT, first, second, worker, holding=(102,), serving=servers)
    assert found.owners == {102: Owner.NEIGHBOUR}


def test_a_service_unit_is_no_container() -> None:
    """A unit restarts in place, and the orphans of the one before stay in it."""
    server = parent(100, unit="vllm.service")
    worker = left(child(102, "VLLM::Worker", server))
    assert look(INIT, server, worker, holding=(102,), serving=(server,)).owners == {102: Owner.ORPHAN}


def test_a_worker_whose_engine_died_first_still_belongs_to_its_server() -> None:
    before = look(SHELL, SERVER, CORE, WORKER, holding=(102,), serving=(SERVER,))
    after = look(SHELL, SERVER, left(WORKER), holding=(102,), serving=(SERVER,), after=before.ledger)
    assert after.ownerships[102].server == "llama"


def test_a_server_keeps_its_workers_when_its_name_changes() -> None:
    """A second server of the same model makes both names longer."""
    before = look(SHELL, SERVER, CORE, WORKER, holding=(102,), serving=(SERVER,))
    second = parent(200)
    servers = (SERVER, serves(second, port=8001))
    after = look(SHELL, SERVER, second, left(WORKER), holding=(102,), serving=servers, after=before.ledger)
    assert after.ownerships[102].server == "llama:8000"


def test_a_sleeping_servers_workers_are_its() -> None:
    page = vllm_page(sleep_state="weights_offloaded")
    found = look(SHELL, SERVER, CORE, WORKER, holding=(101, 102), serving=(serves(SERVER, page=page),))
    assert set(found.owners.values()) == {Owner.SERVER}


def test_a_parent_outside_of_this_pid_namespace() -> None:
    core = replace(CORE, ppid=0)
    assert look(core, holding=(101,)).owners == {101: Owner.NEIGHBOUR}


def test_other_users_processes_may_be_hidden() -> None:
    assert look(CORE, holding=(101,), hidden=True).owners == {101: Owner.NEIGHBOUR}
    assert look(CORE, holding=(101,)).owners == {101: Owner.ORPHAN}


def test_a_command_line_that_cannot_be_read_proves_nothing() -> None:
    unreadable = process(100, "launcher", ppid=SHELL.pid, session=SHELL.pid)
    assert look(SHELL, unreadable, CORE, holding=(101,)).owners == {101: Owner.NEIGHBOUR}


# --- rules ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule",
    [
        Rule(program="train*.py"),
        Rule(user="dana"),
        Rule(workload="slurm job 4?"),
        Rule(container="3f3f*"),
        Rule(program="train.py", user="d*", workload="slurm*", container="*"),
    ],
)
def test_rules_by_every_field(rule: Rule) -> None:
    one = process(5, "train.py", user="dana", unit="slurm job 42", container=ID, argv=("python3", "train.py"))
    other = process(6, "fit.py", user="eve", unit="slurm job 50", container=OTHER_ID)
    for holders, owner in (
        (Holders(allowed=(rule,)), Owner.ALLOWED),
        (Holders(neighbours=(rule,)), Owner.NEIGHBOUR),
    ):
        found = look(one, other, holding=(5, 6), config=Config(holders=holders))
        assert found.owners == {5: owner, 6: Owner.FOREIGN}


def test_a_rule_beats_what_kvwatch_thinks_but_not_what_it_knows() -> None:
    config = Config(holders=Holders(allowed=(Rule(user="vllm"),)))
    found = look(SHELL, SERVER, CORE, holding=(101,), serving=(SERVER,), config=config)
    assert found.owners == {101: Owner.SERVER}
    assert look(INIT, left(CORE), holding=(101,), config=config).owners == {101: Owner.ALLOWED}


# --- servers of every shape -----------------------------------------------------------------------------


def titled(*names: str, under: Process, first: int = 110) -> tuple[Process, ...]:
    return tuple(child(first + number, name, under) for number, name in enumerate(names))


RANKS = ("VLLM::Worker_PP0_TP0", "VLLM::Worker_PP0_TP1", "VLLM::Worker_PP1_TP0", "VLLM::Worker_PP1_TP1")
DATA_PARALLEL = (
    "VLLM::DPCoordinator",
    "VLLM::EngineCore_DP0",
    "VLLM::EngineCore_DP1",
    "VLLM::APIServer_0",
    "VLLM::APIServer_1",
)
SHAPES = {
    "one engine": (CORE,),
    "tp 2, pp 2": (CORE, *titled(*RANKS, under=CORE)),
    "dp 2 with two api servers": titled(*DATA_PARALLEL, under=SERVER),
    "workers without titles": (CORE, spawned(110, CORE), spawned(111, CORE)),
    "old release, spawned": (spawned(110, SERVER),),
    "own prefix": titled("chat::EngineCore", under=SERVER),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_process_of_a_server_is_its_and_an_orphan_after_it(shape: str) -> None:
    tree = SHAPES[shape]
    pids = [one.pid for one in tree]
    found = look(SHELL, SERVER, *tree, holding=(100, *pids), serving=(SERVER,))
    assert {one.server for one in found.ownerships.values()} == {"llama"}
    assert found.held() == {(Owner.SERVER, "llama"): (1 + len(pids)) * GIB, (Owner.UNATTRIBUTED, ""): 0}
    survivors = [left(one) if one.ppid == SERVER.pid else one for one in tree]
    remembered = look(INIT, SHELL, *survivors, holding=pids, after=found.ledger)
    assert set(remembered.owners.values()) == {Owner.ORPHAN}
    found_later = look(INIT, SHELL, *survivors, holding=pids)
    assert set(found_later.owners.values()) == {Owner.ORPHAN}


def test_several_servers_on_one_card_and_several_per_node() -> None:
    second = parent(200, container=ID, session=200)
    third = parent(300, unit="pod 0b1c", session=300)
    cores = [child(one.pid + 1, "VLLM::EngineCore", one) for one in (SERVER, second, third)]
    found = look(
        SHELL,
        SERVER,
        second,
        third,
        *cores,
        holding={101: 3 * GIB, 201: 2 * GIB, 301: GIB},
        serving=(SERVER, serves(second, port=8001), serves(third, name="other", port=8000)),
    )
    assert found.held() == {
        (Owner.SERVER, "llama:8000"): 3 * GIB,
        (Owner.SERVER, "llama:8001"): 2 * GIB,
        (Owner.SERVER, "other"): GIB,
        (Owner.UNATTRIBUTED, ""): 0,
    }


def test_sibling_ranks_contexts_on_the_first_card_are_the_servers() -> None:
    ranks = titled(*(f"VLLM::Worker_TP{rank}" for rank in range(8)), under=CORE)
    contexts = {rank.pid: GIB for rank in ranks[1:]}
    cards = tuple(
        gpu({ranks[index].pid: 60 * GIB, **(contexts if index == 0 else {})}, index=str(index))
        for index in range(8)
    )
    one = serves(SERVER, flags=Flags(tensor_parallel_size=8))
    members = frozenset({100, 101, *(rank.pid for rank in ranks)})
    seen = observation(cards, (SHELL, SERVER, CORE, *ranks), (replace(one, members=members),))
    snapshot = join(seen, Config())
    assert snapshot.servers[0].gpus == tuple(map(str, range(8)))
    assert snapshot.gpus[0].held() == {(Owner.SERVER, "llama"): 67 * GIB, (Owner.UNATTRIBUTED, ""): 0}
