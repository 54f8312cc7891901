"""What the two-bit code with step and minimum per block is, for every CPU implementation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from laconic.ops import reference
from laconic.ops.codebooks import MIN_SCALE
from tests.ops.cases import (
    BLOCK_SIZES,
    DTYPES,
    each_code,
    every_pattern,
)
from tests.ops.implementations import ON_CPU as ops

# (arange(70) - 35) / 8 in blocks of 32 with bf16 scales: seed, codes. A change here breaks what is stored.
GOLDEN = {
    None: "00505555aaaafaff00505555aaaafaff940e",
    1: "005555a599aaeeff001595969aaabaff940e",
}
GOLDEN_SCALES = [1.296875, -4.375, 1.296875, -0.375, 0.208984375, 3.625]


def numbers_of(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Step and minimum of each block, fp64."""
    return scales[..., 0::2].double(), scales[..., 1::2].double()


def test_worked_example_is_true() -> None:
    values = torch.tensor([-1.0, 5.0, 0.9, 1.0, 2.1, 3.0, 4.9])
    codes, scales = ops.quantize_blockwise(values, "uint2", 16, torch.float32, None)
    assert scales.tolist() == [2.0, -1.0]
    # 0, 3, 1, 1, 2 (1.55), 2, 3 (2.95)
    assert codes.tolist() == [0b01_01_11_00, 0b11_10_10]
    back = ops.dequantize_blockwise(codes, scales, "uint2", 16, 7, torch.float32)
    assert back.tolist() == [-1.0, 5.0, 1.0, 1.0, 3.0, 3.0, 5.0]


def test_ties_go_to_the_even_code() -> None:
    codes, _ = ops.quantize_blockwise(torch.tensor([0.0, 3.0, 0.5, 1.5, 2.5]), "uint2", 16, torch.float32, None)
    assert each_code(codes.unsqueeze(0), "uint2", 5).tolist() == [[0, 3, 0, 2, 2]]


@pytest.mark.parametrize("seed", GOLDEN)
def test_golden_bytes_stay(seed: int | None) -> None:
    codes, scales = ops.quantize_blockwise((torch.arange(70) - 35) / 8, "uint2", 32, torch.bfloat16, seed)
    assert bytes(codes.tolist()).hex() == GOLDEN[seed]
    assert scales.tolist() == GOLDEN_SCALES


@pytest.mark.parametrize(("dtype", "scale_dtype"), [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16)])
def test_every_16_bit_number_beside_zero_stays_within_its_range(dtype: torch.dtype, scale_dtype: torch.dtype) -> None:
    x = every_pattern(dtype)
    x = torch.stack((x, torch.zeros_like(x)), 1)
    codes, scales = ops.quantize_blockwise(x, "uint2", 16, scale_dtype, None)
    step, minimum = numbers_of(scales)
    broken = ~x.isfinite().all(1)
    # The range of the largest bf16 numbers is a third beyond a step of bf16 at most; none of fp16's is.
    assert torch.equal(step.isnan(), broken.unsqueeze(1))
    assert torch.equal(minimum.isnan(), broken.unsqueeze(1))
    exact, step, minimum = x[~broken].double(), step[~broken], minimum[~broken]
    # Rounded outwards, so no value lies outside of the four levels.
    assert (minimum <= exact.amin(1, keepdim=True)).all()
    assert (minimum + 3 * step + MIN_SCALE * 3 >= exact.amax(1, keepdim=True)).all()
    back = ops.dequantize_blockwise(codes, scales, "uint2", 16, 2, torch.float32)[~broken].double()
    assert ((back - exact).abs() <= step / 2 * (1 + 2.0**-20) + 3 * MIN_SCALE).all()


