"""The real `kvwatch run` process on a node whose NVML answers from a scenario file."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import requests
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.waiting import wait_until

KVWATCH = Path(sys.executable).with_name("kvwatch")
CYCLE_SECONDS = 30.0
"""More than one cycle takes on a busy machine."""

FAST = "poll: {interval: 1s}\n"
"""A kvwatch.yaml with no server in it: discovery alone, at a pace fit for a test."""

_ADDRESS = re.compile(r"(?:event=serving address=|page: http://)([\w.]+:\d+)[/\n]")


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of the page."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Page:
    """One cycle's page.

    Attributes:
        text: as scraped.
    """

    text: str
    samples: tuple[Sample, ...]

    @classmethod
    def parse(cls, text: str) -> Page:
        """Read a page of the Prometheus text format."""
        families = text_string_to_metric_families(text)
        return cls(text, tuple(Sample(s.name, s.labels, s.value) for f in families for s in f.samples))

    def having(self, name: str = "", /, **labels: str) -> list[Sample]:
        """The samples of a family (of any, without a name) that carry these labels."""
        return [
            sample
            for sample in self.samples
            if (not name or sample.name == name) and labels.items() <= sample.labels.items()
        ]

    def get(self, name: str, /, **labels: str) -> float | None:
        """The value of the one such sample, None where there is none.

        Raises:
            AssertionError: there are several.
        """
        found = self.having(name, **labels)
        assert len(found) <= 1, found
        return found[0].value if found else None

    @property
    def cycles(self) -> int:
        return int(self.get("kvwatch_cycles_total") or 0)


class KvwatchDaemon:
    """One `kvwatch run` or `kvwatch demo` on a free loopback port, ended by leaving the `with` block."""

    def __init__(self, directory: Path, environment: Mapping[str, str], *command: str | Path) -> None:
        """Start it without waiting for it. Its log goes to a file in ``directory``."""
        directory.mkdir(parents=True, exist_ok=True)
        self.log = directory / "kvwatch.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [KVWATCH, *command, "--web.listen-address", "127.0.0.1:0"],
                env=dict(environment),
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @classmethod
    def run(cls, directory: Path, environment: Mapping[str, str], config: str = FAST) -> KvwatchDaemon:
        """`kvwatch run` with this text as its configuration."""
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "kvwatch.yaml"
        path.write_text(config, encoding="utf-8")
        return cls(directory, environment, "run", "--config", path)

    def __enter__(self) -> KvwatchDaemon:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._process.kill()
        self._process.wait()

    def wait_ready(self) -> KvwatchDaemon:
        """Wait until the first cycle is published."""
        wait_until(self._ready, CYCLE_SECONDS, otherwise=self.log_text)
        return self

    def _ready(self) -> bool:
        assert self._process.poll() is None, self.log_text()
        return bool(_ADDRESS.search(self.log_text())) and self.get("/-/ready").ok

    @property
    def address(self) -> str:
        """host:port."""
        match = _ADDRESS.search(self.log_text())
        assert match, self.log_text()
        return match[1]

    def get(self, path: str) -> requests.Response:
        return requests.get(f"http://{self.address}{path}", timeout=10)

    def page(self) -> Page:
        """The page as it stands."""
        response = self.get("/metrics")
        response.raise_for_status()
        return Page.parse(response.text)

    def page_after(self, cycles: int = 1) -> Page:
        """The first page whose looks at the node, so many of them, all began after this call."""
        # One cycle may be under way.
        wanted = self.page().cycles + 1 + cycles

        def reached() -> Page | None:
            page = self.page()
            return page if page.cycles >= wanted else None

        page = wait_until(reached, cycles * CYCLE_SECONDS, otherwise=self.log_text)
        assert page is not None
        return page

    def reload(self) -> bool:
        """Ask for the configuration to be read again (SIGHUP); whether it was there to hear."""
        self._process.send_signal(signal.SIGHUP)
        return self._process.poll() is None

    def stop(self) -> int:
        """End it as an operator would (SIGTERM) and return its exit code."""
        self._process.terminate()
        return self._process.wait(CYCLE_SECONDS)

    def log_text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")


def run_kvwatch(
    environment: Mapping[str, str], *arguments: str | Path, cwd: Path
) -> subprocess.CompletedProcess[str]:
    """One run of another command of kvwatch to its end."""
    return subprocess.run(
        [KVWATCH, *arguments],
        env=dict(environment),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
