"""One line of a server's log, freed of what wrote and carried it.

vLLM puts a process, a level and a source position before each message; docker, Kubernetes, journald and log
shippers put more before that, or wrap the message in JSON. Nothing here knows what a message means.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

MAX_LINE = 65_536
"""Characters of a line that are looked at; the rest is dropped."""

_MAX_PREFIXES = 8
_ANSI = re.compile(r"(?:\x1b|\\u001b|\\x1b|\\033)\[[0-9;?]*[A-Za-z]")
_LEVEL = r"(?P<level>DEBUG|INFO|NOTICE|WARN|WARNING|ERROR|CRITICAL|FATAL|TRACE)"
_TIME = r"\d\d:\d\d:\d\d(?:[.,]\d+)?"

_PREFIXES = tuple(
    re.compile(pattern)
    for pattern in (
        # docker compose: "vllm-1  | "
        r"[\w.-]+\s*\|(?: |$)",
        # kubectl --timestamps, CRI files: "2026-01-28T00:18:18.123Z stderr F "
        rf"\[?\d{{4}}[-/]\d\d[-/]\d\d[T ]{_TIME}(?:Z|[+-]\d\d:?\d\d)?\]?(?: (?:stdout|stderr) [FP])?(?:\s|$)",
        # kubectl --prefix: "[pod/vllm-0/vllm] "
        r"\[(?:pod|container)/[^\]\s]+\]\s",
        # syslog and journald: "Nov 30 07:43:00 node vllm[8273]: "
        rf"[A-Z][a-z]{{2}} [ \d]\d {_TIME} [\w.-]+ [\w.@/-]+(?:\[\d+\])?: ",
        # vLLM and Ray: "(EngineCore_DP0 pid=1094) ", "(VllmWorker rank=5 pid=3073) "
        r"\((?P<process>[\w:.-]+)(?: rank=\d+)? pid=(?P<pid>\d+)[^)]*\)(?: |$)",
        # torchrun: "[rank0]: "
        r"\[(?P<rank>rank\d+)\]: ?",
        # vLLM: "ERROR 12-16 02:38:41 engine.py:366] ", "INFO 01-28 00:18:18 [core.py:935] "
        rf"{_LEVEL}\s+(?:\d\d-\d\d {_TIME}\s+)?\[?[\w./-]+:\d+\](?: |$)",
        # the position alone: "[multiproc_executor.py:492] "
        r"\[?[\w./-]+\.py:\d+\](?: |$)",
        # Python's logging and uvicorn: "ERROR:vllm.engine:", "INFO:     ", "[ERROR] ", "vllm - ERROR - "
        rf"{_LEVEL}:(?:[\w.]+:\s?|\s+)",
        rf"\[{_LEVEL}\]\s+",
        rf"(?:- )?(?:[\w.]+ )?- {_LEVEL} - ",
    )
)
_MESSAGE_KEYS = ("message", "msg", "log", "MESSAGE", "text", "textPayload")
_LEVEL_KEYS = ("level", "levelname", "severity")
_BROKEN_JSON = re.compile(r'"(?:message|msg|log|text)"\s*:\s*"(?P<message>(?:[^"\\]|\\.)*)')


@dataclass(frozen=True, slots=True)
class LogLine:
    """A message and the outermost process and level that its prefixes name.

    Attributes:
        level: upper case, as logged; None for a bare line (a traceback, another program).
        process: for example ``EngineCore_DP0`` or ``Worker_TP1``.
        body: the message, its indentation kept.
    """

    body: str
    level: str | None = None
    process: str | None = None
    pid: int | None = None


def split_line(raw: str) -> tuple[LogLine, ...]:
    """The messages of one raw line: one, or several where JSON carries a text of several lines."""
    text = raw[:MAX_LINE].rstrip("\r\n")
    if "\x1b" in text or "\\" in text:
        text = _ANSI.sub("", text)
    line = _strip_prefixes(LogLine(text.removeprefix("\ufeff")))
    if not line.body.lstrip().startswith("{"):
        return (line,)
    message, level = _json_message(line.body.strip())
    if message is None:
        return (line,)
    carrier = replace(line, level=level or line.level)
    parts = message.splitlines() or [""]
    return tuple(_strip_prefixes(replace(carrier, body=_ANSI.sub("", part))) for part in parts)


def _strip_prefixes(line: LogLine) -> LogLine:
    body, level, process, pid = line.body, line.level, line.process, line.pid
    for _ in range(_MAX_PREFIXES):
        match = next((found for prefix in _PREFIXES if (found := prefix.match(body))), None)
        if match is None:
            break
        body = body[match.end() :]
        groups = match.groupdict()
        level = groups.get("level") or level
        process = process or groups.get("process") or groups.get("rank")
        pid = pid or (int(groups["pid"]) if groups.get("pid") else None)
    return LogLine(body, level, process, pid)


def _json_message(text: str) -> tuple[str | None, str | None]:
    """The message and level of a JSON record, also of one that was cut off."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        match = _BROKEN_JSON.search(text)
        return (match["message"].replace('\\"', '"').replace("\\n", "\n"), None) if match else (None, None)
    if not isinstance(record, Mapping):
        return None, None
    return _first_text(record, _MESSAGE_KEYS), (_first_text(record, _LEVEL_KEYS) or "").upper() or None


def _first_text(record: Mapping[str, Any], keys: tuple[str, ...]) -> str | None:
    return next((record[key] for key in keys if isinstance(record.get(key), str)), None)
