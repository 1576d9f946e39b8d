"""What a real vLLM plans for a model, on a machine without a GPU: its own model classes and planner.

Runs with the Python of that vLLM. Each line of standard input is a JSON object: ``config`` (a config.json),
``flags`` (names of vLLM's engine arguments) and ``available`` (bytes for KV). Each line of standard output
answers one, after ``@``: what vLLM plans, or ``error``. Models are built without weights, on PyTorch's meta
device; of the tensor-parallel ranks only the first exists.

    $KVWATCH_VLLM_VENV/bin/python -m tools.vllm_plan < questions.jsonl
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

MARK = "@"


class Rank:
    """The first rank of a group, as vLLM's model classes ask for it; nothing is ever sent."""

    def __init__(self, size: int) -> None:
        self.world_size = size
        self.ranks = list(range(size))
        self.rank = self.rank_in_group = self.local_rank = self.first_rank = 0
        self.is_first_rank = True
        self.is_last_rank = size == 1
        self.last_rank = self.prev_rank = size - 1
        self.next_rank = 1 % size
        self.unique_name = f"rank-of-{size}"
        self.use_device_communicator = False
        self.device_communicator = self.mq_broadcaster = None
        self.device = import_module("torch").device("cpu")
        self.cpu_group = self.device_group = MagicMock()
        self.device_group.size.return_value = size
        self.device_group.rank.return_value = 0


def start() -> None:
    """Bring vLLM up far enough to build models.

    Must precede its first import: vLLM reads its environment then.
    """
    os.environ.update(VLLM_LOGGING_LEVEL="ERROR", VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1")
    distributed = import_module("torch.distributed")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)


def engine_config(config: dict[str, Any], flags: dict[str, Any]) -> Any:
    """vLLM's configuration of a server of this model."""
    flags = dict(flags)
    ranks = flags.pop("tensor_parallel_size", 1)
    arguments = import_module("vllm.engine.arg_utils")
    usage = import_module("vllm.usage.usage_lib").UsageContext.OPENAI_API_SERVER
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        engine = arguments.EngineArgs(
            model=folder, skip_tokenizer_init=True, load_format="dummy", enforce_eager=True, **flags
        ).create_engine_config(usage)
    # Asked for earlier, more ranks would need their processes.
    engine.parallel_config.tensor_parallel_size = ranks
    engine.model_config.verify_with_parallel_config(engine.parallel_config)
    return engine


def layer_specs(engine: Any) -> dict[str, Any]:
    """Every layer's cache, from the model's own classes."""
    torch = import_module("torch")
    vllm_config = import_module("vllm.config")
    state = import_module("vllm.distributed.parallel_state")
    ranks = engine.parallel_config.tensor_parallel_size
    for name in ("_TP", "_EP", "_PP", "_DP", "_DCP", "_PCP", "_WORLD", "_EPLB"):
        setattr(state, name, Rank(ranks if name in ("_TP", "_EP") else 1))
    engine.compilation_config.static_forward_context.clear()
    with (
        vllm_config.set_current_vllm_config(engine),
        torch.device("meta"),
        import_module("vllm.utils.torch_utils").set_default_torch_dtype(engine.model_config.dtype),
    ):
        import_module("vllm.model_executor.model_loader.utils").initialize_model(vllm_config=engine)
    import_module("vllm.platforms").current_platform.update_block_size_for_backend(engine)
    base = import_module("vllm.model_executor.layers.attention_layer_base").AttentionLayerBase
    layers = import_module("vllm.config.vllm").get_layers_from_vllm_config(engine, base)
    specs = {}
    for name, layer in layers.items():
        if getattr(layer, "kv_sharing_target_layer_name", None):
            continue
        spec = layer.get_kv_cache_spec(engine)
        if spec is None:
            continue
        if hasattr(spec, "num_kv_heads"):
            spec = layer.get_attn_backend().customize_spec(spec)
        specs[name] = spec
    return specs


def plan(engine: Any, specs: dict[str, Any], available: int) -> dict[str, Any]:
    """What vLLM makes of the layers."""
    planner = import_module("vllm.v1.core.kv_cache_utils")
    engine.cache_config.kv_cache_layout = "LBNHC"
    answer: dict[str, Any] = {
        "max_model_len": engine.model_config.max_model_len,
        "max_num_batched_tokens": engine.scheduler_config.max_num_batched_tokens,
        "max_num_seqs": engine.scheduler_config.max_num_seqs,
        "dtype": str(engine.model_config.dtype).removeprefix("torch."),
    }
    groups = planner.get_kv_cache_groups(engine, dict(specs))
    if not groups:
        return answer
    answer["bytes_per_block"] = planner._pool_bytes_per_block(engine, groups)
    answer["needed_bytes"] = planner._max_memory_usage_bytes_from_groups(engine, groups)
    answer["blocks_per_request"] = [
        -(-group.kv_cache_spec.max_memory_usage_bytes(engine) // group.kv_cache_spec.page_size_bytes)
        for group in groups
    ]
    answer["longest_length"] = planner._estimate_max_model_len_from_groups(engine, groups, available)
    answer["num_blocks"] = planner.get_kv_cache_config_from_groups(engine, groups, available).num_blocks
    return answer


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """The answer to one question; a refusal is one too."""
    try:
        engine = engine_config(question["config"], question["flags"])
        return plan(engine, layer_specs(engine), question["available"])
    except Exception as error:  # noqa: BLE001 - whatever vLLM raises is its answer
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Answer every line of standard input."""
    start()
    for line in sys.stdin:
        print(MARK + json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
