"""Memory that comes back slowly, and what is known of a process once it is gone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwatch.config import GIB, Config, Holders
from kvwatch.forecast.restart import forecast_restart
from kvwatch.ledger import EMPTY
from kvwatch.node import join
from kvwatch.observe.records import Failure, Process
from kvwatch.ownership import Owner
from tests.nodes import NOW, gpu, observation, process
from tests.trees import INIT, SHELL, Look, child, left, look, parent, serves

SERVER = parent(100)
CORE = child(101, "VLLM::EngineCore", SERVER)
GRACE = Holders().release_grace
NOBODY = (Owner.UNATTRIBUTED, "")
RELEASING = (Owner.RELEASING, "")


def serving(other: int = 0) -> Look:
    return look(SHELL, SERVER, CORE, holding={101: 8 * GIB}, serving=(SERVER,), other=other)


# --- still in NVML's list -------------------------------------------------------------------------------


def test_a_listed_pid_whose_process_is_gone_releases_until_the_grace_ends() -> None:
    one = serving()
    for seconds in (15, GRACE):
        one_later = look(SHELL, holding={101: 8 * GIB}, after=one.ledger, at=NOW + seconds)
        assert one_later.held() == {RELEASING: 8 * GIB, NOBODY: 0}
        assert one_later.ownerships[101].origin == "llama"
        assert one_later.snapshot.gpus[0].visibility == 1
    late = look(SHELL, holding={101: 8 * GIB}, after=one_later.ledger, at=NOW + GRACE + 1)
    assert late.held() == {NOBODY: 8 * GIB}
    assert late.snapshot.gpus[0].visibility == 0
    assert late.ledger.holders == {}


def test_the_grace_is_configured() -> None:
    config = Config(holders=Holders(release_grace=300.0))
    one = look(CORE, holding=(101,), config=config)
    later = look(SHELL, holding=(101,), after=one.ledger, at=NOW + 299, config=config)
    assert later.owners == {101: Owner.RELEASING}


@pytest.mark.parametrize("state", ["Z", "X"])
def test_a_dead_process_releases_from_when_it_was_first_seen_dead(state: str) -> None:
    """Its name is cut and its command line empty by then; who it was is known from before."""
    dead = replace(CORE, state=state, argv=(), name="VLLM::EngineCor")
    found = look(SHELL, dead, holding=(101,))
    assert found.owners == {101: Owner.RELEASING}
    found = look(SHELL, dead, holding=(101,), after=found.ledger, at=NOW + GRACE)
    assert found.owners == {101: Owner.RELEASING}
    found = look(SHELL, dead, holding=(101,), after=found.ledger, at=NOW + GRACE + 1)
    assert found.owners == {101: Owner.UNATTRIBUTED}
    found = look(SHELL, dead, holding=(101,), after=found.ledger, at=NOW + 10 * GRACE)
    assert found.owners == {101: Owner.UNATTRIBUTED}, "it must not begin anew"
    known = look(SHELL, SERVER, dead, holding=(101,), serving=(SERVER,), after=serving().ledger)
    assert known.ownerships[101].origin == "llama"


def test_a_pid_that_was_never_seen_is_nobodys() -> None:
    """That is how a host's pids look from a container."""
    assert look(SHELL, holding=(101,)).owners == {101: Owner.UNATTRIBUTED}


def test_a_pid_that_is_used_again_is_another_process() -> None:
    other = replace(process(101, "train.py", user="dana"), start_time=NOW + 5)
    found = look(SHELL, other, holding=(101,), after=serving().ledger, at=NOW + 15)
    assert found.owners == {101: Owner.FOREIGN}
    gone = look(SHELL, holding=(101,), after=found.ledger, at=NOW + 30)
    assert (gone.owners, gone.ownerships[101].origin) == ({101: Owner.RELEASING}, "")


def test_without_a_process_list_nobody_is_said_to_be_gone() -> None:
    one = serving()
    blind = join(
        observation((gpu({101: 8 * GIB}),), Failure("processes", "timeout", "x")), Config(), one.ledger
    )
    assert blind.gpus[0].held() == {NOBODY: 8 * GIB}
    core = left(CORE, to=SHELL)
    after = look(SHELL, core, holding=(101,), after=blind.ledger, at=NOW + 10 * GRACE)
    assert after.ownerships[101].origin == "llama", "what was known outlives the gap"


# --- no longer in NVML's list ---------------------------------------------------------------------------


