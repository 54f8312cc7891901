"""The driver of the day."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.gpu_day.faults import load_tool


@pytest.fixture
def gpu_day() -> ModuleType:
    return load_tool()
