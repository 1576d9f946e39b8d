from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvwatch.config import Config, Poll, load
from kvwatch.daemon import Daemon
from kvwatch.export.cycle import Cycle
from kvwatch.export.server import Content
from kvwatch.forecast.bundle import Forecasts
from kvwatch.monitor import Monitor
from kvwatch.observe.cycle import Observer
from kvwatch.observe.records import Failure, NvmlRecord
from kvwatch.sdnotify import Notifier
from tests.nodes import gpu
from tests.observe.test_cycle import FakeSources
from tests.systemd import Manager

QUICK = Config(poll=Poll(interval=0.02))


def events(caplog: pytest.LogCaptureFixture, name: str) -> list[dict[str, object]]:
    """The fields of the events of that name."""
    return [record.__dict__["fields"] for record in caplog.records if record.message == name]


class Run:
    """A daemon on a thread of its own, with what it published."""

    def __init__(self, sources: FakeSources, config: Config = QUICK, **more: object) -> None:
        self.monitor = Monitor(Observer(sources, config), config)
        self.daemon = Daemon(self.monitor, **more)  # type: ignore[arg-type]
        self.published: list[Content] = []
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self.daemon.run, args=(self._publish,))

    def _publish(self, content: Content) -> None:
        with self._changed:
            self.published.append(content)
            self._changed.notify_all()

    def __enter__(self) -> Run:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.daemon.stop()
        self.join()

    def join(self) -> None:
        self._thread.join(10)
        assert not self._thread.is_alive()

    def wait_for(self, text: str) -> bytes:
        """The first page from now on that has the text."""
        with self._changed:
            seen = len(self.published)
            found = self._changed.wait_for(
                lambda: any(text.encode() in one.metrics for one in self.published[seen:]), timeout=10
            )
            assert found, f"{text} never came; last page:\n{self.published[-1].metrics.decode()}"
            return next(one.metrics for one in self.published[seen:] if text.encode() in one.metrics)


def test_pages_follow_what_is_seen_and_nothing_stale_stays() -> None:
    sources = FakeSources()
    with Run(sources) as run:
        run.wait_for("kvwatch_server_up")
        sources.launches = ()
        page = run.wait_for("kvwatch_up 1.0")
        while b"kvwatch_server_up" in page:
            page = run.wait_for("kvwatch_up 1.0")
        assert b'server="llama"' not in page


def test_stopping_does_not_wait_for_the_interval() -> None:
    begun = time.monotonic()
    with Run(FakeSources(), Config(poll=Poll(interval=3600))) as run:
        run.wait_for("kvwatch_up")
    assert time.monotonic() - begun < 8


def test_a_good_reload_is_used_and_a_bad_one_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "k.yaml"
    path.write_text("poll: {interval: 20ms}\nplans: {p: {max_model_len: 1k}}\n", encoding="utf-8")
    with Run(FakeSources(), config_path=path) as run, caplog.at_level(logging.INFO, "kvwatch"):
        run.wait_for("kvwatch_config_last_reload_successful 1.0")
        run.daemon.reload()
        run.wait_for('forecast="plan:p"')
        path.write_text("poll: {interval: never}\n", encoding="utf-8")
        run.daemon.reload()
        page = run.wait_for("kvwatch_config_last_reload_successful 0.0")
        assert b'forecast="plan:p"' in page
        path.write_text("poll: {interval: 20ms}\n", encoding="utf-8")
        run.daemon.reload()
        assert b'forecast="plan:p"' not in run.wait_for("kvwatch_config_last_reload_successful 1.0")
    (refused,) = events(caplog, "reload_refused")
    assert "k.yaml:1: poll.interval" in str(refused["detail"])


def test_a_changed_file_is_read_again_and_a_removed_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "k.yaml"
    path.write_text("poll: {interval: 20ms}\n", encoding="utf-8")
    with Run(FakeSources(), config_path=path) as run, caplog.at_level(logging.INFO, "kvwatch"):
        assert b'forecast="plan:p"' not in run.wait_for("kvwatch_up")
        replacement = tmp_path / "new"
        replacement.write_text("poll: {interval: 20ms}\nplans: {p: {max_model_len: 1k}}\n", encoding="utf-8")
        os.utime(replacement, (1, 1))
        replacement.replace(path)
        run.wait_for('forecast="plan:p"')
        path.unlink()
        page = run.wait_for("kvwatch_config_last_reload_successful 0.0")
        assert b'forecast="plan:p"' in page
    assert len(events(caplog, "reloaded")) == 1
    assert len(events(caplog, "reload_refused")) == 1


def test_the_command_line_keeps_its_say_and_web_settings_need_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "k.yaml"
    path.write_text("poll: {interval: 1h}\n", encoding="utf-8")

    def adjust(config: Config) -> Config:
        return replace(config, poll=replace(config.poll, interval=0.02))

    with Run(FakeSources(), config_path=path, adjust=adjust) as run, caplog.at_level(logging.INFO, "kvwatch"):
        run.wait_for("kvwatch_up")
        path.write_text("web: {max_scrapes: 3}\nplans: {p: {max_model_len: 1k}}\n", encoding="utf-8")
        run.daemon.reload()
        run.wait_for('forecast="plan:p"')
        run.wait_for("kvwatch_up")
    assert len(events(caplog, "restart_needed")) == 1


