"""For each line of standard input, a time in seconds, reads NVML and prints the answer as JSON."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from kvwatch.observe.nvml import NvmlSource


def plain(value: Any) -> Any:
    """Sets as sorted lists; ``json`` knows the rest."""
    if isinstance(value, frozenset):
        return sorted(value)
    raise TypeError(type(value))


def main() -> None:
    now = 0.0
    source = NvmlSource(first_delay=1.0, longest_delay=8.0, clock=lambda: now)
    for line in sys.stdin:
        now = float(line)
        print(json.dumps(dataclasses.asdict(source.read()), default=plain), flush=True)


if __name__ == "__main__":
    main()
