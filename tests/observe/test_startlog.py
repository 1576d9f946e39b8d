"""The log reader against public samples, real failed starts, and everything that wraps a line."""

from __future__ import annotations

import json
import textwrap
import tracemalloc
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwatch.observe.startlog import Finding, StartLog, classify_line, flags_of, logged_arguments, read_log
from tests.support import ROOT, shared_dir

PATIENT = settings(deadline=None)  # a loaded machine is no failure
SAMPLES = [
    json.loads(line) for line in (ROOT / "tests/vectors/public/error_samples.jsonl").read_text().splitlines()
]
OTHERS = [
    json.loads(line) for line in (ROOT / "tests/observe/startlog_wordings.jsonl").read_text().splitlines()
]
WORDINGS = [sample for sample in OTHERS if sample["kind"] is not None]
INNOCENT = [sample for sample in OTHERS if sample["kind"] is None]
FAILURES = [sample for sample in SAMPLES if not sample["kind"].startswith(("info_", "warn_"))]

# Report wordings, not log lines; and torch's text alone, from which nobody can tell the stage.
NOT_IN_THE_TEXT = {
    "c045": "cuda_oom",
    "c068": None,
    "c107": "engine_core_init_failed",
    "c125": "engine_core_init_failed",
    "c172": None,
    "c218": "cuda_oom",
    "c238": "cuda_oom",
}

START = "INFO 01-01 00:00:00 [utils.py:1] non-default args: {'model': 'm', 'max_model_len': 4096}"
STARTED_LINE = "INFO:     Application startup complete."
STARTED = None
FAILED_STARTS = {
    "len_gt_cache": "kv_needed_gt_available",
    "len_gt_cache_1block": "no_available_memory_for_blocks",
    "cache_lt_block": "no_available_memory_for_blocks",
    "kvbytes_zero": "no_available_memory_for_blocks",
    "kvspace_zero": "no_available_memory_for_blocks",
    "kvspace_frac": "config_invalid",
    "len_gt_derived": "max_model_len_gt_derived",
    "len_gt_derived_allow": STARTED,
    "auto_len_reduce": STARTED,
    "auto_len_full": STARTED,
    "auto_len_fail": "auto_fit_failed",
    "blocks_override": STARTED,
    "blocks_override_small": "kv_needed_gt_available",
    "blocks_override_17": STARTED,
    "blocks_override_gt_mem": STARTED,
    "kvbytes_gt_ram": "kv_allocation_gt_free",
    "util_high": "free_lt_desired",
    "util_0": "config_invalid",
    "util_2": "config_invalid",
    "util_tiny": "kv_allocation_gt_free",
    "fp8": STARTED,
    "fp8_e5m2": STARTED,
    "fp8_pth": STARTED,
    "int8_pth": STARTED,
    "bs16": "block_size_unsupported",
    "bs17": "block_size_unsupported",
    "bad_flag": "unrecognized_arguments",
    "bad_dtype": "invalid_argument",
    "bad_len": "invalid_argument",
    "len_zero": "config_invalid",
    "no_model": "model_not_found",
    "swap_space": "unrecognized_arguments",
    "tp_not_div": "indivisible_heads",
    "batched_lt_len": "batched_tokens_lt_max_model_len",
    "default_util": "free_lt_desired",
}


def captures(name: str) -> str:
    shared = shared_dir()
    if shared is None:
        pytest.skip("the captures of real servers are not beside the repository")
    return (shared / "captures/vllm-0.32.0-cpu" / name).read_text()


def holds(finding: Finding | None, sample: dict[str, Any]) -> bool:
    """Whether kind and every number of a sample were found."""
    expected = sample.get("numbers", {}).items()
    return (
        finding is not None
        and finding.kind == sample["kind"]
        and all(finding.numbers.get(name) == value for name, value in expected)
    )


