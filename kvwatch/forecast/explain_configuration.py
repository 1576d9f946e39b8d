"""Starts that failed before or beside memory: refused values, and logs that do not show the cause."""

from __future__ import annotations

from collections.abc import Mapping

from kvwatch.blockmath.flags import AUTO_LENGTH
from kvwatch.forecast.diagnosis import (
    Advice,
    Diagnosis,
    Draft,
    FailedStart,
    Rule,
    gib,
    length_flag,
)


def max_model_len_gt_derived(s: FailedStart) -> Diagnosis:
    """A longer length than the model was made for."""
    length, derived = s.finding.printed("max_model_len"), s.finding.printed("derived")
    return (
        Draft(
            s,
            f"--max-model-len {int(length)} is more than the {int(derived)} tokens the model's config.json "
            "allows.",
        )
        .add(
            Advice("The longest length the model was made for.", length_flag(derived)),
            Advice(
                "Overrides the limit; outputs past it are wrong or fail unless the model's rope scaling is "
                "set for it (--hf-overrides).",
                environment=("VLLM_ALLOW_LONG_MAX_MODEL_LEN=1",),
            ),
            "More memory, by whatever flag: this limit comes from the model's configuration.",
        )
        .done()
    )


def batched_tokens_lt_max_model_len(s: FailedStart) -> Diagnosis:
    """Chunked prefill is off, and a prompt is longer than a batch."""
    tokens, length = s.finding.printed("max_num_batched_tokens"), s.finding.printed("max_model_len")
    return (
        Draft(
            s,
            f"Without chunked prefill a prompt of {int(length)} tokens does not fit into a batch of "
            f"{int(tokens)}.",
        )
        .add(
            Advice(
                "Cuts long prompts into batches; nothing else need change.", ("--enable-chunked-prefill",)
            ),
            Advice(
                "Makes batches as large as the longest prompt (larger activation peak).",
                ("--max-num-batched-tokens", str(int(length))),
            ),
            Advice("Or shorten the prompts.", length_flag(tokens)),
        )
        .done()
    )


def batched_tokens_lt_max_num_seqs(s: FailedStart) -> Diagnosis:
    """Fewer tokens per batch than sequences."""
    tokens, seqs = s.finding.printed("max_num_batched_tokens"), s.finding.printed("max_num_seqs")
    return (
        Draft(s, f"A batch of {int(tokens)} tokens cannot hold one token of each of {int(seqs)} sequences.")
        .add(
            Advice("As many sequences as tokens.", ("--max-num-seqs", str(int(tokens)))),
            Advice("As many tokens as sequences.", ("--max-num-batched-tokens", str(int(seqs)))),
        )
        .done()
    )


def indivisible_heads(s: FailedStart) -> Diagnosis:
    """The heads cannot be shared out evenly."""
    heads, size = int(s.finding.printed("heads")), int(s.finding.printed("tensor_parallel_size"))
    divisor = next(smaller for smaller in range(size, 0, -1) if heads % smaller == 0)
    draft = Draft(s, f"{heads} attention heads cannot be shared out evenly over {size} GPUs.")
    return draft.add(
        Advice("The next smaller size that divides the heads.", ("--tensor-parallel-size", str(divisor))),
        Advice(
            "Or cut the model into stages instead, which need not divide the heads.",
            ("--tensor-parallel-size", "1", "--pipeline-parallel-size", str(size)),
        ),
    ).done()


def world_size_gt_gpus(s: FailedStart) -> Diagnosis:
    """More ranks than GPUs."""
    size, gpus = s.finding.number("world_size"), s.finding.number("gpus")
    draft = Draft(
        s,
        "The server wants more GPUs than it can see.",
        size is not None and gpus is not None and f"It wants {int(size)} and sees {int(gpus)}.",
    )
    if gpus is not None and gpus >= 1:
        draft.add(Advice("Use the GPUs that are there.", ("--tensor-parallel-size", str(int(gpus)))))
    return draft.add(
        Advice(
            "Check which GPUs it sees (CUDA_VISIBLE_DEVICES, the container's devices).",
            command="nvidia-smi -L",
        ),
        Advice("Over several nodes.", ("--distributed-executor-backend", "ray")),
    ).done()


def swap_space_too_large(s: FailedStart) -> Diagnosis:
    """V0's swap space does not fit into host memory."""
    swap, host = s.finding.printed("swap_gib"), s.finding.printed("host_gib")
    return (
        Draft(
            s,
            "The swap space is too large for the host's memory.",
            f"{gib(swap)} (per GPU times GPUs) of {gib(host)}; 4 GiB per GPU is the default up to 0.17.",
        )
        .add(
            Advice("Uses none; preempted requests are recomputed instead.", ("--swap-space", "0")),
            Advice("Or upgrade to 0.18 or later, where the flag and the space are gone."),
        )
        .done()
    )


def block_size_unsupported(s: FailedStart) -> Diagnosis:
    """The attention backend has no such block size."""
    size, kernel = s.finding.printed("block_size"), s.finding.number("kernel_block_size")
    draft = Draft(
        s, f"No attention backend of this server works with blocks of {int(size)} tokens.", s.finding.text
    )
    if kernel is not None:
        draft.add(Advice("The size the backend names.", ("--block-size", str(int(kernel)))))
    return draft.add(Advice("Drop --block-size: vLLM then takes the backend's own.")).done()


