"""Each situation's pages against the recorded ones, and the rules that every page keeps."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fakenvml import Scenario, environment
from tests.golden.situations import SITUATIONS
from tests.support import ROOT

pytestmark = pytest.mark.xdist_group("golden")

PAGES = Path(__file__).with_name("pages")
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
VOLATILE = re.compile(
    r'^(\w+_duration_seconds(?:\{.*\})?) .*|(?<=[{,])(version|python)="[^"]*"(?=.*simulated)', re.M
)


def normalised(page: str) -> str:
    """The page without what differs from run to run: durations and the versions of kvwatch and Python."""
    return VOLATILE.sub(lambda found: f"{found[1]} …" if found[1] else f'{found[2]}="…"', page)


def without_comments(page: str) -> str:
    return re.sub(r"(?m)^#.*\n", "", page)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Sequence[str]]:
    """The normalised pages of all situations; one process per kind of library, all at the same time."""
    folder = tmp_path_factory.mktemp("golden")

    def batch(name: str) -> tuple[str, str]:
        situation = SITUATIONS[name]
        return str(situation.driver), name if situation.alone else ""

    running = [
        start(list(names), folder / f"scenario-{number}")
        for number, (_, names) in enumerate(groupby(sorted(SITUATIONS, key=batch), key=batch))
    ]
    found: dict[str, Sequence[str]] = {}
    for process in running:
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        found.update(json.loads(output))
    return {name: [normalised(page) for page in played] for name, played in found.items()}


def start(names: Sequence[str], scenario: Path) -> subprocess.Popen[str]:
    Scenario().write(scenario)
    driver = SITUATIONS[names[0]].driver
    env = environment(scenario, driver) if driver else without_library(scenario)
    return subprocess.Popen(
        [sys.executable, "-m", "tests.golden.play", *names],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def without_library(scenario: Path) -> dict[str, str]:
    """A machine where the library cannot be loaded, even if this one has it: the first one found is empty."""
    folder = scenario.with_name("no-library")
    folder.mkdir()
    (folder / "libnvidia-ml.so.1").touch()
    return {**os.environ, "LD_LIBRARY_PATH": str(folder), "KVWATCH_FAKENVML": str(scenario)}


def samples(page: str) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page.replace(" …\n", " 0\n"))
        for sample in family.samples
    }


def values(page: str, name: str, **labels: str) -> list[float]:
    return [
        value
        for (sample, own), value in samples(page).items()
        if sample == name and labels.items() <= dict(own).items()
    ]


# --- byte for byte --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SITUATIONS)
def test_pages_are_as_recorded(
    pages: Mapping[str, Sequence[str]], name: str, pytestconfig: pytest.Config
) -> None:
    situation = SITUATIONS[name]
    told = [page if name == "plain" else without_comments(page) for page in pages[name]]
    text = "\n".join(
        f"# cycle {number}: {cycle.title}\n{page}"
        for number, (cycle, page) in enumerate(zip(situation.cycles, told, strict=True), 1)
    )
    path = PAGES / f"{name}.prom"
    if pytestconfig.getoption("--update-golden"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_no_page_is_left_over() -> None:
    assert {path.stem for path in PAGES.iterdir()} == set(SITUATIONS)


# --- what holds for every page --------------------------------------------------------------------------


def every_page(pages: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    return [
        (f"{name}, cycle {n}", page) for name, played in pages.items() for n, page in enumerate(played, 1)
    ]


def test_each_byte_in_use_has_one_owner(pages: Mapping[str, Sequence[str]]) -> None:
    checked = 0
    for where, page in every_page(pages):
        for (name, labels), used in samples(page).items():
            if name != "kvwatch_gpu_memory_used_bytes":
                continue
            gpu = {"gpu": dict(labels)["gpu"]}
            total = values(page, "kvwatch_gpu_memory_total_bytes", **gpu)
            free = values(page, "kvwatch_gpu_memory_free_bytes", **gpu)
            reserved = values(page, "kvwatch_gpu_memory_reserved_bytes", **gpu)
            assert used + sum(free) + sum(reserved) == sum(total), (where, gpu)
            if values(page, "kvwatch_gpu_memory_held_bytes", owner="unattributed", **gpu):
                assert sum(values(page, "kvwatch_gpu_memory_held_bytes", **gpu)) == used, (where, gpu)
                checked += 1
    assert checked > 30


def test_a_page_has_no_nan_and_the_server_is_on_all_of_them(pages: Mapping[str, Sequence[str]]) -> None:
    """NVML costs its own families and what is judged by them, never the servers'."""
    for where, page in every_page(pages):
        assert "nan" not in page.lower().split(), where
        assert values(page, "kvwatch_up") == [1], where
        if SITUATIONS[where.partition(",")[0]].servers:
            assert values(page, "kvwatch_server_up", server="llama") == [1], where
            assert values(page, "kvwatch_kv_cache_blocks", server="llama") == [26000], where
            assert values(page, "kvwatch_kv_headroom_tokens", server="llama"), where