def root(text: str | list[str]) -> Finding:
    """The root cause of a log that has one."""
    cause = read_log(text.splitlines() if isinstance(text, str) else text).root_cause
    assert cause is not None
    return cause


# --- public material ------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample["id"])
def test_sample_line(sample: dict[str, Any]) -> None:
    finding = classify_line(sample["text"])
    assert holds(finding, sample), finding


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample["id"])
def test_sample_as_log(sample: dict[str, Any]) -> None:
    log = read_log(sample["text"].splitlines())
    finding = log.root_cause or log.information[-1]
    assert holds(finding, sample), finding
    assert finding.is_failure == (sample in FAILURES)


def test_error_texts_of_public_cases() -> None:
    shared = shared_dir()
    if shared is None:
        pytest.skip("the public cases are not beside the repository")
    found, expected = {}, {}
    for line in (shared / "public/cases.jsonl").read_text().splitlines():
        case = json.loads(line)
        if case.get("error_text"):
            finding = classify_line(case["error_text"])
            found[case["id"]] = finding.kind if finding is not None and finding.is_failure else None
            expected[case["id"]] = NOT_IN_THE_TEXT.get(case["id"], case["error_kind"])
    assert found == expected


@pytest.mark.parametrize("name", FAILED_STARTS)
def test_real_failed_start(name: str) -> None:
    sections = dict(section.split("\n", 1) for section in captures("failed-starts.md").split("\n## ")[1:])
    cause = read_log(sections[name].splitlines()).root_cause
    assert (cause.kind if cause is not None else STARTED) == FAILED_STARTS[name]


def test_every_failed_start_is_listed() -> None:
    names = {section.split("\n", 1)[0] for section in captures("failed-starts.md").split("\n## ")[1:]}
    assert names == set(FAILED_STARTS)


def test_log_of_a_started_server() -> None:
    log = read_log(captures("startup.log").splitlines())
    assert log.failures == ()
    assert log.root_cause is None
    assert log.started
    assert log.version == "0.32.0"
    assert log.flags.max_model_len == 2048
    assert log.flags.max_num_seqs == 8
    assert log.flags.enforce_eager is True
    tokens = log.info("info_kv_tokens_and_concurrency")[0].numbers
    assert tokens == {"tokens": 2097152, "per_request": 2048, "x": 1024.0}


# --- wordings of the releases ---------------------------------------------------------------------


@pytest.mark.parametrize("sample", WORDINGS, ids=lambda sample: str(sample["kind"]))
def test_wording(sample: dict[str, Any]) -> None:
    finding = classify_line(sample["text"])
    assert holds(finding, sample), finding
    assert finding is not None
    assert ("est_len" in finding.numbers) == ("est_len" in sample["numbers"])


# --- what is no failure ---------------------------------------------------------------------------


@pytest.mark.parametrize("text", [sample["text"] for sample in INNOCENT])
def test_no_failure(text: str) -> None:
    finding = classify_line(text)
    assert finding is None or not finding.is_failure
    assert read_log([text]).failures == ()


@PATIENT
@given(st.binary(max_size=300).map(lambda octets: octets.decode("latin-1")))
def test_random_text_never_fails(text: str) -> None:
    finding = classify_line(text)
    assert finding is None or not finding.is_failure


@PATIENT
@given(st.lists(st.text(alphabet="aA1 .:'\"([{}]),=\n\tKGiB/", max_size=80), max_size=30))
def test_random_lines_never_fail(lines: list[str]) -> None:
    assert read_log(lines).failures == ()


def test_source_lines_of_a_traceback_do_not_count() -> None:
    lines = """\
(EngineCore pid=1) ERROR 01-01 00:00:00 [core.py:1] Traceback (most recent call last):
(EngineCore pid=1) ERROR 01-01 00:00:00 [core.py:1]   File "/v/kv_cache_utils.py", line 1010, in check
(EngineCore pid=1) ERROR 01-01 00:00:00 [core.py:1]     No available memory for the cache blocks
(EngineCore pid=1) ERROR 01-01 00:00:00 [core.py:1] KeyError: 'x'
"""
    assert read_log(lines.splitlines()).failures == ()


