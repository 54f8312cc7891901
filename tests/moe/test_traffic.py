from __future__ import annotations

import pytest

from laconic.errors import ConfigError
from laconic.moe.dispatch.traffic import LevelTraffic, add_traffic

FIRST = LevelTraffic(num_entries=8, num_rows=4, num_sent_entries=5, num_sent_rows=3, row_nbytes=96, id_nbytes=56)
SECOND = LevelTraffic(num_entries=2, num_rows=2, num_sent_entries=1, num_sent_rows=1, row_nbytes=32, id_nbytes=24)


def test_duplicate_rate_is_the_share_without_a_row() -> None:
    assert FIRST.duplicate_rate == 0.5
    assert SECOND.duplicate_rate == 0.0
    assert LevelTraffic(0, 0, 0, 0, 0, 0).duplicate_rate == 0.0


def test_traffic_adds_up_stage_by_stage() -> None:
    first, second = add_traffic([(FIRST, SECOND), (SECOND, FIRST), (FIRST, FIRST)])
    assert first == LevelTraffic(18, 10, 11, 7, 224, 136)
    assert second == first
    assert add_traffic([]) == ()


def test_traffic_of_different_depths_does_not_add_up() -> None:
    with pytest.raises(ConfigError, match="dispatches have 1 and 2 stages"):
        add_traffic([(FIRST,), (FIRST, SECOND)])
