"""`kvwatch status`: one look at this node, on the terminal."""

from __future__ import annotations

import argparse
from typing import Any

from kvwatch.cli.common import EXIT_USAGE, add_config_argument
from kvwatch.cli.watched import add_replay_argument, watched_or_complain
from kvwatch.cli.watching import add_watch_argument, watch
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
        description="One look at this node: GPUs with owners, servers with headroom, verdict and remedy.",
        epilog="exit code: 0 every server would start again, 1 some would not, 2 unknown or error",
    )
    add_config_argument(parser)
    add_replay_argument(parser)
    parser.add_argument(
        "--json", action="store_true", help="the same as JSON; with --watch one line per look"
    )
    add_watch_argument(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the status; the exit code is the verdict."""
    watched = watched_or_complain(args)
    if watched is None:
        return EXIT_USAGE
    if args.watch is not None:
        show = as_json if args.json else status_text
        last = watch(watched, show, every=args.watch, redraw=not args.json)
        return EXIT_UNKNOWN if last is None else exit_code(last)
    cycle = watched.look()
    print(as_json(cycle, indent=2) if args.json else status_text(cycle))
    return exit_code(cycle)


def exit_code(cycle: Cycle) -> int:
    """0 where every server would start again, 1 where some would not, 2 where it is not known."""
    feasible = [forecast.feasible for forecast in cycle.forecasts.restart.values()]
    if False in feasible:
        return EXIT_INFEASIBLE
    sources_up = all(source.up for source in cycle.snapshot.sources)
    return EXIT_FEASIBLE if feasible and None not in feasible and sources_up else EXIT_UNKNOWN
