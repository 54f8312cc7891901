"""Process groups of a grid."""

from __future__ import annotations

import pytest

from laconic.errors import ConfigError
from laconic.moe.parallel.grid import Grid


def test_a_grid_needs_a_process_group() -> None:
    with pytest.raises(ConfigError, match="init_process_group"):
        Grid()
