"""Gated products and gradients in Triton: the reference's bits, on a GPU where there is one, else interpreted."""

from __future__ import annotations

import pytest
import torch

from laconic.ops import reference
from tests.ops.cases import same_bits
from tests.ops.interpreter import DEVICE, numpy_may_warn, on_device, slow_in_interpreter
from tests.ops.test_gated import gradient, pair

pytest.importorskip("triton")

pytestmark = numpy_may_warn

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@on_device
@pytest.mark.parametrize(
    ("code", "block_size", "dtype", "scale_dtype", "activation", "rows", "length"),
    [
        ("nf4", 64, BF16, BF16, "silu", 5, 1024),
        ("int8", 32, FP16, FP32, "gelu_tanh", 3, 77),
        ("int5", 128, FP32, FP16, "quick_gelu", 2, 261),
        slow_in_interpreter("int6", 16, BF16, FP16, "silu", 4, 100),
        slow_in_interpreter("e2m1", 256, FP32, BF16, "gelu_tanh", 1, 4096),
        slow_in_interpreter("int4", 64, FP16, BF16, "silu", 3, 640),
    ],
)
def test_all_bits_are_the_references(
    code: str, block_size: int, dtype: torch.dtype, scale_dtype: torch.dtype, activation: str, rows: int, length: int
) -> None:
    from laconic.ops.triton import gated

    packed, grad = pair(rows, length, code, block_size, scale_dtype), gradient(rows, length, dtype)
    there = tuple(part.to(DEVICE) for part in packed)
    arguments = (code, block_size, length, dtype, activation)
    product = gated.gated_product_blockwise(*there, *arguments)
    assert same_bits(product.cpu(), reference.gated_product_blockwise(*packed, *arguments))
    found = gated.gated_backward_blockwise(grad.to(DEVICE), *there, code, block_size, activation)
    expected = reference.gated_backward_blockwise(grad, *packed, code, block_size, activation)
    assert all(same_bits(mine.cpu(), theirs) for mine, theirs in zip(found, expected, strict=True))


@on_device
def test_nothing_is_launched_for_no_rows() -> None:
    from laconic.ops.triton import gated

    packed = tuple(part[:0].to(DEVICE) for part in pair(2, 64, "nf4", 64, BF16))
    assert gated.gated_product_blockwise(*packed, "nf4", 64, 64, BF16, "silu").shape == (0, 64)
    grad = torch.zeros(0, 64, dtype=BF16, device=DEVICE)
    assert gated.gated_backward_blockwise(grad, *packed, "nf4", 64, "silu")[1].shape == (0, 64)
