"""Starts that failed on the KV cache: too small for one request or the state slots, or not there at all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvwatch.forecast.diagnosis import (
    SHOW_HOLDERS,
    Advice,
    Diagnosis,
    Draft,
    FailedStart,
    Rule,
    fewer_graphs,
    gib,
    length_flag,
    more_gpus,
    quantized_weights,
    share_down,
    smaller_batches,
    smallest_useful_cache,
)
from kvwatch.forecast.explain_model import PoolPlanner


def _auto_length(s: FailedStart) -> Advice | None:
    if s.before(0, 14):
        return None
    return Advice(
        "Lets vLLM find the longest length that fits at each start (0.14 and later); it can change from "
        "start to start.",
        ("--max-model-len", "auto"),
    )


def kv_needed_gt_available(s: FailedStart) -> Diagnosis:
    """One request of the longest length does not fit into the KV cache."""
    length, need, available = (s.finding.printed(name) for name in ("max_model_len", "need_gib", "avail_gib"))
    draft = Draft(
        s,
        f"One request of {int(length)} tokens does not fit into the KV cache.",
        f"It needs {gib(need)} of KV cache per GPU; {gib(available)} are available, {gib(need - available)} "
        "too little.",
        _override_note(s),
        _pipeline_note(s),
    )
    if available <= 0 and not _tiny(s):
        return _nothing_left(s, draft, -available).done()
    enough = _StateSlots(s, int(length), need)
    draft.add(enough.beside(_shorter(s, length, need, available), available))
    for outcome in _narrower_cache(s, need / available if available else math.inf, length):
        draft.add(enough.beside(outcome, available))
    if s.flags.num_gpu_blocks_override is not None:
        draft.add(
            Advice(
                "Drop --num-gpu-blocks-override, or raise it: it, not the memory, sets the size of the cache."
            )
        )
    if s.flags.kv_cache_memory_bytes is not None:
        draft.add(_larger_kv_bytes(s, need))
    draft.add(enough.beside(s.raised_utilization(need - available), need), *_graph_remedies(s))
    draft.add(_upgrade_for_pipeline(s), enough.beside(_auto_length(s), available), more_gpus(s))
    return draft.done()


def _tiny(s: FailedStart) -> bool:
    """Whether sizes are so small that the log's two decimals round them to nothing."""
    return s.finding.number("est_len") is not None


def _override_note(s: FailedStart) -> str | None:
    if s.flags.num_gpu_blocks_override is None:
        return None
    return (
        f"The cache has {s.flags.num_gpu_blocks_override} blocks because --num-gpu-blocks-override says so; "
        "from 0.29 one of them is kept back."
    )


def _pipeline_note(s: FailedStart) -> str | None:
    if _over_counts_pipeline(s):
        return (
            "This release (0.14 to 0.16) compares the whole model's need with one pipeline stage's memory, "
            "so the need it prints is too large."
        )
    return None


def _over_counts_pipeline(s: FailedStart) -> bool:
    return s.flags.pp > 1 and s.since(0, 14) and s.before(0, 17)


def _upgrade_for_pipeline(s: FailedStart) -> Advice | None:
    if not _over_counts_pipeline(s):
        return None
    return Advice("Upgrade to vLLM 0.17 or later, which counts each pipeline stage by itself.")


def _shorter(s: FailedStart, length: float, need: float, available: float) -> Advice | None:
    printed = s.finding.number("est_len")
    lengths = [value for finding in s.same_kind() if (value := finding.number("est_len")) is not None]
    if printed is not None and printed >= 1:
        tokens = min(lengths)
        text = f"The longest length that fits by vLLM's own count: {int(tokens)} of {int(length)} tokens."
    elif s.planner is not None:
        tokens = s.planner.longest(int(length), available) or 0
        text = f"The longest length that fits, worked out from the model: {tokens} of {int(length)} tokens."
    else:
        tokens = 16 * int(length * (available - 0.005) / (need + 0.005) / 16)
        text = (
            f"About the longest length that fits: {gib(available)} of the {gib(need)} that {int(length)} "
            "tokens take (exact where every layer is full attention)."
        )
    if tokens < 1:
        return None
    return Advice(text, length_flag(tokens))


