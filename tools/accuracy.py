"""Write docs/accuracy.md: how the block arithmetic fares against vLLM's planner and against public reports.

python -m tools.accuracy            # write the page
python -m tools.accuracy --check    # exit 1 if the page is not up to date
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from kvwatch.blockmath.batch import plan_row
from kvwatch.blockmath.device import Device
from kvwatch.blockmath.errors import Refused, Unsupported
from kvwatch.blockmath.flags import Flags
from kvwatch.blockmath.pool import Pool, plan_pool
from kvwatch.blockmath.releases import Engine, Release
from kvwatch.blockmath.startup import RankMemory, judge, requested_bytes
from tests.blockmath.test_vectors import EXCLUDED, differences
from tests.blockmath.vectors import FOLDER, config_of, rows
from tests.support import ROOT, shared_dir

PAGE: Final = ROOT / "docs" / "accuracy.md"
GIB: Final = 1 << 30
UNKNOWN: Final = "not enough data"
INTRODUCTION: Final = """\
# How exact the block arithmetic is

Written by `python -m tools.accuracy`.

## Against vLLM's own planner

Each row is a model, a card and a set of flags, planned by vLLM 0.32.0 itself. A row agrees when bytes per
block, bytes needed, blocks per group, and for every amount of memory blocks, tokens, concurrency, the
longest length and the failure are all equal.
"""
REPORTS: Final = """
## Against public reports

{agree} agree, {disagree} disagree, {rest} do not tell enough. A range is what the printed figure can stand
for; what departs is in bold. Where a report names no release, each era was tried.
"""
HALF_UNIT: Final = 0.00501
"""Half of the last printed digit of a figure in GiB."""

MODELS: Final[Mapping[str, str]] = {
    r"chinese-alpaca-2": "Llama-2-7B",
    r"meta-llama-3-8b": "Llama-3-8B",
    r"^llama-3 70b": "Llama-3-70B",
    r"llama-?3\.1-8b": "Llama-3.1-8B",
    r"llama-3\.[13]-70b": "Llama-3.1-70B",
    r"llama-3\.1-405b": "Llama-3.1-405B",
    r"llama-4-scout": "Llama-4-Scout",
    r"codellama-34b": "CodeLlama-34b",
    r"qwen1\.5-14b": "Qwen1.5-14B",
    r"qwen1\.5-moe": "Qwen1.5-MoE-A2.7B",
    r"qwen2\.5-vl-7b": "Qwen2.5-VL-7B",
    r"qwen2\.5-7b": "Qwen2.5-7B",
    r"distill-qwen-14b": "Qwen2.5-14B",
    r"^qwen2\.5-32b": "Qwen2.5-32B",
    r"^qwen2\.5-72b": "Qwen2.5-72B",
    r"qwen3-0\.6b": "Qwen3-0.6B",
    r"qwen3-1\.7b": "Qwen3-1.7B",
    r"qwen3-8b": "Qwen3-8B",
    r"qwen3-14b": "Qwen3-14B",
    r"qwen3-32b": "Qwen3-32B",
    r"qwen3-235b": "Qwen3-235B-A22B",
    r"qwen3-coder-30b": "Qwen3-Coder-30B-A3B",
    r"qwen3-vl-4b": "Qwen3-VL-4B",
    r"qwen3\.6-27b": "Qwen3.6-27B",
    r"qwen3\.6-35b": "Qwen3.6-35B-A3B",
    r"gpt-oss-20b": "gpt-oss-20b",
    r"gpt-oss-120b": "gpt-oss-120b",
    r"gemma-2-9b": "gemma-2-9b",
    r"gemma-2-27b": "gemma-2-27b",
    r"gemma-3-4b": "gemma-3-4b",
    r"gemma-3-12b": "gemma-3-12b",
    r"gemma-3-27b": "gemma-3-27b",
    r"gemma-4-31b": "gemma-4-31B",
    r"phi-2$": "phi-2",
    r"opt-125m": "opt-125m",
    r"granite-3\.1-8b": "granite-3.1-8b",
    r"deepseek-r1$": "DeepSeek-R1",
    r"minimax-m2": "MiniMax-M2",
    r"deepseek-v4-flash$": "DeepSeek-V4-Flash",
}
"""What reports call a model, and the file with its shape. Names that tell too little are not here."""

UNTOLD: Final[Mapping[str, str]] = {
    "c020": "memory is told for one of four ranks, the blocks are those of the smallest",
    "c055": "memory is told for one of two ranks, the blocks are those of the smallest",
    "c086": "the draft model's layers are not told",
    "c144": "the cache type is not told (a packed one fits the figures)",
    "c230": "a length beyond the derived one needs overrides that are not told",
}
"""Reports that leave out what decides the figures."""

NOT_CUDA: Final = re.compile(r"apple|tenstorrent|ascend|xpu|amd|mi300|other engine|metal", re.IGNORECASE)
LARGE: Final = re.compile(r"H[12]00|GH200|B[23]00|80GB")
GENERATIONS: Final = (
    (re.compile(r"H[12]00|GH200|H20\b|^$"), (9, 0)),
    (re.compile(r"B[23]00"), (10, 0)),
    (re.compile(r"GB10|50[789]0|RTX PRO"), (12, 0)),
)
ERAS: Final = ("0.8.5", "0.19.0", "0.28.0", "0.32.0")
"""Releases that stand for their era where a report names none."""

FLAG_NAMES: Final = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size"}


@dataclass(frozen=True, slots=True)
class Finding:
    """What became of one report.

    Attributes:
        case: its id.
        subject: model and release as reported.
        outcome: ``agree``, ``disagree`` or UNKNOWN.
        detail: what was compared, or what is missing.
    """

    case: str
    subject: str
    outcome: str
    detail: str


class Missing(Exception):
    """The report does not tell what a comparison needs."""


Case = Mapping[str, Any]


def public_cases() -> list[dict[str, Any]]:
    """The reports, where the shared folder is present."""
    shared = shared_dir()
    if shared is None:
        return []
    text = (shared / "public" / "cases.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def shape_of(name: str) -> dict[str, Any]:
    """A public model's shape."""
    content: dict[str, Any] = json.loads((FOLDER / "public_configs" / f"{name}.json").read_text("utf-8"))
    return content


