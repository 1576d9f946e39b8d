"""Where `--watch` draws: with rich, if it is installed, in colour; else plainly."""

from __future__ import annotations

import shutil
import sys
from typing import Protocol

_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""The terminal's second screen, without a cursor: what was printed before is there again afterwards."""
_HOME, _REST_OF_LINE, _REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
_STYLES = {
    "bold green": r"\bok\b",
    "bold red": r"\b(FAILS|down)\b",
    "yellow": r"\b(unknown|unattributed|releasing)\b",
    "red": r"\b(orphan|foreign)\b",
    "bold": r"^(GPU|SERVER|OWNER) .*$",
}
"""What stands out, as regular expressions."""


class Screen(Protocol):
    """A terminal while something is watched on it."""

    def draw(self, text: str) -> None:
        """Draw a text from the top over the last one; lines that do not fit are counted."""

    def leave(self) -> None:
        """Go back to what was there before."""


def open_screen() -> Screen | None:
    """The terminal behind standard output, None where that is none."""
    if not sys.stdout.isatty():
        return None
    try:
        return RichScreen()
    except ModuleNotFoundError:
        return PlainScreen()


class PlainScreen:
    """A screen for any terminal."""

    def __init__(self) -> None:
        sys.stdout.write(_ENTER)

    def draw(self, text: str) -> None:
        drawn = "".join(f"{line}{_REST_OF_LINE}\r\n" for line in _fitting(text))
        sys.stdout.write(f"{_HOME}{drawn}{_REST_OF_SCREEN}")
        sys.stdout.flush()

    def leave(self) -> None:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()


class RichScreen:
    """A screen with verdicts and owners in colour, where the terminal has any and NO_COLOR is not set.

    Raises:
        ModuleNotFoundError: rich, an extra, is not installed.
    """

    def __init__(self) -> None:
        # Here, since it takes long to import and most looks are not drawn.
        from rich.console import Console
        from rich.live import Live

        self._live = Live(console=Console(), screen=True, auto_refresh=False)
        self._live.start()

    def draw(self, text: str) -> None:
        from rich.text import Text

        shown = Text("\n".join(_fitting(text)), no_wrap=True, overflow="ellipsis")
        for style, pattern in _STYLES.items():
            shown.highlight_regex(f"(?m){pattern}", style)
        self._live.update(shown, refresh=True)

    def leave(self) -> None:
        self._live.stop()


def _fitting(text: str) -> list[str]:
    """The lines that the terminal has room for; the last one counts the others."""
    lines = text.splitlines()
    room = shutil.get_terminal_size().lines - 1
    if len(lines) > room:
        lines = [*lines[: room - 1], f"… {len(lines) - room + 1} more lines"]
    return lines
