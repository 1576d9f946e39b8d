"""Prevention: what is not wrong yet but will be, one rule at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvwatch.blockmath.flags import AUTO_LENGTH
from kvwatch.forecast.context import RequestLengths
from kvwatch.forecast.history import Outlook
from kvwatch.forecast.remedies import COSTLY
from kvwatch.forecast.restart import RestartForecast
from kvwatch.forecast.together import TogetherForecast
from kvwatch.node import ServerState

ENOUGH_REQUESTS = 1_000
"""Fewer say nothing about how long requests are."""
WASTE_FACTOR = 4
NEAR_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Advice:
    """One broken rule.

    Attributes:
        rule: short name fit for a label.
        text: what to do, with the number to type.
    """

    rule: str
    text: str


@dataclass(frozen=True, slots=True)
class Facts:
    """What the rules look at, for one server."""

    server: ServerState
    restart: RestartForecast
    together: TogetherForecast | None
    lengths: RequestLengths | None
    outlook: Outlook

    @property
    def command_line_known(self) -> bool:
        """Its process was found, so that a flag that is not there was not given."""
        return self.server.launch.pid is not None and not self.server.launch.failures


def advise(facts: Facts) -> tuple[Advice, ...]:
    """The rules that one server breaks, in the rules' order."""
    return tuple(Advice(rule, text) for rule, check in RULES.items() if (text := check(facts)) is not None)


def _remedy(facts: Facts, action: str) -> str | None:
    """What to type of one flag so that the next start passes, where it would not."""
    return next((one.flags for one in facts.restart.remedies if one.action == action), None)


def _length_not_set(facts: Facts) -> str | None:
    if not facts.command_line_known or facts.server.launch.flags.max_model_len is not None:
        return None
    running = facts.server.max_model_len
    present = f"--max-model-len {running}" if running else "--max-model-len"
    typed = _remedy(facts, "max_model_len") or present
    return f"the length comes from the model's config.json and changes with it: type {typed}"


def _utilization_not_pinned(facts: Facts) -> str | None:
    if not facts.command_line_known or facts.server.launch.flags.gpu_memory_utilization is not None:
        return None
    release = facts.server.release
    if release is None:
        return None
    present = f"--gpu-memory-utilization {release.default_utilization:g}"
    typed = _remedy(facts, "gpu_memory_utilization") or present
    return f"the default moves between releases (0.90 before 0.20, 0.92 since): type {typed}"


def _swap_space_zero(facts: Facts) -> str | None:
    release = facts.server.release
    if release is None or not release.has_swap_space or facts.server.launch.flags.swap_space != 0:
        return None
    return f"preempted requests are recomputed: type --swap-space {release.default_swap_space_gib:g}"


def _length_above_derived(facts: Facts) -> str | None:
    found = facts.restart.situation
    if found is None:
        return None
    settings = found.pool.settings
    if settings.max_model_len <= settings.derived_max_model_len:
        return None
    return (
        f"{settings.max_model_len} tokens is above what the model was made for: "
        f"type --max-model-len {settings.derived_max_model_len}"
    )


def _length_far_above_use(facts: Facts) -> str | None:
    lengths, limit = facts.lengths, facts.server.max_model_len
    if lengths is None or limit is None or lengths.count < ENOUGH_REQUESTS:
        return None
    if lengths.longest * WASTE_FACTOR > limit:
        return None
    return (
        f"no request was longer than {lengths.longest:.0f} of {limit} tokens: "
        f"a --max-model-len of {_next_power(lengths.longest * 2)} would start with less memory"
    )


def _length_near_limit(facts: Facts) -> str | None:
    lengths = facts.lengths
    if lengths is None or lengths.count < ENOUGH_REQUESTS or not lengths.near_limit:
        return None
    if lengths.near_limit < NEAR_SHARE:
        return None
    longest = facts.restart.verdict.longest_length if facts.restart.verdict else None
    limit = facts.server.max_model_len or 0
    room = f": up to --max-model-len {longest} would start" if longest and longest > limit else ""
    return f"about {lengths.near_limit:.0%} of the requests are within a tenth of the limit{room}"


def _kv_fp8_would_fit(facts: Facts) -> str | None:
    typed = _remedy(facts, "kv_cache_dtype")
    return f"the restart would pass with {typed}" if typed else None


def _auto_would_help(facts: Facts) -> str | None:
    found, verdict = facts.restart.situation, facts.restart.verdict
    if found is None or verdict is None or facts.restart.blocking_check != "one_request":
        return None
    if not found.release.has_auto_length or found.flags.max_model_len == AUTO_LENGTH:
        return None
    return (
        f"--max-model-len auto would start with {verdict.longest_length}" if verdict.longest_length else None
    )


def _hardware_needed(facts: Facts) -> str | None:
    situation = facts.restart.situation
    if facts.restart.feasible is not False or situation is None:
        return None
    others = {site.gpu: site.total - site.free_next for site in situation.sites if site.free_next is not None}
    if situation.judge(freed=others).feasible:
        return None
    if any(remedy.action not in COSTLY for remedy in facts.restart.remedies):
        return None
    found = " or ".join(remedy.flags for remedy in facts.restart.remedies) or "smaller weights or larger GPUs"
    return f"neither the cache's flags nor stopping a process makes the restart pass, only {found}"


def _utilizations_exceed_card(facts: Facts) -> str | None:
    together = facts.together
    if together is None or not together.overcommitted:
        return None
    gpu, share = max(together.overcommitted.items(), key=lambda item: item[1])
    return f"with {', '.join(together.sharing)} the utilizations on GPU {gpu} add to {share:.2f}"


def _unstable_neighbour(facts: Facts) -> str | None:
    gpus = facts.outlook.unstable_gpus
    if not gpus:
        return None
    return f"others' memory on GPU {', '.join(gpus)} moves: a start may abort while it profiles"


RULES: dict[str, Callable[[Facts], str | None]] = {
    "length_not_set": _length_not_set,
    "utilization_not_pinned": _utilization_not_pinned,
    "swap_space_zero": _swap_space_zero,
    "length_above_derived": _length_above_derived,
    "length_far_above_use": _length_far_above_use,
    "length_near_limit": _length_near_limit,
    "kv_fp8_would_fit": _kv_fp8_would_fit,
    "auto_would_help": _auto_would_help,
    "hardware_needed": _hardware_needed,
    "utilizations_exceed_card": _utilizations_exceed_card,
    "unstable_neighbour": _unstable_neighbour,
}
"""Every rule by its name; a function returns None where its rule is kept or cannot be judged."""


def _next_power(tokens: float) -> int:
    return 1 << max(0, int(tokens) - 1).bit_length()
