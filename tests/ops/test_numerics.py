"""What the numbers of one scale per block are, for every CPU implementation: the examples of docs/formats.md."""

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
from laconic.ops.codebooks import ARITHMETIC, BITS, LEVEL_MAX, MIN_SCALE, codebook
from tests.grid import grid
from tests.ops.cases import (
    BLOCK_SIZES,
    CODES,
    DTYPES,
    SYMMETRIC,
    each_code,
    every_pattern,
)
from tests.ops.implementations import ON_CPU as ops


def levels_of(code: str) -> Tensor:
    """The levels that quantize produces, ascending, in float64."""
    if code in ARITHMETIC:
        return torch.arange(-LEVEL_MAX[code], LEVEL_MAX[code] + 1, dtype=torch.float64)
    return torch.tensor(sorted(set(codebook(code).sorted_levels)), dtype=torch.float64)


def level_of_each_code(code: str) -> Tensor:
    """Level [2**bits] fp32 of every code that a row can hold, written by quantize or not."""
    if code not in ARITHMETIC:
        return torch.tensor(codebook(code).levels)
    half = 1 << (BITS[code] - 1)
    return torch.cat((torch.arange(half), torch.arange(-half, 0))).float()


# docs/formats.md, "Worked examples": code, values, scale, bytes, values read back.
EXAMPLES = [
    (
        "nf4",
        [2, -2, 1, 0.1, -0.1, 0],
        2.0,
        "0f 8c 76",
        [2, -2, 0.88141966, 0.1591606, -0.18210007, 0],
    ),
    (
        "e2m1",
        [6, -6, 0.25, 0.75, 5, -3.5, 2.6, -0.2, 1.25],
        1.0,
        "f7 20 e6 05 02",
        [6, -6, 0, 1, 4, -4, 3, 0, 1],
    ),
    (
        "int4",
        [7, -7, 0.5, 1.5, 2.5, -0.5, -1.5, 3.4],
        1.0,
        "97 20 02 3e",
        [7, -7, 0, 2, 2, 0, -2, 3],
    ),
    (
        "int5",
        [15, -15, 0.5, 1.5, -2.5, 7.4, -1, 14.6, 3],
        1.0,
        "2f 02 e1 cf 7f 03",
        [15, -15, 0, 2, -2, 7, -1, 15, 3],
    ),
    (
        "int6",
        [31, -31, 0.5, 1.5, -2.5, 20.4, -1],
        1.0,
        "5f 08 08 3e f5 03",
        [31, -31, 0, 2, -2, 20, -1],
    ),
    (
        "int8",
        [127, -127, 0.5, 1.5, -2.5, 100.4, 0],
        1.0,
        "7f 81 00 02 fe 64 00",
        [127, -127, 0, 2, -2, 100, 0],
    ),
]


@pytest.mark.parametrize(("code", "values", "scale", "code_bytes", "back"), EXAMPLES)
def test_worked_example_is_true(
    code: str, values: list[float], scale: float, code_bytes: str, back: list[float]
) -> None:
    codes, scales = ops.quantize_blockwise(torch.tensor(values), code, 16, torch.float32, None)
    assert bytes(codes.tolist()).hex(" ") == code_bytes
    assert scales.tolist() == [scale]
    assert torch.equal(
        ops.dequantize_blockwise(codes, scales, code, 16, len(values), torch.float32), torch.tensor(back)
    )


