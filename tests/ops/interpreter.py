"""Tests of Triton kernels run on a GPU where there is one, else in Triton's interpreter.

Triton decides at import whether it interprets, so without a GPU `test_interpreted.py` runs those whose name or whose
kernels are Triton's once more, in one fresh process for all of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from _pytest.mark.structures import ParameterSet

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

if INTERPRETED:
    from triton import language
    from triton.runtime import interpreter

    # At each call of a function within a kernel Triton looks through its language for what it has replaced by numpy
    # already, which takes three quarters of the time. Nothing compiles in this process, so all of it stays replaced.
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
    interpreter._patch_lang = lambda function: SimpleNamespace(restore=lambda: None)

on_device = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="runs in the interpreter, started by test_interpreted.py"
)
"""For the tests that run kernels."""


def slow_in_interpreter(*values: object) -> ParameterSet:
    """Parameters of a test whose path another case of the test takes as well: in the interpreter it is slow."""
    return pytest.param(*values, marks=[pytest.mark.slow] if INTERPRETED else [])


def slow_where_interpreted(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test whose kernels other tests run as well: in the interpreter it is slow."""
    return pytest.mark.slow(test) if INTERPRETED else test


numpy_may_warn = pytest.mark.filterwarnings("ignore::RuntimeWarning")
"""The interpreter computes with numpy, which warns where NaN, infinity and 64-bit wrap-around are meant to happen."""


MOST_SECONDS = 1500
"""For all of them in one process; a test that starts it needs a limit above that."""


def run_interpreted(markers: str) -> None:
    """Run the tests of Triton kernels that are marked so in a process with the interpreter; they must pass."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        "--timeout=280",
        "-p",
        "no:cacheprovider",
        "-m",
        markers,
    ]
    result = subprocess.run(
        [*command, "-k", "triton", "-W", "ignore::RuntimeWarning", Path(__file__).parent],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=MOST_SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout
