"""`--watch`: one look after another, drawn over the last one on a terminal."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from datetime import datetime

from kvwatch.cli.common import add_config_argument, argument
from kvwatch.cli.screens import open_screen
from kvwatch.cli.watched import Watched, add_replay_argument, watched_or_complain
from kvwatch.config import duration
from kvwatch.export.cycle import Cycle

CONFIGURED = 0.0
"""Stands for the interval of the configuration."""


def add_look_arguments(parser: argparse.ArgumentParser) -> None:
    """What is looked at, how often, and in which form it is printed."""
    add_config_argument(parser)
    add_replay_argument(parser)
    parser.add_argument(
        "--json", action="store_true", help="the same as JSON; with --watch one line per look"
    )
    parser.add_argument(
        "--watch",
        metavar="SECONDS",
        nargs="?",
        type=argument(duration),
        const=CONFIGURED,
        help="look again and again until Ctrl-C, so far apart (without SECONDS: as poll.interval says)",
    )


def show_looks(
    args: argparse.Namespace, as_text: Callable[[Cycle], str], as_json: Callable[..., str]
) -> Cycle | None:
    """Print one look, or each until interrupted or until all captures are seen.

    Args:
        args: those of `add_look_arguments`.
        as_json: takes ``indent`` as `json.dumps` does.

    Returns:
        The last look; None where there was none, which has been complained about.
    """
    watched = watched_or_complain(args)
    if watched is None:
        return None
    if args.watch is not None:
        return _watch(watched, as_json if args.json else as_text, every=args.watch, redraw=not args.json)
    cycle = watched.look()
    print(as_json(cycle, indent=2) if args.json else as_text(cycle))
    return cycle


def _watch(watched: Watched, show: Callable[[Cycle], str], *, every: float, redraw: bool) -> Cycle | None:
    """Show look after look; None where the interrupt came before the first had ended.

    Args:
        redraw: draw over the last look, under the time, where the output is a terminal.
    """
    last = None
    screen = open_screen() if redraw else None
    try:
        for last in _cycles(watched, every):
            if screen is None:
                print(show(last) + ("\n" if redraw else ""), flush=True)
            else:
                screen.draw(f"{_seen(last)}\n\n{show(last)}")
    except KeyboardInterrupt:
        pass
    finally:
        watched.monitor.close()
        if screen is not None:
            screen.leave()
    if screen is not None and last is not None:
        print(show(last))
    return last


def _seen(cycle: Cycle) -> str:
    return f"{datetime.fromtimestamp(cycle.snapshot.time).astimezone():%Y-%m-%d %H:%M:%S %Z}"


def _cycles(watched: Watched, every: float) -> Iterator[Cycle]:
    """A real node's cycles without end, starting so far apart; captures one after the other."""
    if watched.captured:
        for _ in range(watched.cycles):
            yield watched.monitor.cycle()
        return
    interval = every or watched.monitor.config.poll.interval
    due = time.monotonic()
    while True:
        yield watched.monitor.cycle()
        due = max(due + interval, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))