# (arange(70) - 35) / 8 in blocks of 32 with bf16 scales, nearest and with seed 1. A change here breaks what is stored.
GOLDEN = {
    ("nf4", None): "0000001111111122223233334454556566778798a9aabbccccddedeeeeeefffffeffff",
    ("nf4", 1): "0000111111111122212233334354556566768889a9babbcbdddcdeeeeeeffffffefffe",
    ("e2m1", None): "ffffffeeeeeeeededdddcdccbcbbaa9a99001021323344545555666666767777777777",
    ("e2m1", 1): "ffffeeefeeeeeedddeddccccbcbbaa9a99091112324344545555666666677777767777",
    ("int4", None): "99a9aaaabbbbcbccccddddedeeeeffff0f000011212222334344445565666677667677",
    ("int4", 1): "999aaababbbbbbccccccedddeeeefffff0001111212233324443455555667677766676",
    ("int5", None): "314a3927a5b4566befbd18e7acb5de9bf3debbf7fe7f1082106310528a31e7a094945a8bb1d69c7bad39f71e",
    ("int5", 1): "314a39e9a4b55a6bedc517e3acb5d69bf3debdf7df7f1082106390528a3907a194d2528bb5d6dc7bcc39e71e",
    ("int6", None): "a13892a5699e68aaae6cdbba2f1ccb335dd7f68de7facef3bdff03813010c68124cac2340e144913"
    "555917966d5ce77ddbc675de07",
    ("int6", 1): "a1388ea569a269aaae2cebbe2f1ccb334dd7368ee7fabef77dff03814010c68124cac2380f044913555"
    "917a6695ce77d1ac775de07",
    ("int8", None): "8185888c8f93979a9ea2a5a9acb0b4b7bbbfc2c6cacdd1d4d8dcdfe3e7eaeef1f2f7fb0005090e12"
    "171b2024292d32363b3f44484d52565b5f64686d71767a7f6c7074787b7f",
    ("int8", 1): "8184888b9093979b9ea2a6a9acb0b4b8bbbfc2c6cacdd1d4d8dcdfe3e7eaeef2f3f6fb0005090e12"
    "171b2025292d32373b4044494d51565a5f63696d71767b7f6c7074777b7f",
}
GOLDEN_SCALES = {
    "nf4": [4.375, 3.5, 4.25],
    "e2m1": [0.73046875, 0.58203125, 0.70703125],
    "int4": [0.625, 0.5, 0.60546875],
    "int5": [0.291015625, 0.2333984375, 0.283203125],
    "int6": [0.1416015625, 0.11279296875, 0.13671875],
    "int8": [0.034423828125, 0.027587890625, 0.033447265625],
}


@pytest.mark.parametrize(("code", "seed"), GOLDEN)
def test_golden_bytes_stay(code: str, seed: int | None) -> None:
    codes, scales = ops.quantize_blockwise((torch.arange(70) - 35) / 8, code, 32, torch.bfloat16, seed)
    assert bytes(codes.tolist()).hex() == GOLDEN[code, seed]
    assert scales.tolist() == GOLDEN_SCALES[code]


def test_every_code_has_a_worked_example_and_golden_bytes() -> None:
    assert {code for code, *_ in EXAMPLES} == {code for code, _ in GOLDEN} == set(GOLDEN_SCALES) == set(SYMMETRIC)


def test_random_numbers_are_the_documented_ones() -> None:
    index = torch.tensor([0, 1, 2, 3, 2**32 - 1, 2**32, 2**62])
    integers = [13440492, 9627422, 3605398, 13976068, 9554806, 3494144, 13574166]
    assert (reference.uniform(1, index) * 2**24).int().tolist() == integers
    with torch.device("meta"):  # no device may be asked for the key, or every call would wait for it
        assert reference.seed_key(1) == -7995527694508729151


@pytest.mark.parametrize("code", SYMMETRIC)
def test_every_bf16_goes_to_the_nearest_level(code: str) -> None:
    # The first element makes the scale exactly 1, so the second is compared with the levels themselves.
    x = every_pattern(torch.bfloat16)
    x = x[x.abs() <= LEVEL_MAX[code]]
    pairs = torch.stack((torch.full_like(x, LEVEL_MAX[code]), x), dim=1)
    codes, scales = ops.quantize_blockwise(pairs, code, 16, torch.bfloat16, None)
    assert scales.eq(1).all()
    back = ops.dequantize_blockwise(codes, scales, code, 16, 2, torch.float32)
    assert back[:, 0].eq(LEVEL_MAX[code]).all()
    levels, exact = levels_of(code), x.double().unsqueeze(1)
    distance = (levels - exact).abs()
    assert torch.equal((back[:, 1].double() - x.double()).abs(), distance.amin(1))
    # Where two levels are equally near, the even code wins. No bf16 number is half-way between two levels of nf4.
    ties = distance.eq(distance.amin(1, keepdim=True)).sum(1) > 1
    assert ties.any() == (code != "nf4")
    assert (each_code(codes[ties], code, 2)[:, 1] % 2 == 0).all()


def test_nf4_tie_goes_to_the_lower_level() -> None:
    thresholds = torch.tensor(codebook("nf4").thresholds[:15])
    for n, expected in ((thresholds, 0), (torch.nextafter(thresholds, torch.tensor(2.0)), 1)):
        x = torch.stack((torch.ones(15), n), dim=1)
        codes, _ = ops.quantize_blockwise(x, "nf4", 16, torch.float32, None)
        assert torch.equal(codes[:, 0] >> 4, (torch.arange(15) + expected).to(torch.uint8))


