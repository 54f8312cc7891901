"""The rows of load held, some seconds of each: results are right, and nothing grows (tools/load.py does more)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trust.loads import ROWS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("row", ROWS)
def test_load_is_held_and_nothing_grows(row: str, tmp_path: Path) -> None:
    do, sizes = ROWS[row]
    load = do(tmp_path, sizes.short)
    assert load.row == row
    assert load.facts
    assert load.slopes
    assert not load.leaks