@dataclass(frozen=True, slots=True)
class _StateSlots:
    """The check that comes after the one for a request: a recurrent model's slots, one per sequence.

    Attributes:
        length: tokens that ``need`` GiB are for.
    """

    start: FailedStart
    length: int
    need: float

    def beside(self, outcome: Advice | str | None, available: float) -> Advice | str | None:
        """Advice that leaves ``available`` GiB, with fewer sequences where it would fail on the slots."""
        slots = self._certain(available)
        if not isinstance(outcome, Advice) or not outcome.arguments or slots is None:
            return outcome
        text = (
            f"{outcome.text} The model keeps one state slot per sequence, and {slots} sequences are certain "
            f"to find one then, not {self.start.max_num_seqs}."
        )
        return replace(outcome, text=text, arguments=(*outcome.arguments, "--max-num-seqs", str(slots)))

    def _certain(self, available: float) -> int | None:
        """Sequences certain to have a slot, where that is fewer than the server would take.

        Without the model: a hybrid's need is at least ``ceil(length / block) + 1`` blocks, which bounds the
        block from above and the number of blocks from below. Without CUDA graphs vLLM does not check.
        """
        if self.start.flags.enforce_eager:
            return None
        planner, block = self.start.planner, self.start.hybrid_block_tokens
        blocks = planner.state_slots(self.length, available) if planner is not None else None
        if blocks is None and block is not None:
            blocks = int((math.ceil(self.length / block) + 1) * (available - 0.005) / (self.need + 0.005))
        if blocks is None or blocks >= self.start.max_num_seqs:
            return None
        return max(blocks, 1)


_FP8 = "slight loss of accuracy; needs a GPU and an attention backend with fp8"


def _narrower_cache(s: FailedStart, shortage: float, length: float) -> tuple[Advice | str | None, ...]:
    """fp8 for the KV cache, where halving it is enough or lets a longer length fit."""
    if s.fp8_cache:
        return (f"--kv-cache-dtype fp8: the cache is {s.flags.kv_cache_dtype} already.",)
    if s.planner is not None and s.available_gib is not None:
        return (_planned_fp8(s.planner, int(length), s.available_gib),)
    if s.hybrid_block_tokens is not None:
        return (
            Advice(
                "Halves the attention layers' KV cache; the state of the mamba layers stays as it is, so how "
                "much it brings depends on the model.",
                ("--kv-cache-dtype", "fp8"),
            ),
        )
    if shortage <= 2:
        return (
            Advice(
                f"Halves the KV cache, which is enough for {int(length)} tokens ({_FP8}).",
                ("--kv-cache-dtype", "fp8"),
            ),
        )
    if math.isinf(shortage):
        return ()
    alone = (
        f"--kv-cache-dtype fp8 alone: it halves the need, but {shortage:.1f} times the available memory is "
        "needed. Together with a shorter length it doubles what fits."
    )
    return (alone,)


def _planned_fp8(planner: PoolPlanner, length: int, available: float) -> Advice | None:
    longest = planner.longest(length, available, kv_cache_dtype="fp8")
    if not longest:
        return None
    if longest == length:
        return Advice(f"Makes room for {length} tokens ({_FP8}).", ("--kv-cache-dtype", "fp8"))
    return Advice(
        f"Makes room for {longest} of {length} tokens ({_FP8}).",
        ("--kv-cache-dtype", "fp8", *length_flag(longest)),
    )


def _larger_kv_bytes(s: FailedStart, need: float) -> Advice:
    given = (s.flags.kv_cache_memory_bytes or 0) / 2**30
    wanted = math.ceil(need * 100 + 1) / 100
    return Advice(
        f"Raise it from {gib(given)} to a little over the need, if the card has that much free beside the "
        "weights.",
        ("--kv-cache-memory-bytes", str(math.ceil(wanted * 1.02 * 2**30 / 2**20) * 2**20)),
    )


def max_seq_len_gt_kv_tokens(s: FailedStart) -> Diagnosis:
    """The V0 engine's wording of the same."""
    length, tokens = s.finding.printed("max_model_len"), s.finding.number("kv_tokens")
    if tokens is None:
        return _cut_off(s, length)
    draft = Draft(
        s,
        f"The KV cache holds {int(tokens)} tokens, fewer than the {int(length)} of one longest request.",
        _v0_memory(s),
    )
    if tokens <= 0:
        return _nothing_left(s, draft, None).done()
    draft.add(
        Advice(
            f"As many tokens as the cache holds ({int(tokens)} of {int(length)}).",
            length_flag(tokens),
        )
    )
    draft.add(*_narrower_cache(s, length / tokens, length))
    available = s.available_gib
    if available is not None and available > 0:
        draft.add(s.raised_utilization(available * (length / tokens - 1)))
    else:
        draft.add(
            Advice(
                f"Give the KV cache {length / tokens:.2f} times its memory: raise --gpu-memory-utilization, "
                "as far as the card is free; the log does not say how much memory that is."
            )
        )
    if s.before(0, 8) and not s.flags.enable_chunked_prefill:
        draft.add(
            Advice(
                "Chunks long prompts, so that profiling no longer runs one of full length and the activation "
                "peak shrinks (on by default above 32k tokens in these releases).",
                ("--enable-chunked-prefill",),
            )
        )
    return draft.add(more_gpus(s)).done()


