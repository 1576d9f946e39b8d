"""`kvwatch holders`: who holds the VRAM, and what the next restart would gain from its end."""

from __future__ import annotations

import argparse
from typing import Any

from kvwatch.cli.common import EXIT_USAGE, add_config_argument
from kvwatch.cli.watched import add_replay_argument, watched_or_complain
from kvwatch.cli.watching import add_watch_argument, watch
from kvwatch.export.cycle import Cycle
from kvwatch.export.holders import holders_json, holders_text

EXIT_UNSEEN = 2


def add_parser(commands: Any) -> None:
    """The command's arguments."""
    parser = commands.add_parser(
        "holders",
        description="Everyone who holds VRAM, with owner, age and workload; what each server's next start"
        " would gain if it went; and the command to stop it, which kvwatch itself never runs.",
        epilog="exit code: 0, or 2 where NVML or /proc gave no answer",
    )
    add_config_argument(parser)
    add_replay_argument(parser)
    parser.add_argument(
        "--json", action="store_true", help="the same as JSON; with --watch one line per look"
    )
    add_watch_argument(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the holders once, or until interrupted."""
    watched = watched_or_complain(args)
    if watched is None:
        return EXIT_USAGE
    if args.watch is not None:
        show = holders_json if args.json else holders_text
        last = watch(watched, show, every=args.watch, redraw=not args.json)
        return EXIT_UNSEEN if last is None else _exit_code(last)
    cycle = watched.look()
    print(holders_json(cycle, indent=2) if args.json else holders_text(cycle))
    return _exit_code(cycle)


def _exit_code(cycle: Cycle) -> int:
    needed = [source.up for source in cycle.snapshot.sources if source.name in ("nvml", "processes")]
    return 0 if all(needed) else EXIT_UNSEEN
