"""A real `vllm serve` on the CPU, as a test starts, asks, stops, kills and buries it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import requests
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.waiting import free_port, wait_until

READY_SECONDS = 600.0
"""A start takes 26 to 44 s on two idle cores, 104 s with two engines, and several times that on busy ones."""

GONE_SECONDS = 30.0

BASE_FLAGS: tuple[str, ...] = ("--enforce-eager", "--max-num-seqs", "8", "--kv-cache-memory-bytes", "8M")

# No network, no telemetry. Pinning threads needs more cores per worker than a small machine has.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
# A value in whole GiB that would win over --kv-cache-memory-bytes.
UNWANTED = ("VLLM_CPU_KVCACHE_SPACE",)

_POOL_LINE = re.compile(
    r"KV cache size: (?P<tokens>[\d,]+) tokens, "
    r"Maximum concurrency for (?P<request>[\d,]+) tokens per request: (?P<concurrency>[\d.]+)x"
)
_CAUSE = re.compile(
    r"^(?:\([\w-]+ pid=\d+\) )?(?:ERROR [^\]]*\] )?\s*((?:[\w.]+Error|Exception): .+|Value error, .+)$",
    re.MULTILINE,
)


def server_environment() -> dict[str, str]:
    """This process's environment, as vLLM gets it."""
    return {name: value for name, value in os.environ.items() if name not in UNWANTED} | ENVIRONMENT


@dataclass(frozen=True, slots=True)
class PoolLine:
    """What the server's log says of one engine's KV cache.

    Attributes:
        tokens: capacity in tokens.
        request_tokens: the server's max_model_len.
        concurrency: requests of that length that fit, rounded to two places by the server.
    """

    tokens: int
    request_tokens: int
    concurrency: float


@dataclass(frozen=True, slots=True)
class FailedStart:
    """How a server that would not start ended.

    Attributes:
        causes: the errors that the log names, each once, in order.
    """

    exit_code: int
    causes: tuple[str, ...]


class VllmServer:
    """One `vllm serve` process tree in a session of its own, ended by leaving the `with` block."""

    def __init__(
        self,
        venv: Path,
        model: Path,
        directory: Path,
        flags: Sequence[str] = (),
        *,
        port: int | None = None,
        base: Sequence[str] = BASE_FLAGS,
    ) -> None:
        """Start the server without waiting for it. Its log goes to a file in ``directory``.

        Args:
            flags: on top of ``base``; of a flag given twice the last one counts.
            port: that of a server which it takes the place of; a free one without it.
        """
        self.port = port or free_port()
        self.name = f"tiny-{self.port}"
        self.model = model
        self.flags = ("--served-model-name", self.name, *base, *flags)
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.log = Path(tempfile.mkstemp(".log", f"vllm-{self.port}-", directory)[1])
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [venv / "bin/vllm", "serve", model, *self._address(), *self.flags],
                env=server_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> VllmServer:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.kill()

    def _address(self) -> tuple[str, ...]:
        return ("--host", "127.0.0.1", "--port", str(self.port))

    @property
    def pid(self) -> int:
        """Of the `vllm serve` parent, which keeps its command line."""
        return self._process.pid

    @property
    def engine_pids(self) -> tuple[int, ...]:
        """The EngineCore processes, in the order of their data-parallel rank."""
        return self._titled("VLLM::EngineCore")

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """The processes that would hold GPU memory, in the order of their engine."""
        engines = self.engine_pids
        workers = {psutil.Process(pid).ppid(): pid for pid in self._titled("VLLM::Worker")}
        return tuple(workers[engine] for engine in engines)

    def _titled(self, prefix: str) -> tuple[int, ...]:
        children = psutil.Process(self.pid).children(recursive=True)
        titles = sorted((child.name(), child.pid) for child in children if child.name().startswith(prefix))
        return tuple(pid for _, pid in titles)

    def wait_ready(self, timeout: float = READY_SECONDS) -> VllmServer:
        """Wait until /health answers 200.

        Raises:
            AssertionError: the server ended instead, or the time is up; the text shows the end of its log.
        """
        wait_until(self._healthy, timeout, every=0.25, otherwise=self._explain)
        return self

    def _healthy(self) -> bool:
        assert self._process.poll() is None, self._explain()
        try:
            return requests.get(f"{self.base_url}/health", timeout=5).ok
        except requests.RequestException:
            return False

    def wait_failed(self, timeout: float = READY_SECONDS) -> FailedStart:
        """Wait for the server to end by itself and say how.

        Raises:
            AssertionError: it came up, or the time is up.
        """
        deadline = time.monotonic() + timeout
        while (exit_code := self._process.poll()) is None:
            assert time.monotonic() < deadline, self._explain()
            assert "Application startup complete" not in self.log_text(), f"{self.flags} came up"
            try:
                self._process.wait(0.25)
            except subprocess.TimeoutExpired:
                continue
        return FailedStart(exit_code, tuple(dict.fromkeys(_CAUSE.findall(self.log_text()))))

    def stop(self) -> int:
        """End the server as an operator would (SIGTERM), if it still runs, and return its exit code."""
        if self._process.poll() is None:
            self._process.terminate()
        return self._process.wait(GONE_SECONDS)

    def kill(self) -> None:
        """End the whole tree at once (SIGKILL), with children that outlived their parent."""
        members = [process for process in psutil.process_iter() if _session(process.pid) == self.pid]
        for process in members:
            process.send_signal(signal.SIGKILL)
        psutil.wait_procs([process for process in members if process.pid != self.pid], GONE_SECONDS)
        self._process.wait(GONE_SECONDS)

    def kill_parent(self) -> None:
        """End the parent alone (SIGKILL), as the kernel or an impatient operator would."""
        self._process.kill()
        self._process.wait(GONE_SECONDS)

    def log_text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def pool_lines(self) -> tuple[PoolLine, ...]:
        """The log's own figures, one per engine."""
        return tuple(
            PoolLine(
                tokens=int(match["tokens"].replace(",", "")),
                request_tokens=int(match["request"].replace(",", "")),
                concurrency=float(match["concurrency"]),
            )
            for match in _POOL_LINE.finditer(self.log_text())
        )

    def get_json(self, path: str) -> Any:
        """The server's answer to GET ``path``."""
        response = requests.get(self.base_url + path, timeout=10)
        response.raise_for_status()
        return response.json()

    def cache_config(self) -> dict[str, Mapping[str, str]]:
        """The labels of the server's own cache_config_info, by engine. Values are Python's reprs."""
        response = requests.get(f"{self.base_url}/metrics", timeout=10)
        response.raise_for_status()
        return {
            sample.labels["engine"]: sample.labels
            for family in text_string_to_metric_families(response.text)
            for sample in family.samples
            if sample.name == "vllm:cache_config_info"
        }

    def max_model_len(self) -> int:
        """As /v1/models says."""
        length = self.get_json("/v1/models")["data"][0]["max_model_len"]
        assert isinstance(length, int)
        return length

    def _explain(self) -> str:
        tail = "\n".join(self.log_text().splitlines()[-40:])
        return f"vllm serve {self.model} {' '.join(self.flags)}: exit code {self._process.poll()}\n{tail}"


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return None
