"""The product of two tensors and the codes of one of them in one pass: torch's product, quantize_blockwise's codes."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from laconic.errors import FormatError
from laconic.ops import multiply_quantize_blockwise, quantize_blockwise, reference
from tests.grid import grid
from tests.ops.cases import BLOCK_SIZES, CODES, DTYPES, awkward_tensors, every_pattern, same_bits, threads
from tests.ops.implementations import CPU_IMPLEMENTATIONS, ON_CPU

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAN_BITS = {FP32: 0x7FC00000, BF16: 0x7FC0, FP16: 0x7E00}


def product_of(a: Tensor, b: Tensor) -> Tensor:
    """Torch's, contiguous, every NaN without sign and payload; torch's own depends on where the value lies."""
    product = torch.empty(a.shape, dtype=a.dtype).copy_(a * b)  # a row may have any strides and be contiguous
    bits = product.view(torch.int32 if product.dtype == FP32 else torch.int16)
    bits.masked_fill_(product.isnan(), NAN_BITS[product.dtype])
    return product


def check(a: Tensor, b: Tensor, code: str, block_size: int, scale_dtype: torch.dtype) -> None:
    expected = product_of(a, b), *reference.quantize_blockwise(b, code, block_size, scale_dtype, None)
    assert all(map(same_bits, ON_CPU.multiply_quantize_blockwise(a, b, code, block_size, scale_dtype), expected))


@pytest.mark.parametrize(("dtype", "code", "block_size"), grid(DTYPES, CODES, BLOCK_SIZES))
def test_bits_are_those_of_the_product_and_of_quantizing(dtype: torch.dtype, code: str, block_size: int) -> None:
    for number, (_, b) in enumerate(awkward_tensors(dtype)):
        spread = torch.exp2(40 * torch.randn(b.shape, generator=torch.Generator().manual_seed(number)))
        for a in (b.flip(0) if b.dim() else b, (b.float() * spread).to(dtype)):
            check(a, b, code, block_size, DTYPES[number % 3])


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_every_16_bit_pattern_times_many_others(dtype: torch.dtype) -> None:
    b = every_pattern(dtype)
    # Each number beside numbers of every exponent: products round, overflow, vanish and are subnormal.
    for shift in range(1, 1 << 16, 3001):
        check(b.roll(shift), b, "int8", 64, FP32)
    for number in (0.0, -0.0, float("inf"), float("nan"), 1.0, -1.5, torch.finfo(dtype).tiny, torch.finfo(dtype).max):
        check(torch.full_like(b, number), b, "nf4", 16, BF16)


@settings(max_examples=60)
@given(
    st.sampled_from(CODES),
    st.sampled_from(BLOCK_SIZES),
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
    st.integers(0, 4),
    st.integers(0, 300),
    st.sampled_from(["contiguous", "transposed", "strided", "expanded"]),
    st.sampled_from(["contiguous", "transposed", "strided", "expanded"]),
    st.integers(0, 1000),
)
def test_bits_are_right_for_any_bits_and_strides(
    code: str,
    block_size: int,
    dtype: torch.dtype,
    scale_dtype: torch.dtype,
    rows: int,
    length: int,
    layout_of_a: str,
    layout_of_b: str,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def made(layout: str) -> Tensor:
        shape = {"transposed": (length, rows), "strided": (rows, 2 * length), "expanded": (1, length)}.get(
            layout, (rows, length)
        )
        x = torch.randint(-(1 << 31), 1 << 31, shape, generator=generator).int().view(torch.float32).to(dtype)
        x = {"transposed": x.t(), "strided": x[:, ::2]}.get(layout, x)
        return x.expand(rows, length)

    check(made(layout_of_a), made(layout_of_b), code, block_size, scale_dtype)


def test_worked_example_is_true() -> None:
    # docs/formats.md, "A product and the codes of a factor".
    x = torch.tensor([1.0078125]).bfloat16()
    found = ON_CPU.multiply_quantize_blockwise(x, x, "nf4", 64, BF16)
    assert [part.tolist() for part in found] == [[1.015625], [15], [1.0078125]]


def test_threads_do_not_change_bits() -> None:
    a, b = torch.randn(2, 1031, 1027).bfloat16()
    with threads(1):
        expected = multiply_quantize_blockwise(a, b)
    with threads(3):
        assert all(map(same_bits, multiply_quantize_blockwise(a, b), expected))


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (
            torch.ones(3, 4),
            torch.ones(4),
            "a is torch.float32 (3, 4) on cpu, but it must be like b, torch.float32 (4,)",
        ),
        (torch.ones(4).half(), torch.ones(4), "a is torch.float16 (4,) on cpu, but it must be like b, torch.float32"),
        (torch.ones(4, device="meta"), torch.ones(4), "on meta, but it must be like b, torch.float32 (4,) on cpu"),
        (torch.ones(4).int(), torch.ones(4).int(), "x.dtype is torch.int32, but it must be one of float32"),
    ],
)
def test_factors_that_are_not_alike_are_refused(a: Tensor, b: Tensor, message: str) -> None:
    for run in (
        multiply_quantize_blockwise,
        *(lambda a, b, f=f: f.multiply_quantize_blockwise(a, b, "nf4", 64, BF16) for f in CPU_IMPLEMENTATIONS),
    ):
        with pytest.raises(FormatError, match=re.escape(message)):
            run(a, b)
    with pytest.raises(FormatError, match="code is 'nf5'"):
        multiply_quantize_blockwise(torch.ones(4), torch.ones(4), code="nf5")


def test_a_compiled_call_gives_the_same_bits() -> None:
    def run(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return multiply_quantize_blockwise(a, b * 2, block_size=32)

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((4, 70), (7, 64)):
        a, b = torch.randn(2, *shape).bfloat16().unbind()
        assert all(map(same_bits, compiled(a, b), run(a, b)))


def test_a_product_of_one_row_has_the_strides_of_its_shape() -> None:
    a, b = torch.randn(2, 1).t(), torch.randn(1, 4)[:, ::2]
    for layout in ((a, b), (b, a), (a, a)):
        check(*layout, "nf4", 16, FP32)


def test_codes_are_those_of_the_op_that_only_quantizes() -> None:
    a, b = torch.randn(2, 5, 200).bfloat16().unbind()
    product, *packed = multiply_quantize_blockwise(a, b, code="int6", block_size=32, scale_dtype=FP32)
    assert torch.equal(product, a * b)
    assert all(map(same_bits, packed, quantize_blockwise(b, code="int6", block_size=32, scale_dtype=FP32)))
