"""Where tests find what lies outside the repository."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def shared_dir() -> Path | None:
    """The folder with further vectors next to the repository, or None where there is none."""
    shared = ROOT.parent / "shared"
    return shared if (shared / "vectors").is_dir() else None
