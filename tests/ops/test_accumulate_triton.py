"""The gradient store's Triton kernels return the reference's bits: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from laconic.ops import reference
from tests.ops.cases import DTYPES
from tests.ops.interpreter import DEVICE, INTERPRETED, numpy_may_warn, on_device, slow_in_interpreter
from tests.ops.test_accumulate import Store, awkward_gradients, same_store

triton = pytest.importorskip("triton")

pytestmark = numpy_may_warn


def moved(store: Store, device: str) -> Store:
    other = store.copy()
    other.parts = tuple(None if part is None else part.to(device) for part in other.parts)
    return other


@on_device
@pytest.mark.parametrize(
    ("dtype", "bits"),
    [(dtype, 12) if dtype == torch.bfloat16 else slow_in_interpreter(dtype, 12) for dtype in DTYPES]
    + [(dtype, 8) if dtype == torch.float32 else slow_in_interpreter(dtype, 8) for dtype in DTYPES],
)
def test_all_bits_are_the_references(dtype: torch.dtype, bits: int) -> None:
    from laconic.ops.triton import accumulate

    for number, (name, gradient) in enumerate(awkward_gradients(dtype)):
        # The interpreter is slow: there each gradient takes one number of bits per type.
        if INTERPRETED and (number + DTYPES.index(dtype)) % 2 == (bits == 12):
            continue
        if INTERPRETED and gradient.numel() > 4096:
            gradient = gradient[::37]
        expected = Store(gradient.numel(), bits)
        found = moved(expected, DEVICE)
        for alpha in (1.0, -0.37):
            reference.accumulate_blockwise_(*expected.parts, gradient, alpha)
            accumulate.accumulate_blockwise_(*found.parts, gradient.to(DEVICE), alpha)
            assert same_store(moved(found, "cpu"), expected), (name, alpha)
            total = reference.square_sum_blockwise(*expected.parts)
            total_found = accumulate.square_sum_blockwise(*found.parts).cpu()
            assert total_found == total or (total.isnan() and total_found.isnan()), (name, alpha)


@on_device
def test_square_sum_over_many_programs_has_the_references_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    from laconic.ops.triton import accumulate

    monkeypatch.setattr(accumulate, "_FOLD", 8)
    store = Store(128 * 16 * 70 + 3, 8)
    store.parts[0].random_(0, 256, generator=torch.Generator().manual_seed(0))
    store.parts[1].normal_(generator=torch.Generator().manual_seed(1)).abs_()
    found = accumulate.square_sum_blockwise(*moved(store, DEVICE).parts)
    assert found.cpu() == reference.square_sum_blockwise(*store.parts)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
@pytest.mark.parametrize("residual", [False, True])
def test_kernels_compile_without_fused_or_flushing_arithmetic(residual: bool) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from laconic.ops.triton import accumulate

    def ptx_of(kernel: triton.JITFunction, types: dict[str, str], constants: dict[str, object]) -> str:
        signature = {name: types.get(name, "constexpr" if name in constants else "i32") for name in kernel.arg_names}
        return triton.compile(
            ASTSource(fn=kernel, signature=signature, constexprs=constants),
            target=GPUTarget("cuda", 90, 32),
            options={"enable_fp_fusion": False},
        ).asm["ptx"]

    pointers = {"codes_ptr": "*u8", "scales_ptr": "*fp32", "residual_codes_ptr": "*u8", "residual_scales_ptr": "*fp32"}
    shape = {"RESIDUAL": residual, "BLOCKS": 16}
    for ptx in (
        ptx_of(accumulate._accumulate_kernel, pointers | {"gradient_ptr": "*i16", "alpha": "fp32"}, shape),
        ptx_of(accumulate._square_kernel, pointers | {"sums_ptr": "*fp64"}, shape | {"ROUNDS": 4}),
        ptx_of(accumulate._fold_kernel, {"values_ptr": "*fp64", "sums_ptr": "*fp64"}, {"FOLD": 1024, "ROUNDS": 10}),
    ):
        assert "fma" not in ptx
        assert ".ftz" not in ptx
        assert ".approx" not in ptx
