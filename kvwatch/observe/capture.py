"""Capture files: all that one cycle saw, as JSON, without what is private.

A file holds one JSON document per cycle, one after the other (``cat a.json b.json`` makes two cycles), plain
or compressed with gzip. What redaction leaves out is said in the document itself.
"""

from __future__ import annotations

import gzip
import json
import platform
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvwatch import __version__
from kvwatch.config import Config
from kvwatch.observe.cycle import Observation
from kvwatch.observe.plain import NotPlain, from_plain, to_plain
from kvwatch.observe.redaction import KINDS, redact

FORMAT = 1
"""Version of the document. Fields are added without a change of it; one that goes or changes raises it."""

MAX_BYTES = 256 << 20
"""Of one file, decompressed. Five hundred processes and eight servers make a third of a megabyte."""

_GZIP_MAGIC = b"\x1f\x8b"


class CaptureError(ValueError):
    """A file that is no capture, or not one that this kvwatch reads. The text names file and field."""


@dataclass(frozen=True, slots=True)
class Capture:
    """One document.

    Attributes:
        kvwatch, python, platform: what took it.
        removed: sentences for people, what is not in the document.
        config: the configuration that was in use.
    """

    kvwatch: str
    python: str
    platform: str
    removed: tuple[str, ...]
    config: Config
    observation: Observation


def take_capture(observation: Observation, config: Config, *, keep_names: bool = False) -> Capture:
    """What may leave the node of one cycle."""
    clean = redact(observation, config, keep_names=keep_names)
    return Capture(
        kvwatch=__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        removed=tuple(f"{count} {KINDS[kind]}" for kind, count in clean.removed.items() if count),
        config=clean.config,
        observation=clean.observation,
    )


def capture_text(capture: Capture) -> str:
    """The document, ending in a line feed."""
    when = datetime.fromtimestamp(capture.observation.time, UTC)
    document = {
        "kvwatch_capture": FORMAT,
        "time": when.isoformat(timespec="milliseconds"),
        **to_plain(capture, Capture),
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def capture_bytes(capture: Capture, *, compress: bool) -> bytes:
    """The document as it stands in a file."""
    data = capture_text(capture).encode()
    return gzip.compress(data, mtime=0) if compress else data


def read_captures(path: Path) -> tuple[Capture, ...]:
    """All captures of one file, in its order; at least one.

    Raises:
        OSError: the file cannot be read.
        CaptureError: it holds something else, or a capture of another version.
    """
    try:
        return tuple(_captures(_read_text(path)))
    except CaptureError as error:
        raise CaptureError(f"{path}: {error}") from None


def _read_text(path: Path) -> str:
    with path.open("rb") as file:
        compressed = file.read(2) == _GZIP_MAGIC
        file.seek(0)
        try:
            data = (gzip.GzipFile(fileobj=file) if compressed else file).read(MAX_BYTES + 1)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise CaptureError(f"damaged gzip: {error}") from None
    if len(data) > MAX_BYTES:
        raise CaptureError(f"more than {MAX_BYTES} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise CaptureError("not a capture: no UTF-8") from None


def _captures(text: str) -> Iterator[Capture]:
    decoder = json.JSONDecoder()
    rest = text.lstrip()
    if not rest:
        raise CaptureError("the file is empty")
    while rest:
        try:
            document, end = decoder.raw_decode(rest)
        except (json.JSONDecodeError, RecursionError) as error:
            raise CaptureError(f"not JSON: {error}") from None
        yield _capture(document)
        rest = rest[end:].lstrip()


def _capture(document: Any) -> Capture:
    if not isinstance(document, dict) or "kvwatch_capture" not in document:
        raise CaptureError("not a capture: no field kvwatch_capture")
    version = document["kvwatch_capture"]
    if version != FORMAT:
        written = f"written by kvwatch {document.get('kvwatch', 'of unknown version')}"
        raise CaptureError(f"a capture of format {version} ({written}); this kvwatch reads {FORMAT}")
    record = {name: value for name, value in document.items() if name not in ("kvwatch_capture", "time")}
    try:
        capture: Capture = from_plain(record, Capture, "capture")
    except NotPlain as error:
        raise CaptureError(str(error)) from None
    return capture
