from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from laconic.moe.dispatch.traffic import LevelTraffic, traffic_of

FIRST = LevelTraffic(num_entries=8, num_rows=4, num_sent_entries=5, num_sent_rows=3, row_nbytes=96, id_nbytes=56)
SECOND = LevelTraffic(num_entries=2, num_rows=2, num_sent_entries=1, num_sent_rows=1, row_nbytes=32, id_nbytes=24)


def test_duplicate_rate_is_the_share_without_a_row() -> None:
    assert FIRST.duplicate_rate == 0.5
    assert SECOND.duplicate_rate == 0.0
    assert LevelTraffic(0, 0, 0, 0, 0, 0).duplicate_rate == 0.0


@pytest.mark.parametrize("me", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_rank_counts_what_it_sends_to_others(me: int, dtype: torch.dtype) -> None:
    plan = SimpleNamespace(row_splits=[3, 5, 7], entry_splits=[4, 6, 11], ids=torch.zeros(21, dtype=torch.int32))
    exchange: Any = SimpleNamespace(plan=plan, group=SimpleNamespace(rank=lambda: me))
    found = traffic_of(exchange, torch.zeros(15, 10, dtype=dtype), torch.zeros(21))
    rows, entries = (12, 17) if me == 0 else (8, 10)
    assert (found.num_rows, found.num_entries) == (15, 21)
    assert (found.num_sent_rows, found.num_sent_entries) == (rows, entries)
    assert found.row_nbytes == rows * 10 * (4 if dtype is torch.float32 else 2)
    assert found.id_nbytes == entries * (4 + 4) + 2 * 8 * (1 + 3)  # and to each peer a length and rows to all places
