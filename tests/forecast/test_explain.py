"""Explanations: what helps is worked out from the log's numbers, what cannot help is never advised."""

from __future__ import annotations

import gzip
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwatch.blockmath.flags import Flags
from kvwatch.forecast.diagnosis import Diagnosis
from kvwatch.forecast.explain import RULES, explain
from kvwatch.observe.log_failures import ARGPARSE, FAILURES
from kvwatch.observe.startlog import flags_of, read_log
from tests.support import ROOT, shared_dir

PATIENT = settings(deadline=None)  # a loaded machine is no failure
SAMPLES = [
    json.loads(line) for line in (ROOT / "tests/vectors/public/error_samples.jsonl").read_text().splitlines()
]


def diagnose(*lines: str, **options: Any) -> Diagnosis:
    return explain(read_log(lines), **options)


def typed(diagnosis: Diagnosis) -> list[str]:
    """What the remedies say to type, in order; those without such a form left out."""
    return [remedy.to_type for remedy in diagnosis.remedies if remedy.to_type]


def advised(diagnosis: Diagnosis, flag: str) -> list[str]:
    """The values that are advised for a flag."""
    return [
        remedy.arguments[position + 1]
        for remedy in diagnosis.remedies
        for position, word in enumerate(remedy.arguments)
        if word == flag
    ]


def ruled_out(diagnosis: Diagnosis, words: str) -> bool:
    return any(words in reason for reason in diagnosis.ruled_out)


def needed(length: int, need: float, available: float, estimate: int | None = None) -> str:
    """The V1 message, as releases from 0.22 print it."""
    told = "" if estimate is None else f"the estimated maximum model length is {estimate}. "
    return (
        f"ValueError: To serve at least one request with the model's max seq len ({length}), ({need} GiB KV "
        f"cache is needed, which is larger than the available KV cache memory ({available} GiB). Based on "
        f"the available memory, {told}Try increasing `gpu_memory_utilization`"
    )


def free(free_gib: float, total: float, util: float, device: int = 0) -> str:
    return (
        f"ValueError: Free memory on device cuda:{device} ({free_gib}/{total} GiB) on startup is less than "
        f"desired GPU memory utilization ({util}, {round(total * util, 2)} GiB). Decrease"
    )


def told(**arguments: object) -> str:
    return f"INFO 01-01 00:00:00 [utils.py:1] non-default args: {arguments!r}"


def version(text: str) -> str:
    return f"INFO 01-01 00:00:00 [core.py:1] Initializing a V1 LLM engine (v{text}) with config: x"


def snapshot(free_gib: float, total: float) -> str:
    return (
        "(Worker pid=1) DEBUG 01-01 00:00:00 [gpu_worker.py:1] worker init memory snapshot: "
        f"torch_peak=0.0GiB, free_memory={free_gib}GiB, total_memory={total}GiB, cuda_memory=1.0GiB"
    )


def graphs(gib: float) -> str:
    return f"(Worker pid=1) INFO 01-01 00:00:00 [r.py:1] Estimated CUDA graph memory: {gib:.2f} GiB total"


def available(gib: float) -> str:
    return f"(Worker pid=1) INFO 01-01 00:00:00 [w.py:1] Available KV cache memory: {gib} GiB"


NO_BLOCKS = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"


def test_every_kind_has_a_rule() -> None:
    kinds = {message.kind for message in FAILURES if isinstance(message.kind, str)}
    kinds |= {kind for kind, _ in ARGPARSE}
    kinds |= {
        "cuda_oom",
        "cuda_oom_foreign_listed",
        "cuda_oom_kv_alloc",
        "cuda_oom_runtime",
        "unclassified_error",
    }
    assert set(RULES) == kinds


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample["id"])
def test_sample(sample: dict[str, Any]) -> None:
    diagnosis = diagnose(*sample["text"].splitlines())
    failure = not sample["kind"].startswith(("info_", "warn_"))
    assert diagnosis.kind == (sample["kind"] if failure else None)
    assert bool(diagnosis.remedies) == failure


def test_nothing_failed() -> None:
    nothing = diagnose("hello")
    assert nothing.what == "Nothing failed in this log."
    assert nothing.why == ("No line of it is known from vLLM: is it a server's log, and all of it?",)
    assert diagnose("INFO vLLM API server version 0.19.0").why == ()
    assert diagnose("INFO:     Application startup complete.").what == "The log shows a server that started."


