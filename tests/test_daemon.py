from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import pytest

from kvwatch.config import Config, Poll
from kvwatch.daemon import Daemon
from kvwatch.export.server import Content
from kvwatch.monitor import Monitor
from kvwatch.observe.cycle import Observer
from kvwatch.observe.records import Failure, NvmlRecord
from tests.nodes import gpu
from tests.observe.test_cycle import FakeSources

QUICK = Config(poll=Poll(interval=0.02))


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
    assert "reload refused" in caplog.text
    assert "k.yaml:1: poll.interval" in caplog.text


def test_a_failure_is_logged_once_and_its_end_once(caplog: pytest.LogCaptureFixture) -> None:
    sources = FakeSources()
    with Run(sources) as run, caplog.at_level(logging.INFO, "kvwatch"):
        run.wait_for("kvwatch_up")
        sources.nvml = Failure("nvml", "gpu_lost", "GPU 0 fell off the bus")
        run.wait_for('kvwatch_errors_total{reason="gpu_lost",source="nvml"} 4.0')
        sources.nvml = NvmlRecord((gpu({}),))
        run.wait_for('kvwatch_source_up{source="nvml"} 1.0')
    lines = [record.message for record in caplog.records if "gpu_lost" in record.message]
    assert lines == [
        "source=nvml reason=gpu_lost GPU 0 fell off the bus",
        "source=nvml reason=gpu_lost is over",
    ]


def test_the_textfile_is_written_and_its_failure_survived(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "textfiles"
    path = folder / "kvwatch.prom"
    with Run(FakeSources(), textfile=path) as run, caplog.at_level(logging.ERROR, "kvwatch"):
        run.wait_for("kvwatch_cycles_total 2.0")
        folder.mkdir()
        run.wait_for("kvwatch_up")
        run.wait_for("kvwatch_up")
        assert b"kvwatch_up 1.0" in path.read_bytes()
    assert "kvwatch.prom not written: No such file or directory" in caplog.text