def test_a_failure_is_logged_once_and_its_end_once(caplog: pytest.LogCaptureFixture) -> None:
    sources = FakeSources()
    with Run(sources) as run, caplog.at_level(logging.INFO, "kvwatch"):
        run.wait_for("kvwatch_up")
        sources.nvml = Failure("nvml", "gpu_lost", "GPU 0 fell off the bus")
        run.wait_for('kvwatch_errors_total{reason="gpu_lost",source="nvml"} 4.0')
        sources.nvml = NvmlRecord((gpu({}),))
        run.wait_for('kvwatch_source_up{source="nvml"} 1.0')
    (begun,) = events(caplog, "source_failed")
    assert begun == {"source": "nvml", "reason": "gpu_lost", "detail": "GPU 0 fell off the bus"}
    (ended,) = events(caplog, "source_recovered")
    assert ended == {"source": "nvml", "reason": "gpu_lost", "seconds": 0}


def test_the_textfile_is_written_and_its_failure_survived(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "textfiles"
    path = folder / "kvwatch.prom"
    with Run(FakeSources(), textfile=path) as run, caplog.at_level(logging.INFO, "kvwatch"):
        run.wait_for('kvwatch_errors_total{reason="enoent",source="textfile"} 1.0')
        folder.mkdir()
        run.wait_for("kvwatch_up")
        run.wait_for("kvwatch_up")
        assert b"kvwatch_up 1.0" in path.read_bytes()
    (failed,) = events(caplog, "source_failed")
    assert failed["detail"] == f"{path}: No such file or directory"
    assert len(events(caplog, "source_recovered")) == 1


def test_a_cycle_that_ends_in_an_error_publishes_nothing_of_the_last_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_arguments: object) -> Forecasts:
        raise ZeroDivisionError("a bug")

    with Run(FakeSources()) as run, caplog.at_level(logging.INFO, "kvwatch"):
        assert b"kvwatch_server_up" in run.wait_for("kvwatch_up")
        monkeypatch.setattr("kvwatch.monitor.forecast", broken)
        page = run.wait_for('kvwatch_source_up{source="cycle"} 0.0')
        assert b"kvwatch_server_up" not in page
        assert b"kvwatch_gpu_" not in page
        assert b'kvwatch_errors_total{reason="ZeroDivisionError",source="cycle"}' in page
        monkeypatch.undo()
        assert b'source="cycle",' not in run.wait_for("kvwatch_server_up")
    assert len(events(caplog, "source_failed")) == 1
    assert "ZeroDivisionError: a bug" in caplog.text


def test_a_daemon_whose_cycles_cannot_go_on_ends(caplog: pytest.LogCaptureFixture) -> None:
    def broken(_cycle: Cycle) -> None:
        raise ZeroDivisionError("a bug")

    with Run(FakeSources(), on_cycle=broken) as run:
        run.join()
        assert run.daemon.crashed
    assert len(events(caplog, "cycles_ended")) == 1


class WedgedSources(FakeSources):
    """NVML answers until `wedge` is called."""

    def __init__(self) -> None:
        super().__init__()
        self.wedged = threading.Event()

    def wedge(self) -> None:
        self.hang.clear()

    def read_nvml(self) -> NvmlRecord | Failure:
        if not self.hang.is_set():
            self.wedged.set()
        return super().read_nvml()


def test_the_end_does_not_wait_for_a_wedged_source() -> None:
    sources = WedgedSources()
    with Run(sources, Config(poll=Poll(interval=0.02, nvml_timeout=60))) as run:
        run.wait_for("kvwatch_up")
        sources.wedge()
        assert sources.wedged.wait(10)
        begun = time.monotonic()
        run.daemon.stop()
        run.join()
        assert time.monotonic() - begun < 2
    sources.hang.set()


def test_a_clock_that_is_set_is_counted_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Run(FakeSources()) as run, caplog.at_level(logging.INFO, "kvwatch"):
        run.wait_for("kvwatch_up")
        clock = time.time
        monkeypatch.setattr("kvwatch.daemon.time.time", lambda: clock() - 3600)
        run.wait_for('kvwatch_errors_total{reason="jump",source="clock"} 1.0')
        run.wait_for("kvwatch_up")
        monkeypatch.undo()
        run.wait_for('kvwatch_errors_total{reason="jump",source="clock"} 2.0')
    back, forth = events(caplog, "clock_jump")
    assert (round(float(str(back["seconds"]))), round(float(str(forth["seconds"])))) == (-3600, 3600)


def test_systemd_is_told_what_happens_and_its_watchdog_fed_while_cycles_end(tmp_path: Path) -> None:
    path = tmp_path / "k.yaml"
    path.write_text(
        "poll: {interval: 20ms, nvml_timeout: 20ms, processes_timeout: 20ms, vllm_timeout: 20ms}\n",
        encoding="utf-8",
    )
    gate = threading.Event()
    gate.set()
    with Manager(tmp_path / "notify") as manager:
        notifier = Notifier({"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "40000"})
        with Run(
            FakeSources(), load(path), config_path=path, notifier=notifier, on_cycle=lambda _: gate.wait(30)
        ) as run:
            manager.wait_for("READY=1")
            manager.wait_for("WATCHDOG=1")
            run.daemon.reload()
            assert "\nMONOTONIC_USEC=" in manager.wait_for("RELOADING=1")
            manager.wait_for("READY=1")
            gate.clear()
            while manager.next(timeout=1.0) is not None:
                pass
            gate.set()
            manager.wait_for("WATCHDOG=1")
        manager.wait_for("STOPPING=1")
