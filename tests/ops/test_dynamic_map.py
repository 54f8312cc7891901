"""The 8-bit maps of Adam's moments: levels, nearest rounding, and what never becomes zero."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.ops import dequantize_dynamic, quantize_dynamic
from laconic.ops.dynamic_map import dynamic_map, zero_code

SIGNED = pytest.mark.parametrize("signed", [True, False])


def levels(signed: bool) -> torch.Tensor:
    return torch.tensor(dynamic_map(signed).levels)


def with_scale(n: torch.Tensor, scale: float) -> torch.Tensor:
    """n in blocks of 256 that start with 1 and are multiplied by a scale."""
    values = torch.nn.functional.pad(n, (0, -len(n) % 255)).view(-1, 255)
    return torch.cat((torch.ones(len(values), 1), values), dim=1) * scale


@SIGNED
def test_levels_are_those_of_bitsandbytes(signed: bool) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    assert torch.equal(levels(signed), functional.create_dynamic_map(signed=signed))


@SIGNED
@pytest.mark.parametrize("scale", [1.0, 3.7e-9, 2.0**-126, 1e30])
def test_every_level_keeps_its_code(signed: bool, scale: float) -> None:
    codes, scales = quantize_dynamic(with_scale(levels(signed), scale), signed=signed)
    assert torch.equal(scales, torch.full_like(scales, scale))
    assert codes[:, 1:].flatten()[:256].tolist() == list(range(256))
    assert (codes[:, 0] == 255).all()
    values = dequantize_dynamic(codes, scales, signed=signed)
    assert torch.equal(values[:, 1:].flatten()[:256], levels(signed) * scale)


@SIGNED
def test_every_normalized_number_gets_the_nearest_level(signed: bool) -> None:
    # All numbers of [2**-26, 1] with 12 bits of mantissa, and those around each midpoint. The fp32 arithmetic may take
    # a number for one that differs by 2**-19 of it.
    n = torch.arange(101 << 23, (127 << 23) + 1, 1 << 11, dtype=torch.int32).view(torch.float32)
    middle = (levels(signed)[1:] + levels(signed)[:-1]) / 2
    middle = middle[middle > 0]
    n = torch.cat((n, middle * (1 - 2.0**-18), middle * (1 + 2.0**-18)))
    if signed:
        n = torch.cat((n, -n))
    codes, _ = quantize_dynamic(with_scale(n, 1.0), signed=signed)
    found = levels(signed)[codes[:, 1:].flatten()[: len(n)].int()]
    nearest = levels(signed)[torch.searchsorted(((levels(signed)[1:] + levels(signed)[:-1]) / 2), n)]
    far = (found - n).abs() - (nearest - n).abs() > 2.0**-19 * n.abs()
    if signed:
        assert not far.any()
    else:
        # Only where nearest would be zero: there it is the smallest level instead.
        assert (found[far] == levels(signed)[1]).all()
        assert (nearest[far] == 0).all()


@SIGNED
def test_codes_agree_with_bitsandbytes_where_it_rounds_to_nearest(signed: bool) -> None:
    # On the CPU bitsandbytes 0.50 finds levels through a table of limited resolution, which is coarse below 1e-2.
    functional = pytest.importorskip("bitsandbytes.functional")
    x = torch.randn(64, 256) if signed else torch.randn(64, 256).square()
    codes, scales = quantize_dynamic(x, signed=signed)
    theirs, state = functional.quantize_blockwise(x, code=levels(signed), blocksize=256)
    assert torch.equal(scales.flatten(), state.absmax)
    high = (x / scales).abs() > 0.02
    assert (codes != theirs)[high].float().mean() < 0.01
    assert (codes.int() - theirs.int())[high].abs().max() <= 1


def test_second_moments_become_zero_only_if_they_are() -> None:
    v = torch.tensor([[1e9, 1.0, 1e-30, 1e-35, 0.0]])
    codes, scales = quantize_dynamic(v, signed=False)
    assert codes.tolist() == [[255, 1, 1, 1, 0]]
    assert scales.tolist() == [[1e9]]


@SIGNED
def test_blocks_that_are_not_ordinary(signed: bool) -> None:
    inf, nan = float("inf"), float("nan")
    rows = torch.tensor([[0.0, 0.0], [2.0**-127, 0.0], [1.0, inf], [nan, 1.0], [2.0**-126, 0.0]])
    codes, scales = quantize_dynamic(rows, signed=signed)
    assert scales[:2].tolist() == [[0.0], [0.0]]
    assert (codes[:4] == zero_code(signed)).all()
    assert scales[2:4].isnan().all()
    assert dequantize_dynamic(codes, scales, signed=signed)[2:4].isnan().all()
    assert codes[4].tolist() == [255, zero_code(signed)]


@settings(max_examples=60)
@given(
    rows=st.integers(0, 3),
    length=st.sampled_from([1, 2, 255, 256, 257, 600]),
    spread=st.floats(0, 40),
    signed=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_error_is_at_most_half_a_gap(rows: int, length: int, spread: float, signed: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, length, generator=generator)
    x *= torch.exp2(spread * torch.randn(rows, length, generator=generator))
    x = x.clamp(-1e37, 1e37)
    if not signed:
        x = x.abs()
    codes, scales = quantize_dynamic(x, signed=signed)
    assert codes.shape == x.shape
    assert scales.shape == (rows, -(-length // 256))
    back = dequantize_dynamic(codes, scales, signed=signed)
    n = (x / scales.repeat_interleave(256, dim=1)[:, :length]).nan_to_num(0.0)
    # Relative to the value the widest gap is that above the smallest level of the signed map, 5.5e-7 to 3.25e-6.
    largest = scales.repeat_interleave(256, dim=1)[:, :length]
    error = (back - x).abs()
    assert (error <= torch.maximum(0.72 * x.abs(), 3.3e-7 * largest)).all()
    high = n.abs() > 0.11
    assert (error[high] <= (0.0071 if signed else 0.0036) * largest[high]).all()


def test_worked_examples_of_the_documentation() -> None:
    codes, scales = quantize_dynamic(torch.tensor([[0.5, -0.5, 0.001, 0.0]]), signed=True)
    assert (codes.tolist(), scales.tolist()) == ([[0xFF, 0x00, 0x90, 0x7F]], [[0.5]])
    values = dequantize_dynamic(codes, scales, signed=True)
    torch.testing.assert_close(values, torch.tensor([[0.5, -0.49648, 0.00092188, 0.0]]), rtol=1e-5, atol=0)
    codes, scales = quantize_dynamic(torch.tensor([[0.25, 0.001, 1e-9, 0.0]]), signed=False)
    assert (codes.tolist(), scales.tolist()) == ([[0xFF, 0x29, 0x01, 0x00]], [[0.25]])
    values = dequantize_dynamic(codes, scales, signed=False)
    torch.testing.assert_close(values, torch.tensor([[0.25, 0.00098828, 8.125e-8, 0.0]]), rtol=1e-5, atol=0)