def model_config(case: Case) -> dict[str, Any]:
    """The shape of the reported model."""
    name = str(case.get("model") or "").lower()
    for pattern, file in MODELS.items():
        if re.search(pattern, name):
            content: dict[str, Any] = json.loads(
                (FOLDER / "public_configs" / f"{file}.json").read_text("utf-8")
            )
            return content
    raise Missing("the model's shape is not told" if name else "no model is named")


def releases_of(case: Case) -> list[Release]:
    """The reported release, or one of each era."""
    told = str(case.get("vllm_version") or "")
    match = re.search(r"\b\d+\.\d+(?!x)(?:\.(?:\d+|x))?(?:rc\d+)?(?:\.dev\d+|\.post\d+)?", told)
    if match is None:
        return [Release.parse(text) for text in ERAS]
    version = match[0].replace(".x", ".0")
    engine: Engine | None = "V0" if "V0" in told else "V1" if "V1" in told else None
    if version.startswith("0.8.") and engine is None:
        return [Release.parse(version, engine="V1"), Release.parse(version, engine="V0")]
    return [Release.parse(version, engine=engine)]


def flags_of(case: Case) -> Flags:
    """The reported flags that bear on the pool."""
    known = {}
    for name, value in (case.get("flags") or {}).items():
        field = FLAG_NAMES.get(name, name)
        if (field in Flags.__dataclass_fields__ and not isinstance(value, list | str | None)) or (
            field in ("dtype", "kv_cache_dtype") and isinstance(value, str)
        ):
            known[field] = value
    return Flags.from_mapping(known)


def device_of(case: Case) -> Device:
    """The reported card, as far as it matters."""
    told = str(case.get("gpu") or "")
    if NOT_CUDA.search(told) or NOT_CUDA.search(str(case.get("vllm_version") or "")):
        raise Missing("not a CUDA card")
    total = number(case, "total_gib")
    large = (total is not None and total >= 70) or LARGE.search(told) is not None
    generations = (found for pattern, found in GENERATIONS if pattern.search(told))
    return Device(told or "NVIDIA H100", (80 if large else 24) * GIB, next(generations, (8, 6)))


def number(case: Case, name: str) -> float | None:
    """One figure of the report, if it is a single one."""
    value = (case.get("norm") or {}).get(name)
    return value if isinstance(value, int | float) else None


def memory_range(gib: float) -> tuple[int, int]:
    """Bytes that print as this many GiB."""
    return int((gib - HALF_UNIT) * GIB), int((gib + HALF_UNIT) * GIB)


Check = Callable[[Case, Pool], Iterator[tuple[str, bool]]]


def check_blocks(case: Case, pool: Pool) -> Iterator[tuple[str, bool]]:
    """Blocks from the memory that the log gives."""
    available, told = number(case, "kv_available_gib"), number(case, "num_gpu_blocks")
    if available is None or told is None or available <= 0 or pool.blocks_override is not None:
        return
    low, high = map(pool.num_blocks, memory_range(available))
    yield f"{told:.0f} blocks in {low}..{high}", low <= told <= high