FLAG_HISTORY = {
    "--swap-space": "--swap-space was removed in 0.18 (the space was given up with the V0 engine): drop it.",
    "--kv-cache-memory-bytes": "--kv-cache-memory-bytes exists from 0.10.2.",
    "--kv-cache-memory": "--kv-cache-memory-bytes exists from 0.10.2.",
    "--decode-context-parallel-size": "--decode-context-parallel-size exists from 0.10.2.",
    "--device-ids": "--device-ids exists from 0.24.",
    "--api-server-count": "--api-server-count exists from 0.9.2.",
    "--prefill-context-parallel-size": "--prefill-context-parallel-size exists from 0.12.",
}
"""Flags that a release may not know, from the survey of releases 0.3.3 to 0.33.0."""


def unrecognized_arguments(s: FailedStart) -> Diagnosis:
    """argparse does not know a flag."""
    words = str(s.finding.numbers.get("arguments", "")).split()
    unknown = [word.split("=", 1)[0].replace("_", "-") for word in words if word.startswith("--")]
    draft = Draft(
        s,
        "This release of vLLM does not know " + (", ".join(unknown) or "some of the arguments") + ".",
        "The server stopped at its command line (exit status 2); nothing was loaded.",
    )
    for flag in unknown:
        draft.add(Advice(FLAG_HISTORY.get(flag, f"Drop or correct {flag}.")))
    return draft.add(Advice("List what this release knows.", command="vllm serve --help=all")).done()


def invalid_argument(s: FailedStart) -> Diagnosis:
    """argparse knows the flag but not its value."""
    argument, value = s.finding.numbers.get("argument"), s.finding.numbers.get("value")
    draft = Draft(
        s,
        f"vLLM does not take the value given to {argument}" + (f": {value}." if value else "."),
        s.finding.text,
    )
    if argument == "--max-model-len" and s.flags.max_model_len in (None, AUTO_LENGTH):
        draft.add(
            Advice("Lengths are whole numbers, 4k (4000) or 4K (4096) from 0.8.5, auto or -1 from 0.14.")
        )
    return draft.add(
        Advice(f"Correct {argument}; see what this release takes.", command="vllm serve --help=all")
    ).done()


def config_invalid(s: FailedStart) -> Diagnosis:
    """A value that vLLM's own configuration classes refuse."""
    return (
        Draft(s, "vLLM refuses a value of its configuration.", s.finding.text)
        .add(Advice("Correct the value that the message names; memory has no part in it."))
        .done()
    )


def model_not_found(s: FailedStart) -> Diagnosis:
    """No such model on disk or on the hub."""
    model = s.flags.model
    return (
        Draft(
            s,
            "The model was not found" + (f": {model}." if model else "."),
            s.finding.text,
        )
        .add(
            Advice("Check the path or hub id; a relative path counts from the server's working directory."),
            Advice(
                "For a gated model or a private one, give the server a token.", environment=("HF_TOKEN=…",)
            ),
        )
        .done()
    )


_EXIT_CODES = {
    -9: "It was killed (SIGKILL): most often the host ran out of memory.",
    -15: "It was told to stop (SIGTERM), usually because another worker failed first.",
    -11: "It crashed (SIGSEGV).",
    -7: "It crashed (SIGBUS): often /dev/shm is too small (docker: --ipc=host or --shm-size).",
    -6: "It aborted (SIGABRT).",
}


def consequence(s: FailedStart) -> Diagnosis:
    """The log shows only that something failed before."""
    code = s.finding.number("exit_code")
    draft = Draft(
        s,
        "A process of the server failed; the log that was read does not show why.",
        _EXIT_CODES.get(int(code)) if code is not None else None,
    )
    if code == -9:
        draft.add(
            Advice(
                "See what the kernel says.",
                command="dmesg -T | grep -iE 'out of memory|oom-kill|killed process'",
            )
        )
    return draft.add(
        Advice(
            "Read the whole log: the cause is further up, in the lines of (EngineCore …), (Worker …) or "
            "VllmWorkerProcess."
        )
    ).done()


def unclassified_error(s: FailedStart) -> Diagnosis:
    """An exception kvwatch has no rule for."""
    return (
        Draft(s, "The server stopped with an error that is not about memory planning.", s.finding.text)
        .add("Memory flags: nothing in the log says that memory was short.")
        .done()
    )


RULES: Mapping[str, Rule] = {
    "max_model_len_gt_derived": max_model_len_gt_derived,
    "batched_tokens_lt_max_model_len": batched_tokens_lt_max_model_len,
    "batched_tokens_lt_max_num_seqs": batched_tokens_lt_max_num_seqs,
    "indivisible_heads": indivisible_heads,
    "world_size_gt_gpus": world_size_gt_gpus,
    "swap_space_too_large": swap_space_too_large,
    "block_size_unsupported": block_size_unsupported,
    "unrecognized_arguments": unrecognized_arguments,
    "invalid_argument": invalid_argument,
    "config_invalid": config_invalid,
    "config_validation_failed": config_invalid,
    "model_not_found": model_not_found,
    "engine_core_init_failed": consequence,
    "worker_init_failed": consequence,
    "worker_died": consequence,
    "unclassified_error": unclassified_error,
}