@pytest.mark.parametrize("scale_dtype", DTYPES)
@settings(max_examples=12)
@given(data=st.data())
def test_both_neighbours_contain_the_value_and_the_mean_converges(
    scale_dtype: torch.dtype, data: st.DataObject
) -> None:
    shape = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 70)))
    elements = st.floats(-1, 1, width=32, allow_subnormal=False)
    offset = data.draw(st.sampled_from([0.0, 1.0, -37.3, 1000.1]))
    x = torch.from_numpy(data.draw(hnp.arrays(np.float32, shape, elements=elements)))
    x = x * 2.0 ** data.draw(st.integers(-12, 6)) + offset
    block_size = data.draw(st.sampled_from(BLOCK_SIZES))
    first_seed = data.draw(st.integers(-(2**63), 2**63 - 1 - 16))
    total = torch.zeros(shape, dtype=torch.float64)
    for seed in range(first_seed, first_seed + 16):
        codes, scales = ops.quantize_blockwise(x, "uint2", block_size, scale_dtype, seed)
        back = reference.dequantize_blockwise(codes, scales, "uint2", block_size, shape[1], torch.float32).double()
        step, minimum = (number.repeat_interleave(block_size, -1)[:, : shape[1]] for number in numbers_of(scales))
        # fp32 rounds what a value is scaled by, and the value that comes back.
        slack = (step * 3 + minimum.abs() + x.double().abs()) * 2.0**-22 + 3 * MIN_SCALE
        assert ((back - x.double()).abs() <= step + slack).all()
        assert (back >= minimum - slack).all()
        total += back
    # A value between two levels has a variance of step^2 / 4 at most. 6 deviations: once in 10^9.
    assert ((total / 16 - x.double()).abs() <= 6 * step / 2 / 4 + slack).all()


def test_stochastic_rounding_has_no_bias_at_either_end_of_the_range() -> None:
    # Where scales are rounded to nearest, the ends of a block lie outside its levels and are clipped towards the
    # middle.
    count, row = 1 << 12, torch.tensor([-1 / 3, 60.0, 140.0, 254.9])
    for scale_dtype in DTYPES:
        codes, scales = ops.quantize_blockwise(row.repeat(count, 1), "uint2", 16, scale_dtype, 5)
        back = ops.dequantize_blockwise(codes, scales, "uint2", 16, 4, torch.float32).double()
        step = float(scales[0, 0])
        assert ((back.mean(0) - row.double()).abs() <= 4.5 * step / 2 / math.sqrt(count) + 1e-4).all()
        assert back[:, 1:3].std(0).gt(0.3 * step).all()


def test_seed_and_index_decide_the_random_numbers() -> None:
    x = torch.randn(8, 96)
    codes, _ = ops.quantize_blockwise(x, "uint2", 32, torch.float32, 9)
    assert torch.equal(codes, ops.quantize_blockwise(x, "uint2", 32, torch.float32, 9)[0])
    assert not torch.equal(codes, ops.quantize_blockwise(x, "uint2", 32, torch.float32, 10)[0])
    moved, _ = ops.quantize_blockwise(x[3:], "uint2", 32, torch.float32, 9, first_index=3 * 96)
    assert torch.equal(codes[3:], moved)


@pytest.mark.parametrize("seed", [None, 3])
def test_levels_stay_what_they_are(seed: int | None) -> None:
    for minimum, step in itertools.product((-4.0, 0.0, 1.5, 96.0), (0.25, 1.0, 8.0)):
        x = minimum + step * torch.tensor([0.0, 1.0, 2.0, 3.0]).repeat(40)
        for scale_dtype in DTYPES:
            codes, scales = ops.quantize_blockwise(x, "uint2", 64, scale_dtype, seed)
            assert torch.equal(ops.dequantize_blockwise(codes, scales, "uint2", 64, 160, torch.float32), x)


@pytest.mark.parametrize("seed", [None, 3])
def test_block_of_one_value_comes_back_as_far_as_its_minimum_goes(seed: int | None) -> None:
    exact = torch.tensor([0.0, -0.0, 1.0, -3.5, 2.0**-126, -(2.0**-126), 65504.0]).unsqueeze(1).expand(-1, 20)
    for scale_dtype in (torch.float32, torch.bfloat16):
        x = exact[:6] if scale_dtype == torch.bfloat16 else exact
        codes, scales = ops.quantize_blockwise(x, "uint2", 32, scale_dtype, seed)
        assert scales[:, 0].eq(0).all()
        assert codes.eq(0).all()
        back = ops.dequantize_blockwise(codes, scales, "uint2", 32, 20, torch.float32)
        assert torch.equal(back, x)
        assert not back[:2].signbit().any()
    # bf16 has no 1.001: the block lies between its minimum and three steps above.
    x = torch.full((1, 20), 1.001)
    codes, scales = ops.quantize_blockwise(x, "uint2", 32, torch.bfloat16, seed)
    back = ops.dequantize_blockwise(codes, scales, "uint2", 32, 20, torch.float32)
    assert scales[0, 1] == 1.0
    assert ((back >= 1.0) & (back <= 1.008)).all()


