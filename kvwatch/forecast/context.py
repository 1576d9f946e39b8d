"""How long the requests of a server really are, from the histograms on its page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvwatch.node import ServerState
from kvwatch.observe.records import Histogram, VllmRecord

NEAR = 0.9
"""A request longer than this share of the limit is near it."""


@dataclass(frozen=True, slots=True)
class RequestLengths:
    """Prompt plus generated tokens of the requests finished since the server started.

    The page tells prompts and answers apart, not their sum, and each to a bucket only. The lengths are
    therefore upper bounds: at least half, 99 in 100, or all of the requests were no longer.

    Attributes:
        count: requests finished.
        near_limit: share of them above nine tenths of `max_model_len`, an estimate that takes the lengths of
            prompt and answer as independent; None where the limit is not known.
    """

    count: int
    p50: float
    p99: float
    longest: float
    near_limit: float | None


def request_lengths(server: ServerState) -> RequestLengths | None:
    """None where the page has no such histogram, or no request has finished."""
    if not isinstance(server.page, VllmRecord):
        return None
    prompts = [engine.prompt_tokens for engine in server.page.engines if engine.prompt_tokens]
    answers = [engine.generation_tokens for engine in server.page.engines if engine.generation_tokens]
    prompt, answer = merged(prompts), merged(answers)
    if prompt is None or answer is None or not prompt.count or not answer.count:
        return None
    limit = float(server.max_model_len) if server.max_model_len else float("inf")

    def bound(quantile: float) -> float:
        # Each part exceeds its bound in at most half of (1 - quantile), so the sum in no more than that.
        share = 1 - (1 - quantile) / 2
        return min(limit, upper_bound(prompt, share) + upper_bound(answer, share))

    return RequestLengths(
        count=int(prompt.count),
        p50=bound(0.5),
        p99=bound(0.99),
        longest=bound(1.0),
        near_limit=None
        if server.max_model_len is None
        else _share_above(prompt, answer, NEAR * limit, limit),
    )


def merged(histograms: Sequence[Histogram]) -> Histogram | None:
    """The sum of histograms with equal bounds; None for none, or where the bounds differ."""
    if len(histograms) < 2:
        return histograms[0] if histograms else None
    bounds = [bound for bound, _ in histograms[0].buckets]
    if any([bound for bound, _ in one.buckets] != bounds for one in histograms):
        return None
    counts = [
        sum(column)
        for column in zip(*([count for _, count in one.buckets] for one in histograms), strict=True)
    ]
    known = [one.sum for one in histograms if one.sum is not None]
    return Histogram(
        buckets=tuple(zip(bounds, counts, strict=True)),
        sum=sum(known) if len(known) == len(histograms) else None,
        count=sum(one.count for one in histograms),
    )


def upper_bound(histogram: Histogram, quantile: float) -> float:
    """The upper bound of the first bucket that reaches the quantile; infinity for the last one."""
    wanted = quantile * histogram.count
    return next((bound for bound, count in histogram.buckets if count >= wanted), float("inf"))


def _share_above(prompt: Histogram, answer: Histogram, threshold: float, limit: float) -> float:
    """Share of the sums above a threshold, buckets at their middle."""
    answers = list(_masses(answer, limit))
    above = 0.0
    for length, mass in _masses(prompt, limit):
        above += mass * sum(share for more, share in answers if length + more > threshold)
    return above


def _masses(histogram: Histogram, limit: float) -> list[tuple[float, float]]:
    """Middle of each bucket and its share of the requests."""
    masses = []
    lower = before = 0.0
    for bound, count in histogram.buckets:
        upper = min(bound, limit)
        if count > before:
            masses.append(((lower + upper) / 2, (count - before) / histogram.count))
        lower, before = upper, count
    return masses