def check_tokens(case: Case, pool: Pool) -> Iterator[tuple[str, bool]]:
    """Tokens from blocks where they are told, else from memory."""
    told, blocks = number(case, "kv_tokens"), number(case, "num_gpu_blocks")
    available = number(case, "kv_available_gib")
    if told is None or pool.blocks_override is not None:
        return
    if blocks is not None:
        tokens = pool.capacity_tokens(int(blocks))
        yield f"{told:.0f} tokens, {tokens} from blocks", tokens == told
    elif available is not None:
        low, high = (pool.capacity_tokens(pool.num_blocks(size)) for size in memory_range(available))
        yield f"{told:.0f} tokens in {low}..{high}", low <= told <= high


def check_concurrency(case: Case, pool: Pool) -> Iterator[tuple[str, bool]]:
    """Requests of full length at once."""
    told, blocks = number(case, "max_concurrency"), number(case, "num_gpu_blocks")
    available = number(case, "kv_available_gib")
    if told is None or pool.blocks_override is not None:
        return
    if blocks is not None:
        low = high = pool.max_concurrency(int(blocks))
    elif available is not None:
        low, high = (pool.max_concurrency(pool.num_blocks(size)) for size in memory_range(available))
    else:
        return
    yield f"{told}x in {low:.2f}..{high:.2f}", round(low, 2) - 0.0051 <= told <= round(high, 2) + 0.0051


def check_need(case: Case, pool: Pool) -> Iterator[tuple[str, bool]]:
    """Memory that one request needs."""
    told = number(case, "kv_needed_gib")
    if told is None or not number(case, "max_model_len"):
        return
    need = max(pool.need_bytes(pool.settings.max_model_len)) / GIB
    yield f"{told} GiB needed, {need:.2f} worked out", abs(need - told) <= 2 * HALF_UNIT


def check_longest(case: Case, pool: Pool) -> Iterator[tuple[str, bool]]:
    """The estimated maximum length."""
    told, available = number(case, "estimated_max_model_len"), number(case, "kv_available_gib")
    if told is None or available is None:
        return
    kept = max(pool.kept_back_bytes)
    low, high = (pool.longest_length(size + kept) for size in memory_range(available))
    yield f"length {told:.0f} in {low}..{high}", low <= told <= high


def check_length_failure(case: Case, pool: Pool) -> Iterator[tuple[str, bool]]:
    """Whether one request of full length fits, as the report's outcome says."""
    available = number(case, "kv_available_gib")
    failed = case.get("error_kind") in ("kv_needed_gt_available", "max_seq_len_gt_kv_tokens")
    if available is None or available <= 0 or not (failed or case.get("outcome") == "started"):
        return
    if not number(case, "max_model_len") or case["case_partial"]:
        return
    low, high = memory_range(available)
    # The error prints the memory without the block that is kept back, the log line with it.
    kept = max(pool.kept_back_bytes) if failed else 0
    length = pool.settings.max_model_len
    fits = {pool.fits(length, low + kept), pool.fits(length, high + kept)}
    yield ("does not fit" if failed else "fits"), (not failed) in fits


def check_tokens_failure(case: Case, pool: Pool) -> Iterator[tuple[str, bool]]:
    """V0's failure: the length is beyond the tokens that the blocks hold."""
    told, blocks = number(case, "kv_tokens"), number(case, "num_gpu_blocks")
    length = number(case, "max_model_len")
    if case.get("error_kind") != "max_seq_len_gt_kv_tokens" or told is None or length is None:
        return
    memory = int(told) // pool.settings.block_size * max(pool.bytes_per_block)
    longest = pool.longest_length(memory)
    yield f"longest length {longest} of {told:.0f} tokens", longest == told and length > longest
    if blocks is not None:
        yield f"{blocks:.0f} blocks hold {told:.0f} tokens", blocks * pool.settings.block_size == told


def check_state_slots(case: Case, pool: Pool) -> Iterator[tuple[str, bool]]:
    """Fewer state blocks than requests."""
    concurrency = number(case, "max_concurrency")
    if case.get("error_kind") != "mamba_blocks_lt_max_num_seqs" or concurrency is None:
        return
    blocks = round(concurrency * sum(pool.blocks_per_request(pool.settings.max_model_len)))
    yield f"{blocks} blocks < {pool.settings.max_num_seqs} requests", blocks < pool.settings.max_num_seqs


CHECKS: Final[tuple[Check, ...]] = (
    check_blocks,
    check_tokens,
    check_concurrency,
    check_need,
    check_longest,
    check_length_failure,
    check_tokens_failure,
    check_state_slots,
)


