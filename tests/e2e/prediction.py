"""How a start of vLLM on the CPU ends: as kvwatch's arithmetic says, and as vLLM itself does."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from kvwatch.blockmath.device import Device
from kvwatch.blockmath.errors import Refused
from kvwatch.blockmath.flags import Flags
from kvwatch.blockmath.pool import Pool, plan_pool
from kvwatch.blockmath.releases import Release
from kvwatch.blockmath.startup import RankMemory, judge
from kvwatch.observe.command_line import parse_command_line
from kvwatch.observe.startlog import classify_line
from tests.e2e.vllm_server import VllmServer, server_environment

RELEASE = Release.parse("0.32.0")
RAM = 1 << 50
"""Any amount above what is asked for: with ``--kv-cache-memory-bytes`` no figure of a start depends on it."""
HOST = Device("CPU", RAM, kind="cpu")
STARTS_SECONDS = 1800.0

REFUSALS = {
    "block_size": "block_size_unsupported",
    "max_model_len_gt_derived": "max_model_len_gt_derived",
    "batched_tokens": "batched_tokens_lt_max_num_seqs",
}
"""Kinds of log line that refusals before any planning leave."""


def seed() -> int:
    """Today's number, so that each day draws anew; KVWATCH_SEED repeats another day's draw."""
    return int(os.environ.get("KVWATCH_SEED") or datetime.now(tz=UTC).date().toordinal())


NO_FP8 = "FP8 KV cache on CPU requires"
"""The CPU build stores fp8 with AVX-512 only. It looks for that after it has planned and checked the pool."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a start ends.

    Attributes:
        kind: of the failure, as kvwatch names log lines; None where all checks passed.
        message: vLLM's words, where memory decides.
        blocks, tokens, concurrency, length: of a pool that passed the checks.
        host_limit: what this CPU, and no GPU, cannot do with that pool.
    """

    kind: str | None = None
    message: str | None = None
    blocks: int | None = None
    tokens: int | None = None
    concurrency: float | None = None
    length: int | None = None
    host_limit: str | None = field(default=None, compare=False)

    @classmethod
    def failed(cls, text: str) -> Self:
        """From the text of the error that ended the start."""
        for line in text.splitlines():
            finding = classify_line(line)
            if finding is not None and finding.is_failure and not finding.is_consequence:
                worded = finding.kind not in REFUSALS.values()
                return cls(finding.kind, line.removeprefix("ValueError: ") if worded else None)
        return cls("unclassified", text)

    def __str__(self) -> str:
        if self.kind is None:
            verb = f"passes all checks, then: {self.host_limit}" if self.host_limit else "starts"
            return (
                f"{verb}: {self.blocks} blocks, {self.tokens} tokens, {self.concurrency:.2f} x {self.length}"
            )
        finding = classify_line(self.message or "")
        estimate = finding.number("est_len") if finding else None
        return self.kind if estimate is None else f"{self.kind}, longest {estimate:.0f}"


def flags_of(words: Sequence[str]) -> Flags:
    """The flags of a command line, as kvwatch reads them off a process."""
    line = parse_command_line(["serve", *words])
    assert (line.failures, line.unknown_flags) == ((), ())
    return line.flags


def pool_of(config: Mapping[str, Any], flags: Flags) -> Pool:
    """The pool of a server on the CPU."""
    return plan_pool(config, flags, device=HOST, release=RELEASE)


def predict(config: Mapping[str, Any], words: Sequence[str]) -> Outcome:
    """What kvwatch says of a start with ``--kv-cache-memory-bytes``."""
    flags = flags_of(words)
    try:
        pool = pool_of(config, flags)
    except Refused as refusal:
        return Outcome(REFUSALS[refusal.kind])
    verdict = judge(pool, flags, [RankMemory("cpu", 0, RAM, free_bytes=RAM, non_kv_bytes=0)], release=RELEASE)
    if not verdict.feasible:
        assert verdict.message is not None, verdict
        return Outcome.failed(verdict.message)
    assert flags.kv_cache_memory_bytes is not None
    length = pool.settings.max_model_len
    if pool.settings.auto_length:
        assert verdict.longest_length is not None
        length = min(length, verdict.longest_length)
        pool = pool_of(config, replace(flags, max_model_len=length))
    blocks = pool.num_blocks(flags.kv_cache_memory_bytes)
    return Outcome(
        blocks=blocks,
        tokens=pool.capacity_tokens(blocks),
        concurrency=pool.max_concurrency(blocks),
        length=length,
    )


def start_engines(venv: Path, command_lines: Sequence[Sequence[str]], log: Path) -> Iterator[Outcome]:
    """Start a real engine for each command line (see engine_starts.py). vLLM's own log goes to a file."""
    with log.open("w", encoding="utf-8") as errors:
        ended = subprocess.run(
            [venv / "bin/python", Path(__file__).with_name("engine_starts.py")],
            input="".join(json.dumps(list(words)) + "\n" for words in command_lines),
            env=server_environment(),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            timeout=STARTS_SECONDS,
            check=True,
        )
    results = ended.stdout.splitlines()
    assert len(results) == len(command_lines), log.read_text(encoding="utf-8")[-2000:]
    for words, result in zip(command_lines, results, strict=True):
        assert result, f"the engine of {words} died: see {log}"
        yield _ended(**json.loads(result))


def _ended(error: str | None, planned: dict[str, Any] | None) -> Outcome:
    if error is None or (planned and NO_FP8 in error):
        assert planned is not None
        return Outcome(**planned, host_limit=error and error.strip())
    return Outcome.failed(error)


def served(server: VllmServer) -> Outcome:
    """What a real server tells of itself, once it is up."""
    server.wait_ready()
    [told] = server.cache_config().values()
    return Outcome(
        blocks=int(told["num_gpu_blocks"]),
        tokens=int(told["kv_cache_size_tokens"]),
        concurrency=float(told["kv_cache_max_concurrency"]),
        length=server.max_model_len(),
    )


def refused(server: VllmServer) -> Outcome:
    """How a real server ended by itself."""
    failed = server.wait_failed()
    assert failed.exit_code == 1
    return Outcome.failed("\n".join(failed.causes))
