"""A real Prometheus server, and its promtool."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import requests

from tests.e2e.waiting import free_port, wait_until

SCRAPED_SECONDS = 60.0
"""Prometheus takes up to 5 s to notice a new target."""

_CONFIG = """\
global: {scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}
scrape_configs:
  - job_name: kvwatch
    file_sd_configs: [{files: [targets.json], refresh_interval: 1s}]
"""


@dataclass(frozen=True, slots=True)
class Result:
    """One series of an instant query's answer."""

    labels: Mapping[str, str]
    value: float


class Prometheus:
    """One server, ended by leaving the `with` block. Targets come and go while it runs."""

    def __init__(self, directory: Path, *, alerting: str = "") -> None:
        """Start the server and wait until it is ready; ``alerting`` is further configuration."""
        self._targets = directory / "targets.json"
        self._targets.write_text("[]")
        config = directory / "prometheus.yml"
        config.write_text(_CONFIG + alerting)
        self._log = directory / "prometheus.log"
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    tool("prometheus"),
                    f"--config.file={config}",
                    f"--storage.tsdb.path={directory / 'data'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                    "--log.level=warn",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        wait_until(self._ready, SCRAPED_SECONDS, otherwise=self._log.read_text)

    def __enter__(self) -> Prometheus:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._process.kill()
        self._process.wait()

    def _ready(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        try:
            return requests.get(f"{self._url}/-/ready", timeout=5).ok
        except requests.RequestException:
            return False

    def scrape(self, address: str) -> None:
        """Make this host:port the only target, and wait until it has been scraped successfully."""
        draft = self._targets.with_suffix(".new")
        draft.write_text(json.dumps([{"targets": [address]}]))
        draft.replace(self._targets)
        self.wait_for(f'up{{instance="{address}"}} == 1')

    @property
    def url(self) -> str:
        return self._url

    def query_range(self, expression: str, start: float, end: float, step: float) -> list[Mapping[str, str]]:
        """The labels of the series that a range query finds."""
        params: dict[str, str | float] = {"query": expression, "start": start, "end": end, "step": step}
        response = requests.get(f"{self._url}/api/v1/query_range", params=params, timeout=10)
        assert response.ok, f"{expression}: {response.text}"
        return [series["metric"] for series in response.json()["data"]["result"]]

    def query(self, expression: str) -> list[Result]:
        """The answer to an instant query."""
        response = requests.get(f"{self._url}/api/v1/query", params={"query": expression}, timeout=10)
        response.raise_for_status()
        return [
            Result(series["metric"], float(series["value"][1]))
            for series in response.json()["data"]["result"]
        ]

    def wait_for(self, expression: str) -> list[Result]:
        """The first answer to an instant query that is not empty."""
        return wait_until(
            lambda: self.query(expression), SCRAPED_SECONDS, every=0.2, otherwise=f"nothing for {expression}"
        )


def check_metrics(page: str) -> str:
    """What `promtool check metrics` objects to on a page; empty when it is clean."""
    checked = subprocess.run(
        [tool("promtool"), "check", "metrics"], input=page, capture_output=True, text=True, check=False
    )
    return checked.stdout + checked.stderr + (f"exit code {checked.returncode}" if checked.returncode else "")


def tool(name: str) -> str:
    """Path of a program of the prometheus package; its absence is a failure, not a reason to skip."""
    path = shutil.which(name)
    assert path, f"{name} is not installed: run tools/install_system.sh"
    return path
