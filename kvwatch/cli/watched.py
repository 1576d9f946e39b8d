"""The node that a command looks at: this one, or captures of another in its place."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvwatch.cli.common import complain, read_config
from kvwatch.config import Config, load
from kvwatch.export.cycle import Cycle
from kvwatch.monitor import Monitor
from kvwatch.observe.cycle import Observer
from kvwatch.observe.local import LocalSources
from kvwatch.yamlfile import ConfigError


@dataclass(frozen=True, slots=True)
class Watched:
    """A node behind a monitor.

    Attributes:
        cycles: how many cycles there are to see, 1 for a real node.
        captured: it is made of captures, whose cycles come to an end.
    """

    monitor: Monitor
    cycles: int = 1
    captured: bool = False

    def look(self) -> Cycle:
        """See all cycles once; returns the last."""
        for _ in range(self.cycles):
            cycle = self.monitor.cycle()
        self.monitor.close()
        return cycle


def add_replay_argument(parser: argparse.ArgumentParser) -> None:
    """``--replay FILE``."""
    parser.add_argument(
        "--replay",
        metavar="FILE",
        type=Path,
        help="look at the captures in FILE instead of this node, with the configuration captured there"
        " unless --config is given",
    )


def watched_or_complain(
    args: argparse.Namespace, *, adjust: Callable[[Config], Config] = lambda config: config
) -> Watched | None:
    """What the command line asks for; errors are written for the operator and None returned.

    Args:
        adjust: what the command line changes in the configuration.
    """
    try:
        return _captured(args, adjust) if args.replay else _real(args, adjust)
    except OSError as error:
        complain(f"{args.replay}: {error.strerror or error}")
    except ConfigError as error:
        complain(str(error))
    return None


def _real(args: argparse.Namespace, adjust: Callable[[Config], Config]) -> Watched:
    config = adjust(read_config(args.config))
    return Watched(Monitor(Observer(LocalSources(config.poll), config), config))


def _captured(args: argparse.Namespace, adjust: Callable[[Config], Config]) -> Watched | None:
    # Who looks at a real node does not wait for these.
    from kvwatch.observe.capture import CaptureError, read_captures
    from kvwatch.observe.replay import ReplayObserver, captured_config

    try:
        captures = read_captures(args.replay)
    except CaptureError as error:
        complain(str(error))
        return None
    config = adjust(load(args.config) if args.config else captured_config(captures))
    observer = ReplayObserver(captures, config)
    monitor = Monitor(observer, config, now=observer.now, simulated=True)
    return Watched(monitor, observer.cycles, captured=True)
