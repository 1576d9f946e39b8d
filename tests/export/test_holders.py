from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from kvwatch.config import GIB, Config
from kvwatch.export.cycle import Cycle, SelfState
from kvwatch.export.holders import holders_json, holders_text, stop_command
from kvwatch.export.text import COLUMNS
from kvwatch.forecast.bundle import forecast
from kvwatch.forecast.gain import gains
from kvwatch.node import Holder, join
from kvwatch.observe.cycle import Observation
from kvwatch.observe.records import Failure, Gpu, Process
from kvwatch.ownership import Owner, Ownership
from tests.nodes import NOW, gpu, observation, process
from tests.trees import INIT, SHELL, child, left, parent, serves

ID = "3f" * 32
SERVER = parent(100)
CORE = child(101, "VLLM::EngineCore", SERVER)
LEFTOVER = left(child(910, "VLLM::EngineCore", parent(909)), to=SHELL)
NOTEBOOK = process(900, "ipykernel_launcher", user="dana", unit="jupyter.service", cgroup="/system.slice/x")
SMALL = process(901, "gnome-shell", user="gdm")


def node(cards: tuple[Gpu, ...], *extra: Process, hidden: int = 0) -> Observation:
    server = replace(serves(SERVER, name="chat"), members=frozenset({100, 101}))
    return observation(cards, (INIT, SHELL, SERVER, CORE, *extra), (server,))


def cycle(seen: Observation) -> Cycle:
    snapshot = join(seen, Config())
    return Cycle(snapshot, forecast(snapshot, Config()), SelfState(1, 0.1))


