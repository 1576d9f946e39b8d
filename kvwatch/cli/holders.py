"""`kvwatch holders`: who holds the VRAM, and what the next restart would gain from its end."""

from __future__ import annotations

import argparse
from typing import Any

from kvwatch.cli.watching import add_look_arguments, show_looks
from kvwatch.export.cycle import Cycle
from kvwatch.export.holders import holders_json, holders_text

EXIT_UNSEEN = 2


def add_parser(commands: Any) -> None:
    """The command's arguments."""
    parser = commands.add_parser(
        "holders",
        description="Lists everyone who holds VRAM, with owner, age and workload; what each server's next"
        " start would gain if it went; and the command to stop it, which kvwatch itself never runs.",
        epilog="exit code: 0 seen, 2 NVML or /proc gave no answer",
    )
    add_look_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the holders once, or until interrupted."""
    last = show_looks(args, holders_text, holders_json)
    return EXIT_UNSEEN if last is None else _exit_code(last)


def _exit_code(cycle: Cycle) -> int:
    needed = [source.up for source in cycle.snapshot.sources if source.name in ("nvml", "processes")]
    return 0 if all(needed) else EXIT_UNSEEN
