"""Rows times a coded matrix: the specification beside the exact product, every kernel's bits."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from laconic.errors import FormatError
from laconic.ops import dequantize_blockwise, linear_blockwise, quantize_blockwise, reference
from tests.ops.cases import BLOCK_SIZES, DTYPES, SYMMETRIC, same_bits
from tests.ops.implementations import Kernels, each_implementation, each_kernel, each_native, num_examples
from tests.ops.interpreter import INTERPRETED


def rows_and_matrix(
    rows: int, outputs: int, length: int, code: str, block_size: int, dtype: torch.dtype, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Values over many magnitudes; of several outputs the last one has a block of NaN, of several rows the last NaN."""
    generator = torch.Generator().manual_seed(rows + 10 * length)
    x, matrix = (torch.randn(n, length, generator=generator) for n in (rows, outputs))
    x, matrix = (part * torch.exp2(3 * torch.randn(part.shape, generator=generator)) for part in (x, matrix))
    if rows > 1 and length:
        x[-1, 0] = float("nan")
        x[-1, -1] = 1 if INTERPRETED else float("inf")  # numpy warns where infinity times zero is NaN
    if outputs > 1 and length:
        matrix[-1, -1] = float("nan")
    return x.to(dtype), *reference.quantize_blockwise(matrix, code, block_size, scale_dtype, None)


