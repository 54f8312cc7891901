"""One bit per value: the specification in numbers, every kernel's bits, what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from laconic.errors import FormatError
from laconic.ops import pack_bits, reference, select_bits, unpack_bits
from laconic.ops.declarations.bits import MASK_DTYPES
from tests.grid import slow_but
from tests.ops.cases import every_pattern, same_bits
from tests.ops.implementations import Kernels, each_kernel, each_native, num_examples

PAIRS = [(0.0, 1.0), (-1.0, 1.0), (6.0, 3.0), (0.0, -0.0), (-0.0, 0.0), (1 / 0.7, 1e-40), (float("inf"), 1e300)]


def mask_of(numel: int, dtype: torch.dtype, density: float = 0.4, seed: int = 0) -> Tensor:
    """Values of both signs and zeros of both signs; NaN, infinity and the smallest number among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator, dtype=torch.float64)
    x[::7], x[1::11], x[2::13] = float("nan"), -float("inf"), 5e-324
    x = torch.where(torch.rand(numel, generator=generator) < density, x, -0.0 * x.sign().nan_to_num()).to(dtype)
    return x


def test_worked_example() -> None:
    x = torch.tensor([1.0, 0.0, -0.0, -2.0, float("nan"), 0.0, 0.0, 0.0, 0.0, 3.0])
    codes = pack_bits(x)
    assert codes.tolist() == [0b00011001, 0b10]
    assert unpack_bits(codes, length=10).tolist() == [True, False, False, True, True, *[False] * 4, True]
    values = unpack_bits(codes, length=10, dtype=torch.bfloat16, zero=6.0, one=3.0)
    assert values.dtype is torch.bfloat16
    assert values.tolist() == [3.0, 6.0, 6.0, 3.0, 3.0, 6.0, 6.0, 6.0, 6.0, 3.0]


ANY_MASK = (
    st.sampled_from(MASK_DTYPES),
    st.integers(0, 700),
    st.floats(0, 1),
    st.integers(0, 99),
    st.sampled_from(PAIRS),
)


@settings(max_examples=60)
@given(*ANY_MASK)
def test_the_reference_is_a_bit_for_each_value(
    dtype: torch.dtype, numel: int, density: float, seed: int, pair: tuple[float, float]
) -> None:
    x = mask_of(numel, dtype, density, seed)
    codes = reference.pack_bits(x)
    assert [bool(codes[index // 8] >> (index % 8) & 1) for index in range(numel)] == (x != 0).tolist()
    zero, one = torch.tensor(pair, dtype=dtype)
    assert same_bits(reference.unpack_bits(codes, numel, dtype, *pair), torch.where(x != 0, one, zero))
    other = mask_of(numel, dtype, 0.9, seed + 1)
    assert same_bits(reference.select_bits(other, codes), torch.where(x != 0, other, torch.zeros((), dtype=dtype)))


def check(
    kernels: Kernels, dtype: torch.dtype, numel: int, density: float, seed: int, pair: tuple[float, float]
) -> None:
    x, other = mask_of(numel, dtype, density, seed), mask_of(numel, dtype, 0.9, seed + 1)
    codes = reference.pack_bits(x)
    assert same_bits(kernels.pack_bits(x), codes)
    assert same_bits(kernels.select_bits(other, codes), reference.select_bits(other, codes))
    expected = reference.unpack_bits(codes, numel, dtype, *pair)
    assert same_bits(kernels.unpack_bits(codes, numel, dtype, *pair), expected)


@each_kernel
@settings(max_examples=num_examples(60))
@given(*ANY_MASK)
def test_all_bits_are_the_references(
    kernels: Kernels, dtype: torch.dtype, numel: int, density: float, seed: int, pair: tuple[float, float]
) -> None:
    check(kernels, dtype, numel, density, seed, pair)


@each_kernel
@pytest.mark.parametrize("dtype", MASK_DTYPES)
def test_all_bits_of_every_dtype_are_the_references(kernels: Kernels, dtype: torch.dtype) -> None:
    for number, numel in enumerate((0, 1, 8, 1003, 4096, 9001)):  # a program of Triton takes 4096
        check(kernels, dtype, numel, 0.4, number, PAIRS[number])


@each_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_agree_on_every_number(kernels: Kernels, dtype: torch.dtype) -> None:
    x = every_pattern(dtype)
    codes = reference.pack_bits(x)
    assert codes.sum(dtype=torch.int64) > 0
    assert same_bits(kernels.pack_bits(x), codes)


@each_native
@pytest.mark.parametrize("dtype", slow_but(MASK_DTYPES, torch.bool, torch.float32))
def test_threads_share_long_tensors(kernels: Kernels, dtype: torch.dtype) -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        check(kernels, dtype, 300_001, 0.4, 0, (0.0, 1.0))
    finally:
        torch.set_num_threads(threads)


@each_kernel
def test_bits_behind_the_last_are_zero(kernels: Kernels) -> None:
    for numel in (1, 63, 64, 65, 127):
        codes = kernels.pack_bits(torch.ones(numel))
        assert int(codes[-1]) == (1 << (numel - 8 * (len(codes) - 1))) - 1


def test_values_need_not_be_contiguous() -> None:
    x = mask_of(60, torch.float32).view(5, 12).T
    assert torch.equal(pack_bits(x), pack_bits(x.contiguous()))
    assert torch.equal(pack_bits(torch.tensor(2.0)), torch.tensor([1], dtype=torch.uint8))
    codes = torch.stack([pack_bits(x)] * 2, -1)[:, 0]
    assert torch.equal(unpack_bits(codes, length=60), (x != 0).reshape(-1))
    assert torch.equal(select_bits(torch.ones(5, 12).T, codes), (x != 0).float())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pack_bits(torch.ones(3, dtype=torch.int32)), "x.dtype is torch.int32, but it must be one of bool, fl"),
        (lambda: pack_bits(torch.ones(3).to_sparse()), "x.layout is torch.sparse_coo, but it must be strided"),
        (lambda: unpack_bits(torch.ones(1), length=3), "codes.dtype is torch.float32, but it must be uint8"),
        (lambda: unpack_bits(pack_bits(torch.ones(9)), length=8), r"shape \(2,\), but length 8 takes \(1,\)"),
        (lambda: unpack_bits(pack_bits(torch.ones(9))[None], length=9), r"shape \(1, 2\), but length 9 takes \(2,\)"),
        (lambda: select_bits(torch.ones(9), pack_bits(torch.ones(8))), r"shape \(1,\), but length 9 takes \(2,\)"),
        (lambda: select_bits(torch.ones(8).long(), pack_bits(torch.ones(8))), "x.dtype is torch.int64"),
        (lambda: select_bits(torch.ones(8), pack_bits(torch.ones(8, device="meta"))), "x is on cpu and codes on meta"),
        (lambda: unpack_bits(pack_bits(torch.ones(0)), length=-1), "length is -1, but it must be at least 0"),
        (
            lambda: unpack_bits(pack_bits(torch.ones(9)), length=9, dtype=torch.int8),
            "dtype is torch.int8, but it must be one of",
        ),
    ],
)
def test_bad_argument_is_named(call: object, message: str) -> None:
    with pytest.raises((FormatError, NotImplementedError), match=message):
        call()  # type: ignore[operator]
