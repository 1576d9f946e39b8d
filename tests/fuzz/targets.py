"""What strangers may send to kvwatch, each as a function of bytes that must not fail.

A target raises nothing on any input; where there is a second implementation it compares the two.
"""

from __future__ import annotations

import gzip
import json
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import cast

from prometheus_client.parser import text_string_to_metric_families

from kvwatch.config import parse
from kvwatch.export.http1 import BadRequest, RequestReader
from kvwatch.export.negotiation import accepts_gzip, wants_openmetrics
from kvwatch.observe.exposition import FamilyFilter, MalformedPage
from kvwatch.observe.launch import LaunchSource
from kvwatch.observe.procfs import split_arguments
from kvwatch.observe.records import Process, ProcessRecord
from kvwatch.observe.startlog import read_log
from kvwatch.observe.vllm_page import read_page
from kvwatch.yamlfile import ConfigError

TESTS = Path(__file__).resolve().parents[1]
NO_PROC = Path("/proc/self/no-such-folder")
NAMES = ("vllm:kv_cache_usage_perc", "vllm:cache_config_info", "process_start_time_seconds")
FILTER = FamilyFilter(NAMES)
_ODD_SPACE = re.compile(r"[^\S \t\r\n]|\r(?!\n)")
"""What Python calls white space and the format does not: the reference strips it, Prometheus refuses it."""


@dataclass(frozen=True, slots=True)
class Target:
    """One way in.

    Attributes:
        seeds: inputs that the fuzzer begins with.
        longest: bytes of an input.
    """

    run: Callable[[bytes], None]
    seeds: Callable[[], Iterable[bytes]]
    longest: int = 4096


def _page(data: bytes) -> None:
    """A vLLM server's page: a number is read as the reference parser reads it, or not at all."""
    with suppress(MalformedPage):
        read_page(data)
    try:
        found = FILTER.samples(data)
        text = data.decode()
        if _ODD_SPACE.search(text):
            return
        families = list(text_string_to_metric_families(text))
    except (MalformedPage, ValueError, KeyError, IndexError, TypeError):
        return
    ours = {(s.name, *sorted(s.labels.items()), _value(s.value)) for rows in found.values() for s in rows}
    theirs = {
        (s.name, *sorted(s.labels.items()), _value(s.value))
        for family in families
        for s in family.samples
        if s.name in NAMES
    }
    assert ours == theirs, (ours ^ theirs, data)


def _value(value: float) -> str:
    """To compare by: NaN equals itself, and 0 equals -0, which the reference reads as an int."""
    return repr(float(value) + 0.0)


def _pages() -> Iterator[bytes]:
    for path in sorted((TESTS / "vectors" / "pages").glob("*.gz")):
        lines = gzip.decompress(path.read_bytes()).splitlines(keepends=True)
        wanted = [line for line in lines if line.startswith(tuple(name.encode() for name in NAMES))]
        yield b"".join(wanted)
        yield from wanted


class _Pieces:
    """A socket from which a request comes in pieces of the size of the first byte."""

    def __init__(self, data: bytes) -> None:
        self._size = data[0] + 1 if data else 1
        self._rest = data[1:]

    def recv(self, _limit: int) -> bytes:
        piece, self._rest = self._rest[: self._size], self._rest[self._size :]
        return piece


def _request(data: bytes) -> None:
    """What a client sends to the exporter."""
    reader = RequestReader(cast(socket.socket, _Pieces(data)))
    with suppress(BadRequest):
        while (request := reader.next()) is not None:
            wants_openmetrics(request.headers.get("accept", ""))
            accepts_gzip(request.headers.get("accept-encoding", ""))


def _requests() -> Iterator[bytes]:
    accept = b"Accept: application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.4,*/*;q=0.1\r\n"
    yield b"\xffGET /metrics HTTP/1.1\r\nHost: x\r\n" + accept + b"Accept-Encoding: gzip;q=0.5, *\r\n\r\n"
    yield b"\x03POST /-/reload HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabcGET / HTTP/1.0\r\n\r\n"


def _config(data: bytes) -> None:
    """kvwatch.yaml."""
    with suppress(ConfigError):
        parse(data.decode(errors="replace"), Path("kvwatch.yaml"))


def _configs() -> Iterator[bytes]:
    yield (TESTS.parent / "kvwatch.yaml").read_bytes()
    yield b"servers: [{url: 'http://a:1', flags: {max_model_len: 32k}, launch: {file: [a, b], service: c}}]\n"
    yield b"plans: {a: {server: b, max_model_len: 1k}}\nholders: {allowed: [{program: X*}], top: 3}\n"


def _command_line(data: bytes) -> None:
    """The command line of anybody's process on the node."""
    process = Process(7, 1, 1.0, "vllm", "u", 1000, 7, "S", argv=split_arguments(data))
    LaunchSource(NO_PROC).read(ProcessRecord({7: process}))


def _command_lines() -> Iterator[bytes]:
    for line in (TESTS / "observe" / "command_lines.jsonl").read_text(encoding="utf-8").splitlines()[1:200:4]:
        words = json.loads(line).get("argv", [])
        yield "\0".join(["python3", "/usr/bin/vllm", "serve", *map(str, words)]).encode()


def _start_log(data: bytes) -> None:
    """A log that somebody gives to `kvwatch explain`."""
    read_log(data.decode(errors="replace").splitlines(keepends=True))


def _start_logs() -> Iterator[bytes]:
    for line in (TESTS / "observe" / "startlog_wordings.jsonl").read_text(encoding="utf-8").splitlines():
        yield json.loads(line)["text"].encode()


TARGETS: Mapping[str, Target] = MappingProxyType(
    {
        "page": Target(_page, _pages),
        "request": Target(_request, _requests),
        "config": Target(_config, _configs),
        "command_line": Target(_command_line, _command_lines),
        "start_log": Target(_start_log, _start_logs),
    }
)
