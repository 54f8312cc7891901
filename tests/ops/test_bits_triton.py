"""pack_bits, unpack_bits and select_bits in Triton: the bits of the reference, on a GPU or interpreted."""

from __future__ import annotations

import pytest
import torch

from laconic.ops import reference
from laconic.ops.declarations.bits import MASK_DTYPES
from tests.ops.cases import every_pattern, same_bits
from tests.ops.interpreter import DEVICE, numpy_may_warn, on_device
from tests.ops.test_bits import mask_of, same

triton = pytest.importorskip("triton")

pytestmark = numpy_may_warn


@on_device
@pytest.mark.parametrize("dtype", MASK_DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 8, 1003, 4096, 9001])
def test_all_bits_are_the_references(numel: int, dtype: torch.dtype) -> None:
    from laconic.ops.triton import bits

    x = mask_of(numel, dtype)
    codes = reference.pack_bits(x)
    assert same_bits(bits.pack_bits(x.to(DEVICE)).cpu(), codes)
    other = mask_of(numel, dtype, 0.9, 1)
    assert same(bits.select_bits(other.to(DEVICE), codes.to(DEVICE)).cpu(), reference.select_bits(other, codes))
    for pair in ((0.0, 1.0), (-0.0, 0.0), (1 / 0.7, 1e300)):
        values = reference.unpack_bits(codes, numel, dtype, *pair)
        assert same(bits.unpack_bits(codes.to(DEVICE), numel, dtype, *pair).cpu(), values)


@on_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernel_agrees_on_every_number(dtype: torch.dtype) -> None:
    from laconic.ops.triton import bits

    x = every_pattern(dtype)
    assert same_bits(bits.pack_bits(x.to(DEVICE)).cpu(), reference.pack_bits(x))
