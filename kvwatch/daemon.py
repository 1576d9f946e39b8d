"""The long-running process: cycles on time, the page served, reload and an orderly end.

Cycles have a thread of their own, so that the main thread is always free to end the process, to take a signal
and to feed systemd's watchdog, whatever a cycle waits for.
"""

from __future__ import annotations

import errno
import logging
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import Enum
from importlib import import_module
from pathlib import Path
from types import FrameType

from kvwatch.config import Config, load
from kvwatch.export.content import lifetime, render
from kvwatch.export.cycle import Cycle
from kvwatch.export.server import Content
from kvwatch.export.textfile import write_textfile
from kvwatch.failurelog import FailureLog
from kvwatch.filestamp import WatchedFile
from kvwatch.logs import log_crash, log_event
from kvwatch.monitor import Monitor
from kvwatch.observe.records import Failure
from kvwatch.sdnotify import Notifier

STOP_SECONDS = 0.5
"""How long the end waits for a cycle under way."""
CLOCK_JUMP_SECONDS = 1.0
"""Between two cycles the wall clock may differ from the steady clock by so much."""


LATE_MODULES = (
    "kvwatch.blockmath.weights",
    "kvwatch.export.statuspage",
    "kvwatch.forecast.slope",
    "kvwatch.observe.nextstart_compose",
    "kvwatch.observe.nextstart_kubernetes",
    "psutil",
)
"""What a command that looks once does without, and does not wait for."""


def load_late_modules() -> None:
    """Have them all. One that cannot be had must show at the start of a daemon, not after half an hour.

    Nor may it come from another release that was installed meanwhile.

    Raises:
        ImportError: one cannot be loaded.
    """
    for module in LATE_MODULES:
        import_module(module)


class _Order(Enum):
    """What the main thread is asked to do."""

    STOP = "stop"
    RELOAD = "reload"


