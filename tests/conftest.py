"""Rules for the whole suite."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings

Report = TypeVar("Report", pytest.CollectReport, pytest.TestReport)

# How long an example takes says how busy the machine is, not whether kvwatch is right.
settings.register_profile(
    "kvwatch", parent=settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("kvwatch")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="record the pages of tests/golden instead of comparing"
    )


@pytest.fixture(scope="session")
def vllm_venv() -> Path:
    """Virtual environment of the real vLLM; `make e2e` names it."""
    named = os.environ.get("KVWATCH_VLLM_VENV")
    assert named, (
        "KVWATCH_VLLM_VENV is not set: run `make e2e`, or set it to what tools/install_vllm.sh prints"
    )
    assert (Path(named) / "bin/vllm").exists(), f"no vLLM in {named}: run tools/install_vllm.sh"
    return Path(named)


def refuse_skip(report: Report) -> Report:
    """Turn a skip into a failure where nobody would read its reason (CI sets KVWATCH_FORBID_SKIPS)."""
    expected_failure = hasattr(report, "wasxfail")
    if report.skipped and not expected_failure and os.environ.get("KVWATCH_FORBID_SKIPS"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        report.outcome = "failed"
        report.longrepr = f"skipped, which is not allowed here: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    return refuse_skip(report)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    return refuse_skip(report)
