"""From a server's log to what failed, why, and what to type."""

from __future__ import annotations

from dataclasses import replace

from kvwatch.blockmath.flags import Flags
from kvwatch.forecast import explain_cache, explain_configuration, explain_memory
from kvwatch.forecast.diagnosis import Diagnosis, FailedStart
from kvwatch.observe.startlog import StartLog

RULES = {**explain_cache.RULES, **explain_memory.RULES, **explain_configuration.RULES}
"""How each kind of failure is explained."""


def explain(log: StartLog, *, flags: Flags | None = None, version: str | None = None) -> Diagnosis:
    """Explain a log.

    Args:
        log: as read by `kvwatch.observe.startlog.read_log`.
        flags: what the server was told, over what the log itself says.
        version: vLLM's release, where the log does not say it.

    Returns:
        A diagnosis with kind None where nothing failed.
    """
    finding = log.root_cause
    if finding is None:
        return Diagnosis(
            None, "The log shows a server that started." if log.started else "Nothing failed in this log."
        )
    told = replace(log.flags, **flags.given()) if flags is not None else log.flags
    return RULES[finding.kind](FailedStart(log, finding, told, log.version or version))