def judged_kind(case: Case, pool: Pool, release: Release) -> str | None:
    """The kind of failure that the verdict predicts from the reported card figures."""
    total, free = number(case, "total_gib"), smallest(case, "free_startup_gib")
    available = number(case, "kv_available_gib")
    flags = flags_of(case)
    if total is None or (free is None and available is None):
        raise Missing("neither free memory nor memory for KV is told")
    card = int(total * GIB)
    budget = requested_bytes(card, flags.gpu_memory_utilization or release.default_utilization, release)
    rank = RankMemory(
        gpu="cuda:0",
        stage=0,
        total_bytes=card,
        free_bytes=None if free is None else int(free * GIB),
        non_kv_bytes=None if available is None else budget - int(available * GIB),
        foreign_bytes=0,
    )
    ranks = [replace(rank, stage=stage) for stage in range(len(pool.stages))]
    return judge(pool, flags, ranks, release=release).failure_kind


def smallest(case: Case, name: str) -> float | None:
    """A figure of the report, or the least of several cards'."""
    value = (case.get("norm") or {}).get(name)
    return min(value) if isinstance(value, list) else value


JUDGED: Final = frozenset({"free_lt_desired", "no_available_memory_for_blocks"})


def examine(case: Case, release: Release) -> list[tuple[str, bool]]:
    """All comparisons that the report allows, for one release."""
    kind = case.get("error_kind")
    device = device_of(case)
    try:
        config = model_config(case)
    except Missing:
        if kind != "free_lt_desired":
            raise
        config = shape_of("Llama-3.1-8B")
    flags = flags_of(case)
    if kind in JUDGED:
        flags = flags.with_changes(max_model_len=None)
    try:
        pool = plan_pool(config, flags, device=device, release=release)
    except Refused as refusal:
        return [(f"refused: {refusal.kind}", refusal.kind == kind)]
    except Unsupported as unknown:
        raise Missing(str(unknown)) from None
    found = [result for check in CHECKS for result in check(case, pool)]
    if kind in JUDGED:
        predicted = judged_kind(case, pool, release)
        found.append((f"predicted {predicted}", predicted == kind))
    return found


def find(case: dict[str, Any]) -> Finding:
    """Compare one report."""
    case["case_partial"] = "speculative_config" in (case.get("flags") or {})
    subject = f"{case.get('model') or 'model not told'}, {case.get('vllm_version') or 'release not told'}"
    best: list[tuple[str, bool]] = []
    if case["id"] in UNTOLD:
        return Finding(case["id"], subject, UNKNOWN, UNTOLD[case["id"]])
    try:
        eras = releases_of(case)
        for release in eras:
            results = examine(case, release)
            if len(eras) > 1 and results and not results[0][1] and results[0][0].startswith("refused"):
                continue
            if results and (not best or sum(ok for _, ok in results) > sum(ok for _, ok in best)):
                best = results
    except Missing as missing:
        return Finding(case["id"], subject, UNKNOWN, str(missing))
    if not best:
        return Finding(case["id"], subject, UNKNOWN, "no figure that the block arithmetic gives")
    outcome = "agree" if all(agreed for _, agreed in best) else "disagree"
    return Finding(
        case["id"], subject, outcome, "; ".join(text if ok else f"**{text}**" for text, ok in best)
    )


def vector_scores() -> dict[str, tuple[int, int]]:
    """Agreeing and compared rows of the planner's table, per layout."""
    agreeing: Counter[str] = Counter()
    compared: Counter[str] = Counter()
    for row in rows():
        if row["name"] in EXCLUDED or "note" in row:
            continue
        result = plan_row(row, config_of(row))
        layout = result.get("layout") or "refused"
        compared[layout] += 1
        agreeing[layout] += not differences(row, result)
    return {layout: (agreeing[layout], total) for layout, total in sorted(compared.items())}


def page() -> str:
    """The page's text."""
    scores = vector_scores()
    findings = [find(case) for case in public_cases()]
    outcomes = Counter(finding.outcome for finding in findings)
    parts = [
        INTRODUCTION,
        "| layout | agree | of |\n|---|---:|---:|",
        *(f"| {layout} | {agreed} | {total} |" for layout, (agreed, total) in scores.items()),
        "\nLeft out:\n",
        *(f"- `{name}`: {reason}" for name, reason in sorted(EXCLUDED.items())),
        REPORTS.format(agree=outcomes["agree"], disagree=outcomes["disagree"], rest=outcomes[UNKNOWN]),
        "| case | report | result | compared, or missing |\n|---|---|---|---|",
        *(
            f"| {found.case} | {found.subject.replace('|', '/')} | {found.outcome} | {found.detail} |"
            for found in findings
        ),
    ]
    return "\n".join(parts) + "\n"


def main(arguments: list[str], target: Path = PAGE) -> int:
    """Write or check the page."""
    text = page()
    if "--check" in arguments:
        return 0 if target.is_file() and target.read_text(encoding="utf-8") == text else 1
    target.parent.mkdir(exist_ok=True)
    target.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