def _cut_off(s: FailedStart, length: float) -> Diagnosis:
    return (
        Draft(
            s,
            f"The KV cache holds fewer tokens than the {int(length)} of one longest request.",
            "The sentence was cut off before the number that the cache holds.",
            _v0_memory(s),
        )
        .add(
            Advice("Lower --max-model-len to the number that the whole sentence ends with, in parentheses."),
            more_gpus(s),
        )
        .done()
    )


def _v0_memory(s: FailedStart) -> str | None:
    if s.available_gib is None or s.weights_gib is None:
        return None
    return f"The weights took {gib(s.weights_gib)}; {gib(s.available_gib)} were left for the KV cache."


def no_available_memory_for_blocks(s: FailedStart) -> Diagnosis:
    """The budget is used up before the first block."""
    available = s.available_gib
    requested = s.flags.kv_cache_memory_bytes
    if requested is not None:
        return (
            Draft(
                s,
                "The KV cache was given less memory than it needs for its first blocks.",
                f"--kv-cache-memory-bytes is {requested}; one block is kept back, a second one must fit.",
            )
            .add(
                Advice("Drop --kv-cache-memory-bytes: the server then takes what the budget leaves."),
                s.raised_utilization(0),
            )
            .done()
        )
    draft = Draft(
        s,
        "Nothing of the memory budget is left for the KV cache.",
        available is not None
        and (
            f"After weights, activations and CUDA graphs {gib(available)} remain."
            if available > 0
            else f"Weights, activations and CUDA graphs take {gib(-available)} more than the budget."
        ),
        s.weights_gib is not None and f"The weights take {gib(s.weights_gib)} per GPU.",
        _foreign_note(s),
    )
    return _nothing_left(s, draft, None if available is None else max(-available, 0)).done()


def _nothing_left(s: FailedStart, draft: Draft, missing: float | None) -> Draft:
    """Remedies where the KV cache gets nothing: the length is not what to change."""
    draft.add(*_graph_remedies(s), _release_foreign(s))
    if missing is None:
        draft.add(_unmeasured_utilization(s))
    else:
        draft.add(s.raised_utilization(missing + smallest_useful_cache(s)))
    draft.add(
        smaller_batches(s),
        quantized_weights(),
        more_gpus(s),
        "A shorter --max-model-len: there is no memory for even one block, whatever the length.",
    )
    if not s.fp8_cache:
        draft.add("--kv-cache-dtype fp8: half of nothing is nothing.")
    return draft


def _unmeasured_utilization(s: FailedStart) -> Advice | str | None:
    if s.graphs_ate_the_card:
        return s.raised_utilization(0)
    if s.utilization is not None and s.utilization >= 0.95:
        return f"Raising --gpu-memory-utilization: {s.utilization:g} leaves just enough for the CUDA context."
    return Advice(
        "Raise --gpu-memory-utilization, as far as the card is free; the log does not say how much is "
        "missing (with VLLM_LOGGING_LEVEL=DEBUG it does)."
    )


def _foreign_note(s: FailedStart) -> str | None:
    if s.before(0, 9, 2):
        return (
            "This release (before 0.9.2) counts memory of other processes on the GPU as its own non-torch "
            "memory, so they shrink the KV cache directly."
        )
    return None


def _release_foreign(s: FailedStart) -> Advice | None:
    if s.before(0, 9, 2):
        return Advice("Stop what else holds memory on the GPU.", command=SHOW_HOLDERS)
    return None


def _graph_remedies(s: FailedStart) -> tuple[Advice | None, ...]:
    if not s.graphs_ate_the_card:
        return ()
    return (
        Advice(
            f"Stops setting the estimated {gib(s.graph_estimate_gib or 0)} aside; lower the utilization by a "
            "few hundredths so that the graphs still find room.",
            environment=("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0",),
        ),
        *fewer_graphs(),
    )


