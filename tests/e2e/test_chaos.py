"""Random faults, one upon the other: each scrape is answered at once, and no value on the page is wrong.

Runs for KVWATCH_CHAOS_SECONDS (40 by default; 600 for a long run) from the seed KVWATCH_CHAOS_SEED, which a
failure names. The node is the tests' NVML library, this machine's /proc and a scripted vLLM server.
"""

from __future__ import annotations

import http.client
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from tests.e2e.kvwatch_daemon import KVWATCH, Page
from tests.e2e.waiting import free_port, wait_until
from tests.fakenvml import Gpu, Process, Rule, Scenario, environment, fail, hang
from tests.observe.scripted_server import Answer, ScriptedServer, drip, raw, reply, status
from tests.observe.scripted_server import hang as hang_up
from tests.observe.vllm_pages import recorded

SECONDS = float(os.environ.get("KVWATCH_CHAOS_SECONDS", "40"))
SEED = int(os.environ.get("KVWATCH_CHAOS_SEED", str(random.randrange(2**32))))
ANSWER_SECONDS = 1.0
SETTLE_SECONDS = 30.0
GIB = 1 << 30
USAGE = 'vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} '
CONFIG = """\
poll:
  interval: 300ms
  nvml_timeout: 500ms
  processes_timeout: 2s
  vllm_connect_timeout: 300ms
  vllm_timeout: 500ms
discovery: false
servers: [{{url: "{url}", name: chat, gpus: ["0"]}}]
plans: {{{plan}: {{max_model_len: 1k}}}}
"""


@dataclass(slots=True)
class Truth:
    """What one value was, and when; a change is under way for a moment, in which both are true."""

    spans: list[tuple[float, float, float]] = field(default_factory=list)

    def change(self, value: float, apply: Callable[[], None]) -> None:
        """Make the value this from some moment within the call on."""
        begun = time.time()
        apply()
        if self.spans:
            since, _, before = self.spans[-1]
            self.spans[-1] = (since, time.time(), before)
        self.spans.append((begun, float("inf"), value))

    def values(self, begun: float, ended: float) -> set[float]:
        """What was true at some time between these two."""
        return {value for since, until, value in self.spans if since <= ended and until >= begun}