@pytest.mark.parametrize("code", SYMMETRIC)
def test_the_product_is_that_of_the_dequantized_matrix(code: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, matrix = torch.randn(2, 5, 700, generator=generator), torch.randn(40, 700, generator=generator)
    codes, scales = quantize_blockwise(matrix, code=code)
    exact = dequantize_blockwise(codes, scales, code=code, length=700, dtype=torch.float32).double()
    found = linear_blockwise(x, codes, scales, code=code)
    assert found.shape == (2, 5, 40)
    torch.testing.assert_close(found.double(), x.double() @ exact.T, rtol=0, atol=1e-4)
    half = linear_blockwise(x.bfloat16(), codes, scales, code=code)
    torch.testing.assert_close(half.double(), x.bfloat16().double() @ exact.T, rtol=2**-8, atol=1e-4)


@each_implementation
def test_the_worked_example_of_the_page(ops: Kernels) -> None:
    codes = torch.tensor([[127, -127, 0]], dtype=torch.int8).view(torch.uint8)
    arguments = (torch.tensor([[1.0, 3.0, 5.0]]), codes, torch.tensor([[2.0]]), "int8", 16)
    assert ops.linear_blockwise(*arguments).tolist() == [[-508.0]]


@each_implementation
def test_product_k_is_added_to_sum_k_modulo_64(ops: Kernels) -> None:
    # 1 of sum 0, 2**24 of sum 1, -2**24 of sum 33: 1 + 2**24 is 2**24, so the order of sums is to be seen.
    x = torch.zeros(1, 128)
    x[0, 64], x[0, 1], x[0, 33] = 1, 2**24, -(2**24)
    ones = reference.quantize_blockwise(torch.ones(1, 128), "nf4", 64, torch.float32, None)
    assert ops.linear_blockwise(x, *ones, "nf4", 64).item() == 1.0  # 1 and 33 are added first
    x[0, 33], x[0, 2] = 0, -(2**24)
    assert ops.linear_blockwise(x, *ones, "nf4", 64).item() == 1.0  # then 0 and 2, to which 1 and 3 are added
    x[0, 2], x[0, 65], x[0, 1] = 0, 2**24, 1
    assert ops.linear_blockwise(x, *ones, "nf4", 64).item() == 2**24


@each_kernel
@settings(max_examples=num_examples(60), deadline=None)
@given(
    st.sampled_from(SYMMETRIC),
    st.sampled_from(BLOCK_SIZES),
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
    st.integers(1, 19),
    st.integers(1, 40),
    st.integers(0, 300),
)
@example("nf4", 64, torch.bfloat16, torch.bfloat16, 9, 17, 1024)  # two passes, two programs
@example("int8", 16, torch.float16, torch.float32, 3, 5, 77)
@example("int5", 256, torch.float32, torch.float16, 2, 3, 261)
@example("int6", 32, torch.bfloat16, torch.float32, 1, 1, 1)
def test_all_bits_are_the_references(
    kernels: Kernels,
    code: str,
    block_size: int,
    dtype: torch.dtype,
    scale_dtype: torch.dtype,
    rows: int,
    outputs: int,
    length: int,
) -> None:
    arguments = (*rows_and_matrix(rows, outputs, length, code, block_size, dtype, scale_dtype), code, block_size)
    assert same_bits(kernels.linear_blockwise(*arguments), reference.linear_blockwise(*arguments))


@each_native
def test_threads_change_no_bit(kernels: Kernels) -> None:
    x, codes, scales = rows_and_matrix(3, 300, 1024, "int4", 64, torch.bfloat16, torch.bfloat16)
    expected = reference.linear_blockwise(x, codes, scales, "int4", 64)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert same_bits(kernels.linear_blockwise(x, codes, scales, "int4", 64), expected), threads
    finally:
        torch.set_num_threads(before)


@each_implementation
@pytest.mark.parametrize("shape", [(96,), (0, 96), (2, 0, 96), (2, 3, 96), (3, 1, 2, 96)], ids=str)
def test_leading_dimensions_and_strides_may_be_any(ops: Kernels, shape: tuple[int, ...]) -> None:
    x, codes, scales = rows_and_matrix(math.prod(shape[:-1]), 7, 96, "nf4", 32, torch.float32, torch.bfloat16)
    expected = ops.linear_blockwise(x, codes, scales, "nf4", 32)
    found = ops.linear_blockwise(x.reshape(shape), codes, scales, "nf4", 32)
    assert found.shape == (*shape[:-1], 7)
    assert same_bits(found.reshape(-1, 7), expected)
    strided = x.t().contiguous().t(), codes.t().contiguous().t(), scales.t().contiguous().t()
    assert same_bits(ops.linear_blockwise(*strided, "nf4", 32), expected)


def test_a_result_has_no_history() -> None:
    codes, scales = quantize_blockwise(torch.randn(4, 64))
    assert not linear_blockwise(torch.randn(2, 64, requires_grad=True), codes, scales).requires_grad


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 64).double()}, "x.dtype is torch.float64, but it must be one of float32, bfloat16"),
        ({"x": torch.zeros(2, 65)}, "length 65 in nf4 with block_size 64 takes 33 and 2"),
        ({"x": torch.zeros(())}, "x has shape () on cpu and codes (4, 32) on cpu, but x must"),
        ({"x": torch.zeros(2, 64, device="meta")}, "both must be on one device"),
        ({"codes": torch.zeros(1, 4, 32, dtype=torch.uint8)}, "codes the two of a matrix"),
        ({"scales": torch.zeros(3, 1)}, "must have at least one dimension and agree in all but the last"),
        ({"code": "nf5"}, "code is 'nf5', but it must be one of"),
        ({"block_size": 48}, "block_size is 48, but it must be one of"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change: dict[str, object], message: str) -> None:
    codes, scales = quantize_blockwise(torch.randn(4, 64))
    arguments = {"x": torch.zeros(2, 64), "codes": codes, "scales": scales, "code": "nf4", "block_size": 64} | change
    with pytest.raises(FormatError, match=re.escape(message)):
        linear_blockwise(**arguments)  # type: ignore[arg-type]


def test_two_bits_are_refused() -> None:
    codes, scales = quantize_blockwise(torch.randn(4, 64), code="uint2")
    with pytest.raises(FormatError, match="products read codes of 4 bits or more"):
        linear_blockwise(torch.zeros(1, 64), codes, scales, code="uint2")


@pytest.mark.skipif(not INTERPRETED, reason="Triton is not interpreted here")
def test_triton_takes_more_rows_than_a_grid_has_in_its_second_dimension() -> None:
    # CUDA has 65535 there.
    from laconic.ops.triton import linear

    x, codes, scales = rows_and_matrix(3, 17, 64, "int8", 64, torch.float32, torch.bfloat16)
    grids: list[tuple[int, ...]] = []
    with mock.patch.object(linear, "_linear_blockwise_kernel", defaultdict(lambda: lambda *_, **__: None)) as kernel:
        linear.linear_blockwise(x[:1].expand(70_000, 64), codes, scales, "int8", 64)
        grids += kernel
    assert all(number < 1 << 16 for grid in grids for number in grid[1:])
    assert [math.prod(grid) for grid in grids] == [70_000 * 2]
