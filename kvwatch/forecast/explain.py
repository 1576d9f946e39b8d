"""From a server's log to what failed, why, and what to type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvwatch.blockmath.device import Device
from kvwatch.blockmath.flags import Flags
from kvwatch.blockmath.releases import Release
from kvwatch.forecast import explain_cache, explain_configuration, explain_memory
from kvwatch.forecast.diagnosis import Diagnosis, FailedStart
from kvwatch.forecast.explain_model import GIB, Checked, PoolPlanner, check
from kvwatch.observe.startlog import StartLog

RULES = {**explain_cache.RULES, **explain_memory.RULES, **explain_configuration.RULES}
"""How each kind of failure is explained."""

_UNKNOWN_CARD_GIB = 24


def explain(
    log: StartLog,
    *,
    flags: Flags | None = None,
    config: Mapping[str, Any] | None = None,
    device: Device | None = None,
    version: str | None = None,
) -> Diagnosis:
    """Explain a log.

    Args:
        log: as read by `kvwatch.observe.startlog.read_log`.
        flags: what the server was told, over what the log itself says.
        config: the model's config.json; the log's numbers are then checked against the block arithmetic, and
            advice is worked out with it where it agrees.
        device: the card, where it is known; by default a card of the size that the log prints.
        version: vLLM's release, where the log does not say it.

    Returns:
        A diagnosis with kind None where nothing failed.
    """
    finding = log.root_cause
    if finding is None:
        return _nothing_failed(log)
    told = replace(log.flags, **flags.given()) if flags is not None else log.flags
    start = FailedStart(log, finding, told, _release(log.version) or _release(version))
    checked = _check(start, config, device) if config is not None else Checked()
    diagnosis = RULES[finding.kind](replace(start, planner=checked.plan))
    return replace(diagnosis, checks=checked.sentences)


def _nothing_failed(log: StartLog) -> Diagnosis:
    if log.started:
        return Diagnosis(None, "The log shows a server that started.")
    known = log.information or log.version
    doubt = () if known else ("No line of it is known from vLLM: is it a server's log, and all of it?",)
    return Diagnosis(None, "Nothing failed in this log.", doubt)


def _release(version: str | None) -> Release | None:
    try:
        return Release.parse(version) if version else None
    except ValueError:
        return None


def _check(start: FailedStart, config: Mapping[str, Any], device: Device | None) -> Checked:
    """Compare with the arithmetic, and say what had to be assumed."""
    total = start.total_gib
    card = device or Device("GPU", int((total or _UNKNOWN_CARD_GIB) * GIB))
    planner = PoolPlanner(config, start.flags, card, start.release or Release.LATEST)
    checked = check(start.finding, planner)
    if not checked.sentences:
        return checked
    assumed = [] if start.release else [f"vLLM {Release.LATEST.text}"]
    assumed += [] if device or total else [f"a card of {_UNKNOWN_CARD_GIB} GiB"]
    note = (f"Assumed, as the log does not say: {' and '.join(assumed)}.",) if assumed else ()
    return replace(checked, sentences=(*checked.sentences, *note))
