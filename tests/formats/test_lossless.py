"""Lossless messages: every bit comes back, the bytes are always the same, and damage is always found."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from laconic.errors import FormatError
from laconic.formats import lossless
from laconic.ops.lossless import LAYOUTS

DTYPES = tuple(LAYOUTS)
CODES = ("raw", "window", "tiered", "auto")


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def same_tensor(a: Tensor, b: Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(bits(a), bits(b))


def near_gaussian(numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """What each type holds in practice: normal values, for integers in their middle range."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    if dtype == torch.uint8:
        return (x * 30 + 128).clamp(0, 255).to(dtype)
    if dtype == torch.int8:
        return (x * 30).clamp(-127, 127).to(dtype)
    return x.to(dtype)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_come_back(dtype: torch.dtype, code: str) -> None:
    for numel in (0, 1, 31, 32, 33, 4095, 4096, 4097, 10007):
        x = near_gaussian(numel, dtype)
        message = lossless.encode(x, code)
        assert same_tensor(lossless.decode(message, expect=x), x)
        assert message.numel() <= 72 + x.numel() * x.element_size()


def test_a_flipped_bit_is_found() -> None:
    x = near_gaussian(40, torch.bfloat16)
    message = lossless.encode(x)
    for bit in range(8 * message.numel()):
        damaged = message.clone()
        damaged[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(FormatError):
            lossless.decode(damaged)
