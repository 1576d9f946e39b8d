"""`kvwatch explain`: why a vLLM server did not start, from its own log."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from kvwatch.blockmath.flags import Flags
from kvwatch.cli.common import EXIT_USAGE, complain, file_error, release
from kvwatch.forecast.diagnosis import Advice, Diagnosis
from kvwatch.forecast.explain import explain
from kvwatch.observe.logline import MAX_LINE
from kvwatch.observe.models import ModelSource
from kvwatch.observe.records import Failure, Launch
from kvwatch.observe.startlog import Finding, StartLog, classify_lines, read_log

NOTHING_WRONG, FAILED, UNREADABLE = 0, 1, 2


def add_parser(subparsers: Any) -> None:
    """Add the `explain` command to an argparse subparsers object."""
    parser = subparsers.add_parser(
        "explain",
        description="Reads a vLLM server's log and says what failed, why, and what to change.",
        epilog="exit code: 0 nothing failed, 1 a failure was found, 2 the log could not be read",
    )
    parser.add_argument(
        "logfile", nargs="?", default="-", metavar="LOGFILE", help="the log; - or none: standard input"
    )
    parser.add_argument("--json", action="store_true", help="the same as JSON, on one line")
    parser.add_argument(
        "--each-line",
        action="store_true",
        help="with --json: look at each line by itself, one JSON object per line",
    )
    model = parser.add_mutually_exclusive_group()
    model.add_argument(
        "--config",
        metavar="PATH",
        help="the model's config.json, or its directory: check the log's numbers against it",
    )
    model.add_argument(
        "--model",
        metavar="NAME",
        help="the same, by the model's path or its hub id (looked up in the local cache)",
    )
    parser.add_argument(
        "--vllm-version", metavar="X.Y.Z", type=release, help="the release, where the log does not tell it"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run `kvwatch explain`; returns the exit status."""
    if args.each_line and not args.json:
        complain("--each-line goes with --json")
        return EXIT_USAGE
    try:
        with _open(args.logfile) as stream:
            if args.each_line:
                return _print_each_line(_lines(stream))
            log = read_log(_lines(stream))
        config = _config(args)
    except BrokenPipeError:
        raise
    except OSError as error:
        complain(file_error(error))
        return UNREADABLE
    except ValueError as error:
        complain(str(error))
        return UNREADABLE
    diagnosis = explain(log, config=config, version=args.vllm_version)
    if args.json:
        print(json.dumps(as_json(log, diagnosis), ensure_ascii=False))
    else:
        print(as_text(log, diagnosis))
    return NOTHING_WRONG if diagnosis.kind is None else FAILED


def _config(args: argparse.Namespace) -> Mapping[str, Any] | None:
    """The model's configuration, None where none was asked for.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no configuration, or the model was not found.
    """
    if args.config is not None:
        path = Path(args.config)
        return _read_config(path / "config.json" if path.is_dir() else path)
    if args.model is None:
        return None
    launch = Launch(None, None, Flags(), args.model, (args.model,), None, cwd=str(Path.cwd()))
    found = ModelSource().read(launch)
    if isinstance(found, Failure):
        raise ValueError(found.detail)
    return found.config


def _read_config(path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path}: not a JSON object")
    return config


def _open(name: str) -> IO[bytes]:
    if name == "-":
        return sys.stdin.buffer
    return Path(name).open("rb")


def _lines(stream: IO[bytes]) -> Iterator[str]:
    """Lines as text, each cut to what is looked at, so that one that never ends takes no memory."""
    while line := stream.readline(MAX_LINE):
        yield line.decode("utf-8", "replace")
        while not line.endswith(b"\n") and (line := stream.readline(MAX_LINE)):
            pass


def _print_each_line(lines: Iterable[str]) -> int:
    status = NOTHING_WRONG
    for number, finding in enumerate(classify_lines(lines), 1):
        print(json.dumps({"line": number, **_kind_and_numbers(finding)}, ensure_ascii=False))
        if finding is not None and finding.is_failure:
            status = FAILED
    return status


def _kind_and_numbers(finding: Finding | None) -> dict[str, Any]:
    """``kind`` is null for a line that is no failure; ``information`` then names what it tells."""
    if finding is None:
        return {"kind": None, "numbers": {}}
    if finding.is_failure:
        return {"kind": finding.kind, "numbers": dict(finding.numbers)}
    return {"kind": None, "information": finding.kind, "numbers": dict(finding.numbers)}


def as_json(log: StartLog, diagnosis: Diagnosis) -> dict[str, Any]:
    """The whole answer; ``kind`` and ``numbers`` are the root cause's, else the last telling line's."""
    root = log.root_cause
    return {
        **_kind_and_numbers(root or (log.information[-1] if log.information else None)),
        "what": diagnosis.what,
        "why": list(diagnosis.why),
        "remedies": [_advice_as_json(remedy) for remedy in diagnosis.remedies],
        "ruled_out": list(diagnosis.ruled_out),
        "checks": list(diagnosis.checks),
        "failures": [
            {
                "kind": finding.kind,
                "numbers": dict(finding.numbers),
                "root_cause": finding is root,
                "line": finding.line,
                "process": finding.process,
                "stage": finding.stage,
                "text": finding.text,
            }
            for finding in log.failures
        ],
        "version": log.version,
        "attempts": log.attempts,
        "recovered": log.recovered,
    }


def _advice_as_json(remedy: Advice) -> dict[str, Any]:
    return {
        "text": remedy.text,
        "arguments": list(remedy.arguments),
        "environment": list(remedy.environment),
        "command": remedy.command,
    }


def as_text(log: StartLog, diagnosis: Diagnosis) -> str:
    """The answer for people."""
    lines = [diagnosis.what]
    lines += [f"  {sentence}" for sentence in diagnosis.why]
    if diagnosis.remedies:
        lines += ["", "What helps, in this order:"]
        for number, remedy in enumerate(diagnosis.remedies, 1):
            if remedy.to_type:
                lines += [f"  {number}. {remedy.to_type}", f"     {remedy.text}"]
            else:
                lines.append(f"  {number}. {remedy.text}")
    if diagnosis.ruled_out:
        lines += ["", "What does not help:", *(f"  - {reason}" for reason in diagnosis.ruled_out)]
    if diagnosis.checks:
        lines += ["", "Checked against the model:", *(f"  - {check}" for check in diagnosis.checks)]
    root = log.root_cause
    if root is not None:
        where = f" ({root.process})" if root.process else ""
        release = f", vLLM {log.version}" if log.version else ""
        lines += ["", f"From line {root.line}{where}{release}: {root.text}"]
    if log.recovered:
        lines.append("A later start in this log got through.")
    return "\n".join(lines)
