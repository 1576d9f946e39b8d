from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from kvwatch.blockmath.flags import Flags
from kvwatch.config import Config, Poll, ServerConfig
from kvwatch.observe.cycle import Observer
from kvwatch.observe.records import (
    Failure,
    Launch,
    ModelConfig,
    NextStart,
    NvmlRecord,
    Process,
    ProcessRecord,
    VllmRecord,
)
from tests.e2e.waiting import wait_until
from tests.nodes import LLAMA_8B, NOW, PARENT, gpu, process, server, vllm_page
from tests.support import NewThreads

QUICK = Poll(nvml_timeout=0.2, processes_timeout=0.2, vllm_timeout=0.2)


class Reader:
    def __init__(self, answer: VllmRecord | Failure) -> None:
        self.answer = answer
        self.closed = False

    def read(self) -> VllmRecord | Failure:
        return self.answer

    def close(self) -> None:
        self.closed = True


class FakeSources:
    """Answers set by the test; what it was asked for is kept."""

    def __init__(self) -> None:
        self.nvml: NvmlRecord | Failure = NvmlRecord((gpu({}),))
        self.processes: ProcessRecord | Failure = ProcessRecord({PARENT: process(PARENT, "vllm")})
        self.launches: tuple[Launch, ...] = (server().launch,)
        self.page: VllmRecord | Failure = vllm_page()
        self.model: ModelConfig | Failure = ModelConfig("/m/config.json", LLAMA_8B, 1)
        self.readers: list[tuple[str, ServerConfig | None, Reader]] = []
        self.asked_models: list[str | None] = []
        self.hang = threading.Event()
        self.hang.set()

    def read_nvml(self) -> NvmlRecord | Failure:
        self.hang.wait(30)
        return self.nvml

    def read_processes(self) -> ProcessRecord | Failure:
        return self.processes

    def find_servers(self, processes: ProcessRecord) -> tuple[Launch, ...]:
        return self.launches

    def server_members(
        self, launches: tuple[Launch, ...], processes: ProcessRecord
    ) -> tuple[frozenset[int], ...]:
        return (frozenset({PARENT}),) * len(launches)

    def open_vllm(self, base_url: str, settings: ServerConfig | None) -> Reader:
        reader = Reader(self.page)
        self.readers.append((base_url, settings, reader))
        return reader

    def read_model(
        self,
        launch: Launch,
        process: Process | None,
        served_root: str | None,
        settings: ServerConfig | None,
    ) -> ModelConfig | Failure:
        self.asked_models.append(served_root)
        return self.model

    def read_next_start(
        self,
        launch: Launch,
        process: Process | None,
        served_root: str | None,
        settings: ServerConfig | None,
    ) -> NextStart | Failure:
        return NextStart("command_line", (), launch.flags)


@pytest.fixture
def sources() -> FakeSources:
    return FakeSources()


def observer(sources: FakeSources, **config: object) -> Observer:
    return Observer(sources, replace(Config(poll=QUICK), **config), now=lambda: NOW)  # type: ignore[arg-type]


def test_one_cycle_asks_every_source_once(sources: FakeSources) -> None:
    seen = observer(sources).observe()
    assert seen.time == NOW
    assert seen.nvml == sources.nvml
    assert [one.vllm for one in seen.servers] == [sources.page]
    assert seen.servers[0].members == {PARENT}
    assert sources.asked_models == ["meta-llama/Llama-3.1-8B-Instruct"]
    assert {source.name: source.up for source in seen.sources} == {
        "nvml": True,
        "processes": True,
        "vllm": True,
        "models": True,
    }


def test_readers_live_as_long_as_their_server(sources: FakeSources) -> None:
    watch = observer(sources)
    watch.observe()
    watch.observe()
    assert len(sources.readers) == 1
    sources.launches = (replace(sources.launches[0], pid=PARENT + 7),)
    watch.observe()
    assert len(sources.readers) == 2
    assert sources.readers[0][2].closed
    sources.launches = ()
    assert watch.observe().servers == ()
    assert sources.readers[1][2].closed


def test_a_hanging_source_costs_only_itself(sources: FakeSources) -> None:
    sources.hang.clear()
    watch = observer(sources)
    reasons = []
    for _ in range(3):
        seen = watch.observe()
        assert isinstance(seen.nvml, Failure)
        reasons.append(seen.nvml.reason)
        assert seen.servers[0].vllm == sources.page
    assert reasons == ["timeout", "stuck", "stuck"]
    sources.hang.set()


def test_success_is_remembered_and_failure_told(sources: FakeSources) -> None:
    watch = observer(sources)
    watch.observe()
    sources.nvml = Failure("nvml", "gpu_lost", "lost")
    status = {source.name: source for source in watch.observe().sources}["nvml"]
    assert (status.up, status.last_success) == (False, NOW)
    assert status.failure == sources.nvml


