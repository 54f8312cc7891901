"""The tables by bucket give the code that the definition gives, for every n that a block can have."""

import pytest
import torch
from torch import Tensor

from laconic.ops.codebooks import LEVEL_MAX, bucket_rounder, bucket_tensor
from laconic.ops.reference.blockwise import _codes_from_table, _table

FOUR_BITS = ("nf4", "e2m1", "int4")
REACH = 1000
"""Numbers of fp32 on either side of each threshold and each border of a bucket."""


def around(centers: Tensor) -> Tensor:
    """Fp32 numbers [n, 2 * REACH + 1] next to fp32 centers [n], in order; those of -0 and 0 are neighbours."""
    bits = centers.view(torch.int32)
    order = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    order = order[:, None] + torch.arange(-REACH, REACH + 1)
    return torch.where(order < 0, -order | -(1 << 31), order).to(torch.int32).view(torch.float32)


def looked_up(n: Tensor, u: Tensor | None, code: str) -> Tensor:
    """What the kernel does, in torch."""
    table = bucket_tensor(code, u is not None, torch.device("cpu"))
    bucket = (n + bucket_rounder(code)).view(torch.int32) & 63
    assert bucket.min() > 0
    place = 2 * bucket + (n > table[bucket].view(torch.float32))
    if u is None:
        return table[64 + place]
    lower, reciprocal_gap = (table[start + place].view(torch.float32) for start in (64, 192))
    return table[320 + 2 * place + (u < (n - lower) * reciprocal_gap)]


@pytest.mark.parametrize("code", FOUR_BITS)
def test_buckets_give_the_codes_of_the_definition(code: str) -> None:
    most = 1.5 * LEVEL_MAX[code]
    width = torch.tensor(bucket_rounder(code) / (1.5 * 2**23 + 32))
    borders = (torch.arange(-31, 33) - 0.5) * width
    tables = [_table(code, name, torch.device("cpu")) for name in ("thresholds", "floor_thresholds")]
    places = torch.cat((borders, *tables, torch.tensor([0.0, most, -most])))
    n = torch.cat((around(places).flatten(), torch.linspace(-most, most, 1 << 16), torch.tensor([0.0, -0.0])))
    n = n[n.abs() <= most]
    random = torch.rand(len(n), generator=torch.Generator().manual_seed(0))
    for u in (None, torch.zeros_like(n), torch.full_like(n, 1 - 2**-24), random):
        assert torch.equal(looked_up(n, u, code), _codes_from_table(n, u, code).int())


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("code", FOUR_BITS)
def test_no_bucket_has_two_thresholds_and_bucket_0_is_of_broken_blocks(code: str, stochastic: bool) -> None:
    table = bucket_tensor(code, stochastic, torch.device("cpu"))
    sought = _table(code, "floor_thresholds" if stochastic else "thresholds", torch.device("cpu"))
    thresholds = table[:64].view(torch.float32)
    assert thresholds[thresholds.isfinite()].tolist() == sought[sought.isfinite()].tolist()
    codes, choices = (table[320:], 4) if stochastic else (table[64:], 2)
    assert len(codes) == 64 * choices
    assert codes[:choices].tolist() == [0] * choices
