"""The `kvwatch` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kvwatch import __version__
from kvwatch.cli import capture, check_config, demo, explain, plan, run, status

COMMANDS = (run, status, plan, explain, capture, demo, check_config)


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="kvwatch",
        description="Tells whether the vLLM servers of a node would start again, and what holds their VRAM.",
    )
    top.add_argument("--version", action="version", version=f"kvwatch {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code (argparse itself exits with 2 on a wrong command line)."""
    args = parser().parse_args(argv)
    try:
        code: int = args.run(args)
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        return 130
    return code
