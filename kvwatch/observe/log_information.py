"""The informative lines of vLLM's start-up log: what the server measured and decided on its way."""

from __future__ import annotations

import re

from kvwatch.observe.log_messages import message

INFORMATIVE = ("info_", "warn_", "debug_")
"""How the kinds of lines that are no failures begin."""


def _blocks_override_kind(match: re.Match[str]) -> str:
    """An override of zero blocks is vLLM's own, for its CUDA-graph profile."""
    return "info_blocks_override_profile" if match["from_blocks"] == "0" else "info_blocks_override"


INFORMATION = (
    message(
        "info_budget",
        r"the current vLLM instance can use total_gpu_memory \(<total> GiB\) x gpu_memory_utilization "
        r"\(<util>\) = <usable> GiB",
        "current vLLM instance can use",
    ),
    message(
        "info_breakdown",
        r"model weights take <weights> GiB; non_torch_memory takes <non_torch> GiB; PyTorch activation "
        r"peak memory "
        r"takes <activation> GiB; the rest of the memory reserved for KV Cache is <kv> GiB",
        "model weights take",
    ),
    message(
        "info_profile",
        r"Memory profiling results: total_gpu_memory=<total_gib> GiB initial_memory_usage=<initial_gib> GiB "
        r"peak_torch_memory=<peak_torch_gib> GiB (?:memory_usage_post_profile=<post_profile_gib> GiB )?"
        r"non_torch_memory=<non_torch_gib> GiB kv_cache_size=<kv_gib> GiB gpu_memory_utilization=<util>",
        "Memory profiling results",
    ),
    message("info_load", r"Loading model weights took <gb> Gi?B", "model weights took"),
    message(
        "info_load", r"Model loading took <gib> Gi?B (?:memory )?and <secs> seconds", "Model loading took"
    ),
    message("info_kv_avail", r"Available KV cache memory: <gib> GiB", "Available KV cache memory:"),
    message(
        "info_kv_tokens_and_concurrency",
        r"KV cache size: <tokens> tokens, Maximum concurrency for <per_request> tokens per request: <x>x",
        "KV cache size:",
    ),
    message("info_kv_tokens", r"KV cache size: <tokens> tokens", "KV cache size:"),
    message(
        "info_concurrency",
        r"Maximum concurrency for <tokens> tokens per request: <x>x",
        "Maximum concurrency for",
    ),
    message("info_blocks", r"# \w+ blocks: <gpu_blocks>, # CPU blocks: <cpu_blocks>", "CPU blocks:"),
    message(
        "info_graph", r"Graph capturing finished in <secs> secs?, took <gib> GiB", "Graph capturing finished"
    ),
    message(
        "info_graph_estimate", r"Estimated CUDA graph memory: <gib> GiB total", "Estimated CUDA graph memory"
    ),
    message(
        "info_graph_pool",
        r"CUDA graph pool memory: <actual_gib> GiB \(actual\), <estimated_gib> GiB \(estimated\)",
        "CUDA graph pool memory",
    ),
    message(
        "info_cudagraph_future",
        r"CUDA graph memory profiling will be enabled by default.*?from <util> to <util_to_keep> to maintain",
        "memory profiling will be enabled",
    ),
    message(
        "info_cudagraph_profiling",
        r"CUDA graph memory profiling is enabled.*?--gpu-memory-utilization=<util> is equivalent to "
        r"--gpu-memory-utilization=<equivalent_util>(?: without.*?increase --gpu-memory-utilization to "
        r"<util_to_keep>)?",
        "memory profiling is enabled",
    ),
    message(
        "warn_cudagraph_not_estimated",
        r"CUDA graph memory profiling is disabled",
        "memory profiling is disabled",
    ),
    message(
        _blocks_override_kind,
        r"Overriding num_gpu_blocks=<from_blocks> with num_gpu_blocks_override=<override>",
        "Overriding num_gpu_blocks",
    ),
    message(
        "info_attn_block_size",
        r"Setting attention block size to <tokens> tokens",
        "Setting attention block size",
    ),
    message(
        "warn_padding",
        r"Add <padding_layers> padding layers, may waste at most <waste_pct>%",
        "padding layers",
    ),
    message(
        "info_startup_summary",
        r"Free memory on device(?:\w+:\d+)?\(<free_gib>/<total_gib> GiB\) on startup\. Desired GPU memory "
        r"utilization is "
        r"\(<util>, <requested_gib> GiB\)\. Actual usage is <weights_gib> GiB for "
        r"(?:weight|consumed memory \(weights \+ non-torch\)), <activation_gib> GiB for peak activation, "
        r"(?:<non_torch_gib> GiB for non-torch memory, )?and <cudagraph_gib> GiB for CUDAGraph memory"
        r"(?:.*?--kv-cache-memory=<fit_bytes>`.*?--kv-cache-memory=<full_bytes>`.*?"
        r"Current kv cache memory in use is <kv_in_use_gib> GiB)?",
        "on startup. Desired",
    ),
    message(
        "info_init_snapshot",
        r"worker init memory snapshot:.*?free_memory=<free_gib> GiB, total_memory=<total_gib> GiB, "
        r"(?:cuda_memory=<cuda_gib> GiB, )?(?:torch_memory=[\d.]+ GiB, "
        r")?(?:non_torch_memory=<non_torch_gib> GiB)?",
        "worker init memory snapshot",
    ),
    message(
        "info_initial_free",
        r"Initial free memory: <free_gib> GiB; Requested memory: <util> \(util\), <requested_gib> GiB",
        "Initial free memory:",
    ),
    message("info_requested", r"worker requested memory: <requested_gib> GiB", "worker requested memory"),
    message(
        "info_auto_fit",
        r"Auto-fit max_model_len: reduced from <from_len> to <max_model_len> to fit in available KV cache "
        r"memory \(<gib> GiB",
        "Auto-fit max_model_len",
    ),
    message(
        "info_auto_fit", r"Auto-fit max_model_len: full model context length <max_model_len> fits", "Auto-fit"
    ),
    message("info_max_model_len", r"Using max model len <max_model_len>", "Using max model len"),
    message(
        "info_cpu_kv",
        r"(?:Explicitly|Auto) set \(<kv_gib>/<total_gib>\) GiB for KV cache on node <node>",
        "GiB for KV cache on node",
    ),
    message(
        "warn_swap_space",
        r"Possibly too large swap space\. <swap_gib> GiB out of the <host_gib> GiB",
        "Possibly too large swap",
    ),
    message("info_worker_sigkill", r"Worker Termination: resorting to SIGKILL", "Worker Termination"),
    message(
        "info_load_started",
        r"Starting to load model|Loading model from scratch",
        "to load model",
        "from scratch",
    ),
    message("info_capture_started", r"Capturing (?:the model for )?CUDAgraph", "Capturing"),
    message(
        "info_started",
        r"Application startup complete|Uvicorn running on|Avg prompt throughput",
        "startup complete",
        "Uvicorn running",
        "Avg prompt throughput",
    ),
)
