"""The exporter's HTTP server: sends what was rendered, to well-behaved and other clients.

A small threading server over the standard library, since the usual ones stop answering under a few silent
clients (prometheus_client's with TLS, waitress, cheroot, gunicorn). One thread accepts and enforces
deadlines; each connection has a thread, TLS handshake included; connections, the time of each step and
scrapes at once are bounded. A page is rendered once per cycle, and compressed at most once.
"""

from __future__ import annotations

import base64
import errno
import gzip
import hashlib
import re
import selectors
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from http import HTTPStatus
from time import CLOCK_BOOTTIME, clock_gettime
from typing import Generic, TypeVar

from kvwatch.export.connections import Connection, Connections
from kvwatch.export.http1 import BadRequest, Request, RequestReader, Response
from kvwatch.export.listeners import Listener
from kvwatch.export.negotiation import accepts_gzip, wants_openmetrics
from kvwatch.export.webconfig import WebConfig, WebSettings
from kvwatch.logs import log_crash

T = TypeVar("T")

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
JSON = "application/json"
HTML = "text/html; charset=utf-8"

_MAX_REQUESTS_PER_CONNECTION = 1_000
_GZIP_LEVEL = 5
_ROOM_SECONDS = 0.01  # until a connection that was cut has given its descriptor back
_READ = ("GET", "HEAD")
_CHALLENGE = {"WWW-Authenticate": 'Basic realm="kvwatch"'}
_RETRY = {"Retry-After": "1"}
_INLINE = {
    "style": re.compile(rb"<style>(.*?)</style>", re.DOTALL),
    "script": re.compile(rb"<script>(.*?)</script>", re.DOTALL),
}


@dataclass(frozen=True, slots=True)
class Content:
    """What one cycle hands out.

    Attributes:
        lifetime: seconds after which it is no longer handed out, when nothing newer has come; None for good.
        metrics: Prometheus text format 0.0.4.
        openmetrics: OpenMetrics 1.0.0.
        snapshot: makes the JSON, once and only if it is asked for.
        status: makes the status page, as seldom: HTML with no style or script but in ``<style>`` and
            ``<script>`` elements.
    """

    metrics: bytes
    openmetrics: bytes
    snapshot: Callable[[], bytes]
    status: Callable[[], bytes]
    lifetime: float | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the server, in seconds and counts.

    Attributes:
        connections: open at once; beyond, the client that keeps the server waiting longest is cut.
        scrapes: of /metrics at once; beyond, one waits for ``scrape_wait`` and is then told to come back.
        request: for the TLS handshake and a whole request to arrive.
        idle: between the requests of one connection.
        response: to take in a whole answer.
    """

    connections: int = 256
    scrapes: int = 16
    scrape_wait: float = 1.0
    request: float = 5.0
    idle: float = 75.0
    response: float = 10.0
    tick: float = 0.25


DEFAULT_LIMITS = Limits()


class _Once(Generic[T]):
    """What is made when the first client asks for it; where that fails, the next one tries again."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: T | None = None
        self._one_at_a_time = threading.Lock()

    def __call__(self) -> T:
        with self._one_at_a_time:
            if self._made is None:
                self._made = self._make()
            return self._made


class _Resource:
    """A body in its two encodings."""

    def __init__(self, body: bytes, content_type: str, headers: Mapping[str, str] | None = None) -> None:
        self.body = body
        self._compressed = _Once(lambda: gzip.compress(body, _GZIP_LEVEL, mtime=0))
        self._content_type = content_type
        self._headers = {"Vary": "Accept, Accept-Encoding", **(headers or {})}

    def response(self, request: Request) -> Response:
        if accepts_gzip(request.headers.get("accept-encoding", "")):
            headers = {**self._headers, "Content-Encoding": "gzip"}
            return Response(HTTPStatus.OK, self._compressed(), self._content_type, headers)
        return Response(HTTPStatus.OK, self.body, self._content_type, self._headers)


class _LateResource:
    """A resource that is made when the first client asks for it."""

    def __init__(self, make: Callable[[], _Resource]) -> None:
        self._resource = _Once(make)

    def response(self, request: Request) -> Response:
        try:
            resource = self._resource()
        except Exception:  # noqa: BLE001 - a page for people that cannot be made costs itself only
            log_crash("page_failed", path=request.path)
            return Response.message(HTTPStatus.INTERNAL_SERVER_ERROR)
        return resource.response(request)


class _Published:
    """The resources of one cycle."""

    def __init__(self, content: Content) -> None:
        self.metrics = _Resource(content.metrics, TEXT)
        self.openmetrics = _Resource(content.openmetrics, OPENMETRICS)
        self.snapshot = _LateResource(lambda: _Resource(content.snapshot(), JSON))
        self.status = _LateResource(lambda: _status_resource(content.status()))
        self._expires = None if content.lifetime is None else _seconds_since_boot() + content.lifetime

    @property
    def expired(self) -> bool:
        """Whether it is too old to be true of the node."""
        return self._expires is not None and _seconds_since_boot() > self._expires


