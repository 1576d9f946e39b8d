"""Reports of starts that failed because of somebody else's memory: the verdict on a snapshot from before."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest

from kvwatch.blockmath.device import Device
from kvwatch.blockmath.flags import Flags
from kvwatch.blockmath.pool import plan_pool
from kvwatch.blockmath.releases import Release
from kvwatch.config import GIB, MIB, Config
from kvwatch.forecast.restart import RestartForecast, forecast_restart
from kvwatch.node import join
from kvwatch.observe.records import Gpu, GpuMemory, GpuProcess
from tests.nodes import PARENT, observation, process, server
from tests.support import ROOT, shared_dir

FOLDER = ROOT / "tests" / "vectors"
CASES: Mapping[str, Mapping[str, Any]] = {
    case["id"]: case
    for case in map(json.loads, (FOLDER / "public" / "co_tenant_cases.jsonl").read_text("utf-8").splitlines())
}
CAUSES = frozenset(case["root_cause"] for case in CASES.values())

REPLAYED: Mapping[str, tuple[str, str]] = {
    "c023": ("0.9.2", "Llama-3.1-8B"),
    "c024": ("0.11.0", "opt-125m"),
    "c026": ("0.11.0", "opt-125m"),
    "c069": ("0.6.4", "Qwen2.5-14B"),
    "c080": ("0.9.2", "Llama-3.1-8B"),
    "c189": ("0.19.0", "CodeLlama-34b"),
    "c190": ("0.19.0", "Llama-4-Scout"),
}
"""Release and shape of the model; where the report names none, one that words the failure like it, and the
smallest model: neither takes part in the check that failed."""

LEFT_OUT: Mapping[str, str] = {
    "c076": "two servers that start at once charge each other's loading to themselves: no state of the node",
    "c077": "as c076",
    "c079": "NVML tells no memory of a card that shares the host's, so there is no verdict",
    "c096": "what the desktop holds is told as 1 to 2 GiB, and no figure of the failure is logged",
    "c172": "nobody else's memory: the pool was estimated without what the sleep-mode allocator needs",
    "c237": "no figure of the card is told",
}

CHECKS = {"free_lt_desired": "free_memory", "no_available_memory_for_blocks": "kv_memory"}
"""The check behind each reported kind of failure."""

CONTEXT = 512 * MIB
"""What kvwatch takes the CUDA context of a start to be."""

RESERVED = 400 * MIB
CO_TENANT, WORKER = 900, PARENT + 1
RUNNING_LENGTH = 2048
HALF_DIGIT = 0.005
SPARE = 128 * MIB


@dataclass(frozen=True, slots=False)
class Replay:
    """One report as a node on which the server still runs, in what the co-tenant leaves of the cards."""

    case: Mapping[str, Any]
    version: str
    shape: str

    @property
    def flags(self) -> Flags:
        """Those of the start that failed."""
        given = self.case["flags"]
        return Flags(
            max_model_len=min(given.get("max_model_len") or RUNNING_LENGTH, self.derived),
            gpu_memory_utilization=given["gpu_memory_utilization"],
            tensor_parallel_size=given.get("tp"),
            enforce_eager=given.get("enforce_eager"),
        )

    @cached_property
    def config(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(
            (FOLDER / "public_configs" / f"{self.shape}.json").read_text("utf-8")
        )
        return content

    @property
    def derived(self) -> int:
        text = self.config.get("text_config", self.config)
        return int(text["max_position_embeddings"])

    @property
    def bytes_per_block(self) -> int:
        """Of a rank; the server that still runs has half of its memory for its cache."""
        release = Release.parse(self.version)
        pool = plan_pool(
            self.config, self.flags, device=Device("NVIDIA", self.total, (9, 0)), release=release
        )
        return max(pool.bytes_per_block)

    @cached_property
    def total(self) -> int:
        """CUDA's total: what rounds to the printed total and to the printed budget."""
        numbers, share = self.case["log_numbers"], self.case["flags"]["gpu_memory_utilization"]
        low = self.case["gpu_mem_gib"] - HALF_DIGIT
        high = self.case["gpu_mem_gib"] + HALF_DIGIT
        budget = numbers.get("desired_gib", numbers.get("requested_gib"))
        if budget is not None:
            low, high = (
                max(low, (budget - HALF_DIGIT) / share),
                min(high, (budget + HALF_DIGIT) / share),
            )
        assert low < high, self.case["id"]
        return int((low + high) / 2 * GIB)

    @property
    def co_tenants(self) -> list[int]:
        """Bytes that others hold, by card: what is missing from the total, less the start's own share.

        Of several cards the best one shows how much the start itself had taken.
        """
        numbers = self.case["log_numbers"]
        if (held := numbers.get("initial_memory_usage_gib")) is not None:
            return [int(held * GIB)]
        free = numbers.get("free_startup_gib", numbers.get("free_gib"))
        if isinstance(free, list):
            return [int((max(free) - one) * GIB) for one in free]
        return [self.total - int(free * GIB) - CONTEXT]

    def forecast(self, *, alone: bool = False) -> RestartForecast:
        """The verdict, with the co-tenants there or gone."""
        held = self.co_tenants
        own = self.total - max(held) - SPARE
        cards = [
            self.card(str(index), WORKER + index, own, 0 if alone else size)
            for index, size in enumerate(held)
        ]
        workers = [process(WORKER + index, "VLLM::Worker", ppid=PARENT) for index in range(len(held))]
        seen = server(
            members=frozenset({PARENT, *(worker.pid for worker in workers)}),
            flags=self.flags,
            model=self.config,
            version=self.version,
            max_model_len=RUNNING_LENGTH,
            num_blocks=own // 2 // self.bytes_per_block,
            gpu_memory_utilization=own / self.total,
            max_concurrency=None,
        )
        everybody = (process(PARENT, "vllm"), *workers, process(CO_TENANT, "python", user="dana"))
        snapshot = join(observation(tuple(cards), everybody, (seen,)), Config())
        return forecast_restart(snapshot.servers[0], snapshot, Config())

    def card(self, index: str, worker: int, own: int, co_tenant: int) -> Gpu:
        holders = {worker: own, CO_TENANT: co_tenant} if co_tenant else {worker: own}
        used = own + co_tenant
        return Gpu(
            index=index,
            uuid=f"GPU-{index}",
            name="NVIDIA",
            pci_bus_id="",
            mig_profile=None,
            capability=(9, 0),
            memory=GpuMemory(self.total + RESERVED, self.total - used, used, RESERVED),
            processes={pid: GpuProcess(pid, size, frozenset({"compute"})) for pid, size in holders.items()},
        )