CROWDED = node((gpu({101: 70 * GIB, 910: 7 * GIB, 901: GIB // 8}, other=4096),), LEFTOVER, SMALL)


READ = """\
GPU  PID  OWNER             HELD  AGE  USER  PROGRAM           WORKLOAD
0    101  chat          70.0 GiB  1 h  vllm  VLLM::EngineCore
0    910  orphan        7.00 GiB  1 h  vllm  VLLM::EngineCore
0    901  foreign        128 MiB  1 h  gdm   gnome-shell
0         unattributed  4.00 KiB

orphan 910 VLLM::EngineCore holds 7.00 GiB on GPU 0: the process that started it
  is gone, now under bash (pid 70)
  restart of chat: infeasible -> feasible (longest 131072)
  to stop it: kill 910

foreign 901 gnome-shell holds 128 MiB on GPU 0
  restart of chat: infeasible, 1.28 GiB missing -> 1.15 GiB missing
  to stop it: kill 901"""


def test_what_an_operator_reads() -> None:
    assert holders_text(cycle(CROWDED)) == READ


def test_lines_fit_the_terminal_whatever_the_names() -> None:
    long = process(
        4_000_000,
        "an-unusually-long-program-name-of-64-characters" + "x" * 17,
        user="firstname.lastname",
        unit="pod 0b1c2d3e-1111-2222-3333-444455556666",
        container=ID,
    )
    cards = tuple(gpu({101: GIB, 4_000_000: 100 * GIB // 3}, index=f"{index}:1") for index in range(2))
    lines = holders_text(cycle(node(cards, long))).splitlines()
    assert max(map(len, lines)) <= COLUMNS


def test_a_process_on_several_cards_is_explained_once() -> None:
    cards = tuple(gpu({910: (index + 1) * GIB}, index=str(index)) for index in range(2))
    text = holders_text(cycle(node(cards, LEFTOVER)))
    assert text.count("kill 910") == 1
    assert "holds 1.00 GiB on GPU 0, 2.00 GiB on GPU 1" in " ".join(text.split())


def test_what_cannot_be_seen_is_said() -> None:
    unlisted = replace(gpu({}, index="1"), processes=None)
    text = " ".join(holders_text(cycle(node((gpu({101: GIB, 5: GIB}), unlisted)))).split())
    assert "GPU 0: 50% of its processes cannot be seen" in text
    assert "GPU 1: NVML does not list its processes" in text
    lost = observation(Failure("nvml", "driver_mismatch", "reboot"))
    down = replace(lost, sources=(replace(lost.sources[0], failure=Failure("nvml", "x", "reboot")),))
    assert holders_text(cycle(down)) == "no GPU was seen\n\nnvml: reboot"


# --- what a restart would gain --------------------------------------------------------------------------


def test_an_orphan_whose_end_makes_a_restart_feasible() -> None:
    made = cycle(CROWDED)
    [gain] = gains(910, made.snapshot, made.forecasts.restart)
    assert gain.turns
    assert gains(101, made.snapshot, made.forecasts.restart) == ()
    [small] = gains(901, made.snapshot, made.forecasts.restart)
    assert not small.turns


def test_a_server_on_other_cards_gains_nothing() -> None:
    made = cycle(node((gpu({101: 70 * GIB}), gpu({910: 7 * GIB}, index="1")), LEFTOVER))
    assert gains(910, made.snapshot, made.forecasts.restart) == ()


def test_an_unknown_verdict_stays_unknown() -> None:
    server = replace(
        serves(SERVER, name="chat", page=Failure("vllm", "timeout", "x")), members=frozenset({100, 101})
    )
    made = cycle(observation((gpu({101: GIB, 910: GIB}),), (SHELL, SERVER, CORE, LEFTOVER), (server,)))
    [gain] = gains(910, made.snapshot, made.forecasts.restart)
    assert (gain.before, gain.after, gain.unknown) == (None, None, "server_down")
    assert "restart of chat: unknown (server_down)" in holders_text(made)


# --- what to type ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "command"),
    [
        ({}, "kill 5"),
        (
            {"unit": "ollama.service", "cgroup": "/system.slice/ollama.service"},
            "systemctl stop ollama.service",
        ),
        ({"unit": "app.service", "cgroup": "/user.slice/user@1000.service/app.service"}, "kill 5"),
        ({"unit": "session-3.scope", "cgroup": "/user.slice/session-3.scope"}, "kill 5"),
        ({"container": ID, "cgroup": f"/system.slice/docker-{ID}.scope"}, f"docker stop {ID[:12]}"),
        ({"container": ID, "cgroup": f"/machine.slice/libpod-{ID}.scope"}, f"podman stop {ID[:12]}"),
        (
            {"container": ID, "unit": "pod 0b1c", "cgroup": f"/kubepods.slice/cri-containerd-{ID}.scope"},
            f"crictl stop {ID[:12]}",
        ),
        ({"unit": "slurm job 42", "cgroup": "/slurm/uid_1/job_42/step_0"}, "scancel 42"),
    ],
)
def test_commands(facts: Mapping[str, Any], command: str) -> None:
    one = process(5, "x", **facts)
    foreign = Holder("0", 5, one, GIB, frozenset(), Ownership(Owner.FOREIGN))
    assert stop_command(foreign) == command
    assert stop_command(replace(foreign, ownership=Ownership(Owner.ORPHAN))) == "kill 5"
    for owner in set(Owner) - {Owner.ORPHAN, Owner.FOREIGN}:
        assert stop_command(replace(foreign, ownership=Ownership(owner))) is None


# --- JSON -----------------------------------------------------------------------------------------------


def test_the_document() -> None:
    made = cycle(CROWDED)
    document = json.loads(holders_json(made))
    assert document["time"] == NOW
    [card] = document["gpus"]
    assert card["unattributed_bytes"] == 4096
    by_pid = {holder["pid"]: holder for holder in card["holders"]}
    assert by_pid[101]["server"] == "chat"
    assert (by_pid[101]["restarts"], by_pid[101]["command"]) == ([], None)
    orphan = by_pid[910]
    assert (orphan["owner"], orphan["command"], orphan["bytes"]) == ("orphan", "kill 910", 7 * GIB)
    [restart] = orphan["restarts"]
    assert (restart["server"], restart["feasible"], restart["feasible_without"]) == ("chat", False, True)
    assert restart["max_model_len_without"] > 0
