"""`kvwatch holders`: who holds the VRAM, and what the next restart would gain from its end."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from kvwatch.cli.common import EXIT_USAGE, add_config_argument
from kvwatch.cli.watched import Watched, add_replay_argument, watched_or_complain
from kvwatch.export.cycle import Cycle
from kvwatch.export.holders import holders_json, holders_text

EXIT_UNSEEN = 2
_CLEAR = "\x1b[H\x1b[2J"


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
    parser.add_argument(
        "--watch",
        action="store_true",
        help="look again at the configured interval, and remember what has just ended",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the holders once, or until interrupted."""
    watched = watched_or_complain(args)
    if watched is None:
        return EXIT_USAGE
    return _watch(watched, args) if args.watch else _once(watched, args)


def _once(watched: Watched, args: argparse.Namespace) -> int:
    cycle = watched.look()
    print(holders_json(cycle, indent=2) if args.json else holders_text(cycle))
    return _exit_code(cycle)


def _watch(watched: Watched, args: argparse.Namespace) -> int:
    """A real node is looked at until interrupted; captures are shown one after the other."""
    remaining = watched.cycles if args.replay else None
    code = 0
    try:
        while remaining is None or remaining > 0:
            cycle = watched.monitor.cycle()
            code = _exit_code(cycle)
            _show(cycle, as_json=args.json)
            if remaining is None:
                time.sleep(watched.monitor.config.poll.interval)
            else:
                remaining -= 1
    finally:
        watched.monitor.close()
    return code


def _show(cycle: Cycle, *, as_json: bool) -> None:
    if as_json:
        print(holders_json(cycle), flush=True)
    elif sys.stdout.isatty():
        print(_CLEAR + holders_text(cycle), flush=True)
    else:
        print(holders_text(cycle) + "\n", flush=True)


def _exit_code(cycle: Cycle) -> int:
    needed = [source.up for source in cycle.snapshot.sources if source.name in ("nvml", "processes")]
    return 0 if all(needed) else EXIT_UNSEEN
