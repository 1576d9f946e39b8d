"""vLLM's start-up flags as options of a command, generated from the arithmetic's own list."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from kvwatch.blockmath.flags import Flags

_SHORT = {
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "data_parallel_size": "-dp",
    "quantization": "-q",
}
_METAVARS = {
    "int | None": "N",
    "float | None": "X",
    "str | None": "NAME",
    "tuple[str, ...] | None": "NAMES",
    "Mapping[str, Any] | None": "JSON",
}
_MEANINGS = {
    "max_model_len": "longest request in tokens, such as 32k, or auto",
    "gpu_memory_utilization": "share of the card that the server may take, above 0 and up to 1",
    "kv_cache_memory_bytes": "bytes of the KV cache on each GPU, in place of the utilization",
    "num_gpu_blocks_override": "blocks of the KV cache, in place of what fits",
    "dtype": "type of weights and activations, such as bfloat16",
    "kv_cache_dtype": "type of the KV cache, such as auto or fp8",
    "kv_cache_dtype_skip_layers": "layers that keep the model's type in an fp8 cache",
    "quantization": "quantization of the weights, where config.json does not tell it",
    "tensor_parallel_size": "GPUs that share each layer",
    "pipeline_parallel_size": "stages that share the layers",
    "data_parallel_size": "engines, each with a whole model",
    "decode_context_parallel_size": "GPUs that share the KV cache of a request while it decodes",
    "prefill_context_parallel_size": "GPUs that share a prompt",
    "enable_expert_parallel": "spread whole experts over the GPUs",
    "block_size": "tokens in a block of the KV cache",
    "max_num_batched_tokens": "tokens of one step",
    "max_num_seqs": "requests that run at once",
    "enable_prefix_caching": "keep the blocks of shared prefixes",
    "enable_chunked_prefill": "cut long prompts into pieces",
    "async_scheduling": "schedule a step while the last one runs",
    "disable_hybrid_kv_cache_manager": "treat every layer as full attention",
    "disable_sliding_window": "cut the length to the model's window",
    "enforce_eager": "no CUDA graphs",
    "mamba_cache_mode": "which Mamba states are kept: none, align or all",
    "mamba_cache_dtype": "type of the Mamba cache",
    "mamba_ssm_cache_dtype": "type of the SSM part of the Mamba cache",
    "mamba_block_size": "tokens in a block of Mamba states",
    "speculative_config": "speculative decoding, as for vllm serve",
    "hf_overrides": "fields to change in config.json",
    "attention_backend": "attention backend, where it is not the card's usual one",
    "performance_mode": "balanced, interactivity or throughput",
    "swap_space": "GiB of host memory for the swapped blocks of each GPU, before 0.18",
    "cpu_offload_gb": "GiB of weights on each GPU that stay in host memory",
    "kv_offloading_size": "GiB of host memory for offloaded blocks, of all GPUs together",
    "enable_sleep_mode": "allow the server to sleep",
    "load_format": "how the weights are read, such as auto or dummy",
    "trust_remote_code": "run the model's own code",
    "allow_long_max_model_len": "the variable VLLM_ALLOW_LONG_MAX_MODEL_LEN: more than config.json says",
}
NAMES = tuple(field.name for field in fields(Flags) if field.name != "model")
"""The flags that a plan takes; the model is a positional argument."""


def add_flag_options(parser: argparse.ArgumentParser) -> None:
    """One option for each flag of `vllm serve` that bears on start-up."""
    group = parser.add_argument_group(
        "vLLM's flags", "as for `vllm serve`; what is not given has the release's default"
    )
    for field in fields(Flags):
        if field.name not in NAMES:
            continue
        names = [name for name in (_SHORT.get(field.name), f"--{field.name.replace('_', '-')}") if name]
        kind, meaning = str(field.type), _MEANINGS[field.name]
        if kind == "bool | None":
            group.add_argument(*names, action=argparse.BooleanOptionalAction, default=None, help=meaning)
        else:
            group.add_argument(*names, dest=field.name, metavar=_METAVARS[kind], help=meaning)


def flags_of(args: argparse.Namespace) -> Flags:
    """The flags that were given.

    Raises:
        ValueError: a value is not of its flag's type; the text names the flag.
    """
    given: dict[str, Any] = {name: getattr(args, name) for name in NAMES}
    try:
        return Flags.from_mapping({name.replace("_", "-"): value for name, value in given.items()})
    except ValueError as error:
        raise ValueError(f"--{error}") from None
