"""Tests of Triton kernels run on a GPU where there is one, else in Triton's interpreter.

Triton decides at import whether it interprets, so without a GPU a file runs itself once more in a fresh process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

starts_interpreter = pytest.mark.skipif(
    INTERPRETED or torch.cuda.is_available(), reason="the tests below run in this process"
)
"""For the one test of a file that calls `run_interpreted`."""

on_device = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="runs in the interpreter, started by the first test"
)
"""For all others."""

numpy_may_warn = pytest.mark.filterwarnings("ignore::RuntimeWarning")
"""The interpreter computes with numpy, which warns where NaN, infinity and 64-bit wrap-around are meant to happen."""


def run_interpreted(file: str) -> None:
    """Run the tests of a file in a process with the interpreter; they must pass."""
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--timeout=280", "-p", "no:cacheprovider", file],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout
