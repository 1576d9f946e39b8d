"""Servers that share a card: would each come back if all of them stopped?

The order matters: who starts first finds the card empty, who starts last finds what the others left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvwatch.blockmath.startup import Verdict, requested_bytes
from kvwatch.forecast.restart import RestartForecast
from kvwatch.forecast.situation import Situation


@dataclass(frozen=True, slots=True)
class TogetherForecast:
    """One server's start after all servers of its cards have stopped.

    Attributes:
        sharing: names of the other servers on its cards.
        first, last: the verdict when it starts before, and after, all of them.
        at_once: the verdict when all start at the same moment, at worst: each finds the card empty, and takes
            what the others load while it profiles itself for its own.
        overcommitted: cards on which the servers' budgets add to more than the card, with the sum of shares.
    """

    server: str
    sharing: tuple[str, ...]
    first: Verdict
    last: Verdict
    at_once: Verdict
    overcommitted: Mapping[str, float]


def forecast_together(server: str, restart: Mapping[str, RestartForecast]) -> TogetherForecast | None:
    """None for a server that shares no card, or where a sharer's situation is not known."""
    own = restart[server].situation
    if own is None:
        return None
    cards = frozenset(site.gpu for site in own.sites)
    others = [
        found
        for name, forecast in restart.items()
        if name != server
        and (found := forecast.situation) is not None
        and not cards.isdisjoint(site.gpu for site in found.sites)
    ]
    if not others:
        return None
    # Who has stopped does not wake, so that nothing need be kept free for it.
    stopped = {other.server for other in others}
    held = {
        site.gpu: sum(wanted for name, wanted in site.kept.items() if name in stopped) for site in own.sites
    }
    taken: dict[str, int] = {}
    loaded: dict[str, int] = {}
    shares = {site.gpu: _utilization(own) for site in own.sites}
    for other in others:
        for site in other.sites:
            if site.gpu in cards:
                held[site.gpu] += site.own or 0
                taken[site.gpu] = taken.get(site.gpu, 0) + _will_take(other, site.gpu)
                loaded[site.gpu] = loaded.get(site.gpu, 0) + (site.non_kv or 0) + other.costs.cuda_context
                shares[site.gpu] += _utilization(other)
    return TogetherForecast(
        server=server,
        sharing=tuple(other.server for other in others),
        first=own.judge(freed=held),
        last=own.judge(freed={gpu: held[gpu] - taken.get(gpu, 0) for gpu in held}),
        at_once=own.judge(freed=held, charged=loaded),
        overcommitted={gpu: share for gpu, share in shares.items() if share > 1},
    )


def _utilization(found: Situation) -> float:
    return found.flags.gpu_memory_utilization or found.release.default_utilization


def _will_take(found: Situation, gpu: str) -> int:
    """What a started server holds on a card: its budget, or what it was told outright and the rest it has."""
    site = next(site for site in found.sites if site.gpu == gpu)
    if found.flags.kv_cache_memory_bytes or found.flags.num_gpu_blocks_override:
        return site.own or 0
    return max(site.own or 0, requested_bytes(site.total, _utilization(found), found.release))
