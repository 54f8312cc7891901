"""A plugin of pytest: tests make their tensors on LACONIC_GPU_DAY_DEVICE, and each outcome is written as it comes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

_OUTCOMES = os.environ.get("LACONIC_GPU_DAY_OUTCOMES")
_DEVICE = os.environ.get("LACONIC_GPU_DAY_DEVICE")


@pytest.fixture(autouse=_DEVICE is not None)
def _default_device() -> Iterator[None]:
    """Tensors without a device of their own are on the one that is asked for."""
    torch.set_default_device(_DEVICE)
    yield
    torch.set_default_device(None)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note how a test ended, in the process that collects from all workers."""
    if "PYTEST_XDIST_WORKER" in os.environ or _OUTCOMES is None:
        return
    if report.when == "call" or report.outcome != "passed":
        reason = ""
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = str(crash.message if crash is not None else report.longrepr)[:600]
        with Path(_OUTCOMES).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"test": report.nodeid, "outcome": report.outcome, "reason": reason}) + "\n")