class ExporterServer:
    """Serves the newest published content.

    Args:
        listen: addresses such as ``:9744``, ``127.0.0.1:9744``, ``[::1]:9744``, ``unix:/run/kvwatch.sock``;
            port 0 lets the system choose. They are bound at once.
        web_config: TLS, authentication and headers; None serves plain HTTP to everybody.
        reload: called by POST /-/reload; None leaves that path out.

    Raises:
        ValueError: an address is not one.
        OSError: an address cannot be bound, or there are no descriptors left; nothing stays open.
    """

    def __init__(
        self,
        listen: Sequence[str],
        *,
        web_config: WebConfig | None = None,
        reload: Callable[[], None] | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self._web_config = web_config
        self._reload = reload
        self._limits = limits
        self._published: _Published | None = None
        self._connections = Connections(limits.connections)
        self._scrapes = threading.BoundedSemaphore(limits.scrapes)
        self._routes = self._build_routes()
        with ExitStack() as opened:
            self._listeners = [opened.enter_context(closing(Listener(address))) for address in listen]
            self._wake_receiver, self._wake_sender = map(opened.enter_context, socket.socketpair())
            self._selector = opened.enter_context(selectors.DefaultSelector())
            self._selector.register(self._wake_receiver, selectors.EVENT_READ)
            for listener in self._listeners:
                self._selector.register(listener.socket, selectors.EVENT_READ, listener.socket)
            self._opened = opened.pop_all()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._accept_loop, name="kvwatch-http", daemon=True)

    @property
    def addresses(self) -> tuple[str, ...]:
        """What is listened on, ports filled in."""
        return tuple(listener.address for listener in self._listeners)

    @property
    def connections(self) -> int:
        """Connections open now."""
        return len(self._connections)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def publish(self, content: Content) -> None:
        """Hand out this content from now on; answers under way keep what they began with."""
        self._published = _Published(content)

    def close(self, timeout: float = 1.0) -> None:
        """Stop listening and cut what is open; waits for the workers so long at most."""
        self._closing.set()
        if self._thread.ident is not None:
            self._wake_sender.send(b"\0")
            self._thread.join()
        self._opened.close()
        self._connections.cut_all(timeout)

    # --- accepting

    def _accept_loop(self) -> None:
        while not self._closing.is_set():
            ready = self._selector.select(self._limits.tick if len(self._connections) else None)
            for key, _ in ready:
                if key.data is not None:
                    self._accept(key.data)
            self._connections.cut_overdue()

    def _accept(self, listening: socket.socket) -> None:
        try:
            sock, _ = listening.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._connections.make_room()
                self._closing.wait(_ROOM_SECONDS)
            return
        sock.settimeout(None)
        connection = Connection(sock)
        connection.await_client(self._limits.request)
        if not self._connections.admit(connection):
            sock.close()
            return
        try:
            threading.Thread(target=self._work, args=(connection,), name="kvwatch-http", daemon=True).start()
        except RuntimeError:
            # No more threads: whoever comes next may be luckier.
            self._connections.leave(connection)
            sock.close()

    # --- one connection

    def _work(self, connection: Connection) -> None:
        try:
            if connection.sock.family != socket.AF_UNIX:
                # Else an answer over TLS waits 40 ms for the client to acknowledge the end of the handshake.
                connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            settings = WebSettings() if self._web_config is None else self._web_config.current()
            if settings.tls is not None:
                connection.sock = settings.tls.wrap_socket(
                    connection.sock, server_side=True, do_handshake_on_connect=False
                )
                connection.sock.do_handshake()
            self._converse(connection, settings)
        except OSError:
            # The client went away, was cut, or does not speak TLS: nothing that anybody can act on.
            pass
        finally:
            connection.sock.close()
            self._connections.leave(connection)

    def _converse(self, connection: Connection, settings: WebSettings) -> None:
        reader = RequestReader(connection.sock)
        for remaining in range(_MAX_REQUESTS_PER_CONNECTION - 1, -1, -1):
            try:
                request = reader.next()
            except BadRequest as error:
                self._refuse(connection, error, settings)
                return
            if request is None:
                return
            connection.serve(self._limits.response)
            keep_alive = request.keep_alive and remaining > 0 and not self._closing.is_set()
            self._answer(connection, request, settings, keep_alive=keep_alive)
            if not keep_alive:
                return
            connection.await_client(self._limits.idle)

    def _answer(
        self, connection: Connection, request: Request, settings: WebSettings, *, keep_alive: bool
    ) -> None:
        def send(response: Response) -> None:
            data = response.encode(
                keep_alive=keep_alive, head_only=request.method == "HEAD", extra=settings.headers
            )
            connection.sock.sendall(data)

        if settings.auth is not None and not settings.auth.admits(request.headers.get("authorization", "")):
            send(Response.message(HTTPStatus.UNAUTHORIZED, headers=_CHALLENGE))
        elif request.path == "/metrics" and request.method in _READ:
            self._scrape(request, send)
        else:
            send(self._respond(request))

    def _refuse(self, connection: Connection, error: BadRequest, settings: WebSettings) -> None:
        connection.serve(self._limits.tick)
        response = Response.message(error.status)
        connection.sock.sendall(response.encode(keep_alive=False, head_only=False, extra=settings.headers))
        if settings.tls is None:
            # Closing with unread bytes would reset the connection and may take the answer with it.
            connection.sock.shutdown(socket.SHUT_WR)
            while connection.sock.recv(1 << 16):
                pass

    # --- resources

    def _scrape(self, request: Request, send: Callable[[Response], None]) -> None:
        if not self._scrapes.acquire(timeout=self._limits.scrape_wait):
            send(Response.message(HTTPStatus.SERVICE_UNAVAILABLE, "too many scrapes at once", _RETRY))
            return
        try:
            send(self._respond(request))
        finally:
            self._scrapes.release()

    def _build_routes(self) -> dict[str, dict[str, Callable[[Request], Response]]]:
        """Handlers by path and method."""
        read = {
            "/": self._status,
            "/metrics": self._metrics,
            "/api/v1/snapshot": self._snapshot,
            "/-/healthy": self._healthy,
            "/-/ready": self._ready,
        }
        routes: dict[str, dict[str, Callable[[Request], Response]]] = {
            path: dict.fromkeys(_READ, handler) for path, handler in read.items()
        }
        if self._reload is not None:
            reload = self._reload
            routes["/-/reload"] = {"POST": lambda _: _reloaded(reload)}
        return routes

    def _respond(self, request: Request) -> Response:
        methods = self._routes.get(request.path)
        if methods is None:
            return Response.message(HTTPStatus.NOT_FOUND)
        handler = methods.get(request.method)
        if handler is None:
            return Response.message(HTTPStatus.METHOD_NOT_ALLOWED, headers={"Allow": ", ".join(methods)})
        return handler(request)

    def _metrics(self, request: Request) -> Response:
        def pick(published: _Published) -> _Resource:
            wants = wants_openmetrics(request.headers.get("accept", ""))
            return published.openmetrics if wants else published.metrics

        return self._from_published(request, pick)

    def _snapshot(self, request: Request) -> Response:
        return self._from_published(request, lambda published: published.snapshot)

    def _status(self, request: Request) -> Response:
        return self._from_published(request, lambda published: published.status)

    def _from_published(
        self, request: Request, pick: Callable[[_Published], _Resource | _LateResource]
    ) -> Response:
        published = self._published
        if published is None or published.expired:
            return _unavailable(published)
        return pick(published).response(request)

    def _healthy(self, _request: Request) -> Response:
        published = self._published
        if published is not None and published.expired:
            return _unavailable(published)
        return Response.message(HTTPStatus.OK, "healthy")

    def _ready(self, _request: Request) -> Response:
        published = self._published
        if published is None or published.expired:
            return _unavailable(published)
        return Response.message(HTTPStatus.OK, "ready")


def _unavailable(published: _Published | None) -> Response:
    text = "no cycle has ended yet" if published is None else "no cycle has ended for too long"
    return Response.message(HTTPStatus.SERVICE_UNAVAILABLE, text, _RETRY)


def _seconds_since_boot() -> float:
    """Goes on while the machine sleeps, which time.monotonic() does not."""
    return clock_gettime(CLOCK_BOOTTIME)


def _reloaded(reload: Callable[[], None]) -> Response:
    reload()
    return Response.message(HTTPStatus.ACCEPTED, "reloading")


def _status_resource(page: bytes) -> _Resource:
    return _Resource(page, HTML, {"Content-Security-Policy": _content_security_policy(page)})


def _content_security_policy(page: bytes) -> str:
    """The page's own ``<style>`` and ``<script>`` elements by their hashes, its icon, and itself again."""
    inline = "; ".join(f"{kind}-src {_hashes(pattern.findall(page))}" for kind, pattern in _INLINE.items())
    return (
        f"default-src 'none'; {inline}; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hashes(elements: Iterable[bytes]) -> str:
    digests = [base64.b64encode(hashlib.sha256(element).digest()).decode() for element in elements]
    return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
