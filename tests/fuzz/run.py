"""Lets atheris look for inputs that a target cannot take.

``python -m tests.fuzz.run [--seconds N] [TARGET …]``

Each target runs in a process of its own, on one core, for a bounded time, with the instrumented package. An
input that makes it fail is written to ``.cache/fuzz/TARGET`` and the run ends with 1.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("page", "request", "config", "command_line", "start_log")
MEMORY_MIB = 1024
INPUT_SECONDS = 10
"""One input that takes longer is a failure."""


def main() -> int:
    """Run the targets one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("targets", metavar="TARGET", nargs="*", help=", ".join(NAMES))
    parser.add_argument("--seconds", type=int, default=20, help="for each target (default: %(default)s)")
    args = parser.parse_args()
    failed = [name for name in args.targets or NAMES if not fuzz(name, args.seconds)]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def fuzz(name: str, seconds: int) -> bool:
    """Whether the target took everything."""
    findings = ROOT / ".cache" / "fuzz" / name
    findings.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as corpus:
        command = [sys.executable, "-c", CHILD, name, corpus, f"-max_total_time={seconds}"]
        command += [
            f"-rss_limit_mb={MEMORY_MIB}",
            f"-timeout={INPUT_SECONDS}",
            f"-artifact_prefix={findings}/",
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stderr.splitlines()
    summary = next((line for line in reversed(lines) if line.startswith("Done ")), "ended early")
    print(f"{name}: {summary}")
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
    return done.returncode == 0


CHILD = """
import sys
from pathlib import Path
import atheris
with atheris.instrument_imports(include=["kvwatch"], enable_loader_override=False):
    from tests.fuzz.targets import TARGETS
name, corpus, *options = sys.argv[1:]
target = TARGETS[name]
for number, seed in enumerate(target.seeds()):
    (Path(corpus) / str(number)).write_bytes(seed)
atheris.Setup([sys.argv[0], corpus, f"-max_len={target.longest}", *options], target.run)
atheris.Fuzz()
"""


if __name__ == "__main__":
    sys.exit(main())