# --- prefixes and wrapping ------------------------------------------------------------------------

OUTER = st.sampled_from(
    [
        "",
        "vllm-1  | ",
        "2026-01-28T00:18:18.123456789Z ",
        "2026-01-28T00:18:18.123456789Z stderr F ",
        "[pod/vllm-7d9f/server] ",
        "Nov 30 07:43:00 node7 vllm[8273]: ",
        "2026-01-28 00:18:18,123 ",
    ]
)
INNER = st.sampled_from(
    [
        "",
        "ERROR 12-16 02:38:41 engine.py:366] ",
        "ERROR 06-03 14:24:40 [v1/executor/multiproc_executor.py:1165] ",
        "(EngineCore_DP0 pid=1094) ",
        "(EngineCore pid=2739502) ERROR 06-03 14:24:40 [core.py:1165] ",
        "(VllmWorker rank=1 pid=2445156) ERROR 06-03 14:24:40 [multiproc_executor.py:470] ",
        "(RayWorkerWrapper pid=321, ip=10.0.0.1) ",
        "\x1b[1;36m(Worker_TP1 pid=448)\x1b[0;0m ",
        "[rank0]: ",
        "ERROR:vllm.engine:",
        "2026-01-28 00:18:18,123 - vllm - ERROR - ",
    ]
)
ENDS = st.sampled_from(["", "\n", "\r\n", "\x1b[0m\n"])
BARE = [
    sample for sample in FAILURES if sample["text"][0] not in "([" and not sample["text"].startswith("ERROR")
]
WRAPPABLE = [sample for sample in BARE if len(sample["text"]) > 60 and "\n" not in sample["text"]]


@PATIENT
@given(st.sampled_from(BARE), OUTER, INNER, ENDS)
def test_prefixes_change_nothing(sample: dict[str, Any], outer: str, inner: str, end: str) -> None:
    if sample["kind"] == "host_oom_killed" and inner:
        inner = ""  # the shell writes that word, alone on its line
    text = "\n".join(outer + inner + part for part in sample["text"].split("\n")) + end
    assert holds(classify_line(text), sample)
    assert holds(root(["before", *text.splitlines(), "after"]), sample)


@PATIENT
@given(st.sampled_from(FAILURES), ENDS, st.sampled_from(["message", "msg", "log"]), OUTER)
def test_json_logs(sample: dict[str, Any], end: str, key: str, outer: str) -> None:
    line = outer + json.dumps({"level": "error", key: sample["text"] + end, "stream": "stderr"})
    assert holds(classify_line(line), sample)
    assert holds(root([line]), sample)


@PATIENT
@given(st.sampled_from(WRAPPABLE), st.integers(48, 220), st.booleans(), st.booleans(), OUTER, INNER)
def test_wrapping_changes_nothing(
    sample: dict[str, Any], width: int, hard: bool, repeated: bool, outer: str, inner: str
) -> None:
    text = sample["text"]
    if hard:
        pieces = [text[start : start + width] for start in range(0, len(text), width)]
    else:
        pieces = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
    lines = [
        outer + (inner if repeated or not position else "") + piece for position, piece in enumerate(pieces)
    ]
    assert holds(
        root(["INFO 01-01 00:00:00 [a.py:1] x", *lines, "Traceback (most recent call last):"]), sample
    )


def test_finding_names_its_process_and_line() -> None:
    cause = root(
        "first\n(Worker_TP1 pid=448) ERROR 06-03 14:24:40 [w.py:1] ValueError: No available memory for the "
        "cache blocks."
    )
    assert (cause.process, cause.pid, cause.line) == ("Worker_TP1", 448, 2)


