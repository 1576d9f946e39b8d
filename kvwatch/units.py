"""Numbers as people read them."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def bytes_text(number: int) -> str:
    """Bytes with a binary unit and three significant digits or so: ``-1.25 GiB``, ``512 MiB``, ``12 B``."""
    value = float(number)
    for unit in _UNITS:
        if abs(value) < 1023.5 or unit == _UNITS[-1]:
            break
        value /= 1024
    digits = 0 if unit == "B" or abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f} {unit}"


def counted(number: int, noun: str) -> str:
    """A number of things: ``1 server``, ``2 servers``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def duration_text(seconds: float) -> str:
    """A span in its two largest units: ``3 d 4 h``, ``12 min``, ``45 s``."""
    rest = int(seconds)
    parts = []
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, rest = divmod(rest, length)
        if count:
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2]) or "0 s"
