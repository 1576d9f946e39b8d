"""`kvwatch status`: one look at this node, on the terminal."""

from __future__ import annotations

import argparse
from typing import Any

from kvwatch.cli.watching import add_look_arguments, show_looks
from kvwatch.export.cycle import Cycle
from kvwatch.export.document import as_json
from kvwatch.export.text import status_text

EXIT_FEASIBLE = 0
EXIT_INFEASIBLE = 1
EXIT_UNKNOWN = 2


def add_parser(commands: Any) -> None:
    """The command's arguments."""
    parser = commands.add_parser(
        "status",
        description="Looks at this node once: GPUs with owners, servers with headroom, verdict and remedy.",
        epilog="exit code: 0 every server would start again, 1 some would not, 2 unknown or error",
    )
    add_look_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the status; the exit code is the verdict."""
    last = show_looks(args, status_text, as_json)
    return EXIT_UNKNOWN if last is None else exit_code(last)


def exit_code(cycle: Cycle) -> int:
    """0 where every server would start again, 1 where some would not, 2 where it is not known."""
    feasible = [forecast.feasible for forecast in cycle.forecasts.restart.values()]
    if False in feasible:
        return EXIT_INFEASIBLE
    sources_up = all(source.up for source in cycle.snapshot.sources)
    return EXIT_FEASIBLE if feasible and None not in feasible and sources_up else EXIT_UNKNOWN