def test_text_does_not_run_on_into_the_next_line() -> None:
    cause = root("(A pid=1) ValueError: No available memory for the cache blocks.\n(A pid=1) Process A:\n")
    assert cause.text == "ValueError: No available memory for the cache blocks."


# --- root cause, stages, attempts -----------------------------------------------------------------

CAPTURE_OOM = """\
(EngineCore pid=9) INFO 01-01 00:00:00 [gpu_worker.py:1] Available KV cache memory: 60.00 GiB
(EngineCore pid=9) ERROR 01-01 00:00:01 [core.py:1] EngineCore failed to start.
(EngineCore pid=9) ERROR 01-01 00:00:01 [core.py:1] Traceback (most recent call last):
(EngineCore pid=9) ERROR 01-01 00:00:01 [core.py:1]   File "/v/gpu_worker.py", line 9, in {function}
(EngineCore pid=9) ERROR 01-01 00:00:01 [core.py:1]     self.model_runner.capture_model()
(EngineCore pid=9) ERROR 01-01 00:00:01 [core.py:1] torch.OutOfMemoryError: CUDA out of memory. \
Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.19 GiB of which 1.00 GiB is free.
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.
"""


@pytest.mark.parametrize(
    ("function", "kind", "stage"),
    [
        ("load_model", "cuda_oom_load", "load"),
        ("determine_available_memory", "cuda_oom", "profile"),
        ("initialize_kv_cache_tensors", "cuda_oom_kv_alloc", "kv_alloc"),
        ("capture_model", "cuda_oom_cudagraph_capture", "capture"),
        ("_dummy_sampler_run", "cuda_oom_sampler_warmup", "sampler"),
        ("something", "cuda_oom_kv_alloc", "kv_alloc"),
    ],
)
def test_stage_of_an_out_of_memory_error(function: str, kind: str, stage: str) -> None:
    log = read_log(CAPTURE_OOM.format(function=function).splitlines())
    cause = log.root_cause
    assert cause is not None
    assert (cause.kind, cause.stage) == (kind, stage)
    assert {other.kind for other in log.failures if other.is_consequence} == {"engine_core_init_failed"}


