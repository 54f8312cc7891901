"""The Triton kernels return the reference's bits: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from _pytest.mark.structures import ParameterSet

from laconic.ops import BITS, kernels_in_use, reference
from laconic.ops.codebooks import scales_per_block
from tests.ops.cases import (
    BLOCK_SIZES,
    CODES,
    DTYPES,
    FIRST_INDEX,
    awkward_tensors,
    center_of,
    every_pattern,
    same_bits,
)
from tests.ops.interpreter import DEVICE, INTERPRETED, numpy_may_warn, on_device, slow_in_interpreter

triton = pytest.importorskip("triton")

pytestmark = numpy_may_warn


def each_code_with(dtypes: Sequence[torch.dtype], fast: Sequence[str]) -> list[ParameterSet]:
    """Every code with every type; in the interpreter the default run takes the codes in `fast` with one type each."""
    cases = []
    for number, code in enumerate(CODES):
        for place, dtype in enumerate(dtypes):
            here = code in fast and place == number % len(dtypes)
            cases.append(pytest.param(code, dtype) if here else slow_in_interpreter(code, dtype))
    return cases


@on_device
@pytest.mark.parametrize(("code", "dtype"), each_code_with(DTYPES, ("uint2", "nf4", "int8")))
def test_all_bits_are_the_references(dtype: torch.dtype, code: str) -> None:
    from laconic.ops.triton import blockwise

    everything = list(itertools.product((None, 5), BLOCK_SIZES, DTYPES, DTYPES, (False, True)))
    for number, (name, x) in enumerate(awkward_tensors(dtype)):
        # The interpreter is slow: there each tensor takes every 37th choice, starting elsewhere each time.
        for seed, block_size, scale_dtype, out, is_centered in (
            everything[number % 37 :: 37] if INTERPRETED else everything
        ):
            where = (name, seed, block_size, scale_dtype, out, is_centered)
            length = x.shape[-1] if x.dim() else 1
            center = center_of(length) if is_centered else None
            there = None if center is None else center.to(DEVICE)
            codes, scales = reference.quantize_blockwise(
                x, code, block_size, scale_dtype, seed, center, first_index=FIRST_INDEX
            )
            found_codes, found_scales = blockwise.quantize_blockwise(
                x.to(DEVICE), code, block_size, scale_dtype, seed, there, first_index=FIRST_INDEX
            )
            assert same_bits(found_scales.cpu(), scales), where
            assert same_bits(found_codes.cpu(), codes), where
            back = reference.dequantize_blockwise(codes, scales, code, block_size, length, out, center)
            found = blockwise.dequantize_blockwise(
                codes.to(DEVICE), scales.to(DEVICE), code, block_size, length, out, there
            )
            assert same_bits(found.cpu(), back), where


@on_device
@pytest.mark.parametrize(("code", "dtype"), each_code_with(DTYPES, ("nf4", "int8")))
def test_all_bits_of_a_product_and_its_codes_are_the_references(dtype: torch.dtype, code: str) -> None:
    from laconic.ops.triton import blockwise

    for number, (name, b) in enumerate(awkward_tensors(dtype)):
        format = (code, BLOCK_SIZES[number % 5], DTYPES[number % 3])
        a = (b.flip(0) if b.dim() else b) * 3
        found = blockwise.multiply_quantize_blockwise(a.to(DEVICE), b.to(DEVICE), *format)
        for one, other in zip(found, reference.multiply_quantize_blockwise(a, b, *format), strict=True):
            assert same_bits(one.cpu(), other), (name, format)


@on_device
@pytest.mark.parametrize(("code", "dtype"), each_code_with((torch.bfloat16, torch.float16), ()))
def test_every_16_bit_pattern_gives_the_references_bits(dtype: torch.dtype, code: str) -> None:
    from laconic.ops.triton import blockwise

    x = every_pattern(dtype)
    for scale_dtype, seed in ((torch.float32, None), (torch.bfloat16, 5), (torch.float16, None)):
        codes, scales = reference.quantize_blockwise(x, code, 16, scale_dtype, seed)
        found_codes, found_scales = blockwise.quantize_blockwise(x.to(DEVICE), code, 16, scale_dtype, seed)
        assert same_bits(found_scales.cpu(), scales)
        assert same_bits(found_codes.cpu(), codes)
        # Scales that quantize never writes: signs, subnormals, infinities, NaNs.
        some = every_pattern(scale_dtype)[:: 23 if INTERPRETED else 5] if scale_dtype != torch.float32 else scales
        some = some[: len(some) // 2 * 2]
        length = len(some) // scales_per_block(code) * 16
        every_code = torch.arange(length * BITS[code] // 8).remainder(251).to(torch.uint8)
        back = reference.dequantize_blockwise(every_code, some, code, 16, length, dtype)
        found = blockwise.dequantize_blockwise(every_code.to(DEVICE), some.to(DEVICE), code, 16, length, dtype)
        assert same_bits(found.cpu(), back)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_tensors_take_the_triton_kernels() -> None:
    from laconic.ops import quantize_blockwise

    assert kernels_in_use()["cuda"]["implementation"] == "triton"
    x = torch.randn(8, 100)
    for found, expected in zip(quantize_blockwise(x.cuda()), quantize_blockwise(x), strict=True):
        assert same_bits(found.cpu(), expected)
