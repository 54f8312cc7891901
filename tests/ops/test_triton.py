"""The Triton kernels return the reference's bits: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from _pytest.mark.structures import ParameterSet

from laconic.ops import BITS, kernels_in_use, reference
from laconic.ops.codebooks import AFFINE, LEVEL_MAX, scales_per_block
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
from tests.ops.shards import FACTORS, awkward_shards, shards_of, strided

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


@on_device
@pytest.mark.parametrize("bits", [slow_in_interpreter(8), 12])
def test_all_bits_of_a_sum_are_the_references(bits: int) -> None:
    from laconic.ops.triton import reduce

    for number, (name, x) in enumerate(awkward_shards()):
        # The interpreter is slow: there each gradient takes one factor, and lies one way.
        for factor in FACTORS[number % 3 :][:1] if INTERPRETED else FACTORS:
            layouts = (shards_of(x, bits), strided(shards_of(x, bits)))
            for parts in layouts[number % 2 :][:1] if INTERPRETED else layouts:
                there = [part if part is None else part.to(DEVICE) for part in parts]
                found = reduce.sum_blockwise(*there, factor).cpu()
                assert same_bits(found, reference.sum_blockwise(*parts, factor)), (name, factor)
                packed = reduce.sum_requantize_blockwise(*there, factor)
                for one, other in zip(packed, reference.sum_requantize_blockwise(*parts, factor), strict=True):
                    assert same_bits(one.cpu(), other), (name, factor)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_tensors_take_the_triton_kernels() -> None:
    from laconic.ops import quantize_blockwise

    assert kernels_in_use()["cuda"]["implementation"] == "triton"
    x = torch.randn(8, 100)
    for found, expected in zip(quantize_blockwise(x.cuda()), quantize_blockwise(x), strict=True):
        assert same_bits(found.cpu(), expected)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("code", ["uint2", "nf4", pytest.param("int5", marks=pytest.mark.slow), "int8"])
def test_kernels_compile_without_fused_or_flushing_arithmetic(architecture: int, code: str) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from laconic.ops.triton import blockwise, reduce

    def ptx_of(kernel: triton.JITFunction, types: dict[str, str], constants: dict[str, object]) -> str:
        signature = {name: types.get(name, "constexpr" if name in constants else "i32") for name in kernel.arg_names}
        return triton.compile(
            ASTSource(fn=kernel, signature=signature, constexprs=constants),
            target=GPUTarget("cuda", architecture, 32),
            options={"enable_fp_fusion": False},
        ).asm["ptx"]

    shape = {"BITS": BITS[code], "BLOCK_SIZE": 64, "BLOCKS": 32, "ONE_ROW": False, "AFFINE": code in AFFINE}
    shape["CENTERED"] = code != "int5"
    pointers = {
        "codes_ptr": "*u8",
        "scales_ptr": "*i16",
        "table_ptr": "*fp32",
        "center_ptr": "*fp32",
        "factor_ptr": "*i16",
        "product_ptr": "*i16",
        "seed_key": "i64",
    }
    rounding = {"STOCHASTIC": code != "nf4", "SCALE_TYPE": "bfloat16", "LEVEL_MAX": LEVEL_MAX[code]}
    rounding |= {"MULTIPLIED": code == "nf4", "TYPE": "bfloat16"}
    sum_shape = {"RESIDUAL": code == "nf4", "REQUANTIZE": True, "BLOCK_SIZE": 128, "BLOCKS": 8, "values_ptr": None}
    sum_types = {"codes": "*u8", "scales": "*fp32", "residual_codes": "*u8", "residual_scales": "*fp32"}
    sum_pointers = {f"{name}_ptr": kind for name, kind in sum_types.items()} | {"factor": "fp32"}
    sum_pointers |= {f"new_{name}_ptr": kind.replace("fp", "i") for name, kind in sum_types.items()}
    for ptx in (
        ptx_of(blockwise._quantize_blockwise_kernel, pointers | {"x_ptr": "*i16"}, shape | rounding),
        ptx_of(blockwise._dequantize_blockwise_kernel, pointers | {"values_ptr": "*i16"}, shape | {"TYPE": "bfloat16"}),
        ptx_of(reduce._sum_blockwise_kernel, sum_pointers, sum_shape),
    ):
        assert "fma" not in ptx
        assert ".ftz" not in ptx
        assert ".approx" not in ptx