# --- the length does not fit ----------------------------------------------------------------------


def test_length_that_the_log_prints_comes_first() -> None:
    diagnosis = diagnose(needed(262144, 24.0, 3.18, 34736))
    assert typed(diagnosis)[0] == "--max-model-len 34736"
    assert "20.82 GiB too little" in diagnosis.why[0]


def test_smallest_length_of_all_ranks() -> None:
    diagnosis = diagnose(needed(262144, 24.0, 3.18, 34736), needed(262144, 24.0, 3.0, 32000))
    assert advised(diagnosis, "--max-model-len")[0] == "32000"


def test_length_in_proportion_where_the_release_prints_none() -> None:
    diagnosis = diagnose(needed(32768, 4.0, 1.0))
    assert advised(diagnosis, "--max-model-len")[0] == "8128"
    assert "About" in diagnosis.remedies[0].text


def test_utilization_that_makes_up_for_what_is_missing() -> None:
    diagnosis = diagnose(
        told(gpu_memory_utilization=0.9), snapshot(23.3, 23.69), needed(65536, 2.45, 1.9, 50816)
    )
    assert advised(diagnosis, "--gpu-memory-utilization") == ["0.93"]


def test_default_utilization_of_the_release() -> None:
    lines = (snapshot(79.0, 79.19), needed(65536, 2.45, 1.9, 50816))
    assert advised(diagnose(version("0.19.0"), *lines), "--gpu-memory-utilization") == ["0.91"]
    assert advised(diagnose(version("0.20.0"), *lines), "--gpu-memory-utilization") == ["0.93"]
    assert advised(diagnose(*lines, version="0.20.0"), "--gpu-memory-utilization") == ["0.93"]
    unknown = diagnose(*lines)
    assert not advised(unknown, "--gpu-memory-utilization")
    assert any("0.55 GiB more" in remedy.text for remedy in unknown.remedies)


def test_utilization_stays_within_what_is_free() -> None:
    diagnosis = diagnose(told(gpu_memory_utilization=0.9), snapshot(21.9, 23.69), needed(65536, 2.45, 1.9))
    assert not advised(diagnosis, "--gpu-memory-utilization")
    assert ruled_out(diagnosis, "only 21.90 GiB of 23.69 GiB were free")


def test_utilization_stays_below_the_limit() -> None:
    diagnosis = diagnose(told(gpu_memory_utilization=0.95), snapshot(79.1, 79.19), needed(65536, 9.0, 1.9))
    assert not advised(diagnosis, "--gpu-memory-utilization")
    assert ruled_out(diagnosis, "more than 0.98")


def test_no_card_is_that_large() -> None:
    diagnosis = diagnose(told(gpu_memory_utilization=0.9), needed(202752, 71.16, 28.57, 81392))
    assert ruled_out(diagnosis, "a card of at least 532 GiB")
    assert not any("more per GPU" in remedy.text for remedy in diagnosis.remedies)


def test_utilization_does_not_size_a_cache_given_in_bytes() -> None:
    diagnosis = diagnose(told(kv_cache_memory_bytes=2**30), snapshot(79.1, 79.19), needed(65536, 2.0, 1.0))
    assert not advised(diagnosis, "--gpu-memory-utilization")
    assert ruled_out(diagnosis, "--kv-cache-memory-bytes does")
    assert 2 * 2**30 < int(advised(diagnosis, "--kv-cache-memory-bytes")[0]) < 2.2 * 2**30


def test_utilization_does_not_size_an_overridden_cache() -> None:
    diagnosis = diagnose(told(num_gpu_blocks_override=16), needed(2048, 0.0, 0.0, 1920))
    assert typed(diagnosis)[0] == "--max-model-len 1920"
    assert ruled_out(diagnosis, "--num-gpu-blocks-override does")


def test_flags_of_the_caller_win() -> None:
    diagnosis = diagnose(
        told(gpu_memory_utilization=0.5),
        snapshot(79.1, 79.19),
        needed(65536, 2.45, 1.9),
        flags=Flags(gpu_memory_utilization=0.9),
    )
    assert advised(diagnosis, "--gpu-memory-utilization") == ["0.91"]