@pytest.mark.parametrize(("code", "dtype"), grid(SYMMETRIC, [torch.bfloat16, torch.float16]))
def test_every_16_bit_pattern_alone_in_a_block_comes_back(code: str, dtype: torch.dtype) -> None:
    # Alone, a number is its block's maximum: it comes back exactly up to the rounding of level * (x / level).
    x = every_pattern(dtype)
    codes, scales = ops.quantize_blockwise(x.unsqueeze(1), code, 16, torch.float32, None)
    back = ops.dequantize_blockwise(codes, scales, code, 16, 1, torch.float32).squeeze(1)
    finite = x.isfinite()
    assert back[~finite].isnan().all()
    assert (codes[~finite] == 0).all()
    vanished = finite & (x.float().abs() / LEVEL_MAX[code] < MIN_SCALE)
    assert back[vanished].eq(0).all()
    ordinary = finite & ~vanished
    error = (back[ordinary].double() - x[ordinary].double()).abs()
    # The scale is rounded once to 24 bits, and the product once more.
    assert (error <= x[ordinary].double().abs() * 2.0**-23).all()


@pytest.mark.parametrize(("code", "scale_dtype"), grid(SYMMETRIC, DTYPES, strength=1))
@settings(max_examples=60)
@given(data=st.data())
def test_round_trip_error_stays_within_the_derived_bound(
    code: str, scale_dtype: torch.dtype, data: st.DataObject
) -> None:
    shape = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 80)))
    exponent = data.draw(st.integers(-20, 10))
    x = torch.from_numpy(
        data.draw(hnp.arrays(np.float32, shape, elements=st.floats(-1, 1, width=32, allow_subnormal=False)))
    )
    x = x * 2.0**exponent
    block_size = data.draw(st.sampled_from(BLOCK_SIZES))
    seed = data.draw(st.none() | st.integers(-(2**63), 2**63 - 1))
    codes, scales = ops.quantize_blockwise(x, code, block_size, scale_dtype, seed)
    back = reference.dequantize_blockwise(codes, scales, code, block_size, shape[1], torch.float32)

    gap = levels_of(code).diff().max()
    scale = scales.double().repeat_interleave(block_size, -1)[:, : shape[1]]
    # Half a gap to the nearest level, a whole one to the farther of two; a scale that was rounded down leaves its
    # block's largest values that much outside the levels; 2**-20 covers the fp32 roundings on the way.
    rounding = torch.finfo(scale_dtype).eps * LEVEL_MAX[code]
    bound = scale * ((gap if seed is not None else gap / 2) + rounding) * (1 + 2.0**-20)
    # fp16 scales below 2**-14 lose precision step by step: half a step is 2**-25.
    smallest = 2.0**-25 if scale_dtype == torch.float16 else MIN_SCALE
    bound = bound + smallest * LEVEL_MAX[code]
    assert ((back.double() - x.double()).abs() <= bound).all()


