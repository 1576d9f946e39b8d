"""`kvwatch check-config`: is this configuration file usable?"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kvwatch.cli.common import EXIT_USAGE, config_or_complain
from kvwatch.units import counted


def add_parser(commands: Any) -> None:
    """The command's arguments."""
    parser = commands.add_parser(
        "check-config",
        description="Checks a configuration file and names the line and field of the first error.",
        epilog="exit code: 0 the file can be used, 2 it cannot",
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="the file, such as /etc/kvwatch/kvwatch.yaml")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0 where the file is usable, else 2."""
    config = config_or_complain(args.file)
    if config is None:
        return EXIT_USAGE
    servers, plans = counted(len(config.servers), "server"), counted(len(config.plans), "plan")
    print(f"{args.file}: ok, {servers}, {plans}")
    return 0