def test_narrower_cache_only_where_it_is_enough() -> None:
    assert advised(diagnose(needed(65536, 2.45, 1.9)), "--kv-cache-dtype") == ["fp8"]
    assert ruled_out(diagnose(needed(65536, 24.0, 1.9)), "fp8 alone")
    already = diagnose(told(kv_cache_dtype="fp8"), needed(65536, 2.45, 1.9))
    assert not advised(already, "--kv-cache-dtype")
    assert ruled_out(already, "already")


def test_no_shorter_length_where_nothing_is_left() -> None:
    diagnosis = diagnose(needed(65536, 2.45, -1.9))
    assert not advised(diagnosis, "--max-model-len")
    assert ruled_out(diagnosis, "A shorter --max-model-len")


def test_automatic_length_from_the_release_that_has_it() -> None:
    assert "auto" not in advised(diagnose(version("0.13.0"), needed(65536, 2.45, 1.9)), "--max-model-len")
    assert "auto" in advised(diagnose(version("0.14.0"), needed(65536, 2.45, 1.9)), "--max-model-len")


def test_pipeline_stages_over_counted_by_some_releases() -> None:
    lines = (told(pipeline_parallel_size=2), needed(262144, 24.0, 3.18, 34736))
    over = diagnose(version("0.15.2rc1.dev93"), *lines)
    assert any("Upgrade to vLLM 0.17" in remedy.text for remedy in over.remedies)
    assert not any("Upgrade" in remedy.text for remedy in diagnose(version("0.19.0"), *lines).remedies)


HYBRID = (
    "(EngineCore pid=1) INFO 01-01 00:00:00 [i.py:1] Setting attention block size to 784 tokens to ensure "
    "that attention page size is >= mamba page size."
)


def test_a_length_that_would_fail_on_state_slots_comes_with_fewer_sequences() -> None:
    diagnosis = diagnose(HYBRID, needed(262144, 16.45, 2.0, 25088))
    assert typed(diagnosis)[0] == "--max-model-len 25088 --max-num-seqs 40"
    raised = diagnose(
        HYBRID,
        told(gpu_memory_utilization=0.7),
        snapshot(79.1, 79.19),
        needed(262144, 16.45, 2.0, 25088),
    )
    assert "--gpu-memory-utilization 0.89 --max-num-seqs 335" in typed(raised)
    assert "--max-model-len auto --max-num-seqs 40" in typed(raised)
    roomy = diagnose(HYBRID, told(max_num_seqs=40), needed(262144, 16.45, 2.0, 25088))
    assert typed(roomy)[0] == "--max-model-len 25088"
    eager = diagnose(HYBRID, told(enforce_eager=True), needed(262144, 16.45, 2.0, 25088))
    assert typed(eager)[0] == "--max-model-len 25088"


# --- V0 -------------------------------------------------------------------------------------------


def v0(length: int, tokens: int) -> str:
    return (
        f"ValueError: The model's max seq len ({length}) is larger than the maximum number of tokens that "
        f"can be stored in KV cache ({tokens}). Try"
    )


BUDGET = (
    "INFO 01-01 00:00:00 worker.py:267] the current vLLM instance can use total_gpu_memory (79.32GiB) x "
    "gpu_memory_utilization (0.80) = 63.45GiB"
)
BREAKDOWN = (
    "INFO 01-01 00:00:00 worker.py:267] model weights take 50.00GiB; non_torch_memory takes 0.20GiB; PyTorch "
    "activation peak memory takes 5.00GiB; the rest of the memory reserved for KV Cache is 8.25GiB."
)


def test_v0_sentence_without_its_end() -> None:
    diagnosis = diagnose(v0(32768, 7344).partition(" (7344")[0] + ". Try increasing")
    assert diagnosis.kind == "max_seq_len_gt_kv_tokens"
    assert "cut off" in diagnosis.why[0]
    assert not [flag for flag in typed(diagnosis) if flag.startswith("--max-model-len")]


def test_v0_numbers_of_the_profile() -> None:
    diagnosis = diagnose(BUDGET, BREAKDOWN, v0(16384, 8192))
    assert typed(diagnosis)[0] == "--max-model-len 8192"
    assert advised(diagnosis, "--kv-cache-dtype") == ["fp8"]
    assert advised(diagnosis, "--gpu-memory-utilization") == ["0.91"]
    assert "50.00 GiB" in diagnosis.why[0]


