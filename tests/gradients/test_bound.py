"""The error of reductions for every world up to 8, in numbers alone: the bound of docs/gradients.md holds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from laconic.ops import sum_blockwise
from tests.gradients.reference import block_max, error_bound, mean_by_reference, value_of
from tests.ops.shards import shards_of

WORLDS = range(1, 9)


def gradients(world: int, length: int = 2000) -> Tensor:
    """[W, n]: heavy tails, scales that vary from block to block, and a signal that ranks share."""
    generator = torch.Generator().manual_seed(world)
    noise = torch.randn(world, length, generator=generator) / torch.rand(world, length, generator=generator).sqrt()
    signal = torch.randn(length, generator=generator)
    return (0.3 * signal + noise) * torch.exp2(torch.randn(length // 100, generator=generator)).repeat_interleave(100)


@pytest.mark.parametrize("bits", [8, 12])
@pytest.mark.parametrize("world", WORLDS)
def test_error_of_the_mean_is_within_the_bound(world: int, bits: int) -> None:
    x = gradients(world)
    exact = x.double().mean(0)
    scattered = sum_blockwise(*shards_of(x, bits), factor=1 / world)
    assert ((scattered - exact).abs() <= error_bound(x, gathered=False, bits=bits)).all()
    gathered = value_of(mean_by_reference(x, bits, 1 / world))
    assert ((gathered - exact).abs() <= error_bound(x, gathered=True, bits=bits)).all()


@pytest.mark.parametrize("world", WORLDS)
def test_bound_is_a_part_of_the_mean_block_maximum_that_does_not_grow_with_the_world(world: int) -> None:
    x = gradients(world)
    mean_maximum = block_max(x.double()).mean(0)
    assert (error_bound(x, gathered=False) <= mean_maximum * 1.001 / 254).all()
    # The helper lets the largest error of the whole tensor lift each block's maximum, hence the second term.
    assert (error_bound(x, gathered=True) <= mean_maximum * 2.02 / 254 + mean_maximum.max() / 254**2).all()


def test_bound_is_nearly_reached() -> None:
    # Ranks agree, and every element lies between two levels: nothing averages out.
    x = torch.full((4, 128), 0.5)
    x[:, 0] = 127.0
    found = sum_blockwise(*shards_of(x, 8), factor=0.25)
    assert (found - x[0]).abs().max() >= 0.99 * error_bound(x, gathered=False).max()
