"""Dropout that is drawn where rows come from, and given to experts elsewhere."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laconic.errors import ModelError
from laconic.moe.huggingface.drawn_dropout import GivenDropout, drawn, drops_in, num_columns, packed, unpacked


class Twice(nn.Module):
    def __init__(self, drop: nn.Module) -> None:
        super().__init__()
        self.up, self.drop = nn.Linear(5, 13), drop

    def forward(self, rows: Tensor) -> Tensor:
        inner: Tensor = self.drop(self.up(rows))
        return F.dropout(inner[:, :6], training=self.training, p=0.25)


@pytest.mark.parametrize("p", [0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_given_dropout_is_that_of_the_experts_own(dtype: torch.dtype, p: float) -> None:
    expert, rows = Twice(nn.Dropout(p)).to(dtype), torch.randn(7, 5).to(dtype)
    drops = drops_in(Twice(nn.Dropout(p)).to("meta"), rows[:0])
    assert drops == [(p, 13), (0.25, 6)]
    torch.manual_seed(0)
    expected = expert(rows)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    kept = drawn(drops, rows)
    assert torch.equal(torch.get_rng_state(), state)
    columns = packed(kept, num_columns(drops, dtype), dtype)
    assert columns.shape == (7, -(-19 // (8 * dtype.itemsize)))
    assert torch.equal(unpacked(columns)[:, :19], kept)
    with GivenDropout(unpacked(columns)):
        assert torch.equal(expert(rows), expected)


def test_what_drops_nothing_needs_no_bits() -> None:
    expert = Twice(nn.Dropout(0.0)).to("meta")
    rows = torch.empty(0, 5)
    assert drops_in(expert, rows) == [(0.25, 6)]
    assert drops_in(expert.eval(), rows) == []
    assert num_columns([], torch.float32) == 0


def test_other_kinds_and_experts_that_do_not_run_without_values_are_refused() -> None:
    rows = torch.empty(0, 5)
    with pytest.raises(
        ModelError, match="experts use alpha_dropout, which cannot be drawn for rows of other processes"
    ):
        drops_in(Twice(nn.AlphaDropout(0.1)).to("meta"), rows)
    with pytest.raises(ModelError, match="experts use dropout in place, which cannot be drawn"):
        drops_in(Twice(nn.Dropout(0.1, inplace=True)).to("meta"), rows)
    with pytest.raises(ModelError, match=r"an expert cannot be tried on the meta device \(RuntimeError: "):
        drops_in(Twice(nn.Dropout(0.1)).to("meta"), torch.empty(0, 4))
