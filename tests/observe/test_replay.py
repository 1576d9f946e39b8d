from __future__ import annotations

from dataclasses import replace

from kvwatch.blockmath.flags import Flags
from kvwatch.config import GIB, Config, Holders, Plan, Poll, Rule, ServerConfig, Web
from kvwatch.export.page import build_page
from kvwatch.export.text import status_text
from kvwatch.monitor import Monitor
from kvwatch.observe.capture import Capture, take_capture
from kvwatch.observe.cycle import Observation
from kvwatch.observe.records import Failure
from kvwatch.observe.replay import ReplayObserver, captured_config
from tests.nodes import NOW, observation, process, serving_node

NOTEBOOK = process(900, "ipykernel_launcher", user="dana", uid=1001, unit="jupyter.service")
CONFIG = Config(
    web=Web(listen_addresses=("10.0.0.1:9744",)),
    poll=Poll(interval=5),
    holders=Holders(allowed=(Rule(user="dana"),)),
    plans=(Plan("long", None, Flags(max_model_len=131072)),),
)


class Seen:
    """An observer that was there."""

    def __init__(self, *observations: Observation) -> None:
        self._left = list(observations)
        self.now_is = observations[0].time

    def observe(self) -> Observation:
        seen = self._left.pop(0)
        self.now_is = seen.time
        return seen

    def reconfigure(self, config: Config) -> None:
        raise AssertionError

    def close(self) -> None:
        raise AssertionError

    def now(self) -> float:
        return self.now_is


def captures(*seen: Observation, config: Config = CONFIG, keep_names: bool = True) -> list[Capture]:
    return [take_capture(one, config, keep_names=keep_names) for one in seen]


def lines(page: bytes) -> list[str]:
    """The page but for how long kvwatch itself took, and whether it is real."""
    own = ("kvwatch_cycle_duration_seconds ", "kvwatch_build_info{")
    return [line for line in page.decode().splitlines() if not line.startswith(own)]


def test_a_replay_gives_the_page_that_the_node_gave() -> None:
    story = (
        serving_node((NOTEBOOK, GIB)),
        observation(Failure("nvml", "gpu_lost", "lost"), (NOTEBOOK,), serving_node().servers, time=NOW + 5),
        replace(serving_node((NOTEBOOK, 2 * GIB)), time=NOW + 10),
    )
    real, files = Seen(*story), captures(*story)
    replayed = ReplayObserver(files, captured_config(files))
    here = Monitor(real, CONFIG, now=real.now)
    there = Monitor(replayed, captured_config(files), now=replayed.now, simulated=True)
    for _ in story:
        first, second = here.cycle(), there.cycle()
        assert status_text(first) == status_text(second)
        page = build_page(second, top=20).text()
        assert lines(page) == lines(build_page(first, top=20).text())
        assert b'simulated="true"' in page
    assert replayed.cycles == 3


def test_redaction_changes_who_never_what() -> None:
    plain, named = (captures(serving_node((NOTEBOOK, GIB)), keep_names=keep) for keep in (False, True))
    pages = [
        build_page(Monitor(ReplayObserver(files, config), config, now=lambda: NOW).cycle(), top=20).text()
        for files in (plain, named)
        for config in [captured_config(files)]
    ]
    assert lines(pages[0].replace(b"user1", b"dana").replace(b"user2", b"vllm")) == lines(pages[1])
    assert b"dana" not in pages[0]


def test_captures_follow_each_other_and_the_last_one_stays() -> None:
    files = captures(*(observation((), time=NOW + after) for after in (0, 60, 90)))
    replay = ReplayObserver(files, Config())
    assert replay.now() == NOW
    assert [replay.observe().time for _ in range(5)] == [NOW, NOW + 60, NOW + 90, NOW + 90, NOW + 90]
    assert replay.now() == NOW + 90
    replay.close()
    assert replay.observe().time == NOW + 90


def test_the_captured_configuration_is_used_but_for_where_the_page_was_served() -> None:
    first = captures(observation(()), config=Config())
    assert captured_config(first + captures(observation(()))) == replace(CONFIG, web=Web())


def test_another_configuration_is_laid_over_what_was_captured() -> None:
    replay = ReplayObserver(captures(serving_node()), Config())
    assert replay.observe().servers == serving_node().servers
    settings = ServerConfig(url="http://localhost:8000/", name="chat", flags=Flags(kv_cache_dtype="fp8"))
    replay.reconfigure(Config(servers=(settings, ServerConfig(url="http://10.0.0.2:8000"))))
    (server,) = replay.observe().servers
    assert server.settings == settings
    assert server.launch.flags == Flags(max_model_len=32768, kv_cache_dtype="fp8")
    assert server.vllm == serving_node().servers[0].vllm
