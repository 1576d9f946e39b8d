"""Renders one cycle into everything that the server hands out."""

from __future__ import annotations

from kvwatch.config import Config, Poll
from kvwatch.export.cycle import Cycle
from kvwatch.export.document import document, encode
from kvwatch.export.page import build_page
from kvwatch.export.server import Content
from kvwatch.logs import log_crash


def render(cycle: Cycle, config: Config) -> Content:
    """The page in both formats, and what makes the JSON and the status page of one cycle."""
    page = build_page(cycle, top=config.holders.top)
    return Content(
        lifetime=lifetime(config.poll),
        metrics=page.text(),
        openmetrics=page.openmetrics(),
        snapshot=lambda: encode(document(cycle)).encode(),
        status=lambda: _status(cycle),
    )


def _status(cycle: Cycle) -> bytes:
    # A command that looks once shows no such page: see daemon.LATE_MODULES.
    from kvwatch.export.statuspage import apology, status_page

    try:
        return status_page(document(cycle))
    except Exception:  # noqa: BLE001 - a mistake in the page for people must not cost Prometheus its own
        log_crash("status_page_failed")
        return apology()


def lifetime(poll: Poll) -> float:
    """Seconds for which a page stands: two cycles, each with every source at its deadline."""
    deadlines = poll.nvml_timeout + 2 * poll.processes_timeout + poll.vllm_timeout
    return 2 * (poll.interval + deadlines)
