"""adamw8bit_ in Triton returns the reference's bits: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from laconic.ops import reference
from tests.ops.adamw_cases import Case, awkward_gradients, follow, new_case, quantized
from tests.ops.cases import DTYPES, same_bits
from tests.ops.interpreter import DEVICE, INTERPRETED, numpy_may_warn, on_device

triton = pytest.importorskip("triton")

pytestmark = numpy_may_warn


def assert_same(case: Case, where: object, num_steps: int = 2, **options: object) -> None:
    from laconic.ops.triton import adamw

    expected = follow(reference.adamw8bit_, case.to("cpu"), num_steps, **options)
    found = follow(adamw.adamw8bit_, case.to(DEVICE), num_steps, **options)
    for step, (one, two) in enumerate(zip(found, expected, strict=True), start=1):
        for name in two:
            assert same_bits(one[name], two[name]), (where, step, name)


@on_device
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_bits_are_the_references(dtype: torch.dtype) -> None:
    everything = list(awkward_gradients())
    # The interpreter is slow; it takes every third tensor, starting elsewhere for each type.
    for name, gradient in everything[DTYPES.index(dtype) :: 3] if INTERPRETED else everything:
        assert_same(new_case(tuple(gradient.shape), dtype, gradient.to(dtype)), name)


@on_device
@pytest.mark.parametrize("bits", [8, 12])
def test_quantized_gradients_give_the_references_bits(bits: int) -> None:
    everything = list(awkward_gradients())
    for name, gradient in everything[bits // 12 :: 2] if INTERPRETED else everything:
        case = quantized(new_case(tuple(gradient.shape), torch.float32, gradient), bits)
        assert_same(replace(case, gradient_factor=torch.tensor(0.3)), name)


@on_device
@pytest.mark.parametrize("signed", [True, False])
def test_every_code_is_found_as_the_reference_finds_it(signed: bool) -> None:
    # With beta 0 a moment is the gradient or its square; numbers around every decision of the map.
    n = torch.arange(100 << 23, (127 << 23) + 1, 1 << 15, dtype=torch.int32).view(torch.float32)
    n = torch.cat((n, -n)) if signed else n.sqrt()
    blocks = torch.nn.functional.pad(n, (0, -len(n) % 255)).view(-1, 255)
    gradient = torch.cat((torch.ones(len(blocks), 1), blocks), dim=1)
    assert_same(new_case(tuple(gradient.shape), torch.float32, gradient), signed, 1, beta1=0.0, beta2=0.0)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
@pytest.mark.parametrize("architecture", [80, 90])
def test_kernel_compiles_without_fused_approximate_or_flushing_arithmetic(architecture: int) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from laconic.ops.triton import adamw

    constants = {
        "TYPE": "bfloat16",
        "QUANTIZED": True,
        "RESIDUAL": True,
        "FACTOR": True,
        "MAXIMIZE": False,
        "BLOCKS": 4,
        "ONE_ROW": False,
    }
    types = {"parameter_ptr": "*i16", "length": "i32", "num_blocks": "i32"}
    names = adamw._adamw_kernel.arg_names
    types |= {name: "*u8" for name in names if name.endswith("codes_ptr")} | {"gradient_ptr": "*u8"}
    types |= {name: "*fp32" for name in names if name.endswith(("scales_ptr", "map_ptr", "factor_ptr"))}
    signature = {name: "constexpr" if name in constants else types.get(name, "fp32") for name in names}
    ptx = triton.compile(
        ASTSource(fn=adamw._adamw_kernel, signature=signature, constexprs=constants),
        target=GPUTarget("cuda", architecture, 32),
        options={"enable_fp_fusion": False},
    ).asm["ptx"]
    assert "sqrt.rn.f32" in ptx
    assert "div.rn.f32" in ptx
    for word in ("fma", ".ftz", ".approx"):
        assert word not in ptx
