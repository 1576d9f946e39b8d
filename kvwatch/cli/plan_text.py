"""The answers of `kvwatch plan` for people, within 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from kvwatch.blockmath.flags import Flags
from kvwatch.blockmath.gpus import MIB, Gpu
from kvwatch.blockmath.startup import CheckResult
from kvwatch.blockmath.weights import Weights
from kvwatch.cli.plan_document import Answer
from kvwatch.forecast.sizing import Sizing
from kvwatch.forecast.whatif import Change, Fit, SweepRow, flag_text
from kvwatch.units import bytes_text

WIDTH = 80
GIB = 1 << 30
SHOWN_FROM = GIB // 200
"""Bytes. What is less reads 0.00 GiB."""

_CHECKS = {
    "derived_length": "the model's own length",
    "free_memory": "the memory free at the start",
    "kv_memory": "the KV cache's share",
    "one_request": "room for one request",
    "state_slots": "the state slots",
    "sampler_warmup": "the sampler's warm-up",
    "graph_capture": "the capture of CUDA graphs",
}


def as_text(answer: Answer) -> str:
    """One plan."""
    blocks = (
        _head(answer),
        _memory(answer),
        _cache(answer.sizing),
        _verdict(answer),
        _changes(answer),
        _decode(answer),
        _assumptions(answer.sizing),
    )
    return "\n\n".join("\n".join(lines) for block in blocks if (lines := list(block)))


def _gib(number: float) -> str:
    return f"{number / GIB:,.2f}"


def _line(label: str, value: str, note: str = "") -> str:
    return f"  {label:<38}{value:>16}  {note}".rstrip()


def _head(answer: Answer) -> Iterator[str]:
    sizing = answer.sizing
    total = sizing.scenario.device.total_bytes
    card = answer.gpu.name if answer.gpu else f"{_gib(total)} GiB"
    yield f"{answer.model} on {sizing.world_size} x {card}, vLLM {sizing.scenario.release.text}"
    if answer.count > sizing.world_size:
        yield f"  the other {answer.count - sizing.world_size} of {answer.count} cards stay free"


def _memory(answer: Answer) -> Iterator[str]:
    sizing = answer.sizing
    scenario, stage = sizing.scenario, sizing.tightest
    flags = scenario.flags
    total = scenario.device.total_bytes
    given = answer.gpu is None or total != answer.gpu.total_bytes
    yield f"{'Memory of each GPU' + _of_stages(sizing):<40}{'GiB':>16}"
    yield _line("CUDA total", _gib(total), "given" if given or not answer.gpu else answer.gpu.total_source)
    utilization = flags.gpu_memory_utilization or scenario.release.default_utilization
    yield _line(f"budget, at utilization {utilization:g}", _gib(stage.budget))
    if stage.weights is None:
        yield _line("all but the KV cache", _gib(stage.non_kv), "given")
    else:
        yield _line("weights", _gib(stage.weights), sizing.weights.basis if sizing.weights else "given")
    if stage.allowance is not None:
        beside = stage.allowance
        if beside.rotary >= SHOWN_FROM:
            yield _line("position tables", _gib(beside.rotary), "estimate")
        yield _line("activations", _gib(beside.activation), "estimate")
        yield _line("outside PyTorch", _gib(beside.non_torch), "estimate")
        where = "estimate" if beside.graphs_in_budget else "estimate, outside the budget"
        yield _line("CUDA graphs", _gib(beside.graphs), where)
    doubt = f"+- {_gib(stage.uncertainty)}" if stage.uncertainty else "as asked for"
    yield _line("left for the KV cache", _gib(stage.available), doubt)


def _of_stages(sizing: Sizing) -> str:
    count = len(sizing.stages)
    return f", tightest of {count} stages" if count > 1 else ""


def _cache(sizing: Sizing) -> Iterator[str]:
    pool = sizing.pool
    settings = pool.settings
    if not pool.groups:
        yield "KV cache: this model has none"
        return
    element = settings.dtype if settings.cache_dtype == "auto" else settings.cache_dtype
    kind = f"{pool.layout} layers, {element}, blocks of {settings.block_size} tokens"
    yield f"KV cache: {kind}"
    per_token = pool.kv_bytes_per_token
    if per_token is not None:
        where = "over the stages" if len(sizing.stages) > 1 else "on each GPU"
        yield _line(f"per token {where}", bytes_text(round(per_token)))
    length = sizing.length
    if length:
        yield _line(f"one request of {length:,} tokens", bytes_text(max(pool.need_bytes(length))), "per GPU")
    yield _line("blocks", f"{sizing.num_blocks:,}")
    yield _line("capacity", f"{sizing.capacity_tokens:,}", "tokens")
    if sizing.max_concurrency is not None:
        yield _line("full-length requests at once", _concurrency(sizing.max_concurrency))
    limit = settings.derived_max_model_len
    note = "tokens, model's limit" if sizing.longest_length >= limit else "tokens"
    yield _line("longest request that fits", f"{sizing.longest_length:,}", note)


def _verdict(answer: Answer) -> Iterator[str]:
    sizing = answer.sizing
    text = " ".join((verdict_word(sizing), *_explanation(answer)))
    yield from _wrapped(text, first="")
    if sizing.verdict.message:
        yield from _wrapped(f"vLLM would say: {sizing.verdict.message}", first="  ")


def _wrapped(text: str, *, first: str) -> list[str]:
    """Lines that may not part a flag at its hyphens."""
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent="  ", break_on_hyphens=False)


def verdict_word(sizing: Sizing) -> str:
    """The verdict in a word or two."""
    return {True: "STARTS.", False: "DOES NOT START.", None: "TOO CLOSE TO CALL."}[sizing.feasible]


def _explanation(answer: Answer) -> Iterator[str]:
    sizing, verdict = answer.sizing, answer.sizing.verdict
    if verdict.feasible:
        tightest = _tightest(verdict.checks)
        if tightest is not None:
            yield f"The tightest check, {_CHECKS[tightest.check]}, leaves {_margin(tightest)}."
        return
    result = verdict.blocking or next(each for each in verdict.checks if each.passed is None)
    if verdict.feasible is None:
        yield (
            f"The check of {_CHECKS[result.check]} comes out at {_margin(result)},"
            f" less than the estimate's own doubt of {bytes_text(sizing.tightest.uncertainty)}."
        )
    else:
        yield f"It fails at {_CHECKS[result.check]}, by {_missing(result)}."
    yield _advice(answer)


def _tightest(checks: Sequence[CheckResult]) -> CheckResult | None:
    measured = [check for check in checks if check.margin_bytes is not None]
    return min(measured, key=lambda check: check.margin_bytes or 0, default=None)


def _margin(result: CheckResult) -> str:
    if result.margin_bytes is not None:
        return bytes_text(result.margin_bytes)
    return "an unknown margin" if result.margin_count is None else f"{result.margin_count:,} requests"


def _missing(result: CheckResult) -> str:
    if result.margin_bytes is not None:
        return bytes_text(-result.margin_bytes)
    return f"{-result.margin_count:,} requests" if result.margin_count is not None else "an unknown amount"


def _advice(answer: Answer) -> str:
    """The numbers to type."""
    if answer.remedies:
        return f"Type {', or '.join(answer.remedies)}."
    return "No flag of memory alone helps: take more or larger cards (--fit names them), or fewer bits."


def _changes(answer: Answer) -> Iterator[str]:
    if not answer.changes:
        return
    yield f"{'What one change would buy':<34}{'KV GiB':>8}{'tokens':>12}{'requests':>9}{'longest':>12}"
    yield _change(Change("as planned", answer.sizing))
    for change in answer.changes:
        yield _change(change)
    results = [answer.sizing, *(change.result for change in answer.changes)]
    if not all(isinstance(result, Sizing) and result.feasible for result in results):
        yield _LEGEND


def _change(change: Change) -> str:
    if isinstance(change.result, str):
        return f"  {change.text:<32}" + textwrap.shorten(change.result, WIDTH - 34, placeholder=" ...")
    return f"  {change.text:<32}{_columns(change.result)}"


def _concurrency(number: float) -> str:
    return f"{number:,.2f}" if number < 1000 else f"{number:,.0f}"


def _columns(sizing: Sizing) -> str:
    """KV GiB, tokens, full-length requests, longest length and a mark unless it starts: 41 wide and 2."""
    requests = "-" if sizing.max_concurrency is None else _concurrency(sizing.max_concurrency)
    mark = {True: "", False: " x", None: " ?"}[sizing.feasible]
    return (
        f"{_gib(sizing.tightest.available):>8}{sizing.capacity_tokens:>12,}{requests:>9}"
        f"{sizing.longest_length:>12,}{mark}"
    )


def _decode(answer: Answer) -> Iterator[str]:
    if not answer.decode or answer.gpu is None:
        return
    context = answer.decode[0].context
    yield f"Decoding, an upper bound from {answer.gpu.bandwidth_gb_s:,} GB/s alone, {context:,} tokens each"
    yield f"  {'requests':>10}{'tokens/s':>12}{'each':>10}"
    for each in answer.decode:
        yield f"  {each.batch:>10,}{each.tokens_per_second:>12,.0f}{each.per_request:>10,.1f}"


def _assumptions(sizing: Sizing) -> Iterator[str]:
    yield from _wrapped(f"Assumed: {'; '.join(sizing.assumptions)}.", first="")


def sweep_table(rows: Sequence[SweepRow]) -> str:
    """A table over flags."""
    names = list(rows[0].values)
    cells = [[_cell(row.values[name]) for name in names] for row in rows]
    heads = [name.replace("_", "-") for name in names]
    widths = [max(len(head), *(len(line[column]) for line in cells)) + 2 for column, head in enumerate(heads)]
    lines = ["".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True)) + _COLUMN_HEADS]
    for row, cell in zip(rows, cells, strict=True):
        start = "".join(f"{text:>{width}}" for text, width in zip(cell, widths, strict=True))
        lines.append(start + _result_cells(row.result, max(20, WIDTH - len(start))))
    return "\n".join([*lines, _LEGEND])


_LEGEND = "  x does not start, ? too close to call"
_COLUMN_HEADS = f"{'KV GiB':>8}{'tokens':>12}{'requests':>9}{'longest':>12}"


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:,}" if type(value) is int else str(value)


def _result_cells(result: Sizing | str, width: int) -> str:
    if isinstance(result, str):
        return "  " + textwrap.shorten(result, width - 2, placeholder=" ...")
    return _columns(result)


def fit_table(found: Sequence[Fit]) -> str:
    """The fewest cards of each kind."""
    lines = [f"{'card':<18}{'GPUs':>6}{_COLUMN_HEADS}"]
    for fit in sorted(found, key=lambda each: each.sizing.world_size if each.sizing else 1 << 30):
        count = f"{fit.sizing.world_size}" if fit.sizing else "-"
        result = fit.sizing or f"not with 8 or fewer: {fit.reason}"
        lines.append(f"{fit.gpu.label:<18}{count:>6}{_result_cells(result, WIDTH - 24)}")
    return "\n".join([*lines, "", "GPUs share the model by tensor parallelism, all doubt counted against."])


def weights_text(model: str, flags: Flags, weights: Weights) -> str:
    """Only the weights."""
    typed = " ".join(flag_text(name, value) for name, value in flags.given().items())
    lines = [f"{model} {typed}".rstrip()]
    for stage, own in enumerate(weights.bytes_per_rank):
        label = "weights of each GPU" if len(weights.bytes_per_rank) == 1 else f"each GPU of stage {stage}"
        lines.append(f"  {label:<24}{_gib(own):>10} GiB{own:>18,} bytes  {weights.basis}")
    if any(weights.mla_absorbed_bytes):
        lines.append(f"  {'added after loading':<24}{_gib(max(weights.mla_absorbed_bytes)):>10} GiB")
    return "\n".join(lines)


def gpu_table(gpus: Sequence[Gpu]) -> str:
    """The cards, with the sources of their figures."""
    lines = [f"{'card':<16}{'CUDA GiB':>9}{'GB/s':>7}{'CC':>6}  memory figure's source"]
    for gpu in gpus:
        capability = ".".join(map(str, gpu.capability))
        size = _gib(gpu.total_mib * MIB)
        lines.append(f"{gpu.label:<16}{size:>9}{gpu.bandwidth_gb_s:>7,}{capability:>6}  {gpu.total_source}")
    return "\n".join([*lines, "", "bandwidth: vendor data sheets"])
