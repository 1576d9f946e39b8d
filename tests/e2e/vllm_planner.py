"""Asks a real vLLM's planner what it makes of given layers.

    PYTHON_OF_VLLM -m tests.e2e.vllm_planner < CASES > ANSWERS

Cases are JSON objects, one a line, in the form of tests/vectors/planner_small.json; what comes back are the
figures, bytes per stage of the pipeline, and ``error`` where vLLM refuses. The engine's configuration is that
of a small model; its limits and the layers are the case's.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from typing import Any

from tools import vllm_plan

CARRIER = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 1 << 20,
    "torch_dtype": "bfloat16",
}

Case = dict[str, Any]


def layer_spec(layer: Case, case: Case) -> Any:
    """One layer as vLLM's own class."""
    interface = import_module("vllm.v1.kv_cache_interface")
    kind = getattr(interface, layer["kind"])
    dtype = getattr(import_module("torch"), layer["dtype"].removeprefix("torch."))
    if layer["kind"] == "MambaSpec":
        elements = layer["page"] // dtype.itemsize
        spec = kind(
            block_size=layer["block_size"],
            shapes=((elements,),),
            dtypes=(dtype,),
            mamba_cache_mode=case["mamba_mode"],
        )
    else:
        limits = {"sliding_window": layer["window"], "attention_chunk_size": layer["chunk"]}
        spec = kind(
            block_size=layer["block_size"],
            num_kv_heads=layer["heads"],
            head_size=layer["head_size"],
            dtype=dtype,
            **{name: value for name, value in limits.items() if value is not None},
        )
    assert spec.page_size_bytes == layer["page"], (spec, layer)
    return spec


def worker_specs(case: Case) -> list[dict[str, Any]]:
    """The layers of each worker by name: stages have layers of their own, ranks of one stage the same."""
    workers = []
    for rank, layers in enumerate(case["layers"]):
        stage = rank if case["pp"] > 1 else 0
        named = [
            (f"stage{stage}.{number}.{index}", layer_spec(layer, case))
            for number, layer in enumerate(layers)
            for index in range(layer["n"])
        ]
        workers.append(dict(named))
    return workers


def engine_of(case: Case) -> Any:
    """A server's configuration with the case's limits."""
    engine = vllm_plan.engine_config(CARRIER, {"max_model_len": case["orig"]})
    engine.model_config.max_model_len = case["max_model_len"]
    engine.scheduler_config.max_num_batched_tokens = case["batched"]
    engine.scheduler_config.max_num_encoder_input_tokens = case["enc"]
    engine.scheduler_config.disable_hybrid_kv_cache_manager = case["hybrid_off"]
    engine.parallel_config.pipeline_parallel_size = case["pp"]
    engine.parallel_config.decode_context_parallel_size = case["dcp"]
    engine.cache_config.num_gpu_blocks_override = case["override"]
    engine.cache_config.mamba_cache_mode = case["mamba_mode"]
    engine.cache_config.kv_cache_layout = case["layout"]
    return engine


def answer(case: Case) -> Case:
    """What vLLM plans; a refusal is an answer too."""
    planner = import_module("vllm.v1.core.kv_cache_utils")
    engine = engine_of(case)
    workers = worker_specs(case)
    told: Case = {"max_in_flight_tokens": engine.max_in_flight_tokens}
    try:
        merged = {name: spec for worker in workers for name, spec in worker.items()}
        groups = planner.get_kv_cache_groups(engine, merged)
        told["groups"] = [
            {
                "n": len(group.layer_names),
                "blocks_per_max_req": -(
                    -group.kv_cache_spec.max_memory_usage_bytes(engine) // group.kv_cache_spec.page_size_bytes
                ),
            }
            for group in groups
        ]
        stages = [
            planner._project_kv_cache_groups_to_worker(groups, worker) for worker in workers[: case["pp"]]
        ]
        told["bytes_per_block"] = [planner._pool_bytes_per_block(engine, stage) for stage in stages]
        told["needed_bytes"] = [
            planner._max_memory_usage_bytes_from_groups(engine, stage) for stage in stages
        ]
        configs = planner.get_kv_cache_configs(engine, worker_specs(case), case["avail"])
        whole = planner.generate_scheduler_kv_cache_config(configs)
        tokens, concurrency = planner.get_kv_cache_capacity(engine, whole)
    except Exception as error:  # noqa: BLE001 -- whatever vLLM raises is its answer
        return told | {"error": f"{type(error).__name__}: {error}"}
    return told | {
        "num_blocks": whole.num_blocks,
        "kv_cache_size_tokens": tokens,
        "max_concurrency": concurrency,
        "final_max_model_len": engine.model_config.max_model_len,
    }


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    vllm_plan.start()
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
