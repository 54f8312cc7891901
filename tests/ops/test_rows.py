"""Sums of picked rows: the specification in numbers, every kernel's bits, what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from laconic.errors import FormatError
from laconic.ops import native, reference, sum_rows
from tests.ops.cases import DTYPES, every_pattern, same_bits
from tests.ops.implementations import Kernels, each_kernel, num_examples
from tests.ops.interpreter import on_device


def entries(num_rows: int, num_sums: int, num_entries: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Index, offsets and weights; some sums may have no entry, and rows may be picked several times."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(num_rows, (num_entries,), generator=generator)
    ends = torch.randint(num_entries + 1, (num_sums - 1,), generator=generator).sort().values
    offsets = torch.cat([torch.tensor([0]), ends, torch.tensor([num_entries])])
    return index, offsets, torch.randn(num_entries, generator=generator)


def test_worked_example() -> None:
    rows = torch.tensor([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]])
    index, offsets = torch.tensor([2, 0, 2]), torch.tensor([0, 2, 2, 3])
    assert sum_rows(rows, index, offsets).tolist() == [[101.0, 202.0], [0.0, 0.0], [100.0, 200.0]]
    weights = torch.tensor([0.5, 3.0, -1.0])
    assert sum_rows(rows, index, offsets, weights).tolist() == [[53.0, 106.0], [0.0, 0.0], [-100.0, -200.0]]


def test_entries_are_added_in_their_order_and_rounded_once() -> None:
    # In fp32 1 is lost beside 2**25; in bfloat16 it would be lost beside 2**9.
    rows, offsets = torch.tensor([[2.0**25], [1.0], [-(2.0**25)]]), torch.tensor([0, 3])
    assert sum_rows(rows, torch.tensor([0, 1, 2]), offsets).item() == 0.0
    assert sum_rows(rows, torch.tensor([0, 2, 1]), offsets).item() == 1.0
    few = torch.tensor([[512.0], [1.0], [-512.0]]).bfloat16()
    assert sum_rows(few, torch.tensor([0, 1, 2]), offsets).item() == 1.0


@each_kernel
@settings(max_examples=num_examples(30))
@given(
    st.sampled_from(DTYPES), st.integers(0, 9), st.integers(1, 9), st.integers(0, 30), st.integers(0, 70), st.booleans()
)
@example(torch.float16, 3, 4, 9, 1025, True)  # more columns than a program takes
@example(torch.bfloat16, 1, 1, 1, 1, False)
@example(torch.float32, 4, 3, 0, 8, False)
@example(torch.bfloat16, 0, 3, 0, 8, True)
@example(torch.float32, 3, 2, 4, 0, True)
def test_all_bits_are_the_references(
    kernels: Kernels, dtype: torch.dtype, num_rows: int, num_sums: int, num_entries: int, width: int, weighted: bool
) -> None:
    index, offsets, weights = entries(max(num_rows, 1), num_sums, num_entries if num_rows else 0, width)
    generator = torch.Generator().manual_seed(width)
    spread = torch.exp2(20 * torch.randn(num_rows, width, generator=generator))
    rows = (torch.randn(num_rows, width, generator=generator) * spread).to(dtype)
    arguments = rows, index, offsets, weights if weighted else None
    assert same_bits(kernels.sum_rows(*arguments), reference.sum_rows(*arguments))


@each_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_agree_on_every_number(kernels: Kernels, dtype: torch.dtype) -> None:
    # 65,536 columns: parts of rows, infinities, NaNs, subnormals; minus zero and a zero make zero.
    rows = torch.stack([every_pattern(dtype), every_pattern(dtype).flip(0), torch.zeros(1 << 16, dtype=dtype)])
    arguments = rows, torch.tensor([0, 0, 1, 2]), torch.tensor([0, 1, 4]), torch.tensor([1.0, 0.37, 1.0, 1.0])
    assert same_bits(kernels.sum_rows(*arguments), reference.sum_rows(*arguments))


def test_rows_need_not_be_contiguous() -> None:
    index, offsets, weights = entries(6, 4, 9, 0)
    rows = torch.randn(5, 6).T
    assert same_bits(sum_rows(rows, index, offsets, weights), sum_rows(rows.contiguous(), index, offsets, weights))


@pytest.mark.parametrize("function", [reference.sum_rows, native.sum_rows])
@pytest.mark.parametrize(
    ("index", "offsets"),
    [([0, 3], [0, 2]), ([0, -1], [0, 2]), ([0, 1], [0, 1]), ([0, 1], [1, 2]), ([0, 1], [0, 2, 1, 2]), ([], [0, 1])],
)
def test_entries_that_lead_outside_are_refused(function: object, index: list[int], offsets: list[int]) -> None:
    if function is native.sum_rows and not native.supported_isas():
        pytest.skip("the C++ kernels are not built")
    arguments = torch.ones(3, 2), torch.tensor(index, dtype=torch.int64), torch.tensor(offsets), None
    with pytest.raises(FormatError, match="must be one of the 3 rows, and offsets must ascend from 0 to"):
        function(*arguments)  # type: ignore[operator]  # both take the same


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
def test_sums_in_triton_whose_entries_lead_outside_are_nan(
    index: list[int], offsets: list[int], is_nan: list[bool]
) -> None:
    sums = Kernels("triton").sum_rows(torch.ones(3, 2), torch.tensor(index), torch.tensor(offsets), None)
    assert sums.isnan().tolist() == [[nan] * 2 for nan in is_nan]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": torch.ones(3, 2).double()}, "rows.dtype is torch.float64, but it must be one of float32"),
        ({"rows": torch.ones(3)}, r"rows have shape \(3,\), but it must be \[rows, width\]"),
        ({"index": torch.tensor([0], dtype=torch.int32)}, "index.dtype is torch.int32, but it must be torch.int64"),
        ({"offsets": torch.tensor([[0, 1]])}, r"offsets have shape \(1, 2\), but it must be a vector"),
        ({"offsets": torch.tensor([], dtype=torch.int64)}, "offsets are empty, but they begin with 0"),
        ({"weights": torch.ones(1).double()}, "weights.dtype is torch.float64, but it must be torch.float32"),
        ({"weights": torch.ones(2)}, "there are 2 weights, but 1 entries in index"),
        ({"index": torch.zeros(1, dtype=torch.int64, device="meta")}, "rows are on cpu and index on meta"),
    ],
)
def test_bad_argument_is_named(change: dict[str, Tensor], message: str) -> None:
    arguments = {"rows": torch.ones(3, 2), "index": torch.tensor([0]), "offsets": torch.tensor([0, 1])} | change
    with pytest.raises(FormatError, match=message):
        sum_rows(**arguments)