def test_out_of_memory_after_the_start_is_the_runtime_s() -> None:
    lines = [STARTED_LINE, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."]
    assert root(lines).kind == "cuda_oom_runtime"


def test_an_unknown_error_is_named_where_the_start_failed() -> None:
    lines = [
        "(EngineCore pid=9) Traceback (most recent call last):",
        '(EngineCore pid=9)   File "/v/core.py", line 9, in run',
        "(EngineCore pid=9)     x = y",
        "(EngineCore pid=9) KeyError: 'layers.0.weight'",
    ]
    assert read_log(lines).failures == ()
    cause = root([*lines, "RuntimeError: Engine core initialization failed. See root cause above."])
    assert cause.kind == "unclassified_error"
    assert cause.text == "KeyError: 'layers.0.weight'"


def test_repeats_are_kept_once_and_ranks_apart() -> None:
    line = (
        "(Worker_TP{0} pid=1) ValueError: Free memory on device cuda:{0} (1.0/2.0 GiB) on startup is less "
        "than desired GPU memory utilization (0.9, 1.8 GiB)."
    )
    log = read_log([line.format(rank) for rank in (0, 1, 0, 1)])
    assert [finding.numbers["device"] for finding in log.failures] == [0, 1]


def test_a_later_start_that_served() -> None:
    log = read_log([START, "ValueError: No available memory for the cache blocks.", START, STARTED_LINE])
    assert log.root_cause is not None
    assert log.recovered
    assert log.attempts == 2


def test_the_last_failed_start_counts() -> None:
    log = read_log(
        [
            START,
            "ValueError: No available memory for the cache blocks.",
            START,
            "Killed",
            STARTED_LINE.lower(),
        ]
    )
    assert root_kinds(log) == ["host_oom_killed"]
    assert not log.recovered


def root_kinds(log: StartLog) -> list[str]:
    return [finding.kind for finding in log.failures]


def test_requests_of_a_serving_log_do_not_count() -> None:
    refused = (
        "ERROR 01-01 00:00:00 [serving.py:1]   Value error, max_tokens must be positive [type=value_error]"
    )
    assert root_kinds(read_log([refused])) == ["config_invalid"]
    assert root_kinds(read_log([STARTED_LINE, refused])) == []


def test_a_hub_that_does_not_answer_is_not_the_cause() -> None:
    hub = "ERROR 01-01 00:00:00 [weight_utils.py:1] LocalEntryNotFoundError, retrying 1 of 2"
    assert root(hub).kind == "model_not_found"
    assert root([hub, "ValueError: No available memory for the cache blocks."]).kind == (
        "no_available_memory_for_blocks"
    )


# --- arguments ------------------------------------------------------------------------------------


def test_arguments_of_a_dict_with_objects() -> None:
    body = (
        "non-default args: {'model': 'm', 'gpu_memory_utilization': 0.95, 'enforce_eager': True, "
        "'compilation_config': CompilationConfig(level=3), 'max_num_seqs': 8, 'port': 1}"
    )
    flags = flags_of(logged_arguments(body))
    assert flags.given() == {
        "model": "m",
        "gpu_memory_utilization": 0.95,
        "max_num_seqs": 8,
        "enforce_eager": True,
    }


def test_arguments_of_a_namespace_and_of_the_engine() -> None:
    namespace = (
        "args: Namespace(model='m', config_format=<ConfigFormat.AUTO: 'auto'>, max_model_len=None, "
        "swap_space=4, tensor_parallel_size=2)"
    )
    assert logged_arguments(namespace) == {"model": "m", "swap_space": 4, "tensor_parallel_size": 2}
    engine = (
        "Initializing a V1 LLM engine (v0.9.2) with config: model='m', max_seq_len=8192, "
        "dtype=torch.bfloat16, quantization=None"
    )
    assert logged_arguments(engine) == {"model": "m", "max_model_len": 8192}


def test_arguments_are_never_evaluated() -> None:
    assert logged_arguments("non-default args: {'model': __import__('os').getcwd()}") == {}


@PATIENT
@given(st.text(alphabet="{}()[]'\"\\\\=:,. 0aA-<>", max_size=60))
def test_arguments_of_garbage(text: str) -> None:
    for opening in ("non-default args: {", "args: Namespace(", "with config: "):
        arguments = logged_arguments(opening + text)
        assert all(isinstance(name, str) for name in arguments)
        flags_of(arguments)


def test_flags_leave_out_what_they_do_not_take() -> None:
    assert flags_of({"max_model_len": "many", "port": 80, "block_size": 16}).given() == {"block_size": 16}


# --- size -----------------------------------------------------------------------------------------


def _long_log(lines: int) -> Iterator[str]:
    served = (
        (
            "(APIServer pid=1) INFO 11-30 04:18:48 [loggers.py:1] Engine 000: Avg prompt throughput: 1.0 "
            "tokens/s, GPU KV cache usage: 3.0%"
        ),
        'INFO:     127.0.0.1:45512 - "POST /v1/chat/completions HTTP/1.1" 200 OK',
        (
            "(Worker_TP{0} pid={0}) ERROR 01-01 00:00:00 [w.py:1] torch.OutOfMemoryError: CUDA out of "
            "memory. Tried to allocate {0}.00 MiB."
        ),
    )
    for number, text in enumerate(islice(cycle(served), lines)):
        yield text.format(number) + "\n"


def test_memory_stays_bounded() -> None:
    tracemalloc.start()
    try:
        log = read_log(_long_log(2_000))
        small = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        read_log(_long_log(8_000))
        large = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert log.lines == 2_000
    assert large < small + 1_000_000
