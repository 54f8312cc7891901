"""Shared by all tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_accelerator_stays() -> Iterator[None]:
    """Accelerate's first state is that of the process: a Trainer of one test would settle the precision of the next."""
    yield
    if (state := sys.modules.get("accelerate.state")) is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
