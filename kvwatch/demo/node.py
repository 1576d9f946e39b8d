"""An embedded node: a real HTTP server with vLLM's recorded pages, and scripted GPUs and processes around it.

What kvwatch reads here it reads with the code that reads a real node: pages over HTTP, servers out of command
lines, records from the sources. Only NVML, /proc and the model folder are the script's.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvwatch.config import GIB, ServerConfig
from kvwatch.demo.scenario import Scenario, ScriptedHolder, ScriptedServer, at, data
from kvwatch.observe.launch import find_servers, server_members
from kvwatch.observe.records import (
    Failure,
    Gpu,
    GpuMemory,
    GpuProcess,
    Launch,
    ModelConfig,
    NextStart,
    NvmlRecord,
    Process,
    ProcessRecord,
)
from kvwatch.observe.vllm import VllmSource

PARENT_PID = 4100
FIRST_WORKER_PID = 4210
FIRST_HOLDER_PID = 5300
VLLM_VERSION = "0.32.0"


class DemoNode:
    """Serves the recorded pages and plays the script; implements `kvwatch.observe.cycle.Sources`.

    Args:
        speed: simulated seconds per real second.
    """

    def __init__(self, scenario: Scenario, *, speed: float) -> None:
        self._scenario = scenario
        self._speed = speed
        self._started = time.time()
        self._began = time.monotonic()
        self._page = _scaled_page(scenario)
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._http.serve_forever, name="demo-vllm", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def now(self) -> float:
        """The simulated clock: Unix time at the start, then `speed` times as fast as the real one."""
        return self._started + (time.monotonic() - self._began) * self._speed

    @property
    def minute(self) -> float:
        """Minutes into the present round of the script."""
        return (self.now() - self._started) / 60 % self._scenario.round_minutes

    @property
    def port(self) -> int:
        """Port of the page server on 127.0.0.1."""
        return int(self._http.server_address[1])

    def read_nvml(self) -> NvmlRecord | Failure:
        """The script's GPUs at this minute."""
        script, minute = self._scenario, self.minute
        own = script.server.num_blocks * _bytes_per_block(script)
        own += int(script.server.worker_gib_beside_pool * GIB)
        gpus = []
        for index in range(script.gpu_count):
            held = {FIRST_WORKER_PID + index: own}
            for pid, holder in enumerate(script.holders, FIRST_HOLDER_PID):
                size = holder.bytes_at(minute)
                if holder.gpu == index and size is not None:
                    held[pid] = size
            gpus.append(self._gpu(index, held))
        return NvmlRecord(tuple(gpus), driver_version="570.86.15")

    def _gpu(self, index: int, held: Mapping[int, int]) -> Gpu:
        script = self._scenario
        used = sum(held.values())
        free = script.total_bytes - script.reserved_bytes - used
        return Gpu(
            index=str(index),
            uuid=f"GPU-00000000-0000-4000-8000-{index:012d}",
            name=script.gpu_name,
            pci_bus_id=f"00000000:{0x18 + index:02X}:00.0",
            mig_profile=None,
            capability=script.capability,
            memory=GpuMemory(script.total_bytes, free, used, script.reserved_bytes),
            processes={pid: GpuProcess(pid, size, frozenset({"compute"})) for pid, size in held.items()},
        )

    def read_processes(self) -> ProcessRecord | Failure:
        """The script's processes at this minute."""
        script, minute = self._scenario, self.minute
        server = script.server
        argv = (
            "/usr/bin/python3", "/usr/bin/vllm", "serve", server.model,
            "--served-model-name", server.served_name,
            "--tensor-parallel-size", str(server.tensor_parallel_size),
            "--max-model-len", str(server.max_model_len),
            "--host", "127.0.0.1", "--port", str(self.port),
        )  # fmt: skip
        processes = [
            self._process(PARENT_PID, 1, "vllm", server, argv),
            self._process(PARENT_PID + 1, PARENT_PID, "VLLM::EngineCore", server),
        ]
        processes += [
            self._process(FIRST_WORKER_PID + rank, PARENT_PID + 1, f"VLLM::Worker_TP{rank}", server)
            for rank in range(server.tensor_parallel_size)
        ]
        processes += [
            self._process(pid, 1, holder.name, holder)
            for pid, holder in enumerate(script.holders, FIRST_HOLDER_PID)
            if holder.bytes_at(minute) is not None
        ]
        return ProcessRecord({process.pid: process for process in processes})

    def _process(
        self, pid: int, ppid: int, name: str, who: ScriptedServer | ScriptedHolder, argv: tuple[str, ...] = ()
    ) -> Process:
        session = PARENT_PID if pid < FIRST_HOLDER_PID else pid
        return Process(
            pid=pid,
            ppid=ppid,
            start_time=self._round_began + 60 * who.start,
            name=name,
            user=who.user,
            uid=None,
            session=session,
            state="S",
            argv=argv or (name,),
            unit=who.unit,
        )

    @property
    def _round_began(self) -> float:
        """Unix time, the same throughout a round."""
        length = 60 * self._scenario.round_minutes
        return self._started + (self.now() - self._started) // length * length

    def find_servers(self, processes: ProcessRecord) -> tuple[Launch, ...]:
        """The vLLM server, found by its command line as on a real node.

        The scripted processes have no entry under /proc, so that their environment is empty, not unreadable.
        """
        nowhere = Path("/nonexistent")
        return tuple(replace(found, failures=()) for found in find_servers(processes, proc_root=nowhere))

    def server_members(
        self, launches: tuple[Launch, ...], processes: ProcessRecord
    ) -> tuple[frozenset[int], ...]:
        """The server's process tree."""
        return server_members(launches, processes)

    def open_vllm(self, base_url: str, settings: ServerConfig | None) -> VllmSource:
        """A reader for the recorded pages, over HTTP as on a real node."""
        return VllmSource(base_url)

    def read_model(
        self,
        launch: Launch,
        process: Process | None,
        served_root: str | None,
        settings: ServerConfig | None,
    ) -> ModelConfig | Failure:
        """The packaged config.json."""
        return ModelConfig("demo/config.json", json.loads(data("config.json")), mtime_ns=0)

    def read_next_start(
        self,
        launch: Launch,
        process: Process | None,
        served_root: str | None,
        settings: ServerConfig | None,
    ) -> NextStart | Failure:
        """Nothing is pending: as it was started."""
        return NextStart("command_line", (), launch.flags, launch.environment)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        node = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answer = node.answer(self.path)
                if answer is None:
                    self.send_error(404)
                    return
                kind, body = answer
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
                """Requests are not logged."""

        return Handler

    def answer(self, path: str) -> tuple[str, bytes] | None:
        """Content type and body of one of vLLM's pages, None for a path it does not have."""
        server = self._scenario.server
        if path == "/metrics":
            usage = at(server.usage, self.minute)
            page = _USAGE.sub(rf"\g<1>{usage:.6f}", self._page)
            return "text/plain; version=0.0.4; charset=utf-8", page.encode()
        if path == "/version":
            return "application/json", json.dumps({"version": VLLM_VERSION}).encode()
        if path == "/v1/models":
            entry = {
                "id": server.served_name,
                "object": "model",
                "root": server.model,
                "max_model_len": server.max_model_len,
            }
            return "application/json", json.dumps({"object": "list", "data": [entry]}).encode()
        return None


