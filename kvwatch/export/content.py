"""Renders one cycle into everything that the server hands out."""

from __future__ import annotations

from kvwatch.config import Config, Poll
from kvwatch.export.cycle import Cycle
from kvwatch.export.document import document, encode
from kvwatch.export.page import build_page
from kvwatch.export.server import Content
from kvwatch.export.statuspage import status_page


def render(cycle: Cycle, config: Config) -> Content:
    """The page in both formats, the JSON and the status page of one cycle."""
    page = build_page(cycle, top=config.holders.top)
    told = document(cycle)
    return Content(
        lifetime=lifetime(config.poll),
        metrics=page.text(),
        openmetrics=page.openmetrics(),
        snapshot=encode(told).encode(),
        status=status_page(told),
    )


def lifetime(poll: Poll) -> float:
    """Seconds for which a page stands: two cycles, each with every source at its deadline."""
    deadlines = poll.nvml_timeout + 2 * poll.processes_timeout + poll.vllm_timeout
    return 2 * (poll.interval + deadlines)
