"""GET requests to one server that may be slow, broken or hostile.

The client follows no redirect, uses no proxy and no netrc, keeps no cookie, and bounds every answer in size
(after decompression) and in total time. The time limit holds while headers or body drip in byte by byte,
which a read timeout alone does not catch: a timer shuts the socket down.
"""

from __future__ import annotations

import socket
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import IncompleteRead
from http.cookiejar import DefaultCookiePolicy
from typing import Any
from urllib.parse import urlsplit

import requests
import urllib3
from requests.adapters import HTTPAdapter

from kvwatch import __version__

_CHUNK = 64 * 1024

# The first entry that occurs in the chain of causes names the failure. A refused connection comes first:
# urllib3 files it under timeouts.
_REASONS: tuple[tuple[type[BaseException], str], ...] = (
    (ConnectionRefusedError, "connection_refused"),
    (socket.gaierror, "name_resolution"),
    (requests.exceptions.ConnectTimeout, "connect_timeout"),
    (requests.exceptions.Timeout, "timeout"),
    (urllib3.exceptions.TimeoutError, "timeout"),
    (TimeoutError, "timeout"),
    (requests.exceptions.SSLError, "tls"),
    (urllib3.exceptions.SSLError, "tls"),
    (IncompleteRead, "truncated"),
    (ConnectionError, "connection_reset"),
)
_TRANSPORT_ERRORS = (requests.exceptions.RequestException, urllib3.exceptions.HTTPError, OSError)


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
    """One keep-alive session to one server. Serves one call at a time; not for use by two threads at once.

    Args:
        base_url: ``http://host:port`` or ``https://…``, a path prefix is allowed.
        token: sent as a bearer token, to this server only.
        verify: True for the usual certificate authorities, the path of a CA bundle, or False for no check.
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
        self._timeouts = (connect_timeout, read_timeout)
        self._max_bytes = max_bytes
        self._expired = threading.Event()
        self._requests: dict[str, requests.PreparedRequest] = {}
        self._adapter = _AbortableAdapter()
        self._session = requests.Session()
        self._session.trust_env = False
        if verify is False:
            urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
        self._session.verify = verify
        self._session.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
        self._session.mount("http://", self._adapter)
        self._session.mount("https://", self._adapter)
        self._session.headers.clear()
        self._session.headers.update({"User-Agent": f"kvwatch/{__version__}", "Accept-Encoding": "gzip"})
        if token is not None:
            self._session.headers["Authorization"] = f"Bearer {token}"

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Bounds all requests made inside the block to so many seconds together."""
        self._expired.clear()
        timer = threading.Timer(seconds, self._expire)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()

    def get(self, path: str, *, accept: str = "*/*") -> Reply:
        """Fetches one path below the base URL.

        Raises:
            HttpError: no complete answer in time; any status, 404 and 503 included, is an answer.
        """
        try:
            return self._get(path, accept)
        except HttpError as error:
            # The server may close an idle connection at the moment that it is used again.
            if error.reason != "connection_reset" or self._expired.is_set():
                raise
            return self._get(path, accept)

    def close(self) -> None:
        """Closes the connection, if one is open."""
        self._session.close()

    def _get(self, path: str, accept: str) -> Reply:
        if self._expired.is_set():
            raise _overdue(path)
        try:
            with self._session.send(
                self._prepared(path, accept), timeout=self._timeouts, allow_redirects=False, stream=True
            ) as response:
                body = self._body(path, response)
        except HttpError as error:
            if self._expired.is_set():
                raise _overdue(path) from error
            raise
        except _TRANSPORT_ERRORS as error:
            if self._expired.is_set():
                raise _overdue(path) from error
            reason = _reason(error)
            raise HttpError(reason, f"{path}: {reason.replace('_', ' ')} ({_innermost(error)})") from error
        if self._expired.is_set():
            # The timer ends a body of unknown length like a normal close.
            raise _overdue(path)
        content_type = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        return Reply(response.status_code, content_type, body)

    def _prepared(self, path: str, accept: str) -> requests.PreparedRequest:
        """The request, made once: that costs as much as sending it."""
        if path not in self._requests:
            request = requests.Request("GET", self.base_url + path, headers={"Accept": accept})
            self._requests[path] = self._session.prepare_request(request)
        return self._requests[path]

    def _body(self, path: str, response: requests.Response) -> bytes:
        body = _Body(path, response.headers.get("Content-Encoding", ""), self._max_bytes)
        received = 0
        # http.client ends a short body like a complete one when it is read in pieces.
        while chunk := response.raw.read(_CHUNK, decode_content=False):
            received += len(chunk)
            body.feed(chunk)
        promised = response.headers.get("Content-Length", "")
        if promised.isdecimal() and received != int(promised):
            raise HttpError("truncated", f"{path}: {received} of {promised} bytes arrived")
        return body.finish()

    def _expire(self) -> None:
        self._expired.set()
        self._adapter.abort()


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


class _AbortableAdapter(HTTPAdapter):
    """An adapter whose connection another thread can cut, from the end of the TLS handshake on.

    urllib3 offers no handle on a connection that still waits for its headers, and http.client gives its
    socket away with a body of unknown length, so connections leave their socket here when they are made.
    """

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        super().__init__(pool_connections=1, pool_maxsize=1, max_retries=0)

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        adapter = self

        class PlainConnection(urllib3.connection.HTTPConnection):
            def connect(self) -> None:
                super().connect()
                adapter._socket = self.sock

        class TlsConnection(urllib3.connection.HTTPSConnection):
            def connect(self) -> None:
                super().connect()
                adapter._socket = self.sock

        class PlainPool(urllib3.HTTPConnectionPool):
            ConnectionCls = PlainConnection

        class TlsPool(urllib3.HTTPSConnectionPool):
            ConnectionCls = TlsConnection

        self.poolmanager.pool_classes_by_scheme = {"http": PlainPool, "https": TlsPool}

    def abort(self) -> None:
        """Shuts the socket down: a read in another thread returns at once."""
        if self._socket is not None:
            # Of the plain socket, since an SSLSocket would also drop the state that its reader uses.
            with suppress(OSError):
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)


def _checked_base_url(base_url: str) -> str:
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{base_url!r} is not an http:// or https:// address")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ValueError(
            f"the address of {parts.hostname!r} must not carry credentials, a query or a fragment"
        )
    return base_url.rstrip("/")


def _overdue(path: str) -> HttpError:
    return HttpError("timeout", f"{path}: no complete answer in time")


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and all that it wraps: causes, contexts, urllib3's ``reason``, exceptions in ``args``."""
    pending, seen = [error], set[int]()
    while pending:
        current = pending.pop(0)
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        wrapped = (current.__cause__, current.__context__, getattr(current, "reason", None), *current.args)
        pending.extend(cause for cause in wrapped if isinstance(cause, BaseException))


def _reason(error: BaseException) -> str:
    chain = tuple(_causes(error))
    return next(
        (name for kind, name in _REASONS if any(isinstance(cause, kind) for cause in chain)), "http_error"
    )


def _innermost(error: BaseException) -> str:
    *_, last = _causes(error)
    return f"{type(last).__name__}: {str(last)[:200]}"