class Daemon:
    """Runs a monitor's cycles until told to stop.

    Args:
        config_path: read again on reload and when it changes; None keeps the configuration for good.
        adjust: what the command line changes in a configuration.
        textfile: where the page is also written, for node_exporter's textfile collector.
        speed: how many times faster than real time cycles follow each other (demo).
        on_cycle: called with each finished cycle, after it was published.

    Attributes:
        crashed: `run` came to its end by an error, not by `stop`.
    """

    def __init__(
        self,
        monitor: Monitor,
        *,
        config_path: Path | None = None,
        adjust: Callable[[Config], Config] = lambda config: config,
        textfile: Path | None = None,
        speed: float = 1.0,
        on_cycle: Callable[[Cycle], None] | None = None,
        notifier: Notifier | None = None,
    ) -> None:
        self._monitor = monitor
        self._config_path = config_path
        self._config_file = None if config_path is None else WatchedFile(config_path)
        self._adjust = adjust
        self._textfile = textfile
        self._speed = speed
        self._on_cycle = on_cycle
        self._notifier = notifier or Notifier({})
        # Its put() may be called while the same thread is inside get(), as a signal handler does.
        self._orders: queue.SimpleQueue[_Order] = queue.SimpleQueue()
        self._wake = threading.Event()
        self.crashed = False
        self._stopping = False
        self._reloading = False
        self._finished: float | None = None
        self._clock_offset: float | None = None
        self._failures = FailureLog()

    def stop(self) -> None:
        """End soon, with or without the cycle under way; safe from a signal handler and from any thread."""
        self._orders.put(_Order.STOP)

    def reload(self) -> None:
        """Read the configuration again before the next cycle, which follows at once."""
        self._orders.put(_Order.RELOAD)

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

        Cycles start one interval apart; a late one does not shift the rest. A cycle that still waits for a
        source at the end is left behind with its thread.

        Raises:
            ImportError: see `load_late_modules`.
        """
        load_late_modules()
        worker = threading.Thread(target=self._work, args=(publish,), name="kvwatch-cycles", daemon=True)
        worker.start()
        while self._next_order() is not _Order.STOP:
            self._reloading = True
            self._wake.set()
        self._notifier.stopping()
        self._stopping = True
        self._wake.set()
        worker.join(STOP_SECONDS)
        if worker.is_alive():
            log_event(logging.WARNING, "stopped_within_a_cycle")

    def _next_order(self) -> _Order:
        watchdog = self._notifier.watchdog_seconds
        while True:
            with suppress(queue.Empty):
                return self._orders.get(timeout=None if watchdog is None else watchdog / 2)
            if self._is_alive():
                self._notifier.alive()

    def _is_alive(self) -> bool:
        """Whether cycles come to an end, at their own pace."""
        finished = self._finished
        return finished is not None and time.monotonic() - finished < lifetime(self._monitor.config.poll)

    def _work(self, publish: Callable[[Content], None]) -> None:
        try:
            self._run_cycles(publish)
        except Exception:  # noqa: BLE001 - a daemon whose cycles have ended must end too
            log_crash("cycles_ended")
            self.crashed = True
            self.stop()

    def _run_cycles(self, publish: Callable[[Content], None]) -> None:
        due = time.monotonic()
        while not self._stopping:
            self._reload_if_asked()
            self._cycle(publish)
            interval = self._monitor.config.poll.interval / self._speed
            due = max(due + interval, time.monotonic())
            self._wake.wait(max(0.0, due - time.monotonic()))
            self._wake.clear()
        self._monitor.close()

    def _cycle(self, publish: Callable[[Content], None]) -> None:
        self._watch_clock()
        try:
            cycle = self._monitor.cycle()
            content = render(cycle, self._monitor.config)
        except Exception as error:  # noqa: BLE001 - whatever goes wrong, no page may outlive its cycle
            log_crash("cycle_failed")
            cycle = self._monitor.failed_cycle(error)
            content = render(cycle, self._monitor.config)
        if self._stopping:
            return
        publish(content)
        self._failures.update([*cycle.snapshot.failures, *self._write_textfile(content.metrics)])
        if self._on_cycle is not None:
            self._on_cycle(cycle)
        if self._finished is None:
            self._notifier.ready()
        self._finished = time.monotonic()

    def _write_textfile(self, page: bytes) -> Iterator[Failure]:
        if self._textfile is None:
            return
        try:
            write_textfile(self._textfile, page)
        except OSError as error:
            reason = errno.errorcode.get(error.errno or 0, "error").lower()
            self._monitor.count_error("textfile", reason)
            yield Failure("textfile", reason, f"{self._textfile}: {error.strerror or error}")

    def _reload_if_asked(self) -> None:
        """Read the configuration again on demand, or when its file was changed."""
        if self._config_path is None or self._config_file is None:
            return
        changed = self._config_file.changed()
        if not (changed or self._reloading):
            return
        self._reloading = False
        self._notifier.reloading()
        self._reload(self._config_path)
        self._notifier.ready()

    def _reload(self, path: Path) -> None:
        before = self._monitor.config
        try:
            config = self._adjust(load(path))
        except Exception as error:  # noqa: BLE001 - what is in a file must not end the daemon
            log_event(logging.ERROR, "reload_refused", detail=error)
            self._monitor.reconfigure(None)
            return
        log_event(logging.INFO, "reloaded", file=path)
        if config.web != before.web:
            log_event(logging.WARNING, "restart_needed", detail="the section web is read at the start only")
        self._monitor.reconfigure(config)

    def _watch_clock(self) -> None:
        """Say when the wall clock was set: times on the page before and after do not go together."""
        offset = time.time() - time.monotonic()
        before, self._clock_offset = self._clock_offset, offset
        if before is not None and abs(offset - before) > CLOCK_JUMP_SECONDS:
            self._monitor.clock_jumped()
            log_event(logging.WARNING, "clock_jump", seconds=round(offset - before, 3))
