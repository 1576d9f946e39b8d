"""A busy node for measurements: 8 GPUs with 64 processes, and 8 vLLM servers that answer with recorded pages.

NVML answers from the tests' C library, the pages come over HTTP from a process of their own, /proc is this
machine's with 64 more processes.
"""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path

from tests.fakenvml import Gpu, Process, Scenario, environment

GPUS = 8
PROCESSES = 64
PAGES = Path(__file__).resolve().parents[1] / "tests" / "vectors" / "pages"
PAGE = "vllm-0.32.0-dev_load.prom.gz"
MODELS = {
    "data": [{"id": "llama", "root": "meta-llama/Llama-3.1-8B", "max_model_len": 16384, "object": "model"}]
}
FLAGS = ("--gpu-memory-utilization", "0.9", "--max-model-len", "16384")
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
}


@dataclass(frozen=True, slots=True)
class BusyNode:
    """What kvwatch needs to watch it.

    Attributes:
        environment: for the process that watches.
        config: path of its kvwatch.yaml.
    """

    environment: dict[str, str]
    config: Path


@contextmanager
def busy_node(folder: Path, *, interval: str = "1s") -> Iterator[BusyNode]:
    """Run the node; files go to the folder."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA_8B), encoding="utf-8")
    with ExitStack() as stack:
        urls = stack.enter_context(_page_servers(GPUS))
        servers = stack.enter_context(_servers(folder / "vllm", model, urls))
        others = stack.enter_context(_sleepers(PROCESSES - GPUS))
        share = len(others) // GPUS
        scenario = folder / "nvml.scenario"
        Scenario(
            tuple(
                Gpu(
                    processes=(
                        Process(server, 60 << 30),
                        *(Process(pid, 1 << 30) for pid in others[i * share : (i + 1) * share]),
                    )
                )
                for i, server in enumerate(servers)
            )
        ).write(scenario)
        config = folder / "kvwatch.yaml"
        settings = {
            "poll": {"interval": interval},
            # This machine's own servers are none of the node's.
            "discovery": False,
            "servers": [{"url": url, "name": f"llama-{i}"} for i, url in enumerate(urls)],
            "plans": {"longer": {"max_model_len": 32768}},
        }
        config.write_text(json.dumps(settings), encoding="utf-8")
        yield BusyNode(environment(scenario), config)


@contextmanager
def _servers(program: Path, model: Path, urls: list[str]) -> Iterator[list[int]]:
    """Processes with the command lines of vLLM servers, which only wait."""
    program.write_text("import signal; signal.pause()\n", encoding="utf-8")
    started = [
        subprocess.Popen(
            [sys.executable, "-S", "-E", program, "serve", model, "--port", url.rpartition(":")[2], *FLAGS],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": str(number)},
        )
        for number, url in enumerate(urls)
    ]
    with _ended(started):
        yield [process.pid for process in started]


@contextmanager
def _sleepers(count: int) -> Iterator[list[int]]:
    started = [subprocess.Popen(["sleep", "86400"]) for _ in range(count)]
    with _ended(started):
        yield [process.pid for process in started]


@contextmanager
def _ended(processes: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


@contextmanager
def _page_servers(count: int) -> Iterator[list[str]]:
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(
        target=serve_pages, args=(count, theirs), daemon=True
    )
    child.start()
    try:
        yield ours.recv()
    finally:
        child.kill()
        child.join()


def serve_pages(count: int, parent: Connection) -> None:
    """Serve so many pages, one per port, and tell the addresses."""
    page = gzip.decompress((PAGES / PAGE).read_bytes())
    answers = {
        "/metrics": (page, "text/plain; version=0.0.4; charset=utf-8"),
        "/version": (b'{"version": "0.32.0"}', "application/json"),
        "/v1/models": (json.dumps(MODELS).encode(), "application/json"),
    }

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            body, content_type = answers.get(self.path, (b"", "text/plain"))
            self.send_response(200 if body else 404)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: object) -> None:
            pass

    servers = [ThreadingHTTPServer(("127.0.0.1", 0), Handler) for _ in range(count)]
    parent.send([f"http://127.0.0.1:{server.server_port}" for server in servers])
    for server in servers[1:]:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    servers[0].serve_forever()