@pytest.mark.parametrize("name", SITUATIONS)
def test_every_failure_is_counted(pages: Mapping[str, Sequence[str]], name: str) -> None:
    found = {
        (dict(labels)["source"], dict(labels)["reason"]): value
        for (sample, labels), value in samples(pages[name][-1]).items()
        if sample == "kvwatch_errors_total"
    }
    assert found == SITUATIONS[name].errors


def test_what_was_not_read_is_absent(pages: Mapping[str, Sequence[str]]) -> None:
    blind = [
        pages["init_driver_mismatch"][0],
        pages["init_driver_not_loaded"][0],
        pages["init_unknown"][0],
        *pages["no_library"],
        *pages["hanging_call"][1:],
    ]
    for page in blind:
        assert not re.search(r"(?m)^kvwatch_(gpu|holder|process_visibility|restart|server_non_kv)", page)
        assert values(page, "kvwatch_source_up", source="nvml") == [0]
        assert values(page, "kvwatch_forecast_unknown", server="llama", forecast="restart") == [1]


@pytest.mark.parametrize(
    "name", ["init_driver_mismatch", "init_driver_not_loaded", "init_unknown", "gpu_lost"]
)
def test_after_recovery_the_page_is_as_if_nothing_had_been(
    pages: Mapping[str, Sequence[str]], name: str
) -> None:
    own = re.compile(r"kvwatch_(errors|cycles)_total.*|.*_timestamp_seconds.*")
    recovered = [line for line in pages[name][-1].splitlines() if not own.match(line) and line[0] != "#"]
    plain = [line for line in pages["plain"][0].splitlines() if not own.match(line) and line[0] != "#"]
    assert recovered == plain


def test_a_lost_gpu_costs_nothing_but_itself(pages: Mapping[str, Sequence[str]]) -> None:
    page = pages["gpu_lost"][1]
    assert values(page, "kvwatch_gpu_info", gpu="0") == [1]
    assert not values(page, "kvwatch_gpu_memory_used_bytes", gpu="1")
    assert not values(page, "kvwatch_gpu_memory_held_bytes", gpu="1")
    assert values(page, "kvwatch_restart_feasible", server="llama") == [1]


def test_sums_with_an_unknown_part_are_absent(pages: Mapping[str, Sequence[str]]) -> None:
    wsl = pages["wsl"][0]
    assert not values(wsl, "kvwatch_gpu_memory_held_bytes", gpu="0")
    assert not values(wsl, "kvwatch_gpu_memory_held_bytes", owner="foreign")
    assert not values(wsl, "kvwatch_holder_memory_bytes", pid="900")
    assert values(wsl, "kvwatch_gpu_memory_held_bytes", owner="orphan") == [10 << 30]
    known, unknown = pages["five_hundred_processes"]
    assert len(values(known, "kvwatch_holder_memory_bytes")) == 21
    assert sum(values(known, "kvwatch_holder_memory_bytes")) == sum(
        values(known, "kvwatch_gpu_memory_held_bytes", owner="foreign")
    )
    assert not values(unknown, "kvwatch_gpu_memory_held_bytes", owner="foreign")
    assert len(values(unknown, "kvwatch_holder_memory_bytes")) == 20


def test_pids_that_cannot_be_resolved_are_said_to_be_so(pages: Mapping[str, Sequence[str]]) -> None:
    page = pages["foreign_pid_namespace"][0]
    assert values(page, "kvwatch_process_visibility") == [0, 0]
    assert values(page, "kvwatch_gpu_memory_held_bytes", owner="unattributed", gpu="0") == [73 << 30]
    assert not values(page, "kvwatch_gpu_memory_held_bytes", owner="foreign")


def test_mig_devices_stand_for_their_gpu(pages: Mapping[str, Sequence[str]]) -> None:
    indexes = [
        sorted(dict(labels)["gpu"] for name, labels in samples(page) if name == "kvwatch_gpu_info")
        for page in pages["mig_switched"]
    ]
    assert indexes == [["0", "1"], ["0", "1:0", "1:2"], ["0", "1"], ["0", "1"]]
