"""`kvwatch capture`: what one cycle sees, in a file for a bug report."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from kvwatch.cli.common import EXIT_USAGE, add_config_argument, complain, config_or_complain
from kvwatch.export.textfile import check_replaceable
from kvwatch.observe.capture import Capture, capture_bytes, take_capture
from kvwatch.observe.cycle import Observer
from kvwatch.observe.local import LocalSources
from kvwatch.observe.records import Failure
from kvwatch.units import counted

EXIT_NOT_WRITTEN = 1
STANDARD_OUTPUT = Path("-")


def add_parser(commands: Any) -> None:
    """The command's arguments."""
    parser = commands.add_parser(
        "capture",
        description="Looks at this node once and writes to FILE what was seen: GPUs, processes, servers,"
        " their models and the configuration. Command lines, environments, user names, home directories and"
        " anything like a key are left out; the file itself says so. kvwatch status"
        " --replay FILE shows on any machine what was seen here.",
        epilog="exit code: 0 written, 1 FILE cannot be written, 2 wrong configuration or argument",
    )
    parser.add_argument(
        "file",
        metavar="FILE",
        type=Path,
        help="where to write, compressed where the name ends in .gz; - for standard output",
    )
    parser.add_argument("--force", action="store_true", help="overwrite FILE where there is one")
    parser.add_argument("--keep-names", action="store_true", help="keep the names of users")
    add_config_argument(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0; 1 where the file was not written, 2 where the configuration or an argument is wrong."""
    config = config_or_complain(args.config)
    if config is None:
        return EXIT_USAGE
    file: Path = args.file
    if not args.force and file != STANDARD_OUTPUT and file.exists():
        complain(f"{file}: exists already; --force overwrites it")
        return EXIT_USAGE
    observer = Observer(LocalSources(config.poll), config)
    capture = take_capture(observer.observe(), config, keep_names=args.keep_names)
    observer.close()
    data = capture_bytes(capture, compress=file.suffix == ".gz")
    if file == STANDARD_OUTPUT:
        sys.stdout.buffer.write(data)
        return 0
    try:
        write_private(file, data, overwrite=args.force)
    except OSError as error:
        complain(f"{file}: {error.strerror or error}")
        return EXIT_NOT_WRITTEN
    print(summary(capture, file, len(data)))
    return 0


def write_private(path: Path, data: bytes, *, overwrite: bool) -> None:
    """Make the file in one step, readable by its owner only.

    Raises:
        FileExistsError: there is one, and it is not to be overwritten.
        OSError: the folder is not writable, the disk is full, or what is there is no regular file; nothing is
            left behind.
    """
    check_replaceable(path)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        if overwrite:
            temporary.replace(path)
        else:
            path.hardlink_to(temporary)
    finally:
        temporary.unlink(missing_ok=True)


def summary(capture: Capture, file: Path, size: int) -> str:
    """What the file holds, what it does not, and what to do with it."""
    seen = capture.observation
    gpus = "no GPUs" if isinstance(seen.nvml, Failure) else counted(len(seen.nvml.gpus), "GPU")
    processes = (
        "no processes"
        if isinstance(seen.processes, Failure)
        else f"{len(seen.processes.processes)} processes"
    )
    failures = [source.failure for source in seen.sources if source.failure]
    return "\n".join(
        [
            f"{file}: {size} bytes with {gpus}, {processes} and {counted(len(seen.servers), 'vLLM server')}",
            *(f"not seen: {failure.source}: {failure.detail}" for failure in failures),
            "left out:",
            *(f"  {sentence}" for sentence in capture.removed or ("nothing",)),
            "Program names, GPU UUIDs, model names, addresses and times are in it: look it over",
            f"({'zless' if file.suffix == '.gz' else 'less'} {file}), then attach it to the bug report.",
            f"What others will see: kvwatch status --replay {file}",
        ]
    )
