"""The `kvwatch` command."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import MappingProxyType

from kvwatch import __version__
from kvwatch.cli.common import EXIT_USAGE, complain, file_error

EXIT_BROKEN_PIPE = 128 + 13
"""What a shell reports for a program that SIGPIPE ended."""
EXIT_INTERRUPTED = 128 + 2

COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "run": "watch this node and serve the page",
        "status": "GPUs with owners, servers with headroom and verdict",
        "holders": "who holds the VRAM, and what a restart would gain from its end",
        "plan": "would a model start on some cards, and what would fit?",
        "explain": "say why a vLLM server did not start, from its log",
        "fleet": "headroom and verdicts of every node, out of Prometheus",
        "capture": "write what kvwatch sees to a file for a bug report",
        "doctor": "what kvwatch can and cannot see here, and how to grant it",
        "demo": "watch an embedded node: no GPU and no vLLM needed",
        "check-config": "check a configuration file",
    }
)
"""Commands and what `kvwatch --help` says of them. Each is the module of its name in `kvwatch.cli`."""


def parser(command: str | None = None) -> argparse.ArgumentParser:
    """The command line, in full for one command: only its module is imported."""
    top = argparse.ArgumentParser(
        prog="kvwatch",
        description="Tells whether the vLLM servers of a node would start again, and what holds their VRAM.",
    )
    top.add_argument("--version", action="version", version=f"kvwatch {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        if name == command:
            import_module(f"kvwatch.cli.{name.replace('-', '_')}").add_parser(commands)
        else:
            commands.add_parser(name, help=summary)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code (argparse itself exits with 2 on a wrong command line)."""
    # numpy would start a thread per core, with memory for each, for sums of a hundred numbers.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    argv = sys.argv[1:] if argv is None else argv
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a name in another alphabet than the terminal's
    try:
        return _run(argv)
    except BrokenPipeError:
        _drop_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        _drop_output()
        complain(file_error(error))
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _run(argv: Sequence[str]) -> int:
    command = next((word for word in argv if not word.startswith("-")), None)
    args = parser(command).parse_args(argv)
    code: int = args.run(args)
    if sys.stdout is not None:
        sys.stdout.flush()
    return code


def _drop_output() -> None:
    """Let the interpreter's own flush at the end not fail a second time."""
    with suppress(OSError, AttributeError), Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