def test_subnormal_blocks_become_their_minimum() -> None:
    tiny = 2.0**-130
    for values, minimum in (([tiny, 2 * tiny], 0.0), ([-tiny, tiny], -MIN_SCALE), ([-tiny, -tiny], -MIN_SCALE)):
        codes, scales = ops.quantize_blockwise(torch.tensor(values), "uint2", 16, torch.float32, 1)
        assert scales.tolist() == [0.0, minimum]
        assert codes.tolist() == [0]


def test_nan_and_infinity_make_their_block_nan_and_no_other() -> None:
    ends = (37, 99)  # in a whole block; last of the ragged one
    for dtype, scale_dtype, value, at in itertools.product(DTYPES, DTYPES, [math.nan, math.inf, -math.inf], ends):
        where = (dtype, scale_dtype, value, at)
        x = torch.randn(3, 100).to(dtype)
        x[1, at] = value
        codes, scales = ops.quantize_blockwise(x, "uint2", 32, scale_dtype, 4)
        back = ops.dequantize_blockwise(codes, scales, "uint2", 32, 100, dtype)
        expected = torch.zeros(3, 100, dtype=torch.bool)
        expected[1, at // 32 * 32 : at // 32 * 32 + 32] = True
        assert torch.equal(back.isnan(), expected), where
        assert scales.isnan().sum() == 2, where
        assert codes[1, at // 32 * 8 : at // 32 * 8 + 8].eq(0).all(), where


@pytest.mark.parametrize(
    ("scale_dtype", "values"),
    [
        (torch.float16, [-65505.0, 0.0]),  # no minimum of fp16
        (torch.float16, [0.0, 3 * 65505.0]),  # no step
        (torch.bfloat16, [-3.395e38, 0.0]),
        (torch.float32, [-3e38, 3e38]),  # no range of fp32
    ],
)
def test_range_that_overflows_is_nan(scale_dtype: torch.dtype, values: list[float]) -> None:
    codes, scales = ops.quantize_blockwise(torch.tensor(values), "uint2", 16, scale_dtype, None)
    assert scales.isnan().all()
    assert codes.eq(0).all()
    fits = torch.tensor(values) * 0.99
    if scale_dtype != torch.float32:
        assert ops.quantize_blockwise(fits, "uint2", 16, scale_dtype, None)[1].isfinite().all()


def test_rows_are_quantized_one_by_one_and_padding_changes_nothing() -> None:
    for length in (1, 2, 3, 4, 5, 15, 16, 17, 31, 33, 63, 65, 255, 257):
        # Far from zero, which what is filled up must not bring in.
        x = torch.randn(4, length) + 100
        codes, scales = ops.quantize_blockwise(x, "uint2", 64, torch.float32, None)
        step, minimum = numbers_of(scales)
        for block, at in enumerate(range(0, length, 64)):
            assert torch.equal(minimum[:, block], x[:, at : at + 64].amin(1).double()), length
            assert (step[:, block] <= 10 / 3).all(), length
        for row in range(4):
            row_codes, row_scales = ops.quantize_blockwise(x[row], "uint2", 64, torch.float32, None)
            assert torch.equal(codes[row], row_codes), length
            assert torch.equal(scales[row], row_scales), length
        # Every code is at its bits, and nothing is behind the last.
        numbers = torch.tensor([1.0, 0.0]).repeat(4, scales.shape[1] // 2)
        levels = ops.dequantize_blockwise(codes, numbers, "uint2", 64, length, torch.float32)
        assert torch.equal(levels, each_code(codes, "uint2", length).float()), length


def test_all_256_bytes_hold_four_codes() -> None:
    codes = torch.arange(256, dtype=torch.uint8).unsqueeze(0)
    back = ops.dequantize_blockwise(codes, torch.tensor([[0.5, -1.0]]).repeat(1, 4), "uint2", 256, 1024, torch.float32)
    expected = [[(byte >> shift & 3) * 0.5 - 1.0 for byte in range(256) for shift in (0, 2, 4, 6)]]
    assert back.tolist() == expected
