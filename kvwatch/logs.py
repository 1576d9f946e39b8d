"""The log: one line per event on standard error, as ``key=value`` pairs or JSON.

An event is a name and fields, never a sentence with values inside, so that lines can be counted and filtered.
Journald and containers keep the lines; kvwatch itself writes no file and rotates nothing.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TextIO

LEVELS = ("debug", "info", "warning", "error")

_LOGGER = logging.getLogger("kvwatch")
_PLAIN = re.compile(r"[^\s\"=\\\x00-\x1f\x7f-\x9f\u2028\u2029]+")


def log_event(level: int, event: str, /, **fields: object) -> None:
    """Write one event; fields of None are left out."""
    _LOGGER.log(level, event, extra={"fields": fields})


def log_crash(event: str, /, **fields: object) -> None:
    """Write an error with the traceback of the exception under way as its field ``trace``."""
    _LOGGER.error(event, exc_info=True, extra={"fields": fields})


class _Formatter(logging.Formatter):
    """Turns a record into fields: time, level and event first, then the event's own."""

    def fields(self, record: logging.LogRecord) -> dict[str, object]:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields = {
            "time": when.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            "logger": None if record.name == _LOGGER.name else record.name,
            **getattr(record, "fields", {}),
            "trace": self.formatException(record.exc_info) if record.exc_info else None,
        }
        return {key: value for key, value in fields.items() if value is not None}


class Logfmt(_Formatter):
    """``time=… level=warning event=source_failed source=nvml detail="no answer within 5 s"``."""

    def format(self, record: logging.LogRecord) -> str:
        return " ".join(f"{key}={_quoted(value)}" for key, value in self.fields(record).items())


class Json(_Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(self.fields(record), default=str)


FORMATS: Mapping[str, type[logging.Formatter]] = MappingProxyType({"logfmt": Logfmt, "json": Json})


def _quoted(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=not text.isprintable())


def start_logging(level: str, log_format: str, stream: TextIO | None = None) -> None:
    """Write events from this level on, in one of `FORMATS`; to standard error unless told otherwise."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(FORMATS[log_format]())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # It tells of each reconnection and of headers it finds odd: a failed source is an event of its own.
    logging.getLogger("urllib3").setLevel(logging.ERROR)
