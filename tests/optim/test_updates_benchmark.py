"""Updates of 8-bit moments beside exact ones: the random part is a few percent, the systematic one far below."""

from __future__ import annotations

import re

import pytest

from tests.benchmark_runs import tables


@pytest.mark.slow
def test_updates_are_off_at_random_and_not_in_length() -> None:
    found = tables("adamw-updates", "--smoke")
    rows = re.findall(r"^\| AdamW8bit \| (.*) \|$", found, re.MULTILINE)
    assert len(rows) == 4
    for row in rows:
        steps, error, length, gain, less = row.split(" | ")
        assert 0.01 < float(error) < 0.06, steps  # rounding is there, and no more than it
        assert abs(float(length) - 1) < 0.006, steps
        assert abs(float(less.split()[0])) < 0.01 * float(gain) + 1e-4, steps
