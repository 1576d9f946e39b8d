"""`--watch`: one look after another, drawn over the last one on a terminal."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime

from kvwatch.cli.watched import Watched
from kvwatch.config import duration
from kvwatch.export.cycle import Cycle

CONFIGURED = 0.0
"""Stands for the interval of the configuration."""
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""The terminal's second screen, without a cursor: what was printed before is there again afterwards."""
_HOME, _REST_OF_LINE, _REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


def add_watch_argument(parser: argparse.ArgumentParser) -> None:
    """``--watch [SECONDS]``."""
    parser.add_argument(
        "--watch",
        metavar="SECONDS",
        nargs="?",
        type=duration,
        const=CONFIGURED,
        help="look again and again, so far apart (without SECONDS: the configured interval), until Ctrl-C",
    )


def watch(
    watched: Watched, show: Callable[[Cycle], str], *, every: float = CONFIGURED, redraw: bool = True
) -> Cycle | None:
    """Look until interrupted, or until all captures are seen, and show each look.

    Args:
        show: a look as text.
        every: seconds between looks.
        redraw: draw over the last look, under the time, where the output is a terminal.

    Returns:
        The last look, None where the interrupt came before the first had ended.
    """
    last = None
    screen = _Screen() if redraw and sys.stdout.isatty() else None
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


class _Screen:
    """The terminal while something is watched on it."""

    def __init__(self) -> None:
        sys.stdout.write(_ENTER)

    def draw(self, text: str) -> None:
        """Draw a text from the top, without a flicker; what does not fit is counted."""
        lines = text.splitlines()
        room = shutil.get_terminal_size().lines - 1
        if len(lines) > room:
            lines = [*lines[: room - 1], f"… {len(lines) - room + 1} more lines"]
        drawn = "".join(f"{line}{_REST_OF_LINE}\r\n" for line in lines)
        sys.stdout.write(f"{_HOME}{drawn}{_REST_OF_SCREEN}")
        sys.stdout.flush()

    def leave(self) -> None:
        """Go back to what was there before."""
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
