"""Writes the dashboards' JSON: python -m dashboards.build"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from dashboards.boards import daemon, fleet, node, server

BOARDS = (fleet.BOARD, node.BOARD, server.BOARD, daemon.BOARD)
FOLDER = Path(__file__).resolve().parent


def files() -> Mapping[str, str]:
    """What is generated, by file name."""
    return {
        f"{board.uid}.json": json.dumps(board.as_json(), indent=2, ensure_ascii=False) + "\n"
        for board in BOARDS
    }


def main() -> None:
    """Write the files."""
    for name, text in files().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