@pytest.fixture(params=REPLAYED)
def replay(request: pytest.FixtureRequest) -> Replay:
    return Replay(CASES[request.param], *REPLAYED[request.param])


def test_every_report_is_replayed_or_left_out_with_a_reason() -> None:
    assert REPLAYED.keys() | LEFT_OUT.keys() == CASES.keys()
    assert not REPLAYED.keys() & LEFT_OUT.keys()


@pytest.mark.skipif(shared_dir() is None, reason="all public reports are in the shared folder")
def test_no_report_of_these_causes_is_missing() -> None:
    shared = shared_dir()
    assert shared is not None
    reports = map(json.loads, (shared / "public" / "cases.jsonl").read_text("utf-8").splitlines())
    assert {report["id"] for report in reports if report.get("root_cause") in CAUSES} == CASES.keys()


def test_the_start_that_failed_was_infeasible_before(replay: Replay) -> None:
    forecast = replay.forecast()
    assert forecast.feasible is False
    assert forecast.blocking_check == CHECKS[replay.case["error_kind"]]


def test_the_card_that_was_short_is_named(replay: Replay) -> None:
    forecast = replay.forecast()
    assert forecast.verdict is not None
    assert forecast.verdict.blocking is not None
    held = replay.co_tenants
    assert forecast.verdict.blocking.gpu == str(held.index(max(held)))


def test_the_words_are_those_of_the_report(replay: Replay) -> None:
    """To the digit where one card was used; with several, kvwatch allows more for NCCL than was taken."""
    forecast = replay.forecast()
    assert forecast.verdict is not None
    message = forecast.verdict.message
    assert message is not None
    reported = replay.case["error_text"].removeprefix("ValueError: ")
    if len(replay.co_tenants) == 1:
        assert message.startswith(reported)
    else:
        assert message.partition("(")[0] == reported.partition("(")[0]
        assert message.partition("utilization")[2] == reported.partition("utilization")[2]


def test_without_the_co_tenant_it_would_have_started(replay: Replay) -> None:
    if replay.case["root_cause"].startswith("baseline_overhead"):
        assert replay.forecast(alone=True).blocking_check == "free_memory", "the context alone is too much"
        return
    assert replay.forecast(alone=True).feasible is True
    remedy = next(one for one in replay.forecast().remedies if one.action == "stop_holder")
    assert remedy.pids == (CO_TENANT,)


def test_the_margin_is_what_is_missing(replay: Replay) -> None:
    """With so much freed the check passes, with one byte less it does not."""
    forecast = replay.forecast()
    assert forecast.verdict is not None
    assert forecast.verdict.blocking is not None
    missing = -(forecast.verdict.blocking.margin_bytes or 0)
    assert missing > 0
    assert forecast.situation is not None
    gpu = forecast.verdict.blocking.gpu or ""
    enough, short = (
        forecast.situation.judge(freed={gpu: missing}),
        forecast.situation.judge(freed={gpu: missing - 1}),
    )
    check = forecast.blocking_check
    assert {result.passed for result in enough.checks if result.check == check} == {True}
    assert False in {result.passed for result in short.checks if result.check == check}