def auto_fit_failed(s: FailedStart) -> Diagnosis:
    """`--max-model-len auto` found no length at all."""
    draft = Draft(s, "Not even one token fits into the KV cache, so no length could be chosen.")
    if s.flags.kv_cache_memory_bytes is not None:
        draft.add(
            Advice(
                f"Raise it: {s.flags.kv_cache_memory_bytes} bytes do not hold the two blocks that the "
                "smallest request takes. Or drop it.",
                ("--kv-cache-memory-bytes", "1G"),
            ),
            s.raised_utilization(0),
        )
        return draft.done()
    missing = None if s.available_gib is None else max(-s.available_gib, 0)
    return _nothing_left(s, draft, missing).done()


def mamba_blocks_lt_max_num_seqs(s: FailedStart) -> Diagnosis:
    """Fewer state slots than sequences."""
    seqs, blocks = s.finding.number("max_num_seqs"), s.finding.printed("mamba_blocks")
    blocks = min((b for f in s.same_kind() if (b := f.number("mamba_blocks")) is not None), default=blocks)
    draft = Draft(
        s,
        f"The model keeps one state slot per sequence and only {int(blocks)} fit"
        + (f", fewer than max_num_seqs {int(seqs)}." if seqs is not None else "."),
        "Each slot is one block of the KV pool; CUDA graphs are captured for max_num_seqs sequences.",
    )
    draft.add(
        Advice("As many sequences as there are slots.", ("--max-num-seqs", str(int(blocks))))
        if blocks >= 1
        else None
    )
    if seqs is not None and s.available_gib is not None and s.available_gib > 0 and blocks:
        draft.add(s.raised_utilization(s.available_gib * (seqs / blocks - 1)))
    draft.add("A shorter --max-model-len: the number of blocks does not depend on it.")
    return draft.done()


def kv_allocation_gt_free(s: FailedStart) -> Diagnosis:
    """CPU backend: the KV cache asked for is larger than the memory that is free."""
    wanted = s.finding.printed("kv_gib")
    free = s.finding.printed("free_gib")
    total = s.finding.number("total_gib")
    if wanted <= 0:
        return (
            Draft(
                s,
                "Nothing of the memory budget is left for the KV cache (CPU backend).",
                f"The weights and the rest take {gib(-wanted)} more than the budget.",
            )
            .add(
                _cpu_utilization(s, wanted, free, total),
                "A shorter --max-model-len: there is no memory for even one block.",
            )
            .done()
        )
    room = math.floor(max(free - 1, 0))
    return (
        Draft(
            s,
            "The KV cache asked for is larger than the memory that is free (CPU backend).",
            f"{gib(wanted)} were asked for, {gib(free)} are free.",
        )
        .add(
            Advice(f"Fits into the {gib(free)} that are free.", ("--kv-cache-memory-bytes", f"{room}G"))
            if room >= 1
            else None,
            Advice("Free memory of the host, or raise the container's limit."),
            "Raising --gpu-memory-utilization: the memory is not there.",
        )
        .done()
    )


def _cpu_utilization(s: FailedStart, wanted: float, free: float, total: float | None) -> Advice | str:
    requested = s.finding.number("requested_gib")
    if not total or requested is None:
        return Advice(
            "Raise --gpu-memory-utilization; on the CPU backend it is the share of the host's memory."
        )
    share = math.ceil((requested - wanted + 1) / total * 100) / 100
    if share > share_down(free, total):
        return f"Raising --gpu-memory-utilization to {share:.2f}: only {gib(free)} of {gib(total)} are free."
    return Advice(
        "Gives the KV cache about 1 GiB (on the CPU backend this is the share of the host's memory).",
        ("--gpu-memory-utilization", f"{share:.2f}"),
    )


RULES: Mapping[str, Rule] = {
    "kv_needed_gt_available": kv_needed_gt_available,
    "max_seq_len_gt_kv_tokens": max_seq_len_gt_kv_tokens,
    "no_available_memory_for_blocks": no_available_memory_for_blocks,
    "auto_fit_failed": auto_fit_failed,
    "mamba_blocks_lt_max_num_seqs": mamba_blocks_lt_max_num_seqs,
    "kv_allocation_gt_free": kv_allocation_gt_free,
}
