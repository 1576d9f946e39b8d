from __future__ import annotations

import io
import json
import logging
import shlex
from collections.abc import Iterator

import pytest

from kvwatch.logs import log_crash, log_event, start_logging


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """What is logged; the root logger is as before afterwards."""
    root, urllib3 = logging.getLogger(), logging.getLogger("urllib3")
    before = root.handlers[:], root.level, urllib3.level
    yield io.StringIO()
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    urllib3.setLevel(before[2])


def logfmt(line: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in shlex.split(line))


def test_an_event_is_one_line_of_pairs(stream: io.StringIO) -> None:
    start_logging("info", "logfmt", stream)
    log_event(logging.WARNING, "source_failed", source="nvml", detail='no "answer" within 5 s', times=None)
    (line,) = stream.getvalue().splitlines()
    assert line.endswith(r'level=warning event=source_failed source=nvml detail="no \"answer\" within 5 s"')
    assert logfmt(line)["time"].endswith("Z")


@pytest.mark.parametrize(
    "text", ["two\nlines", "a=b", "", "tab\there", "\u2028", "\x1b[31m", "größer", "back\\slash"]
)
@pytest.mark.parametrize("log_format", ["logfmt", "json"])
def test_no_value_breaks_a_line(text: str, log_format: str, stream: io.StringIO) -> None:
    start_logging("info", log_format, stream)
    log_event(logging.INFO, "event", value=text, after=1)
    (line,) = stream.getvalue().splitlines()
    assert "\x1b" not in line
    if log_format == "json":
        assert json.loads(line)["value"] == text
    else:
        value = line.split(" value=", 1)[1].removesuffix(" after=1")
        assert (json.loads(value) if value.startswith('"') else value) == text


def test_json_has_the_same_fields(stream: io.StringIO) -> None:
    start_logging("info", "json", stream)
    log_event(logging.INFO, "serving", address="[::]:9744", scrapes=16)
    event = json.loads(stream.getvalue())
    assert event.pop("time")
    assert event == {"level": "info", "event": "serving", "address": "[::]:9744", "scrapes": 16}


@pytest.mark.parametrize("log_format", ["logfmt", "json"])
def test_a_traceback_stays_on_its_line(log_format: str, stream: io.StringIO) -> None:
    start_logging("info", log_format, stream)
    try:
        raise ZeroDivisionError("a bug")
    except ZeroDivisionError:
        log_crash("cycle_failed")
    (line,) = stream.getvalue().splitlines()
    assert "ZeroDivisionError: a bug" in line


def test_libraries_are_named_and_urllib3_kept_quiet(stream: io.StringIO) -> None:
    start_logging("debug", "logfmt", stream)
    logging.getLogger("urllib3.connectionpool").warning("Connection pool is full")
    logging.getLogger("some.library").warning("%s things", 3)
    (line,) = stream.getvalue().splitlines()
    assert logfmt(line)["logger"] == "some.library"
    assert logfmt(line)["event"] == "3 things"


def test_the_level_is_kept(stream: io.StringIO) -> None:
    start_logging("warning", "logfmt", stream)
    log_event(logging.INFO, "serving")
    assert stream.getvalue() == ""