def test_v0_without_numbers() -> None:
    diagnosis = diagnose(v0(16384, 1280))
    assert typed(diagnosis)[0] == "--max-model-len 1280"
    assert not advised(diagnosis, "--gpu-memory-utilization")
    assert any("12.80 times" in remedy.text for remedy in diagnosis.remedies)


def test_v0_with_no_token_at_all() -> None:
    diagnosis = diagnose(v0(16384, 0))
    assert not advised(diagnosis, "--max-model-len")
    assert ruled_out(diagnosis, "A shorter --max-model-len")


# --- nothing is left ------------------------------------------------------------------------------


def test_no_blocks_with_what_is_missing() -> None:
    diagnosis = diagnose(told(gpu_memory_utilization=0.8), snapshot(79.1, 79.19), available(-1.44), NO_BLOCKS)
    assert advised(diagnosis, "--gpu-memory-utilization") == ["0.84"]
    assert not advised(diagnosis, "--max-model-len")
    assert ruled_out(diagnosis, "A shorter --max-model-len")


def test_no_blocks_without_numbers_invents_none() -> None:
    diagnosis = diagnose(NO_BLOCKS)
    assert not advised(diagnosis, "--gpu-memory-utilization")
    assert any("the log does not say how much" in remedy.text for remedy in diagnosis.remedies)
    assert ruled_out(diagnose(told(gpu_memory_utilization=0.95), NO_BLOCKS), "0.95")


def test_smaller_batches_are_smaller_than_the_given_ones() -> None:
    diagnosis = diagnose(told(max_num_batched_tokens=1024, max_num_seqs=8), NO_BLOCKS)
    assert "--max-num-batched-tokens 512 --max-num-seqs 4" in typed(diagnosis)


def test_graph_estimate_that_ate_the_card() -> None:
    diagnosis = diagnose(
        told(gpu_memory_utilization=0.8), snapshot(140.0, 141.0), graphs(118.65), available(-60.0), NO_BLOCKS
    )
    assert typed(diagnosis)[0] == "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0"
    assert not advised(diagnosis, "--gpu-memory-utilization")
    assert ruled_out(diagnosis, "118.65 GiB were set aside for CUDA graphs")


def test_an_ordinary_graph_estimate_is_not_blamed() -> None:
    diagnosis = diagnose(
        told(gpu_memory_utilization=0.8), snapshot(79.1, 79.19), graphs(0.36), needed(65536, 2.45, 1.9)
    )
    assert advised(diagnosis, "--gpu-memory-utilization") == ["0.81"]
    assert not any(remedy.environment for remedy in diagnosis.remedies)


def test_too_few_bytes_given() -> None:
    diagnosis = diagnose(told(kv_cache_memory_bytes=2**20), NO_BLOCKS)
    assert any("Drop --kv-cache-memory-bytes" in remedy.text for remedy in diagnosis.remedies)
    assert ruled_out(diagnosis, "--kv-cache-memory-bytes does")


def test_neighbours_shrink_the_cache_of_old_releases() -> None:
    old = diagnose(version("0.8.5"), NO_BLOCKS)
    assert any("other processes" in sentence for sentence in old.why)
    assert any("nvidia-smi" in text for text in typed(old))
    assert not any("nvidia-smi" in text for text in typed(diagnose(version("0.9.2"), NO_BLOCKS)))


# --- other holders --------------------------------------------------------------------------------


def test_less_free_than_wanted() -> None:
    diagnosis = diagnose(free(31.44, 47.38, 0.95))
    assert "nvidia-smi" in typed(diagnosis)[0]
    assert advised(diagnosis, "--gpu-memory-utilization") == ["0.66"]
    assert ruled_out(diagnosis, "Raising --gpu-memory-utilization")
    assert ruled_out(diagnosis, "A shorter --max-model-len")


def test_the_fullest_gpu_decides() -> None:
    diagnosis = diagnose(free(60.87, 79.19, 0.95, 1), free(60.33, 79.19, 0.95, 3))
    assert advised(diagnosis, "--gpu-memory-utilization") == ["0.76"]
    assert "GPUs 1, 3" in diagnosis.what


