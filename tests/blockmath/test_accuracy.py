"""The page about accuracy says what holds now."""

from __future__ import annotations

import pytest

from tests.support import shared_dir
from tools import accuracy


@pytest.mark.skipif(shared_dir() is None, reason="the public reports are in the shared folder")
def test_page_is_up_to_date() -> None:
    assert accuracy.main(["--check"]) == 0, "run python -m tools.accuracy"


@pytest.mark.skipif(shared_dir() is None, reason="the public reports are in the shared folder")
def test_no_report_departs() -> None:
    findings = [accuracy.find(case) for case in accuracy.public_cases()]
    assert [finding for finding in findings if finding.outcome == "disagree"] == []
    assert sum(finding.outcome == "agree" for finding in findings) >= 50
