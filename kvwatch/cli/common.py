"""What several commands share."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from kvwatch.blockmath.releases import Release
from kvwatch.config import Config, load
from kvwatch.logs import FORMATS, LEVELS
from kvwatch.yamlfile import ConfigError

DEFAULT_CONFIG_PATHS = (Path("kvwatch.yaml"), Path("/etc/kvwatch/kvwatch.yaml"))
EXIT_USAGE = 2

T = TypeVar("T")


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


def argument(convert: Callable[[str], T]) -> Callable[[str], T]:
    """A converter for argparse that lets the user read why a value is refused.

    argparse would say that the value is invalid, and name the Python function.
    """

    def converted(text: str) -> T:
        try:
            return convert(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return converted


@argument
def positive_number(text: str) -> float:
    """A finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError(f"{text!r} is not a number above 0")
    return number


@argument
def positive_count(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r} is not a whole number of at least 1")
    return int(text)


@argument
def release(text: str) -> str:
    """A vLLM version, as it was given."""
    Release.parse(text)
    return text


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


def file_error(error: OSError) -> str:
    """What went wrong with which file: ``a.log: No such file or directory``."""
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if error.filename else reason


def complain(text: str) -> None:
    """One line on standard error."""
    print(f"kvwatch: {text}", file=sys.stderr)
