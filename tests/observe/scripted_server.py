"""A real HTTP server on loopback whose answers a test writes, byte by byte where it must."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[BaseHTTPRequestHandler], None]


class ScriptedServer:
    """Answers GET requests out of ``answers``; records path, headers and client port of each request.

    ``released`` is set when the server ends: an answer that hangs waits for it.
    """

    def __init__(self, answers: Mapping[str, Answer], tls: ssl.SSLContext | None = None) -> None:
        self.answers = dict(answers)
        self.requests: list[tuple[str, dict[str, str], int]] = []
        self.released = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                outer.requests.append((self.path, dict(self.headers), self.client_address[1]))
                outer.answers.get(self.path, status(404))(self)

            def log_message(self, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *args: Any) -> None:
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        scheme = "http"
        if tls is not None:
            scheme = "https"
            self._server.socket = tls.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.url = f"{scheme}://127.0.0.1:{self._server.server_port}"

    def paths(self) -> list[str]:
        return [path for path, _, _ in self.requests]

    @contextmanager
    def running(self) -> Iterator[ScriptedServer]:
        thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )
        thread.start()
        try:
            yield self
        finally:
            self.released.set()
            self._server.shutdown()
            self._server.server_close()
            thread.join()


def reply(body: bytes, content_type: str = "text/plain; version=0.0.4", **headers: str) -> Answer:
    """A complete 200; keyword names become header names (``content_encoding``)."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", content_type)
        handler.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def status(code: int, **headers: str) -> Answer:
    """An empty answer with this status."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(code)
        handler.send_header("Content-Length", "0")
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()

    return answer


def raw(data: bytes) -> Answer:
    """These bytes in place of status line, headers and body, then the end of the connection."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(data)
        handler.close_connection = True

    return answer


def drip(start: bytes, byte: bytes, released: threading.Event) -> Answer:
    """These bytes at once, then one more every few milliseconds without end."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.close_connection = True
        handler.wfile.write(start)
        try:
            while not released.wait(0.005):
                handler.wfile.write(byte)
        except OSError:
            return

    return answer


def hang(released: threading.Event) -> Answer:
    """Nothing at all."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        released.wait()
        handler.close_connection = True

    return answer