_USAGE = re.compile(r"(?m)^(vllm:kv_cache_usage_perc\{[^}]*\} ).*$")


def _bytes_per_block(script: Scenario) -> int:
    """One block of every layer on one rank: K and V of the rank's heads in bf16."""
    config = json.loads(data("config.json"))
    heads = config["num_key_value_heads"] // script.server.tensor_parallel_size
    per_token = config["num_hidden_layers"] * 2 * heads * config["head_dim"] * 2
    return int(per_token * script.server.block_size)


def _scaled_page(script: Scenario) -> str:
    """The recorded page with the numbers of the script's model in place of the recorded server's."""
    server = script.server
    tokens = server.num_blocks * server.block_size
    labels = {
        "block_size": server.block_size,
        "effective_attention_block_size": server.block_size,
        "gpu_memory_utilization": server.utilization,
        "kv_cache_max_concurrency": tokens / server.max_model_len,
        "kv_cache_memory_bytes": None,
        "kv_cache_size_tokens": tokens,
        "num_gpu_blocks": server.num_blocks,
    }
    page = data("metrics.prom").replace('model_name="tiny"', f'model_name="{server.served_name}"')
    for label, value in labels.items():
        page, found = re.subn(rf'(cache_config_info{{.*?[{{,]{label})="[^"]*"', rf'\g<1>="{value}"', page)
        if not found:
            raise ValueError(f"the recorded page has no label {label}")
    return page
