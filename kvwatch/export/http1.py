"""The part of HTTP/1.0 and 1.1 that an exporter needs, with a limit on everything that a client sends."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from types import MappingProxyType

MAX_HEAD_BYTES = 16 * 1024
MAX_HEADERS = 100
MAX_BODY_BYTES = 64 * 1024

_REQUEST_LINE = re.compile(r"([A-Z]{1,16}) ([\x21-\x7e]+) HTTP/([0-9])\.([0-9])")
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\x20-\x7e\t\x80-\xff]*?)[ \t]*")
_ABSOLUTE = re.compile(r"https?://[^/?]+(.*)", re.IGNORECASE)
_LENGTH = re.compile(r"[0-9]{1,10}", re.ASCII)


class BadRequest(Exception):
    """A request that is answered with an error, after which the connection is closed."""

    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status.phrase)
        self.status = status


@dataclass(frozen=True, slots=True)
class Request:
    """One request without its body. Header names are in lower case, repeated headers joined with commas."""

    method: str
    path: str
    headers: Mapping[str, str]
    keep_alive: bool


@dataclass(frozen=True, slots=True)
class Response:
    """One answer; ``headers`` come on top of those that every answer has."""

    status: HTTPStatus
    body: bytes = b""
    content_type: str = "text/plain; charset=utf-8"
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def message(
        cls, status: HTTPStatus, text: str = "", headers: Mapping[str, str] = MappingProxyType({})
    ) -> Response:
        """A short text, by default the status in words."""
        return cls(status, f"{text or status.phrase}\n".encode(), headers=headers)

    def encode(self, *, keep_alive: bool, head_only: bool, extra: Mapping[str, str]) -> bytes:
        """The bytes to send; ``extra`` headers replace the answer's own."""
        headers = {
            "Date": formatdate(usegmt=True),
            "Content-Type": self.content_type,
            "Content-Length": str(len(self.body)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Connection": "keep-alive" if keep_alive else "close",
            **self.headers,
            **extra,
        }
        lines = [f"HTTP/1.1 {self.status.value} {self.status.phrase}"]
        lines += (f"{name}: {value}" for name, value in headers.items())
        head = "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"
        return head if head_only else head + self.body


class RequestReader:
    """Reads the requests of one connection, one after the other."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = b""

    def next(self) -> Request | None:
        """The next request, its body read and dropped; None when the client closed the connection.

        Raises:
            BadRequest: it is malformed or too large.
            OSError: the connection broke.
        """
        head = self._read_head()
        if head is None:
            return None
        request = _parse(head)
        self._drop_body(request.headers)
        return request

    def _read_head(self) -> bytes | None:
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise BadRequest(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            if not self._receive():
                return None
        head, self._buffer = self._buffer[:end], self._buffer[end + 4 :]
        return head

    def _drop_body(self, headers: Mapping[str, str]) -> None:
        if "transfer-encoding" in headers:
            raise BadRequest(HTTPStatus.NOT_IMPLEMENTED)
        length = headers.get("content-length", "0")
        if _LENGTH.fullmatch(length) is None:
            raise BadRequest(HTTPStatus.BAD_REQUEST)
        if int(length) > MAX_BODY_BYTES:
            raise BadRequest(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        while len(self._buffer) < int(length):
            if not self._receive():
                raise BadRequest(HTTPStatus.BAD_REQUEST)
        self._buffer = self._buffer[int(length) :]

    def _receive(self) -> bool:
        chunk = self._sock.recv(MAX_HEAD_BYTES)
        self._buffer += chunk
        return bool(chunk)


def _parse(head: bytes) -> Request:
    first, *lines = head.decode("latin-1").split("\r\n")
    match = _REQUEST_LINE.fullmatch(first)
    if match is None or len(lines) > MAX_HEADERS:
        raise BadRequest(HTTPStatus.BAD_REQUEST)
    method, target, major, minor = match.groups()
    if major != "1":
        raise BadRequest(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED)
    headers = _headers(lines)
    is_1_0 = minor == "0"
    if not is_1_0 and "host" not in headers:
        raise BadRequest(HTTPStatus.BAD_REQUEST)
    connection = {token.strip().lower() for token in headers.get("connection", "").split(",")}
    keep_alive = "keep-alive" in connection if is_1_0 else "close" not in connection
    return Request(method, _path(target), headers, keep_alive)


def _headers(lines: list[str]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in lines:
        match = _HEADER.fullmatch(line)
        if match is None:
            raise BadRequest(HTTPStatus.BAD_REQUEST)
        name, value = match[1].lower(), match[2]
        headers[name] = f"{headers[name]},{value}" if name in headers else value
    return headers


def _path(target: str) -> str:
    """The path of ``/path?query`` or ``http://host/path?query``."""
    absolute = _ABSOLUTE.fullmatch(target)
    return (absolute[1] if absolute else target).partition("?")[0] or "/"
