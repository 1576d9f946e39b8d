from __future__ import annotations

import re
from dataclasses import replace
from fnmatch import fnmatch

import pytest

from kvwatch.config import Config
from kvwatch.doctor import Check, Seen, State, examine, exit_code
from kvwatch.export.catalogue import FAMILIES
from kvwatch.observe.cycle import Observation, ObservedServer
from kvwatch.observe.host import DAC_READ_SEARCH, SYS_PTRACE, Access, Host
from kvwatch.observe.records import Failure, Gpu, ModelConfig, NvmlRecord, ProcessRecord
from tests.nodes import LLAMA_8B, NOW, PARENT, gpu, process, server, vllm_page

HOST = Host(
    user="kvwatch",
    capabilities=frozenset({DAC_READ_SEARCH, SYS_PTRACE}),
    open_files=4096,
    clock_synchronized=True,
    own_pid_namespace=False,
)
SERVER = ObservedServer(
    server().launch, None, frozenset({PARENT}), vllm_page(), ModelConfig("/m/config.json", LLAMA_8B, 1)
)
SEEN_PROCESSES = ProcessRecord({PARENT: process(PARENT, "vllm")})
WELL = Observation(NOW, NvmlRecord((gpu({PARENT: 1 << 30}),), "570.86.15"), SEEN_PROCESSES, (SERVER,))
NO_NVML = Failure("nvml", "library_not_found", "initialisation failed")
HUNG = Failure("processes", "timeout", "no answer within 5 s")


def checks(
    observation: Observation = WELL, host: Host = HOST, access: Access | None = None, *setup: Check
) -> tuple[Check, ...]:
    return examine(Seen(Config(), host, observation, {PARENT: access or Access(None, None)}, setup))


def bad(found: tuple[Check, ...]) -> dict[str, Check]:
    return {check.subject: check for check in found if check.state not in (State.OK, State.NOTE)}


def with_server(**changes: object) -> Observation:
    return replace(WELL, servers=(replace(SERVER, **changes),))  # type: ignore[arg-type]


def with_gpus(*gpus: Gpu) -> Observation:
    return replace(WELL, nvml=NvmlRecord(gpus))


NAME = SERVER.launch.base_url
HIDDEN = replace(SEEN_PROCESSES, failures=(Failure("processes", "hidden", "hidepid"),))
LOST = replace(gpu({}), failures=(Failure("nvml", "gpu_lost", "lost"),))
REFUSED = Failure("vllm", "connection_refused", "nobody listens")
NO_KEY = replace(vllm_page(), failures=(Failure("vllm", "http_401", "/v1/models: 401"),))
AMISS: dict[str, tuple[str, tuple[Check, ...]]] = {
    "nvml": ("nvml", checks(replace(WELL, nvml=NO_NVML))),
    "nvml call": ("GPU 0", checks(with_gpus(LOST))),
    "processes": ("processes", checks(replace(WELL, processes=HUNG))),
    "hidepid": ("hidden processes", checks(replace(WELL, processes=HIDDEN))),
    "PIDs": ("PID namespace", checks(with_gpus(gpu({4711: 1 << 30})))),
    "container": ("PID namespace", checks(with_gpus(gpu({})), replace(HOST, own_pid_namespace=True))),
    "clock": ("clock", checks(host=replace(HOST, clock_synchronized=False))),
    "descriptors": ("descriptors", checks(host=replace(HOST, open_files=256))),
    "page": (f"vllm {NAME}", checks(with_server(vllm=REFUSED))),
    "key": (f"vllm {NAME}", checks(with_server(vllm=NO_KEY))),
    "model": (f"model {NAME}", checks(with_server(model=Failure("models", "eacces", "Permission denied")))),
    "launch": (f"launch file {NAME}", checks(with_server(next_start=Failure("launch", "not_text", "x.sh")))),
    "no process": (f"process {NAME}", checks(with_server(launch=replace(SERVER.launch, pid=None)))),
    "environment": (f"environment {NAME}", checks(access=Access("eacces", None))),
    "files": (f"files {NAME}", checks(access=Access(None, "eacces"))),
}


def test_a_node_with_everything_is_well() -> None:
    found = checks()
    assert not bad(found)
    assert exit_code(found) == 0
    assert {check.subject for check in found} >= {"user", "clock", "nvml", "processes", f"vllm {NAME}"}


@pytest.mark.parametrize("case", AMISS)
def test_what_is_missing_is_named_with_its_price_and_its_remedy(case: str) -> None:
    subject, found = AMISS[case]
    assert set(bad(found)) == {subject}
    check = bad(found)[subject]
    assert check.costs
    assert check.grant
    assert exit_code(found) == 1


@pytest.mark.parametrize("case", AMISS)
def test_the_families_that_a_price_names_exist(case: str) -> None:
    names = {family.name for family in FAMILIES}
    subject, found = AMISS[case]
    for word in re.findall(r"kvwatch_[a-z_*]+", bad(found)[subject].costs):
        assert any(fnmatch(name, word) for name in names), word


def test_with_neither_gpus_nor_processes_it_cannot_work() -> None:
    assert exit_code(checks(replace(WELL, nvml=NO_NVML, processes=HUNG, servers=()))) == 2


def test_what_keeps_the_daemon_from_starting_is_fatal() -> None:
    taken = Check("address", State.FATAL, "in use", "it does not start", "free it")
    assert exit_code(checks(WELL, HOST, None, taken)) == 2


def test_without_an_observation_the_setup_stands_alone() -> None:
    broken = Check("configuration", State.FATAL, "k.yaml:1: no", "it does not start", "correct it")
    found = examine(Seen(Config(), HOST, None, setup=(broken,)))
    assert exit_code(found) == 2
    assert "nvml" not in {check.subject for check in found}


@pytest.mark.parametrize("host", [replace(HOST, user="root"), replace(HOST, clock_synchronized=None)])
def test_root_and_a_silent_clock_are_no_fault(host: Host) -> None:
    assert exit_code(checks(host=host)) == 0


def test_a_plain_user_without_servers_is_told_what_it_would_not_see() -> None:
    found = checks(replace(WELL, servers=()), replace(HOST, capabilities=frozenset()))
    assert exit_code(found) == 0
    (note,) = [check for check in found if check.subject == "other users"]
    assert "CAP_SYS_PTRACE" in note.grant


def test_unified_memory_is_no_fault() -> None:
    shared = replace(gpu({}), failures=(Failure("nvml", "unified_memory", "MemTotal stands for it"),))
    assert exit_code(checks(replace(WELL, nvml=NvmlRecord((shared,))))) == 0
