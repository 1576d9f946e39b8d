"""Starts real vLLM engines on the CPU, one after another, as `vllm serve` does, and tells how each ended.

    PYTHON_OF_VLLM engine_starts.py < COMMAND_LINES > RESULTS

Each line of the input is a JSON list: what is typed after `vllm serve`. vLLM's own parser reads it, its own
engine loads the weights, plans and allocates the cache and warms up, in a process of its own. What is spared
are the API server and two more imports of vLLM, which make up nine tenths of the time that a start takes: the
processes are forked from one that has imported everything. One JSON object per line comes back: the pool that
was planned, if it came to that, and the ``error`` that ended the start, if any.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

PRELOADED = (
    "vllm.entrypoints.launchers.cli_args",
    "vllm.model_executor.models.gemma3",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen2",
    "vllm.v1.worker.cpu_worker",
)


def engine_config(words: Sequence[str]) -> Any:
    """The configuration of a server's engine, from its command line."""
    parsing = importlib.import_module("vllm.utils.argparse_utils")
    parser = parsing.FlexibleArgumentParser()
    serve = parser.add_subparsers(dest="subparser").add_parser("serve")
    importlib.import_module("vllm.entrypoints.launchers.cli_args").make_arg_parser(serve)
    options = parser.parse_args(["serve", *words])
    options.model = options.model_tag
    arguments = importlib.import_module("vllm.engine.arg_utils").AsyncEngineArgs.from_cli_args(options)
    usage = importlib.import_module("vllm.usage.usage_lib").UsageContext
    return arguments.create_engine_config(usage.OPENAI_API_SERVER)


def start(words: Sequence[str]) -> dict[str, Any]:
    """Start one engine, in this process."""
    config = None
    try:
        config = engine_config(words)
        executor = importlib.import_module("vllm.v1.executor").Executor.get_class(config)
        importlib.import_module("vllm.v1.engine.core").EngineCore(config, executor, log_stats=False)
        error = None
    except Exception as reason:  # noqa: BLE001 -- the ways in which a start fails are what is asked for
        error = "".join(traceback.format_exception_only(reason))
    return {
        "error": error,
        "planned": pool(config) if config and config.cache_config.num_gpu_blocks else None,
    }


def pool(config: Any) -> dict[str, Any]:
    """What the engine planned."""
    cache = config.cache_config
    return {
        "blocks": cache.num_gpu_blocks,
        "tokens": cache.kv_cache_size_tokens,
        "concurrency": cache.kv_cache_max_concurrency,
        "length": config.model_config.max_model_len,
    }


def start_in_child(words: Sequence[str]) -> str:
    """Start one engine in a process that ends with it; the result as JSON, empty where it died."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, json.dumps(start(words)).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as result:
        text = result.read()
    os.waitpid(child, 0)
    return text


def main() -> None:
    # Engines in the caller's process; OpenMP threads, which no fork survives, are then the child's own.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in PRELOADED:
        importlib.import_module(name)
    for line in sys.stdin:
        print(start_in_child(json.loads(line)), file=results, flush=True)


if __name__ == "__main__":
    main()