def test_memory_that_nobody_holds_any_more_releases_until_the_grace_ends() -> None:
    one = serving(other=GIB)
    assert one.held()[NOBODY] == GIB
    half = look(SHELL, holding={}, other=5 * GIB, after=one.ledger, at=NOW + 15)
    assert half.held() == {RELEASING: 4 * GIB, NOBODY: GIB}
    same = look(SHELL, holding={}, other=5 * GIB, after=half.ledger, at=NOW + GRACE)
    assert same.held() == {RELEASING: 4 * GIB, NOBODY: GIB}
    late = look(SHELL, holding={}, other=5 * GIB, after=same.ledger, at=NOW + GRACE + 1)
    assert late.held() == {NOBODY: 5 * GIB}


def test_no_more_releases_than_was_held() -> None:
    found = look(SHELL, holding={}, other=20 * GIB, after=serving().ledger, at=NOW + 15)
    assert found.held() == {RELEASING: 8 * GIB, NOBODY: 12 * GIB}


def test_memory_that_comes_back_at_once_leaves_nothing() -> None:
    found = look(SHELL, holding={}, after=serving(other=GIB).ledger, other=GIB, at=NOW + 15)
    assert found.held() == {NOBODY: GIB}


def test_a_living_process_that_lets_go_of_its_memory_releases_nothing() -> None:
    idle = look(SHELL, SERVER, CORE, holding={}, serving=(SERVER,), other=3 * GIB, after=serving().ledger)
    assert idle.held() == {NOBODY: 3 * GIB}
    ended = look(SHELL, holding={}, other=4 * GIB, after=idle.ledger, at=NOW + 15)
    assert ended.held() == {NOBODY: 4 * GIB}, "it held nothing when it ended"


def test_cards_are_known_by_their_uuid() -> None:
    """When a card falls off the bus, those after it move up."""
    cards = (gpu({101: GIB}, index="0"), gpu({102: 2 * GIB}, index="1"))
    tree = (SHELL, SERVER, CORE, child(102, "VLLM::Worker", CORE))
    before = join(observation(cards, tree), Config())
    moved = replace(gpu({}, index="1", other=2 * GIB), index="0")
    after = join(observation((moved,), (SHELL,), time=NOW + 15), Config(), before.ledger)
    assert after.gpus[0].held() == {RELEASING: 2 * GIB, NOBODY: 0}


# --- the forecast ---------------------------------------------------------------------------------------


def test_a_restart_finds_what_is_being_released_and_says_so() -> None:
    new = replace(parent(200, session=200), start_time=NOW)
    core = replace(child(201, "VLLM::EngineCore", new), start_time=NOW)
    before = look(SHELL, SERVER, CORE, holding={101: 8 * GIB}, serving=(SERVER,))
    found = look(
        SHELL, new, core, holding={101: 8 * GIB, 201: 70 * GIB}, serving=(serves(new),), after=before.ledger
    )
    assert found.held() == {(Owner.SERVER, "llama"): 70 * GIB, RELEASING: 8 * GIB, NOBODY: 0}
    [server] = found.snapshot.servers
    forecast = forecast_restart(server, found.snapshot, Config())
    assert forecast.situation is not None
    [site] = forecast.situation.sites
    memory = found.snapshot.gpus[0].gpu.memory
    assert memory is not None
    assert site.free_next == memory.free + 78 * GIB
    assert any("8.00 GiB on GPU 0 counted as free" in text for text in forecast.situation.assumptions)
    assert forecast.feasible is True


# --- whatever happens -----------------------------------------------------------------------------------

EVENTS = st.lists(
    st.tuples(
        st.dictionaries(st.integers(1, 6), st.integers(0, 4), max_size=6),
        st.sets(st.integers(1, 6)),
        st.integers(0, 3),
    ),
    max_size=6,
)


@given(EVENTS)
def test_each_byte_has_one_owner_in_every_cycle_and_nothing_stale_survives(
    cycles: list[tuple[dict[int, int], set[int], int]],
) -> None:
    ledger = EMPTY
    for number, (held, running, other) in enumerate(cycles):
        tree: tuple[Process, ...] = tuple(
            process(pid, "VLLM::Worker" if pid % 2 else "python") for pid in running
        )
        holding = {pid: size * GIB for pid, size in held.items()}
        found = look(INIT, *tree, holding=holding, other=other * GIB, after=ledger, at=NOW + 40 * number)
        ledger = found.ledger
        memory = found.snapshot.gpus[0].gpu.memory
        assert memory is not None
        assert sum(found.held().values()) == memory.used
        assert all(entry.alive >= NOW + 40 * number - GRACE for entry in ledger.holders.values())
