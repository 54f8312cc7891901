"""The workers of pytest-xdist that run this suite."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tests.browser import served


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="there is one worker")
def test_a_file_stays_in_one_worker(request: pytest.FixtureRequest) -> None:
    """pytest-xdist writes a test's group behind its name; a pytest that it does not know drops it without a word."""
    if request.config.getoption("loadgroup", False):
        assert request.node.nodeid.endswith("@tests/test_workers.py")


def test_no_thread_stays_where_a_test_is_skipped_while_files_are_served(tmp_path: Path) -> None:
    def skipped() -> None:
        with served(tmp_path):
            assert threading.active_count() == before + 1
            pytest.skip("needs Chromium")

    before = threading.active_count()
    with pytest.raises(pytest.skip.Exception):
        skipped()
    assert threading.active_count() == before
