"""The workers of pytest-xdist that run this suite."""

from __future__ import annotations

import os

import pytest


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="there is one worker")
def test_a_file_stays_in_one_worker(request: pytest.FixtureRequest) -> None:
    """pytest-xdist writes a test's group behind its name; a pytest that it does not know drops it without a word."""
    if request.config.getoption("loadgroup", False):
        assert request.node.nodeid.endswith("@tests/test_workers.py")