def test_next_to_nothing_is_free() -> None:
    diagnosis = diagnose(free(0.49, 79.32, 0.6))
    assert not advised(diagnosis, "--gpu-memory-utilization")
    assert ruled_out(diagnosis, "too little to serve from")


@PATIENT
@given(st.floats(0.5, 140), st.floats(0.05, 0.99), st.floats(0.02, 1.0))
def test_the_lower_utilization_always_fits(total: float, util: float, share: float) -> None:
    total = round(total, 2)
    free_gib = round(total * util * share * 0.98, 2)
    for value in advised(diagnose(free(free_gib, total, round(util, 2))), "--gpu-memory-utilization"):
        assert float(value) * (total + 0.005) <= free_gib - 0.005 + 0.01 * total * 1e-6


def test_listed_processes() -> None:
    text = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity "
        "of 79.19 GiB of which 1.00 GiB is free. Process 77 has 10.00 GiB memory in use. Process 78 has "
        "30.00 GiB memory in use. "
    )
    unsure = diagnose(text)
    assert typed(unsure) == ["ps -o pid,user,lstart,args -p 78,77"]
    sure = diagnose(text + "Including non-PyTorch memory, this process has 38.00 GiB memory in use.")
    assert typed(sure) == ["kill 78 77"]
    assert "PID 78 30.00 GiB" in sure.why[1]


def test_same_memory_before_and_after_profiling() -> None:
    text = (
        "AssertionError: Error in memory profiling. Initial free memory 30.3 GiB, current free memory 30.3 "
        "GiB. This"
    )
    assert any("0.16" in remedy.text for remedy in diagnose(text).remedies)
    assert not any("0.16" in remedy.text for remedy in diagnose(version("0.16.0"), text).remedies)


# --- out of memory --------------------------------------------------------------------------------


OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
    "79.19 GiB of which 1.00 GiB is free."
)
STAGES = {
    "load_model": "cuda_oom_load",
    "profile_run": "cuda_oom",
    "initialize_kv_cache": "cuda_oom_kv_alloc",
    "capture_model": "cuda_oom_cudagraph_capture",
    "_dummy_sampler_run": "cuda_oom_sampler_warmup",
}


@pytest.mark.parametrize("function", STAGES)
def test_out_of_memory_never_raises_the_budget(function: str) -> None:
    diagnosis = diagnose(
        told(gpu_memory_utilization=0.9),
        "Traceback (most recent call last):",
        f'  File "/v/x.py", line 1, in {function}',
        OOM,
    )
    assert diagnosis.kind == STAGES[function]
    assert all(float(value) < 0.9 for value in advised(diagnosis, "--gpu-memory-utilization"))
    assert any("--gpu-memory-utilization" in reason for reason in diagnosis.ruled_out)
    assert "2.00 GiB failed" in diagnosis.why[0]


def test_sampler_warm_up() -> None:
    diagnosis = diagnose(
        told(gpu_memory_utilization=0.95),
        "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests. Please "
        "try",
    )
    assert typed(diagnosis) == ["--max-num-seqs 256", "--gpu-memory-utilization 0.90"]


def test_graph_estimate_that_two_releases_leave_off() -> None:
    lines = ("Traceback (most recent call last):", '  File "/v/x.py", line 1, in capture_model', OOM)
    switch = "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1"
    assert typed(diagnose(version("0.19.0"), *lines))[0] == switch
    assert switch not in typed(diagnose(version("0.20.0"), *lines))
    assert switch not in typed(diagnose(version("0.17.0"), *lines))


# --- state slots, configuration, consequences -----------------------------------------------------


def test_state_slots() -> None:
    diagnosis = diagnose(
        told(gpu_memory_utilization=0.9),
        snapshot(79.1, 79.19),
        available(20.0),
        "ValueError: max_num_seqs (1024) exceeds available Mamba cache blocks (856). Each decode",
    )
    assert typed(diagnosis) == ["--max-num-seqs 856", "--gpu-memory-utilization 0.95"]
    assert ruled_out(diagnosis, "A shorter --max-model-len")


def test_removed_and_later_flags() -> None:
    swap = diagnose("vllm: error: unrecognized arguments: --swap-space 4")
    assert "removed in 0.18" in swap.remedies[0].text
    later = diagnose("vllm: error: unrecognized arguments: --kv_cache_memory_bytes=1G --nonsense")
    assert "0.10.2" in later.remedies[0].text
    assert "--nonsense" in later.remedies[1].text


