"""Takes the pictures in docs/images: the demo's page in Chromium, at moments that its JSON tells.

python -m tools.pictures
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
from PIL import Image

from tests.export.chromium import Page, browser

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
SPEED = "150"
PATIENCE = 120.0


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture: when to take it, and how to look."""

    name: str
    due: Callable[[dict[str, Any]], bool]
    width: int
    height: int | None = None
    dark: bool = False


def _foretold(server: dict[str, Any]) -> bool:
    at = server["trend"]["infeasible_at"]
    return at is not None and server["restart"]["feasible"] is True


def _failing(server: dict[str, Any]) -> bool:
    return server["restart"]["feasible"] is False


PICTURES = (
    Picture("status-foretold.png", _foretold, width=1200, dark=True),
    Picture("status-failing.png", _failing, width=1200, height=1080),
    Picture("status-phone.png", _failing, width=390, height=1400),
)


def main() -> int:
    """Play the demo once and take each picture when its moment has come."""
    IMAGES.mkdir(exist_ok=True)
    kvwatch = Path(sys.executable).with_name("kvwatch")
    demo = subprocess.Popen(
        [kvwatch, "demo", "--web.listen-address", "127.0.0.1:0", "--speed", SPEED],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert demo.stdout is not None
        url = next(line for line in demo.stdout if line.startswith("page: ")).split()[1]
        with tempfile.TemporaryDirectory() as profile, browser(Path(profile)) as running:
            page = Page(running)
            for picture in PICTURES:
                _await(url, picture.due)
                page.look(width=picture.width, dark=picture.dark)
                page.open(url)
                page.picture(IMAGES / picture.name, height=picture.height)
                _shrink(IMAGES / picture.name)
                print(picture.name)
    finally:
        demo.terminate()
        demo.communicate(timeout=20)
    return 0


def _shrink(path: Path) -> None:
    """The same with a palette: a third of the size."""
    Image.open(path).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)


def _await(url: str, due: Callable[[dict[str, Any]], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        answer = requests.get(f"{url}api/v1/snapshot", timeout=5)
        if answer.ok and due(answer.json()["servers"][0]):
            return
        time.sleep(0.05)
    raise TimeoutError(f"the moment for {due.__name__} did not come")


if __name__ == "__main__":
    sys.exit(main())
