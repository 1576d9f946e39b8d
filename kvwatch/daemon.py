"""The long-running process: cycles on time, the page served, reload and an orderly end."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from kvwatch.config import Config, load
from kvwatch.export.content import render
from kvwatch.export.cycle import Cycle
from kvwatch.export.server import Content
from kvwatch.export.textfile import write_textfile
from kvwatch.monitor import Monitor
from kvwatch.yamlfile import ConfigError

log = logging.getLogger("kvwatch")


class Daemon:
    """Runs a monitor's cycles until told to stop.

    Args:
        config_path: read again on reload; None keeps the configuration for good.
        textfile: where the page is also written, for node_exporter's textfile collector.
        speed: how many times faster than real time cycles follow each other (demo).
        on_cycle: called with each finished cycle, after it was published.
    """

    def __init__(
        self,
        monitor: Monitor,
        *,
        config_path: Path | None = None,
        textfile: Path | None = None,
        speed: float = 1.0,
        on_cycle: Callable[[Cycle], None] | None = None,
    ) -> None:
        self._monitor = monitor
        self._config_path = config_path
        self._textfile = textfile
        self._speed = speed
        self._on_cycle = on_cycle
        self._wake = threading.Event()
        self._stopping = False
        self._reloading = False
        self._logged: set[tuple[str, str]] = set()

    def stop(self) -> None:
        """End after the cycle under way; safe from a signal handler and from any thread."""
        self._stopping = True
        self._wake.set()

    def reload(self) -> None:
        """Read the configuration again before the next cycle, which follows at once."""
        self._reloading = True
        self._wake.set()

    def handle_signals(self) -> None:
        """SIGTERM and SIGINT stop, SIGHUP reloads. Main thread only."""

        def stop(_number: int, _frame: FrameType | None) -> None:
            self.stop()

        def reload(_number: int, _frame: FrameType | None) -> None:
            self.reload()

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        signal.signal(signal.SIGHUP, reload)

    def run(self, publish: Callable[[Content], None]) -> None:
        """Cycle until `stop` and hand each cycle's content to `publish`.

        Cycles start one interval apart; a late one does not shift the rest.
        """
        due = time.monotonic()
        while not self._stopping:
            if self._reloading:
                self._reloading = False
                self._reload()
            self._cycle(publish)
            interval = self._monitor.config.poll.interval / self._speed
            due = max(due + interval, time.monotonic())
            self._wake.wait(max(0.0, due - time.monotonic()))
            self._wake.clear()
        self._monitor.close()

    def _cycle(self, publish: Callable[[Content], None]) -> None:
        cycle = self._monitor.cycle()
        self._log_failures(cycle)
        content = render(cycle, self._monitor.config)
        publish(content)
        if self._textfile is not None:
            try:
                write_textfile(self._textfile, content.metrics)
            except OSError as error:
                log.error("textfile=%s not written: %s", self._textfile, error.strerror or error)
        if self._on_cycle is not None:
            self._on_cycle(cycle)

    def _reload(self) -> None:
        if self._config_path is None:
            return
        try:
            config: Config | None = load(self._config_path)
        except ConfigError as error:
            log.error("reload refused, the old configuration stays: %s", error)
            config = None
        else:
            log.info("configuration read again from %s", self._config_path)
        self._monitor.reconfigure(config)

    def _log_failures(self, cycle: Cycle) -> None:
        """One line when a failure begins and one when it is over, however many cycles lie between."""
        now = {(failure.source, failure.reason): failure for failure in cycle.snapshot.failures}
        for key in now.keys() - self._logged:
            log.warning("source=%s reason=%s %s", *key, now[key].detail)
        for source, reason in self._logged - now.keys():
            log.info("source=%s reason=%s is over", source, reason)
        self._logged = set(now)