@pytest.mark.parametrize("code", SYMMETRIC)
def test_nan_and_infinity_make_their_block_nan_and_no_other(code: str) -> None:
    expected = torch.zeros(3, 100, dtype=torch.bool)
    expected[1, 32:64] = True
    for case in itertools.product(DTYPES, DTYPES, [math.nan, math.inf, -math.inf]):
        dtype, scale_dtype, value = case
        x = torch.randn(3, 100).to(dtype)
        x[1, 37] = value
        codes, scales = ops.quantize_blockwise(x, code, 32, scale_dtype, None)
        back = ops.dequantize_blockwise(codes, scales, code, 32, 100, dtype)
        assert torch.equal(back.isnan(), expected), case
        assert scales.isnan().sum() == 1, case
        assert codes[1, 32 * BITS[code] // 8 : 64 * BITS[code] // 8].eq(0).all(), case


def test_every_nan_comes_out_the_same() -> None:
    for dtype, nan_bits in zip(DTYPES, (0x7FC00000, 0x7FC0, 0x7E00), strict=True):
        nans = every_pattern(dtype) if dtype != torch.float32 else torch.tensor([-1, 0x7F800001]).int().view(dtype)
        nans = nans[nans.isnan()].unsqueeze(1)
        as_int = torch.int32 if dtype == torch.float32 else torch.int16
        codes, scales = ops.quantize_blockwise(nans, "nf4", 16, dtype, None)
        assert scales.view(as_int).eq(nan_bits).all()
        # Scales that something else wrote: any NaN, either sign.
        back = ops.dequantize_blockwise(torch.full_like(codes, 0x0F), nans, "nf4", 16, 1, dtype)
        assert back.view(as_int).eq(nan_bits).all()


@pytest.mark.parametrize(("scale_dtype", "largest"), [(torch.float16, 65520.0), (torch.bfloat16, 3.3961775e38)])
def test_scale_that_overflows_is_nan(scale_dtype: torch.dtype, largest: float) -> None:
    # `largest` is the first number that rounds to infinity.
    x = torch.tensor([[largest], [np.nextafter(np.float32(largest), np.float32(0))]])
    codes, scales = ops.quantize_blockwise(x, "nf4", 16, scale_dtype, None)
    assert scales.isnan().flatten().tolist() == [True, False]
    assert ops.dequantize_blockwise(codes, scales, "nf4", 16, 1, torch.float32).isfinite().flatten().tolist() == [
        False,
        True,
    ]


@pytest.mark.parametrize("scale_dtype", DTYPES)
def test_vanishing_block_becomes_zeros(scale_dtype: torch.dtype) -> None:
    smallest_kept = 2.0**-24 if scale_dtype == torch.float16 else MIN_SCALE
    # fp16 rounds half its smallest step to even, which is zero; the other types are cut off at 2**-126.
    vanishes = smallest_kept / 2 if scale_dtype == torch.float16 else smallest_kept * (1 - 2.0**-7)
    for case in itertools.product(SYMMETRIC, [None, 3]):
        code, seed = case
        x = torch.tensor([[0.0], [-0.0], [1e-45], [vanishes * LEVEL_MAX[code]], [smallest_kept * LEVEL_MAX[code]]])
        codes, scales = ops.quantize_blockwise(x, code, 16, scale_dtype, seed)
        assert scales.flatten().tolist() == [0.0, 0.0, 0.0, 0.0, smallest_kept], case
        assert codes[:4].eq(0 if code in ARITHMETIC else codebook(code).zero_code).all(), case
        back = ops.dequantize_blockwise(codes, scales, code, 16, 1, torch.float32)
        assert back.flatten().tolist() == [0.0, 0.0, 0.0, 0.0, smallest_kept * LEVEL_MAX[code]], case
        assert not back.signbit().any(), case


@pytest.mark.parametrize("code", SYMMETRIC)
def test_rows_are_quantized_one_by_one(code: str) -> None:
    for length in (1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 100, 255, 256, 257):
        x = torch.randn(4, length)
        codes, scales = ops.quantize_blockwise(x, code, 64, torch.bfloat16, None)
        for row in range(4):
            row_codes, row_scales = ops.quantize_blockwise(x[row], code, 64, torch.bfloat16, None)
            assert torch.equal(codes[row], row_codes), length
            assert torch.equal(scales[row], row_scales), length
        # Every code is at its bits, and nothing is behind the last.
        levels = ops.dequantize_blockwise(codes, torch.ones_like(scales), code, 64, length, torch.float32)
        assert torch.equal(levels, level_of_each_code(code)[each_code(codes, code, length).int()]), length


@pytest.mark.parametrize(
    ("code", "unwritten", "level"), [("e2m1", 8, 0.0), ("int4", 8, -8.0), ("int5", 16, -16.0), ("int6", 32, -32.0)]
)
def test_most_negative_code_can_be_read_but_is_never_written(code: str, unwritten: int, level: float) -> None:
    stream = (unwritten | unwritten << BITS[code]).to_bytes(-(-2 * BITS[code] // 8), "little")
    codes, scales = torch.tensor([list(stream)], dtype=torch.uint8), torch.tensor([[2.0]])
    back = ops.dequantize_blockwise(codes, scales, code, 16, 2, torch.float32)
    assert back.tolist() == [[2 * level, 2 * level]]
    x = every_pattern(torch.bfloat16)
    x = x[x.isfinite()].view(-1, 2)[::5]
    for seed in (None, 1):
        written, scales = ops.quantize_blockwise(x, code, 16, torch.float32, seed)
        written = written[(scales.isfinite() & (scales > 0)).squeeze(1)]
        assert not each_code(written, code, 2).eq(unwritten).any()


# --- a center ---


@pytest.mark.parametrize("code", CODES)
def test_a_center_keeps_what_tells_values_apart(code: str) -> None:
    center = torch.linspace(-1e4, 1e4, 96)
    x = torch.randn(50, 96, generator=torch.Generator().manual_seed(0)) + center
    centered = ops.quantize_blockwise(x, code, 32, torch.float32, None, center)
    back = ops.dequantize_blockwise(*centered, code, 32, 96, torch.float32, center)
    codes, scales = ops.quantize_blockwise(x - center, code, 32, torch.float32, None)
    assert torch.equal(back, ops.dequantize_blockwise(codes, scales, code, 32, 96, torch.float32) + center)
    if code == "uint2":  # which has a minimum for each block
        return
    assert (back - x).abs().max() < 1.0
    far = ops.dequantize_blockwise(
        *ops.quantize_blockwise(x, code, 32, torch.float32, None), code, 32, 96, torch.float32
    )
    assert (far - x).abs().max() > 20.0


def test_a_center_is_subtracted_and_added_in_fp32() -> None:
    # 0.5 is lost beside 512 in bf16, and 65504 + 65504 in fp16.
    for dtype, value, center in ((torch.bfloat16, 512.0, 511.5), (torch.float16, 65504.0, -65504.0)):
        x = torch.full((2, 16), value, dtype=dtype)
        codes, scales = ops.quantize_blockwise(x, "int8", 16, torch.float32, None, torch.full((16,), center))
        assert scales.tolist() == [[(torch.tensor(value - center) / 127).item()]] * 2
        assert torch.equal(ops.dequantize_blockwise(codes, scales, "int8", 16, 16, dtype, torch.full((16,), center)), x)


# --- stochastic rounding ---


@pytest.mark.parametrize("code", SYMMETRIC)
def test_stochastic_rounding_takes_one_of_the_two_neighbours_without_bias(code: str) -> None:
    count = 1 << 14
    levels = levels_of(code)
    for value in (-0.93, -0.31, 0.017, 0.5, 0.77):
        n = value * LEVEL_MAX[code]
        # Each row is one block: the maximum, then 15 copies of the value.
        x = torch.full((count, 16), n, dtype=torch.float32)
        x[:, 0] = LEVEL_MAX[code]
        codes, scales = ops.quantize_blockwise(x, code, 16, torch.float32, 11)
        back = ops.dequantize_blockwise(codes, scales, code, 16, 16, torch.float32).double()
        assert back[:, 0].eq(LEVEL_MAX[code]).all()
        exact = x[0, 1].double()
        upper = int(torch.searchsorted(levels, exact))
        low, high = levels[upper - 1], levels[upper]
        samples = back[:, 1:].flatten()
        assert (samples.eq(low) | samples.eq(high)).all()
        fraction = (exact - low) / (high - low)
        standard_error = (high - low) * (fraction * (1 - fraction) / samples.numel()).sqrt()
        assert (samples.mean() - exact).abs() <= 4 * standard_error


@pytest.mark.parametrize("code", SYMMETRIC)
def test_stochastic_rounding_keeps_levels(code: str) -> None:
    levels = levels_of(code).float()
    x = torch.cat((levels[-1:], levels)).repeat(50, 1)
    codes, scales = ops.quantize_blockwise(x, code, 256, torch.float32, 2)
    assert torch.equal(ops.dequantize_blockwise(codes, scales, code, 256, x.shape[1], torch.float32), x)


def test_stochastic_rounding_depends_on_seed_and_index_only() -> None:
    x = torch.randn(8, 96)
    codes, _ = ops.quantize_blockwise(x, "int8", 32, torch.float32, 9)
    again, _ = ops.quantize_blockwise(x, "int8", 32, torch.float32, 9)
    other, _ = ops.quantize_blockwise(x, "int8", 32, torch.float32, 10)
    moved, _ = ops.quantize_blockwise(x[3:], "int8", 32, torch.float32, 9, first_index=3 * 96)
    assert torch.equal(codes, again)
    assert not torch.equal(codes, other)
    assert torch.equal(codes[3:], moved)


def test_random_numbers_are_uniform_and_uncorrelated() -> None:
    count = 1 << 18
    index = torch.arange(count)
    streams = [reference.uniform(seed, index + start) for seed, start in ((0, 0), (1, 0), (2, 0), (0, 2**32), (-1, 0))]
    for u in streams:
        assert u.min() >= 0
        assert u.max() < 1
        observed = torch.histc(u, 256, 0, 1).double()
        chi_square = ((observed - count / 256) ** 2 / (count / 256)).sum()
        assert chi_square < 255 + 5 * math.sqrt(2 * 255)
        for lag in (1, 2, 64, 4096):
            correlation = torch.corrcoef(torch.stack((u[:-lag], u[lag:])))[0, 1]
            assert correlation.abs() < 5 / math.sqrt(count)
    correlations = torch.corrcoef(torch.stack(streams)) - torch.eye(len(streams))
    assert correlations.abs().max() < 5 / math.sqrt(count)
