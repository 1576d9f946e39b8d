"""The failures of vLLM's start-up, 0.2 to 0.33, as one table of wordings.

Keys of the numbers are those of the public error samples; where these use two names for one thing, both are
reported (`ALIASES`). Sources: a survey of vLLM's releases, real failed starts of 0.32.0, torch's own texts.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

from kvwatch.observe.log_messages import NUMBER, Number, Numbers, message, named_groups, number

_SIZE = r"[-+]?\d[\d,]*(?:\.\d+)?(?:[KMGT]i?B|[Bb]ytes)"
ALIASES = {"requested_gib": "desired_gib", "util_to_keep": "keep"}


MAX_HOLDERS = 32
_OOM_FIELDS = tuple(
    (name, re.compile("".join(pattern.split()).replace("SIZE", f"({_SIZE})")))
    for name, pattern in (
        ("tried", r"Tried to allocate SIZE"),
        ("total", r"has a total capac?i?ty of SIZE|; SIZE total capacity"),
        ("free", r"of which SIZE is free|; SIZE free;|but only SIZE was free"),
        ("process", r"this process has SIZE memory in use"),
        ("process", r"Process \d+ has SIZE memory in use"),
        ("allocated", r"allocated memory SIZE is allocated by PyTorch|SIZE already allocated"),
        ("private_pool", r"with SIZE allocated in private pools"),
        ("reserved", r"and SIZE is reserved by PyTorch but unallocated|SIZE reserved in total by PyTorch"),
    )
)
_OOM_GPU = re.compile(r"GPU(\d+)(?:hasatotal|;)")
_OOM_OTHERS = re.compile(r"Process(\d+)has(" + _SIZE + ")memory")
_OOM_SELF = re.compile(r"thisprocesshas")
_UNITS_GIB = {"kib": 2**-20, "mib": 2**-10, "gib": 1.0, "tib": 1024.0, "bytes": 2**-30}


def _size(text: str) -> tuple[str, Number]:
    """Unit suffix for a key, and the number as printed: ``2.00MiB`` is ``("mib", 2.0)``."""
    digits = re.match(NUMBER, text)
    assert digits is not None
    unit = text[digits.end() :].lower()
    return {"kb": "kib", "mb": "mib", "gb": "gib", "tb": "tib"}.get(unit, unit), number(digits[0])


def size_gib(numbers: Mapping[str, object], name: str) -> float | None:
    """The field ``name`` of an out-of-memory message in GiB, whatever unit it was printed in."""
    for unit, factor in _UNITS_GIB.items():
        value = numbers.get(f"{name}_{unit}")
        if isinstance(value, int | float):
            return value * factor
    return None


def _gib(text: str) -> float:
    unit, value = _size(text)
    return round(value * _UNITS_GIB[unit], 3)


def _oom_numbers(match: re.Match[str]) -> Numbers:
    text = match.string[match.start() :]
    numbers: Numbers = {}
    seen: set[str] = set()
    for name, pattern in _OOM_FIELDS:
        if name not in seen and (found := pattern.search(text)):
            unit, value = _size(next(group for group in found.groups() if group))
            numbers[f"{name}_{unit}"] = value
            seen.add(name)
    if found := _OOM_GPU.search(text):
        numbers["gpu"] = int(found[1])
    others = _OOM_OTHERS.findall(text)
    if others:
        numbers["processes"] = len(others)
        numbers["holders_gib"] = {pid: _gib(size) for pid, size in others[:MAX_HOLDERS]}
    return numbers


def _oom_kind(match: re.Match[str]) -> str:
    """Whether torch lists processes other than the one that ran out.

    Inside a PID namespace torch prints its own process as ``Process N``: a single one is that, unless the
    message also speaks of ``this process``.
    """
    text = match.string[match.start() :]
    others = len(_OOM_OTHERS.findall(text)) + bool(re.search(r"Process\d+has" + NUMBER + "$", text))
    own = 0 if _OOM_SELF.search(text) else 1
    return "cuda_oom_foreign_listed" if others > own else "cuda_oom"


def _failed_processes(match: re.Match[str]) -> Numbers:
    text = match["failed"]
    if text is None:
        return {}
    try:
        failed = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return {}
    return {"failed_procs": failed} if isinstance(failed, dict) else {}


def _profiling_numbers(match: re.Match[str]) -> Numbers:
    """Free memory before and after, in GiB; releases up to 0.6 printed bytes."""
    numbers: Numbers = {}
    for name in ("initial_free", "current_free"):
        text = match[name]
        if text is not None:
            value = number(text)
            in_bytes = value > 2**20
            numbers[f"{name}_gib"] = round(value / 2**30, 2) if in_bytes else value
            if in_bytes:
                numbers[f"{name}_bytes"] = value
    return numbers


_KV_NEEDED_SENTENCES = (("Tryincreasing", "theengine."), ("Seehttps:", "formoredetails."))


def _kv_needed_numbers(match: re.Match[str]) -> Numbers:
    """The named groups, and ``truncated`` where the log cut the sentence off."""
    numbers = named_groups(match)
    rest = match.string[match.end() :]
    if any(opening in rest and closing not in rest for opening, closing in _KV_NEEDED_SENTENCES):
        numbers["truncated"] = True
    return numbers


def _worker_numbers(match: re.Match[str]) -> Numbers:
    numbers = named_groups(match)
    for short, name in (("exit", "exit_code"), ("child_pid", "pid"), ("process", "name")):
        if short in numbers:
            numbers[name] = numbers.pop(short)
    return numbers


FAILURES = (
    message(
        "kv_needed_gt_available",
        r"To serve at least one request with the models?['\u2019`]?s? max seq len \(<max_model_len>\), "
        r"\(?<need_gib> Gi?B KV cache is needed, which is larger than the available KV cache memory "
        r"\(<avail_gib> Gi?B\)(?:\. Based on the available memory,"
        r"(?: the estimated maximum model length is <est_len>)?)?",
        "at least one request",
        "cache is needed",
        "is larger than the available",
        "available KV cache memory (",
        parse=_kv_needed_numbers,
    ),
    message(
        "max_seq_len_gt_kv_tokens",
        r"max seq len \(<max_model_len>\) is larger than the maximum number of tokens that can be stored in "
        r"KV cache(?: \(<kv_tokens>\))?",
        "max seq len (",
        "maximum number of tokens",
        "be stored in KV",
    ),
    message(
        "no_available_memory_for_blocks",
        r"No available memory for the cache blocks",
        "No available memory",
        "the cache blocks",
    ),
    message(
        "free_lt_desired",
        r"Free memory on device(?:[a-z]+:<device>)?\(<free_gib>/<total_gib> Gi?B\) on startup is less than "
        r"(?:desired GPU memory utilization"
        r"|the engine['\u2019]s budget after excluding external process['\u2019]?s "
        r"weights)"
        r"(?: \(<util>, <requested_gib> Gi?B\))?",
        "Free memory on device",
        "on startup is less",
        "is less than desired GPU",
        "GPU memory utilization (",
    ),
    message(
        "free_lt_desired",
        r"Available memory on node <node> \(<free_gib>/<total_gib> GiB\) on startup is less than desired CPU "
        r"memory utilization(?: \(<util>, <requested_gib> GiB\))?",
        "Available memory on node",
        "on startup is less",
    ),
    message(
        "kv_allocation_gt_free",
        r"Available memory on node <node> \(<free_gib>/<total_gib> GiB\) on kv cache allocation is less than "
        r"requested memory for kv \(<kv_gib>(?:/<requested_gib>)? GiB\)",
        "Available memory on node",
        "on kv cache allocation",
    ),
    message(
        "external_weights_gt_desired",
        r"Externally held weights on device(?:[a-z]+:<device>)?\(<held_gib>/<total_gib> GiB\) exceed the "
        r"desired "
        r"GPU memory utilization \(<util>, <requested_gib> GiB\)",
        "Externally held weights",
        "exceed the desired",
    ),
    message(
        "mamba_blocks_lt_max_num_seqs",
        r"(?:max_num_seqs \(<max_num_seqs>\) )?exceeds available Mamba cache blocks \(<mamba_blocks>\)",
        "exceeds available",
        "Mamba cache blocks",
    ),
    message(
        "memory_profiling_assert",
        r"Error in memory profiling(?:\. (?:Initial free memory <initial_free> (?:GiB)?, "
        r"current free memory <current_free>(?:GiB)?)?)?",
        "Error in memory profiling",
        "Initial free memory",
        parse=_profiling_numbers,
    ),
    message(
        "cuda_oom_sampler_warmup",
        r"(?:CUDA|HIP|XPU) out of memory occurred when warming up sampler with <dummy_requests> dummy "
        r"requests",
        "out of memory occurred",
        "warming up sampler",
        "dummy requests",
    ),
    message(
        "cuda_oom_pooler_warmup",
        r"(?:CUDA|HIP|XPU) out of memory occurred when warming up pooler .{0,200}?with <dummy_requests> "
        r"dummy requests",
        "out of memory occurred",
        "warming up pooler",
    ),
    message(
        "cuda_oom_load",
        r"Failed to load model - not enough GPU memory",
        "Failed to load model",
        "not enough GPU memory",
        parse=_oom_numbers,
    ),
    message(
        "cuda_oom_cudagraph_capture",
        r"OOM during (?:capture_model|CUDAgraph capture)",
        "OOM during",
        parse=_oom_numbers,
    ),
    message(
        _oom_kind,
        r"(?:CUDA|HIP|XPU|MPS)(?: error:)? out of memory|Cuda failure 2?'out of memory'"
        r"|Tried to allocate [\d.]+ [KMG]iB but only [\d.]+ [KMG]iB was free"
        r"|CUBLAS_STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation"
        r"|(?<=OutOfMemoryError:)Allocation on device",
        "out of memory",
        "Tried to allocate",
        "ALLOC_FAILED",
        "cudaErrorMemoryAllocation",
        "OutOfMemoryError",
        parse=_oom_numbers,
    ),
    message(
        "max_model_len_gt_derived",
        r"User-specified max_model_len \(<max_model_len>\) is greater than the derived max_model_len "
        r"\((?:\w+=)?<derived>(?: or model_max_length=(?:None|<model_max_length>))?",
        "User-specified max_model_len",
        "greater than the derived",
    ),
    message(
        "auto_fit_failed",
        r"Cannot auto-fit max_model_len",
        "Cannot auto-fit",
    ),
    message(
        "batched_tokens_lt_max_model_len",
        r"max_num_batched_tokens \(<max_num_batched_tokens>\) is smaller than max_model_len "
        r"\(<max_model_len>\)",
        "max_num_batched_tokens (",
        "is smaller than max_model_len",
    ),
    message(
        "batched_tokens_lt_max_num_seqs",
        r"max_num_batched_tokens \(<max_num_batched_tokens>\) must be greater than or equal to max_num_seqs "
        r"\(<max_num_seqs>\)",
        "max_num_batched_tokens (",
        "greater than or equal to max_num_seqs",
    ),
    message(
        "indivisible_heads",
        r"Total number of attention heads \(<heads>\) must be divisible by tensor parallel size "
        r"\(<tensor_parallel_size>\)",
        "number of attention heads",
        "divisible by tensor parallel",
    ),
    message(
        "indivisible_heads",
        r"AssertionError: <heads> is not divisible by <tensor_parallel_size>$",
        "is not divisible by",
    ),
    message(
        "world_size_gt_gpus",
        r"World size \(<world_size>\) is larger than the number of available GPUs \(<gpus>\)",
        "World size (",
        "number of available GPUs",
    ),
    message(
        "world_size_gt_gpus",
        r"please set tensor_parallel_size \(<world_size>\) to less than max local gpu count(?: \(<gpus>\))?",
        "max local gpu count",
        "set tensor_parallel_size (",
    ),
    message(
        "world_size_gt_gpus",
        r"The number of required (?:\w+ )?(?:GPUs|\w+s) exceeds the total number of available (?:\w+ "
        r")?(?:GPUs|\w+s)",
        "The number of required",
        "exceeds the total number of available",
    ),
    message(
        "swap_space_too_large",
        r"Too large swap space\. <swap_gib> GiB out of the <host_gib> GiB total CPU memory",
        "Too large swap space",
        "total CPU memory",
    ),
    message(
        "block_size_unsupported",
        r"No common block size for <block_size> \(",
        "No common block size",
    ),
    message(
        "block_size_unsupported",
        r"which packed <block_size>-token KV cache blocks cannot be split into\. "
        r"Reduce --block-size to <kernel_block_size>",
        "Reduce --block-size",
        "blocks cannot be split",
    ),
    message(
        "model_not_found",
        r"LocalEntryNotFoundError|RepositoryNotFoundError|GatedRepoError|does not appear to have a file "
        r"named config\.json"
        r"|Cannot find an appropriate cached snapshot folder|is not a local folder and is not a valid "
        r"model identifier"
        r"|Can't load the configuration of|Invalid repository ID or local directory specified",
        "LocalEntryNotFound",
        "RepositoryNotFound",
        "GatedRepoError",
        "file named config.json",
        "cached snapshot folder",
        "not a valid model identifier",
        "load the configuration of",
        "Invalid repository ID",
        parse=lambda _match: {},
    ),
    message(
        "config_invalid",
        r"Value error, ",
        "Value error,",
    ),
    message(
        "config_invalid",
        r"Input should be [^\[]{1,200}\[type=\w+, input_value=<value:[^,\]]+>",
        "Input should be",
        "[type=",
    ),
    message(
        "host_oom_killed",
        r"^Killed$|: line \d+: \d+ Killed|OOMKilled|oom-kill:|Out of memory: Killed process <pid>"
        r"|[Mm]emory cgroup out of memory|\(out of memory\): Killed process|oom_reaper: reaped"
        r"|exited with code <exit_code:137>|node running low on memory",
        "Killed",
        "oom-kill",
        "cgroup out of memory",
        "exited with code 137",
        "oom_reaper",
        "running low on memory",
    ),
    message(
        "worker_died",
        r"Worker (?:proc )?<name:\S*?>(?:pid <pid> died, exit code: <exit_code>|died unexpectedly"
        r"(?: \(exit code: (?:None|<exit:-?\d+>)\))?)",
        "died",
        parse=_worker_numbers,
    ),
    message(
        "worker_died",
        r"(?:RayWorkerProc rank=<rank>|Engine core proc(?:ess)? <name:\w+>) died unexpectedly"
        r"|Engine process \(pid <pid>\) died|Process <process:[\w.-]+> \(PID: <child_pid>\) died with exit "
        r"code <exit_code>",
        "died",
        parse=_worker_numbers,
    ),
    message(
        "worker_init_failed",
        r"WorkerProc initialization failed|WorkerProc failed to start|Worker failed with error"
        r"|Exception in worker \w+ while processing method",
        "WorkerProc",
        "while processing method",
        "Worker failed with error",
        parse=lambda _match: {},
    ),
    message(
        "engine_core_init_failed",
        r"Engine core initialization failed(?:.{0,80}?Failed core proc\(s\): <failed:\{[^}]*\}>)?"
        r"|Frontend process failed during engine core initialization|EngineCore failed to start"
        r"|Engine process failed to start",
        "Engine core init",
        "Failed core proc",
        "engine core initialization",
        "EngineCore failed",
        "Engine process failed",
        parse=_failed_processes,
    ),
    message(
        "config_validation_failed",
        r"<errors> validation errors? for <config:\w+Config|\w+Args>",
        "validation error",
    ),
)

CONSEQUENCES = frozenset(
    {"engine_core_init_failed", "worker_init_failed", "worker_died", "config_validation_failed"}
)
"""Failures that only report another one, which the log shows further up."""


# --- argparse: its texts keep their spaces --------------------------------------------------------

ARGPARSE = (
    ("unrecognized_arguments", re.compile(r"error: unrecognized arguments: (?P<arguments>.+)")),
    (
        "invalid_argument",
        re.compile(
            r"error: argument (?P<argument>[^:]{1,120}): (?P<reason>invalid (?:choice|[\w.]+ value): "
            r"'?(?P<value>[^'\s(]*)"
            r"|expected (?:one|at least one|\d+) arguments?|not allowed with argument .*|Invalid .*|Value .*)"
        ),
    ),
    (
        "invalid_argument",
        re.compile(r"error: ambiguous option: (?P<argument>\S+) (?P<reason>could match .+)"),
    ),
    ("invalid_argument", re.compile(r"error: the following arguments are required: (?P<argument>.+)")),
)