def test_divisors_of_the_heads() -> None:
    text = "Value error, Total number of attention heads (28) must be divisible by tensor parallel size (8)."
    assert advised(diagnose(text), "--tensor-parallel-size")[0] == "7"


def test_consequence_alone_asks_for_the_whole_log() -> None:
    diagnosis = diagnose("RuntimeError: Engine core initialization failed. See root cause above.")
    assert any("whole log" in remedy.text for remedy in diagnosis.remedies)
    both = diagnose(
        needed(65536, 2.45, 1.9), "RuntimeError: Engine core initialization failed. See root cause"
    )
    assert both.kind == "kv_needed_gt_available"


# --- against the model ----------------------------------------------------------------------------

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}


def test_numbers_that_agree_with_the_model() -> None:
    diagnosis = diagnose(
        version("0.32.0"), snapshot(79.1, 79.19), needed(131072, 16.0, 5.0, 40960), config=LLAMA
    )
    assert [check.split(":")[0] for check in diagnosis.checks] == ["Agrees", "Agrees"]
    assert typed(diagnosis)[:2] == ["--max-model-len 40960", "--kv-cache-dtype fp8 --max-model-len 81824"]


def test_length_worked_out_from_the_model() -> None:
    diagnosis = diagnose(version("0.8.5"), snapshot(79.1, 79.19), needed(131072, 16.0, 5.0), config=LLAMA)
    assert advised(diagnosis, "--max-model-len")[0] == "40912"
    assert "worked out from the model" in diagnosis.remedies[0].text


def test_numbers_that_differ_leave_the_model_aside() -> None:
    diagnosis = diagnose(needed(131072, 32.0, 5.0), config=LLAMA)
    assert diagnosis.checks[0].startswith("Differs: ")
    assert diagnosis.checks[-1].startswith("Assumed, as the log does not say: vLLM ")
    assert "About" in diagnosis.remedies[0].text


def test_refusals_that_agree_with_the_model() -> None:
    heads = "Value error, Total number of attention heads (32) must be divisible by tensor parallel size (3)."
    assert diagnose(heads, config=LLAMA).checks[0].startswith("The same from the model's configuration: ")
    length = (
        "Value error, User-specified max_model_len (200000) is greater than the derived max_model_len "
        "(max_position_embeddings=131072.0 or model_max_length=None in model's config.json)."
    )
    assert diagnose(length, config=LLAMA).checks[0].startswith("The same from the model's configuration: ")


def test_a_model_the_arithmetic_does_not_know() -> None:
    diagnosis = diagnose(
        needed(131072, 16.0, 5.0), config={"architectures": ["Unheard"], "model_type": "unheard"}
    )
    assert diagnosis.checks[0].startswith("Not checked: ")


def _is_plain(row: dict[str, Any]) -> bool:
    """Rows that say all there is to say: no draft model, no cache type out of a checkpoint's own files."""
    return (
        row["architecture"] in ("LlamaForCausalLM", "Qwen3ForCausalLM")
        and "speculative_config" not in row["flags"]
        and row["resolved"]["cache_dtype"] == row["flags"]["kv_cache_dtype"]
    )


def test_planner_vectors_agree() -> None:
    """vLLM's own messages for plain models, read as a log and checked against the model."""
    shared = shared_dir()
    if shared is None:
        pytest.skip("the vectors are not beside the repository")
    seen = 0
    with gzip.open(shared / "vectors/startup_planning.jsonl.gz", "rt") as rows:
        for row in map(json.loads, rows):
            texts = [case["raises"] for case in row.get("cases") or [] if case.get("raises")]
            if not texts or not _is_plain(row):
                continue
            config = json.loads((shared / "vectors/configs" / row["config"]).read_text())
            flags = flags_of({name: value for name, value in row["flags"].items() if value != "auto"})
            diagnosis = diagnose(texts[0], flags=flags, config=config, version=row["vllm_version"])
            if re.match("ValueError: To serve", texts[0]):
                agreed = [check for check in diagnosis.checks if not check.startswith("Assumed")]
                assert agreed, row["name"]
                assert all(check.startswith("Agrees") for check in agreed), (row["name"], diagnosis.checks)
                seen += 1
    assert seen > 50