def test_a_source_that_several_servers_share_names_the_one_that_failed(sources: FakeSources) -> None:
    sources.page = Failure("vllm", "timeout", "http://127.0.0.1:8000/metrics: no complete answer in time")
    sources.model = Failure("models", "not_cached", "model m is in no local cache")
    seen = observer(sources).observe()
    details = {source.name: source.failure.detail for source in seen.sources if source.failure}
    assert details == {
        "vllm": "http://127.0.0.1:8000/metrics: no complete answer in time",
        "models": "http://127.0.0.1:8000: model m is in no local cache",
    }
    assert seen.servers[0].model == sources.model


def test_configuration_overrides_what_was_discovered(sources: FakeSources) -> None:
    settings = ServerConfig(url="http://localhost:8000", name="chat", flags=Flags(kv_cache_dtype="fp8"))
    seen = observer(sources, servers=(settings,)).observe()
    assert len(seen.servers) == 1
    assert seen.servers[0].settings == settings
    assert seen.servers[0].launch.flags == Flags(max_model_len=32768, kv_cache_dtype="fp8")


def test_a_server_only_configured_is_read_too(sources: FakeSources) -> None:
    settings = ServerConfig(url="http://10.0.0.1:9000", flags=Flags(tensor_parallel_size=2))
    seen = observer(sources, servers=(settings,)).observe()
    assert [one.launch.base_url for one in seen.servers] == ["http://127.0.0.1:8000", "http://10.0.0.1:9000"]
    assert seen.servers[1].launch.pid is None
    assert seen.servers[1].launch.flags.tp == 2
    assert seen.servers[1].members == frozenset()


def test_without_discovery_only_the_configured_are_watched(sources: FakeSources) -> None:
    settings = ServerConfig(url="http://10.0.0.1:9000")
    seen = observer(sources, servers=(settings,), discovery=False).observe()
    assert [one.launch.base_url for one in seen.servers] == ["http://10.0.0.1:9000"]


def test_without_discovery_the_configured_are_still_known_by_their_processes(sources: FakeSources) -> None:
    settings = ServerConfig(url=sources.launches[0].base_url or "")
    seen = observer(sources, servers=(settings,), discovery=False).observe()
    assert [one.launch.pid for one in seen.servers] == [sources.launches[0].pid]
    assert seen.servers[0].members


def test_without_processes_nothing_is_discovered(sources: FakeSources) -> None:
    sources.processes = Failure("processes", "error", "no /proc")
    seen = observer(sources).observe()
    assert seen.processes == sources.processes
    assert seen.servers == ()


def test_a_server_without_an_address_says_so(sources: FakeSources) -> None:
    sources.launches = (replace(sources.launches[0], base_url=None),)
    seen = observer(sources).observe()
    page = seen.servers[0].vllm
    assert isinstance(page, Failure)
    assert page.reason == "no_address"
    assert isinstance(seen.servers[0].model, ModelConfig)


def test_a_new_configuration_opens_new_readers(sources: FakeSources) -> None:
    watch = observer(sources)
    watch.observe()
    watch.reconfigure(Config(poll=QUICK, discovery=False))
    assert sources.readers[0][2].closed
    assert watch.observe().servers == ()


def test_new_configurations_start_no_second_thread_beside_one_that_hangs(
    sources: FakeSources, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = observer(sources)
    release = threading.Event()
    new_threads = NewThreads()
    monkeypatch.setattr(sources, "read_model", lambda *_: release.wait(30))
    threads = set()
    try:
        for _ in range(3):
            model = watch.observe().servers[0].model
            assert isinstance(model, Failure)
            threads.add(new_threads())
            watch.reconfigure(Config(poll=QUICK))
        assert len(threads) == 1
        assert len(sources.readers) == 3
    finally:
        release.set()
    monkeypatch.undo()
    assert wait_until(lambda: isinstance(watch.observe().servers[0].model, ModelConfig), 10)
    watch.close()
    wait_until(lambda: new_threads() == 0, 10)


def test_a_reader_that_cannot_be_opened_costs_its_own_server_and_is_tried_again(
    sources: FakeSources, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(_base_url: str, _settings: ServerConfig | None) -> Reader:
        raise PermissionError(13, "Permission denied", "/etc/kvwatch/token")

    watch = observer(sources)
    monkeypatch.setattr(sources, "open_vllm", unreadable)
    seen = watch.observe()
    page = seen.servers[0].vllm
    assert isinstance(page, Failure)
    assert page.reason == "not_opened"
    assert "/etc/kvwatch/token" in page.detail
    assert seen.nvml == sources.nvml
    monkeypatch.undo()
    assert isinstance(watch.observe().servers[0].vllm, VllmRecord)
