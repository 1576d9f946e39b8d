"""What several commands share."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvwatch.config import Config, load
from kvwatch.logs import FORMATS, LEVELS
from kvwatch.yamlfile import ConfigError

DEFAULT_CONFIG_PATHS = (Path("kvwatch.yaml"), Path("/etc/kvwatch/kvwatch.yaml"))
EXIT_USAGE = 2


def add_config_argument(parser: argparse.ArgumentParser) -> None:
    """``--config FILE``."""
    places = " or ".join(str(path) for path in DEFAULT_CONFIG_PATHS)
    parser.add_argument(
        "--config",
        metavar="FILE",
        type=Path,
        help=f"configuration file; without it {places} where there is one, else the defaults",
    )


def add_log_arguments(parser: argparse.ArgumentParser) -> None:
    """``--log-level`` and ``--log-format``."""
    parser.add_argument(
        "--log-level",
        choices=LEVELS,
        default="info",
        help="least severe event that is written (default: %(default)s)",
    )
    parser.add_argument(
        "--log-format",
        choices=tuple(FORMATS),
        default="logfmt",
        help="one event per line as key=value pairs, or as JSON (default: %(default)s)",
    )


def read_config(path: Path | None) -> Config:
    """The configuration that the command line asks for.

    Raises:
        ConfigError: the file is missing or wrong.
    """
    if path is not None:
        return load(path)
    for candidate in DEFAULT_CONFIG_PATHS:
        if candidate.is_file():
            return load(candidate)
    return Config()


def config_or_complain(path: Path | None) -> Config | None:
    """`read_config`, with the error written for the operator and None returned."""
    try:
        return read_config(path)
    except ConfigError as error:
        complain(str(error))
        return None


def complain(text: str) -> None:
    """One line on standard error."""
    print(f"kvwatch: {text}", file=sys.stderr)
