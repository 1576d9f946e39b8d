"""For each line of standard input, a time in seconds, reads NVML and prints the answer as JSON.

Each read is made on a thread of its own, as the daemon may do.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from concurrent.futures import ThreadPoolExecutor
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
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(source.read).result()
        print(json.dumps(dataclasses.asdict(answer), default=plain), flush=True)


if __name__ == "__main__":
    main()