class Daemon:
    """One `kvwatch run` after the other on one port, its log in memory: a full disk spares it."""

    def __init__(self, folder: Path, node: dict[str, str], textfile: Path) -> None:
        self.port = free_port()
        self.log: list[str] = []
        self._command: list[str | Path] = [
            KVWATCH,
            "run",
            "--config",
            folder / "kvwatch.yaml",
            "--textfile",
            textfile,
        ]
        self._command += ["--web.listen-address", f"127.0.0.1:{self.port}"]
        self._folder, self._node = folder, node
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            self._command,
            cwd=self._folder,
            env=self._node,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr
        threading.Thread(target=self._keep_log, args=(self.process.stderr,), daemon=True).start()
        wait_until(self._is_ready, 60, otherwise=lambda: "".join(self.log[-50:]))

    def _keep_log(self, stream: IO[str]) -> None:
        self.log.extend(stream)

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, "".join(self.log[-50:])
        with suppress(OSError):
            return self.get("/-/ready")[0] == 200
        return False

    def get(self, path: str) -> tuple[int, str]:
        """Status and body, from a new connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stderr:
            self.process.stderr.close()

    def usage(self) -> Counter[str]:
        """Threads and descriptors."""
        proc = Path(f"/proc/{self.process.pid}")
        counts = {"threads": proc / "task", "descriptors": proc / "fd"}
        return Counter({name: len(list(folder.iterdir())) for name, folder in counts.items()})


class World:
    """The node, what goes wrong on it, and what is true of it."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.chance = chance
        self.folder = folder
        self.scenario = folder / "nvml.scenario"
        self.textfile = folder / "textfiles" / "kvwatch.prom"
        self.textfile.parent.mkdir()
        self.page = recorded("0.32.0-dev_load").decode()
        self.server = ScriptedServer(
            {"/version": reply(b'{"version": "0.32.0"}', "application/json"), "/v1/models": status(401)}
        )
        self.stranger = subprocess.Popen(["sleep", "86400"])
        self.held, self.usage = Truth(), Truth()
        self.rules: tuple[Rule, ...] = ()
        self.done: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()
        self.clients: list[http.client.HTTPConnection] = []
        self.hold(GIB)
        self.use(0.25)
        self.configure("first")
        self.daemon = Daemon(folder, environment(self.scenario), self.textfile)

    # --- the truth

    def hold(self, held: int) -> None:
        """The stranger holds so many bytes."""
        self.held.change(held, lambda: self.write_scenario(held))

    def write_scenario(self, held: int) -> None:
        Scenario((Gpu(processes=(Process(self.stranger.pid, held),)), Gpu()), self.rules).write(self.scenario)

    def use(self, usage: float) -> None:
        """The server's KV cache is full to this part, and its page is a good one."""

        def apply() -> None:
            self.server.answers["/metrics"] = reply(self.page_with(usage))

        self.usage.change(usage, apply)

    def page_with(self, usage: float) -> bytes:
        lines = [USAGE + str(usage) if line.startswith(USAGE) else line for line in self.page.splitlines()]
        return ("\n".join(lines) + "\n").encode()

    def configure(self, plan: str) -> None:
        draft = self.folder / "kvwatch.yaml.new"
        draft.write_text(CONFIG.format(url=self.server.url, plan=plan), encoding="utf-8")
        draft.replace(self.folder / "kvwatch.yaml")

    # --- faults

    def change_memory(self) -> None:
        self.hold(self.chance.randrange(1, 70) * GIB)

    def change_usage(self) -> None:
        self.use(self.chance.randrange(128) / 127)

    def break_nvml(self) -> None:
        rules: list[tuple[Rule, ...]] = [
            (hang("nvmlDeviceGetMemoryInfo*", 2),),
            (hang("*RunningProcesses*", 1, "0"),),
            (hang("nvmlDeviceGetCount*", 0.2),),
            (fail("*", 15, "0"),),
            (fail("nvmlDeviceGetMemoryInfo*", 999),),
            (fail("*RunningProcesses*", 4),),
            (fail("nvmlDeviceGetUUID", 3),),
        ]
        self.rules = self.chance.choice(rules)
        self.write_scenario(int(self.held.spans[-1][2]))

    def mend_nvml(self) -> None:
        self.rules = ()
        self.write_scenario(int(self.held.spans[-1][2]))

    def break_server(self) -> None:
        page = self.page_with(self.usage.spans[-1][2])
        released = self.server.released
        answers: list[Answer] = [
            hang_up(released),
            drip(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n", b"X", released),
            drip(b"HTTP/1.1 200 OK\r\n\r\n" + page[:2000], b"a", released),
            raw(b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n" + page[:3000]),
            raw(b"\0\xff garbage"),
            raw(b""),
            reply(b""),
            reply(b"<html>sorry</html>", "text/html"),
            reply(page[: len(page) // 2]),
            reply(self.page_with(float("nan"))),
            reply(page.replace(b'engine="0"', b'engine="0', 5)),
            reply(page + USAGE.encode() + b"0.123456\n"),
            reply(USAGE.encode() + b'7.5\n{"":}\n'),
            status(503),
            status(302, location="http://127.0.0.1:1/metrics"),
        ]
        self.server.answers["/metrics"] = self.chance.choice(answers)

    def mend_server(self) -> None:
        self.use(self.usage.spans[-1][2])

    def spoil_config(self) -> None:
        path = self.folder / "kvwatch.yaml"
        if self.chance.random() < 0.4:
            path.unlink(missing_ok=True)
            return
        texts = ["poll: {interval: never}\n", "[" * 5000, "\0\xff", "servers: 7\n", "{{a: b}: c}\n"]
        path.write_text(self.chance.choice(texts), encoding="utf-8")

    def mend_config(self) -> None:
        self.configure(self.chance.choice(("first", "second")))
        if self.chance.random() < 0.5:
            self.daemon.process.send_signal(signal.SIGHUP)

    def fill_disk(self) -> None:
        resource.prlimit(self.daemon.process.pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))

    def empty_disk(self) -> None:
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(self.daemon.process.pid, resource.RLIMIT_FSIZE, unlimited)

    def freeze(self) -> None:
        self.daemon.process.send_signal(signal.SIGSTOP)
        time.sleep(self.chance.uniform(0.1, 2))
        self.daemon.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.daemon.kill()
        # A new daemon needs a configuration to start with.
        self.configure("first")
        self.daemon.start()

    def crowd(self) -> None:
        """Clients that say nothing, or nonsense, for a while."""
        for _ in range(20):
            with suppress(OSError):
                client = http.client.HTTPConnection("127.0.0.1", self.daemon.port, timeout=1)
                client.connect()
                client.sock.sendall(
                    self.chance.choice((b"", b"GET ", b"\0" * 100, b"GET / HTTP/9.9\r\n\r\n"))
                )
                self.clients.append(client)
        while len(self.clients) > 60:
            self.clients.pop(0).close()

    def mend(self) -> None:
        """Everything works again."""
        self.mend_nvml()
        self.mend_server()
        self.configure("first")
        self.empty_disk()
        while self.clients:
            self.clients.pop().close()

    def step(self) -> None:
        """One thing happens. Rare ones are those that take long."""
        faults = [
            self.change_memory,
            self.change_memory,
            self.change_usage,
            self.change_usage,
            self.break_nvml,
            self.mend_nvml,
            self.break_server,
            self.mend_server,
            self.spoil_config,
            self.mend_config,
            self.fill_disk,
            self.empty_disk,
            self.freeze,
            self.crowd,
        ]
        fault = self.kill if self.chance.random() < 0.02 else self.chance.choice(faults)
        self.done[fault.__name__] += 1
        fault()

    # --- what is looked at

    def scrape(self) -> Page:
        """One scrape, in time, with nothing wrong on it."""
        begun = time.monotonic()
        code, text = self.daemon.get("/metrics")
        seconds = time.monotonic() - begun
        assert seconds < ANSWER_SECONDS, f"a scrape took {seconds:.2f} s"
        assert code == 200, text
        page = Page.parse(text)
        self.check(page)
        return page

    def check(self, page: Page) -> None:
        begun = page.get("kvwatch_cycle_timestamp_seconds")
        assert begun is not None
        ended = begun + (page.get("kvwatch_cycle_duration_seconds") or 0.0) + 0.05
        held, usage = self.held.values(begun, ended), self.usage.values(begun, ended)
        pid = str(self.stranger.pid)
        right: dict[str, tuple[float | None, set[float]]] = {
            "used": (page.get("kvwatch_gpu_memory_used_bytes", gpu="0"), held),
            "holder": (page.get("kvwatch_holder_memory_bytes", gpu="0", pid=pid), held),
            "idle": (page.get("kvwatch_gpu_memory_used_bytes", gpu="1"), {0.0}),
            "usage": (page.get("kvwatch_kv_cache_usage_ratio", server="chat"), usage),
            "blocks": (page.get("kvwatch_kv_cache_blocks", server="chat"), {128.0}),
        }
        for name, (shown, truths) in right.items():
            if shown is None:
                self.seen[f"{name} absent"] += 1
            else:
                self.seen[name] += 1
                assert shown in truths, f"{name} is {shown}, not {truths}\n{page.text}"

    def check_textfile(self) -> None:
        """Whole at any moment, whatever became of its writer."""
        with suppress(FileNotFoundError):
            text = self.textfile.read_text(encoding="utf-8")
            assert Page.parse(text).get("kvwatch_up") == 1
            assert "kvwatch_config_last_reload_success_timestamp_seconds " in text.splitlines()[-1]


def test_random_faults(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    world = World(tmp_path, chance)
    scrapes = 0
    with world.server.running():
        try:
            before = world.daemon.usage()
            ends = time.monotonic() + SECONDS
            while time.monotonic() < ends:
                world.step()
                for _ in range(chance.randrange(1, 8)):
                    world.scrape()
                    scrapes += 1
                    time.sleep(0.05)
                world.check_textfile()
            world.mend()

            def recovered() -> bool:
                page = world.scrape()
                shown = page.get("kvwatch_gpu_memory_used_bytes", gpu="0"), page.get("kvwatch_server_up")
                return shown == (world.held.spans[-1][2], 1.0) and "plan:first" in page.text

            wait_until(recovered, SETTLE_SECONDS, otherwise=lambda: "".join(world.daemon.log[-50:]))
            wait_until(
                lambda: not (world.daemon.usage() - before - Counter(threads=3, descriptors=3)),
                SETTLE_SECONDS,
                otherwise=lambda: f"{before} before, {world.daemon.usage()} after",
            )
            leftovers = sorted(path.name for path in world.textfile.parent.iterdir())
            assert leftovers == ["kvwatch.prom"]
            world.daemon.process.terminate()
            assert world.daemon.process.wait(10) == 0
        except BaseException as error:
            error.add_note(f"KVWATCH_CHAOS_SEED={SEED} after {scrapes} scrapes and {dict(world.done)}")
            raise
        finally:
            world.daemon.kill()
            world.stranger.kill()
            world.stranger.wait()
    print(f"{scrapes} scrapes, faults {dict(world.done)}, values {dict(world.seen)}", file=sys.stderr)
    assert all(world.seen[name] for name in ("used", "holder", "idle", "usage", "blocks", "usage absent"))
