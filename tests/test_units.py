from __future__ import annotations

import pytest

from kvwatch.units import bytes_text, duration_text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (12, "12 B"),
        (1024, "1.00 KiB"),
        (512 * 2**20, "512 MiB"),
        (-1342177280, "-1.25 GiB"),
        (85520809984, "79.6 GiB"),
        (2**30 - 1, "1.00 GiB"),
        (2**50, "1024 TiB"),
    ],
)
def test_bytes(number: int, text: str) -> None:
    assert bytes_text(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (45, "45 s"), (720, "12 min"), (3 * 86400 + 4 * 3600 + 5, "3 d 4 h"), (86405, "1 d 5 s")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
