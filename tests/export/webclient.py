"""A running exporter server and plain clients for the tests of the HTTP side."""

from __future__ import annotations

import http.client
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvwatch.export.server import Content, ExporterServer

CONTENT = Content(
    metrics=b"# TYPE kvwatch_up gauge\nkvwatch_up 1.0\n",
    openmetrics=b"# TYPE kvwatch_up gauge\nkvwatch_up 1.0\n# EOF\n",
    snapshot=lambda: b'{"gpus": []}',
    status=lambda: b"<!doctype html><style>body{color:red}</style><h1>kvwatch</h1>",
)


@contextmanager
def running(*listen: str, content: Content | None = CONTENT, **options: Any) -> Iterator[ExporterServer]:
    server = ExporterServer(listen or ("127.0.0.1:0",), **options)
    server.start()
    if content is not None:
        server.publish(content)
    try:
        yield server
    finally:
        server.close()


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes


def place(server: ExporterServer, number: int = 0) -> tuple[str, int]:
    host, _, port = server.addresses[number].rpartition(":")
    return host.strip("[]"), int(port)


def fetch(
    server: ExporterServer,
    path: str = "/metrics",
    *,
    method: str = "GET",
    body: bytes | None = None,
    tls: ssl.SSLContext | None = None,
    **headers: str,
) -> Answer:
    """One request on a connection of its own; keyword names become header names."""
    host, port = place(server)
    connection = (
        http.client.HTTPConnection(host, port, timeout=20)
        if tls is None
        else http.client.HTTPSConnection(host, port, timeout=20, context=tls)
    )
    try:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body=body, headers=named)
        response = connection.getresponse()
        return Answer(response.status, dict(response.headers), response.read())
    finally:
        connection.close()


def connect(server: ExporterServer, number: int = 0) -> socket.socket:
    return socket.create_connection(place(server, number), timeout=20)


def exchange(server: ExporterServer, data: bytes) -> bytes:
    """Everything that the server sends until it closes, after these bytes."""
    with connect(server) as client:
        client.sendall(data)
        return read_all(client)


def read_all(client: socket.socket) -> bytes:
    """What arrives until the server closes or resets the connection."""
    parts = []
    with suppress(ConnectionResetError):
        while part := client.recv(65536):
            parts.append(part)
    return b"".join(parts)


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether the condition comes true in time, for what another thread does without telling."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def make_certificate(folder: Path, name: str, *, issuer: str | None = None) -> None:
    """NAME.crt and NAME.key in this folder: a CA of its own, or issued by another of the folder."""
    subject = [
        "-subj",
        f"/CN={name}",
        "-days",
        "2",
        "-nodes",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
    ]
    issued_by = [] if issuer is None else ["-CA", f"{issuer}.crt", "-CAkey", f"{issuer}.key"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", f"{name}.key", "-out", f"{name}.crt"]
    _openssl(folder, "req", "-x509", *subject, *issued_by, *names, *files)


def lock_key(key: Path, locked: Path) -> None:
    """The same key under a pass phrase."""
    options = ["-in", str(key), "-out", str(locked), "-aes128", "-passout", "pass:secret"]
    _openssl(key.parent, "pkey", *options)


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)
