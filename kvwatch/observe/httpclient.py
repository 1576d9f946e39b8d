"""GET requests to one server that may be slow, broken or hostile.

The client follows no redirect, uses no proxy and no netrc, keeps no cookie, and bounds every answer in size
(after decompression) and in total time. The time limit holds while headers or body drip in byte by byte,
which a read timeout alone does not catch: each wait for bytes lasts as long as is left at most.

It is http.client with these rules and nothing between. A GET of a page of 60 kB costs a fifth of the CPU
that it costs with requests, and the import 12 MiB and a quarter of a second less; with 8 servers the GETs
would be the largest part of what a cycle costs.
"""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from kvwatch import __version__

_CHUNK = 64 * 1024

# The first that an error is an instance of names it.
_REASONS: tuple[tuple[type[BaseException], str], ...] = (
    (ConnectionRefusedError, "connection_refused"),
    (socket.gaierror, "name_resolution"),
    (TimeoutError, "timeout"),
    (ssl.SSLError, "tls"),
    (ssl.CertificateError, "tls"),
    (http.client.IncompleteRead, "truncated"),
    (ConnectionError, "connection_reset"),
)


class HttpError(Exception):
    """No usable answer.

    Attributes:
        reason: ``timeout``, ``connect_timeout``, ``connection_refused``, ``connection_reset``,
            ``name_resolution``, ``tls``, ``truncated``, ``too_large``, ``bad_encoding`` or ``http_error``.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete answer, decompressed. ``content_type`` is in lower case, without parameters."""

    status: int
    content_type: str
    body: bytes


