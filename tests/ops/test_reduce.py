"""Sums of quantized gradients: the specification in numbers, and every kernel's bits."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from laconic.errors import FormatError
from laconic.ops import (
    dequantize_blockwise,
    quantize_blockwise,
    reference,
    sum_blockwise,
    sum_requantize_blockwise,
)
from tests.ops.cases import same_bits, threads
from tests.ops.implementations import Kernels, each_kernel, each_native, few
from tests.ops.interpreter import slow_in_interpreter
from tests.ops.shards import FACTORS, awkward_shards, shards_of, strided


def test_worked_example() -> None:
    # Two shards of three elements: 2 * (1, -2, 3) + 0.5 * (10, 20, -127), then the mean.
    codes = torch.tensor([[1, -2, 3], [10, 20, -127]], dtype=torch.int8).view(torch.uint8)
    scales = torch.tensor([[2.0], [0.5]])
    assert sum_blockwise(codes, scales).tolist() == [7.0, 6.0, -57.5]
    assert sum_blockwise(codes, scales, factor=0.5).tolist() == [3.5, 3.0, -28.75]
    new_codes, new_scales, rest, rest_scales = sum_requantize_blockwise(codes, scales)
    assert new_scales.tolist() == [torch.tensor(57.5).div(127).item()]
    assert new_codes.view(torch.int8).tolist() == [15, 13, -127]
    assert rest is None
    assert rest_scales is None


def test_residual_adds_to_each_shard() -> None:
    codes = torch.tensor([[1, 2, 3], [0, 0, 0]], dtype=torch.uint8)
    pairs = torch.tensor([[0xF7, 0x01], [0x02, 0x00]], dtype=torch.uint8)  # 7, -1, 1 and 2, 0, 0
    scales, rest_scales = torch.tensor([[16.0], [1.0]]), torch.tensor([[1.0], [0.25]])
    assert sum_blockwise(codes, scales, pairs, rest_scales).tolist() == [23.5, 31.0, 49.0]


def test_order_of_ranks_is_the_order_of_additions() -> None:
    # In fp32 1 is lost beside 2**25, so the order shows.
    codes = torch.ones(3, 1, dtype=torch.uint8)
    scales = torch.tensor([[2.0**25], [1.0], [-(2.0**25)]])
    assert sum_blockwise(codes, scales).item() == 0.0
    assert sum_blockwise(codes, scales[[0, 2, 1]]).item() == 1.0


@pytest.mark.parametrize("bits", [8, 12])
def test_sum_is_that_of_dequantized_shards(bits: int) -> None:
    x = torch.randn(5, 1000)
    parts = shards_of(x, bits)
    expected = sum(
        dequantize_blockwise(*parts[:2], length=1000, code="int8", block_size=128, dtype=torch.float32).double()
    )
    if bits == 12:
        expected = expected + sum(
            dequantize_blockwise(*parts[2:], length=1000, code="int4", block_size=128, dtype=torch.float32).double()
        )
    bound = 6 * 2.0**-24 * x.abs().sum(0).max() * 1.01
    assert (sum_blockwise(*parts).double() - expected).abs().max() <= bound


def test_broken_block_of_one_shard_breaks_the_same_block_of_the_sum_only() -> None:
    x = torch.randn(3, 300)
    x[1, 130] = float("inf")
    for bits in (8, 12):
        parts = shards_of(x, bits)
        total = sum_blockwise(*parts)
        assert total.isnan().nonzero().flatten().tolist() == list(range(128, 256))
        _, scales, _, rest_scales = sum_requantize_blockwise(*parts)
        assert scales.isnan().tolist() == [False, True, False]
        if rest_scales is not None:
            assert rest_scales.isnan().tolist() == [False, True, False]


def test_sum_that_overflows_becomes_nan_when_quantized_again() -> None:
    parts = shards_of(torch.full((3, 128), 3e38), 8)
    assert sum_blockwise(*parts).isinf().all()
    assert sum_requantize_blockwise(*parts)[1].isnan().all()


@settings(max_examples=30)
@given(st.integers(1, 8), st.integers(0, 300), st.sampled_from([8, 12]), st.integers(0, 1000))
def test_requantized_sum_is_the_quantized_sum(shards: int, length: int, bits: int, seed: int) -> None:
    x = torch.randn(shards, length, generator=torch.Generator().manual_seed(seed))
    parts = shards_of(x, bits)
    total = sum_blockwise(*parts, factor=1 / shards)
    expected = shards_of(total[None], bits)
    found = sum_requantize_blockwise(*parts, factor=1 / shards)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other[0])


# --- kernels ---


@each_kernel
@pytest.mark.parametrize("bits", [slow_in_interpreter(8), 12])
def test_all_bits_are_the_references(kernels: Kernels, bits: int) -> None:
    for number, (name, x) in enumerate(awkward_shards()):
        layouts = (shards_of(x, bits), strided(shards_of(x, bits)))
        # The interpreter is slow: there each gradient takes one factor, and lies one way.
        for parts, factor in itertools.product(few(layouts, 2, number), few(FACTORS, 3, number)):
            assert same_bits(kernels.sum_blockwise(*parts, factor), reference.sum_blockwise(*parts, factor)), name
            packed = reference.sum_requantize_blockwise(*parts, factor)
            for one, other in zip(kernels.sum_requantize_blockwise(*parts, factor), packed, strict=True):
                assert same_bits(one, other), (name, factor)


@each_kernel
def test_bytes_and_scales_that_quantize_never_writes_give_the_same_bits(kernels: Kernels) -> None:
    generator = torch.Generator().manual_seed(3)
    bits = torch.randint(-(1 << 31), 1 << 31, (4, 3), generator=generator).int()
    bits[0, 0], bits[1, 1], bits[2, 2] = 0x7F800000, 0x7FC12345, 1
    for length in (257, 384):
        parts = (
            torch.randint(0, 256, (4, length), generator=generator).byte(),
            bits.view(torch.float32),
            torch.randint(0, 256, (4, (length + 1) // 2), generator=generator).byte(),
            bits.roll(1, 0).contiguous().view(torch.float32),
        )
        assert same_bits(kernels.sum_blockwise(*parts, 0.25), reference.sum_blockwise(*parts, 0.25))
        packed = reference.sum_requantize_blockwise(*parts, 0.25)
        for one, other in zip(kernels.sum_requantize_blockwise(*parts, 0.25), packed, strict=True):
            assert same_bits(one, other)


@each_native
def test_threads_do_not_change_bits(kernels: Kernels) -> None:
    parts = shards_of(torch.randn(2, 300_001), 12)
    with threads(1):
        alone = kernels.sum_requantize_blockwise(*parts, 0.5)
    with threads(3):
        assert all(map(same_bits, kernels.sum_requantize_blockwise(*parts, 0.5), alone))


# --- schemas ---

GOOD = {
    "codes": torch.zeros(2, 130, dtype=torch.uint8),
    "scales": torch.zeros(2, 2),
    "residual_codes": torch.zeros(2, 65, dtype=torch.uint8),
    "residual_scales": torch.zeros(2, 2),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codes": torch.zeros(130, dtype=torch.uint8)}, "codes have shape (130,), but it must be [shards, length]"),
        ({"codes": torch.zeros(0, 130, dtype=torch.uint8)}, "but it must be [shards, length] with a shard at least"),
        ({"codes": torch.zeros(2, 130)}, "codes.dtype is torch.float32, but it must be uint8"),
        ({"scales": torch.zeros(2, 2, dtype=torch.bfloat16)}, "scales.dtype is torch.bfloat16, but it must be float32"),
        ({"scales": torch.zeros(2, 1)}, "scales have shape (2, 1), but 2 shards of 130 elements in blocks of 128 take"),
        ({"scales": torch.zeros(2, 2, device="meta")}, "codes are on cpu and scales on meta"),
        ({"residual_codes": None}, "residual_codes is None, but a residual is both codes and scales"),
        ({"residual_scales": None}, "residual_scales is None, but a residual is both codes and scales"),
        ({"residual_codes": torch.zeros(2, 66, dtype=torch.uint8)}, "residual_codes have shape (2, 66), but 2 shards"),
    ],
)
def test_bad_argument_is_named(change: dict[str, Tensor | None], message: str) -> None:
    for op in (sum_blockwise, sum_requantize_blockwise):
        with pytest.raises(FormatError, match=re.escape(message)):
            op(**GOOD | change)


def test_compiled_call_gives_the_same_bits() -> None:
    def mean(*parts: Tensor) -> Tensor:
        codes, scales, *_ = sum_requantize_blockwise(*parts, factor=0.5)
        return dequantize_blockwise(codes[None], scales[None], length=codes.shape[0], code="int8", block_size=128)

    compiled = torch.compile(mean, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (128, 300):
        parts = quantize_blockwise(torch.randn(2, length), code="int8", block_size=128, scale_dtype=torch.float32)
        assert torch.equal(compiled(*parts), mean(*parts))
