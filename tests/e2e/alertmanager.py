"""A real Alertmanager, and a webhook that takes what it sends."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import requests

from tests.e2e.prometheus import tool
from tests.e2e.waiting import free_port, wait_until

READY_SECONDS = 30.0


class Webhook:
    """An HTTP server that keeps the alerts it is sent, ended by leaving the `with` block."""

    def __init__(self) -> None:
        self.alerts: list[Mapping[str, Any]] = []
        self._arrived = threading.Condition()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/"

    def wait_for(self, matches: Callable[[Mapping[str, Any]], bool], timeout: float) -> Mapping[str, Any]:
        """The first alert, of those already here or yet to come, that the predicate accepts.

        Raises:
            AssertionError: none came in time.
        """
        found: list[Mapping[str, Any]] = []

        def arrived() -> bool:
            found[:] = [alert for alert in self.alerts if matches(alert)]
            return bool(found)

        with self._arrived:
            assert self._arrived.wait_for(arrived, timeout), self.alerts
        return found[0]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        webhook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                with webhook._arrived:
                    webhook.alerts += json.loads(body)["alerts"]
                    webhook._arrived.notify_all()
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
                """Requests are not logged."""

        return Handler


class Alertmanager:
    """One server, ended by leaving the `with` block."""

    def __init__(self, config: Path, directory: Path) -> None:
        """Start the server and wait until it is ready."""
        self.address = f"127.0.0.1:{free_port()}"
        self._log = directory / "alertmanager.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    tool("prometheus-alertmanager"),
                    f"--config.file={config}",
                    f"--storage.path={directory / 'alertmanager'}",
                    f"--web.listen-address={self.address}",
                    "--cluster.listen-address=",
                    "--log.level=warn",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        wait_until(self._ready, READY_SECONDS, otherwise=self._log.read_text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._process.kill()
        self._process.wait()

    def _ready(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        try:
            return requests.get(f"http://{self.address}/-/ready", timeout=5).ok
        except requests.RequestException:
            return False

    def send(self, alerts: Sequence[Mapping[str, str]]) -> None:
        """Alerts with these labels fire from now on."""
        body = [{"labels": dict(labels)} for labels in alerts]
        requests.post(f"http://{self.address}/api/v2/alerts", json=body, timeout=10).raise_for_status()

    def inhibited(self) -> Mapping[str, bool]:
        """Whether each alert that fires is silenced by another one, by its name."""
        response = requests.get(f"http://{self.address}/api/v2/alerts", timeout=10)
        response.raise_for_status()
        return {
            alert["labels"]["alertname"]: bool(alert["status"]["inhibitedBy"]) for alert in response.json()
        }