class HttpClient:
    """One keep-alive connection to one server. Serves one call at a time; not for use by two threads at once.

    Args:
        base_url: ``http://host:port`` or ``https://…``, a path prefix is allowed.
        token: sent as a bearer token, to this server only.
        verify: True for the system's certificate authorities, the path of a CA bundle, or False for no check.
        connect_timeout, read_timeout: seconds, for each connect and each wait for more bytes.
        max_bytes: limit of one answer's body after decompression.

    Raises:
        ValueError: base_url is not an http or https address, or carries credentials, a query or a fragment.
    """

    def __init__(
        self,
        base_url: str,
        *,
        token: str | None = None,
        verify: bool | str = True,
        connect_timeout: float = 2.0,
        read_timeout: float = 5.0,
        max_bytes: int = 64 * 1024 * 1024,
    ) -> None:
        self.base_url = _checked_base_url(base_url)
        self._prefix = urlsplit(self.base_url).path
        self._verify = verify
        self._connect_timeout = connect_timeout
        self._read_timeout = read_timeout
        self._max_bytes = max_bytes
        self._deadline: float | None = None
        self._connection: http.client.HTTPConnection | None = None
        self._headers = {"User-Agent": f"kvwatch/{__version__}", "Accept-Encoding": "gzip"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Bounds all requests made inside the block to so many seconds together."""
        self._deadline = time.monotonic() + seconds
        try:
            yield
        finally:
            self._deadline = None

    def get(self, path: str, *, accept: str = "*/*") -> Reply:
        """Fetches one path below the base URL.

        Raises:
            HttpError: no complete answer in time; any status, 404 and 503 included, is an answer.
        """
        try:
            return self._get(path, accept)
        except HttpError as error:
            # The server may close an idle connection at the moment that it is used again.
            if error.reason != "connection_reset":
                raise
            return self._get(path, accept)

    def close(self) -> None:
        """Closes the connection, if one is open."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _get(self, path: str, accept: str) -> Reply:
        try:
            connection = self._connected(path)
            self._arm(connection.sock)
            connection.request("GET", self._prefix + path, headers={**self._headers, "Accept": accept})
            response = connection.getresponse()
            body = self._body(path, response)
        except HttpError:
            self.close()
            raise
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise self._failure(path, error) from error
        content_type = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        return Reply(response.status, content_type, body)

    def _connected(self, path: str) -> http.client.HTTPConnection:
        """The open connection, or a new one."""
        if self._connection is not None and self._connection.sock is not None:
            return self._connection
        connection = self._connection = self._made()
        connection.timeout = self._left(self._connect_timeout)
        try:
            connection.connect()
        except TimeoutError as error:
            if self._is_overdue():
                raise
            raise HttpError("connect_timeout", f"{path}: connect timeout ({_described(error)})") from error
        return connection

    def _made(self) -> http.client.HTTPConnection:
        address = urlsplit(self.base_url)
        host = address.hostname or ""
        connection: http.client.HTTPConnection
        if address.scheme == "https":
            connection = http.client.HTTPSConnection(host, address.port, context=_tls_context(self._verify))
        else:
            connection = http.client.HTTPConnection(host, address.port)
        connection.response_class = self._response  # type: ignore[assignment]
        return connection

    def _response(self, sock: socket.socket, *arguments: Any, **options: Any) -> http.client.HTTPResponse:
        """A response whose reads keep to the time that is left."""
        bounded = _BoundedSocket(sock, lambda: self._arm(sock))
        return http.client.HTTPResponse(bounded, *arguments, **options)  # type: ignore[arg-type]

    def _arm(self, sock: socket.socket) -> None:
        """Let the next wait last as long as is left."""
        sock.settimeout(self._left(self._read_timeout))

    def _left(self, seconds: float) -> float:
        """So many seconds, or as many as there are.

        Raises:
            TimeoutError: there are none.
        """
        if self._deadline is None:
            return seconds
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("no time left")
        return min(seconds, left)

    def _is_overdue(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    def _body(self, path: str, response: http.client.HTTPResponse) -> bytes:
        body = _Body(path, response.headers.get("Content-Encoding", ""), self._max_bytes)
        received = 0
        # http.client ends a short body like a complete one when it is read in pieces.
        while chunk := response.read(_CHUNK):
            received += len(chunk)
            body.feed(chunk)
        promised = response.headers.get("Content-Length", "")
        if promised.isdecimal() and received != int(promised):
            raise HttpError("truncated", f"{path}: {received} of {promised} bytes arrived")
        return body.finish()

    def _failure(self, path: str, error: BaseException) -> HttpError:
        if self._is_overdue():
            return HttpError("timeout", f"{path}: no complete answer in time")
        reason = next((name for kind, name in _REASONS if isinstance(error, kind)), "http_error")
        words, cause = reason.replace("_", " "), _described(error)
        return HttpError(reason, f"{path}: {words}" + ("" if cause.lower() == words else f" ({cause})"))


class _BoundedSocket:
    """What http.client reads an answer from: a file of the socket that asks for time before each read."""

    def __init__(self, sock: socket.socket, before_read: Callable[[], None]) -> None:
        self._sock = sock
        self._before_read = before_read

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(_BoundedFile(self._sock.makefile("rb", buffering=0), self._before_read))


class _BoundedFile(io.RawIOBase):
    def __init__(self, file: io.RawIOBase | socket.SocketIO, before_read: Callable[[], None]) -> None:
        self._file = file
        self._before_read = before_read

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._before_read()
        return self._file.readinto(buffer)

    def close(self) -> None:
        self._file.close()
        super().close()


class _Body:
    """Collects a body and decompresses it as it comes, never past the limit."""

    def __init__(self, path: str, encoding: str, max_bytes: int) -> None:
        encoding = encoding.strip().lower()
        if encoding not in ("", "identity", "gzip", "x-gzip"):
            raise HttpError("bad_encoding", f"{path}: content encoding {encoding[:40]!r} was not asked for")
        gzip_window = 16 + zlib.MAX_WBITS
        self._inflate = zlib.decompressobj(gzip_window) if encoding.endswith("gzip") else None
        self._path = path
        self._max_bytes = max_bytes
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> None:
        if self._inflate is not None:
            try:
                chunk = self._inflate.decompress(chunk, self._max_bytes - self._size + 1)
            except zlib.error as error:
                raise HttpError("bad_encoding", f"{self._path}: broken gzip stream") from error
        self._size += len(chunk)
        if self._size > self._max_bytes:
            raise HttpError("too_large", f"{self._path}: more than {self._max_bytes} bytes")
        self._parts.append(chunk)

    def finish(self) -> bytes:
        if self._inflate is not None and (not self._inflate.eof or self._inflate.unused_data):
            raise HttpError("truncated", f"{self._path}: incomplete gzip stream")
        return b"".join(self._parts)


def _checked_base_url(base_url: str) -> str:
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{base_url!r} is not an http:// or https:// address")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ValueError(
            f"the address of {parts.hostname!r} must not carry credentials, a query or a fragment"
        )
    return base_url.rstrip("/")


def _tls_context(verify: bool | str) -> ssl.SSLContext:
    """Raises OSError where the CA bundle cannot be used."""
    context = ssl.create_default_context(cafile=verify if isinstance(verify, str) else None)
    if verify is False:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _described(error: BaseException) -> str:
    told = getattr(error, "verify_message", None) or getattr(error, "strerror", None)
    return told or f"{type(error).__name__}: {str(error)[:200]}"
