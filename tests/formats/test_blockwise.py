"""BlockFormat and BlockTensor: choosing a format, exact sizes, and the way back."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from laconic.errors import FormatError
from laconic.formats import BlockFormat, BlockTensor
from laconic.ops import BITS
from laconic.options import ACTIVATION_BITS, listed

CODES = tuple(BITS)
SHAPES = [(), (0,), (1,), (5, 0), (0, 5), (70,), (3, 64), (2, 3, 257)]


def test_bits_choose_the_code() -> None:
    assert BlockFormat.from_bits(4) == BlockFormat("nf4", 64, torch.bfloat16)
    for bits, code in ((2, "uint2"), (5, "int5"), (6, "int6"), (8, "int8")):
        assert BlockFormat.from_bits(bits) == BlockFormat(code, 64, torch.bfloat16)
    assert BlockFormat.from_bits(4, code="e2m1", block_size=16, scale_dtype=torch.float16) == BlockFormat(
        "e2m1", 16, torch.float16
    )
    assert BlockFormat.from_bits(16) is None
    assert [BlockFormat(code).bits for code in ("uint2", "nf4", "e2m1", "int4", "int5")] == [2, 4, 4, 4, 5]


@pytest.mark.parametrize(
    ("bits", "code", "message"),
    [
        (7, None, rf"bits is 7, but it must be {listed(ACTIVATION_BITS)} \(16 keeps the tensor as it is\)"),
        (4, "int8", "code is 'int8', which has 8 bits, but bits is 4; change one of them"),
        (16, "nf4", "code is 'nf4', which has 4 bits, but bits is 16; change one of them"),
        (4, "nf5", f"code is 'nf5', but it must be one of {', '.join(CODES)}"),
    ],
)
def test_bits_without_a_format_are_refused(bits: int, code: str | None, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        BlockFormat.from_bits(bits, code=code)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"code": "fp4"}, f"code is 'fp4', but it must be one of {', '.join(CODES)}"),
        ({"block_size": 100}, "block_size is 100, but it must be one of 16, 32, 64, 128, 256"),
        ({"scale_dtype": torch.int8}, "scale_dtype is torch.int8, but it must be one of float32, bfloat16, float16"),
    ],
)
def test_format_that_does_not_exist_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        BlockFormat(**arguments)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_sizes_are_exact_and_shapes_come_back(code: str, scale_dtype: torch.dtype) -> None:
    for shape, dtype in itertools.product(SHAPES, (torch.float32, torch.bfloat16, torch.float16)):
        format = BlockFormat(code, 32, scale_dtype)
        x = torch.randn(shape, dtype=dtype)
        quantized = format.quantize(x)
        assert isinstance(quantized, BlockTensor)
        assert quantized.nbytes == format.nbytes(shape)
        assert quantized.nbytes == quantized.codes.numel() + quantized.scales.numel() * scale_dtype.itemsize
        back = quantized.dequantize()
        assert (back.shape, back.dtype) == (x.shape, x.dtype)
        assert quantized.dequantize(torch.float32).dtype == torch.float32


def test_nf4_takes_the_documented_4_25_bits() -> None:
    assert BlockFormat().nbytes((1024, 1024)) * 8 == 4.25 * 1024 * 1024


@pytest.mark.parametrize(("code", "bits"), [("int5", 5.25), ("int6", 6.25), ("int8", 8.25)])
def test_integers_are_truly_packed(code: str, bits: float) -> None:
    assert BlockFormat(code).quantize(torch.randn(64, 1024)).nbytes * 8 == bits * 64 * 1024
    # 13 codes of a row take whole bytes of their own.
    assert BlockFormat(code).quantize(torch.randn(3, 13)).codes.shape == (3, math.ceil(13 * int(bits) / 8))


# The largest of 128 Gaussian numbers is about 2.8 sigma; an error that is even over a step has a sigma of
# step / sqrt(12). So the relative error is near 2.8 / (M sqrt(12)).
@pytest.mark.parametrize(("code", "expected"), [("int4", 0.117), ("int5", 0.055), ("int6", 0.027), ("int8", 0.0065)])
def test_error_of_a_round_trip_is_the_known_one(code: str, expected: float) -> None:
    x = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0))
    back = BlockFormat(code, block_size=128, scale_dtype=torch.float32).quantize(x).dequantize()
    assert float((back - x).norm() / x.norm()) == pytest.approx(expected, rel=0.04)


def test_uint2_takes_two_bits_and_two_numbers_per_block() -> None:
    assert BlockFormat("uint2", 256).quantize(torch.randn(64, 1024)).nbytes * 8 == 2.125 * 64 * 1024
    assert BlockFormat("uint2").quantize(torch.randn(3, 13)).codes.shape == (3, 4)
    assert BlockFormat("uint2").is_stochastic
    assert not any(BlockFormat(code).is_stochastic for code in CODES[1:])


def test_seed_rounds_stochastically() -> None:
    x = torch.randn(4, 256)
    format = BlockFormat("int8")
    assert not torch.equal(format.quantize(x, seed=1).codes, format.quantize(x).codes)
    assert torch.equal(format.quantize(x, seed=1).codes, format.quantize(x, seed=1).codes)


def test_zero_dimensional_tensor_comes_back() -> None:
    quantized = BlockFormat("int8", 16, torch.float32).quantize(torch.tensor(-3.0))
    assert quantized.codes.shape == (1,)
    assert quantized.dequantize().item() == -3.0
