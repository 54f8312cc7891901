"""sum_rows in Triton returns the reference's bits: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from laconic.ops import reference
from tests.ops.cases import DTYPES, every_pattern, same_bits
from tests.ops.interpreter import DEVICE, INTERPRETED, numpy_may_warn, on_device
from tests.ops.test_rows import entries

triton = pytest.importorskip("triton")

pytestmark = numpy_may_warn


def in_triton(rows: Tensor, index: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
    from laconic.ops.triton import rows as kernels

    there = None if weights is None else weights.to(DEVICE)
    return kernels.sum_rows(rows.to(DEVICE), index.to(DEVICE), offsets.to(DEVICE), there).cpu()


@on_device
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_rows", "num_sums", "num_entries", "width"),
    [(9, 7, 30, 5), (3, 4, 9, 1025), (1, 1, 1, 1), (4, 3, 0, 8), (0, 3, 0, 8), (3, 2, 4, 0)],
)
def test_all_bits_are_the_references(
    num_rows: int, num_sums: int, num_entries: int, width: int, dtype: torch.dtype, weighted: bool
) -> None:
    index, offsets, weights = entries(max(1, num_rows), num_sums, num_entries, width)
    generator = torch.Generator().manual_seed(width)
    spread = torch.exp2(20 * torch.randn(num_rows, width, generator=generator))
    rows = (torch.randn(num_rows, width, generator=generator) * spread).to(dtype)
    arguments = rows, index, offsets, weights if weighted else None
    assert same_bits(in_triton(*arguments), reference.sum_rows(*arguments))


@on_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernel_agrees_on_every_number(dtype: torch.dtype) -> None:
    rows = torch.stack([every_pattern(dtype), every_pattern(dtype).flip(0), torch.zeros(1 << 16, dtype=dtype)])
    arguments = rows, torch.tensor([0, 0, 1, 2]), torch.tensor([0, 1, 4]), torch.tensor([1.0, 0.37, 1.0, 1.0])
    assert same_bits(in_triton(*arguments), reference.sum_rows(*arguments))


@on_device
@pytest.mark.parametrize(
    ("index", "offsets", "is_nan"),
    [
        ([0, 3, 1], [0, 2, 3], [True, False]),
        ([0, -1, 1], [0, 2, 3], [True, False]),
        ([0, 1, 1], [0, 2, 4], [False, True]),
        ([0, 1, 1], [2, 1, 3], [True, False]),
        ([0, 1, 1], [-1, 1, 3], [True, False]),
    ],
)
def test_sums_whose_entries_lead_outside_are_nan(index: list[int], offsets: list[int], is_nan: list[bool]) -> None:
    sums = in_triton(torch.ones(3, 2), torch.tensor(index), torch.tensor(offsets), None)
    assert sums.isnan().tolist() == [[nan] * 2 for nan in is_nan]


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
@pytest.mark.parametrize("architecture", [80, 90])
def test_kernel_compiles_without_fused_arithmetic(architecture: int) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from laconic.ops.triton import rows

    constants = {"WEIGHTED": True, "TYPE": "bfloat16", "COLUMNS": 1024}
    types = {
        "rows_ptr": "*i16",
        "index_ptr": "*i64",
        "offsets_ptr": "*i64",
        "weights_ptr": "*fp32",
        "sums_ptr": "*i16",
    }
    names = rows._sum_rows_kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    ptx = triton.compile(
        ASTSource(fn=rows._sum_rows_kernel, signature=signature, constexprs=constants),
        target=GPUTarget("cuda", architecture, 32),
        options={"enable_fp_fusion": False},
    ).asm["ptx"]
    assert "mul.f32" in ptx or "mul.rn.f32" in ptx
    assert "fma" not in ptx
    assert ".ftz" not in ptx
