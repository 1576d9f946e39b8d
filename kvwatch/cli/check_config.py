"""`kvwatch check-config`: is this configuration file usable?"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kvwatch.cli.common import EXIT_USAGE, config_or_complain


def add_parser(commands: Any) -> None:
    """The command's arguments."""
    parser = commands.add_parser(
        "check-config",
        description="Checks a configuration file and names the line and field of the first error.",
    )
    parser.add_argument("file", metavar="FILE", type=Path)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0 where the file is usable, else 2."""
    config = config_or_complain(args.file)
    if config is None:
        return EXIT_USAGE
    print(f"{args.file}: ok, {len(config.servers)} servers, {len(config.plans)} plans")
    return 0
