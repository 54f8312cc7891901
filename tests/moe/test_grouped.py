"""The grouped product against one product after the other, all its ways and refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from laconic.errors import RoutingError
from laconic.moe import GatedExperts, GptExperts, grouped_mm
from laconic.moe.experts.grouped_mm import runs_expert_by_expert, way_of


def truth(rows: Tensor, weights: Tensor, counts: list[int]) -> Tensor:
    groups = [part @ weight for part, weight in zip(rows.split(counts), weights, strict=True)]
    return torch.cat(groups)


@settings(max_examples=80)
@given(
    counts=st.lists(st.sampled_from([0, 0, 1, 2, 5]), min_size=1, max_size=6),
    inner=st.sampled_from([1, 3, 8, 16]),
    outer=st.sampled_from([1, 5, 8]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    transposed=st.booleans(),
)
def test_every_shape_and_dtype_has_the_right_product_and_gradients(
    counts: list[int], inner: int, outer: int, dtype: torch.dtype, transposed: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(counts), inner, generator=generator).to(dtype).requires_grad_()
    shape = (len(counts), outer, inner) if transposed else (len(counts), inner, outer)
    held = torch.randn(shape, generator=generator).to(dtype).requires_grad_()
    weights = held.transpose(1, 2) if transposed else held

    product = grouped_mm(rows, weights, torch.tensor(counts))
    grad = torch.randn(product.shape, generator=generator).to(dtype)
    ours = [product, *torch.autograd.grad(product, [rows, held], grad)]

    rows64, held64 = (t.detach().double().requires_grad_() for t in (rows, held))
    expected = truth(rows64, held64.transpose(1, 2) if transposed else held64, counts)
    theirs = [expected, *torch.autograd.grad(expected, [rows64, held64], grad.double())]
    # At most 16 products of numbers up to 4, added up in fp32 at least (fp16 on some CPUs in fp16), then rounded.
    eps = torch.finfo(dtype).eps
    atol = 2 * eps if dtype in (torch.bfloat16, torch.float16) else 128 * eps
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other, rtol=eps, atol=atol)


def test_the_way_is_what_torch_can_do() -> None:
    def way(dtype: torch.dtype, inner: int, outer: int, num_rows: int = 3) -> str:
        return way_of(torch.zeros(num_rows, inner, dtype=dtype), torch.zeros(2, inner, outer, dtype=dtype))

    assert way(torch.float32, 8, 4) == "grouped"
    assert way(torch.bfloat16, 8, 16) == "grouped"
    assert way(torch.bfloat16, 8, 4) == "loop", "8 bytes"
    assert way(torch.float32, 6, 4) == "loop", "24 bytes"
    assert way(torch.float64, 8, 8) == "loop"
    assert way(torch.float32, 8, 8, num_rows=0) == "loop"


@pytest.mark.parametrize("way", ["grouped", "loop"])
def test_gradient_of_a_sum_is_taken(way: str) -> None:
    rows = torch.randn(3, 8, requires_grad=True)
    weights = torch.randn(2, 8, 4, requires_grad=True)
    grouped_mm(rows, weights, torch.tensor([1, 2]), way=way).sum().backward()  # type: ignore[arg-type]
    torch.testing.assert_close(rows.grad, weights.detach().sum(2)[[0, 1, 1]])


def test_autocast_decides_the_dtype() -> None:
    rows, weights, counts = torch.randn(3, 8), torch.randn(2, 8, 8), torch.tensor([1, 2])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        product = grouped_mm(rows, weights, counts)
        assert grouped_mm(rows.bfloat16(), weights, counts).dtype == torch.bfloat16
        assert GatedExperts(2, 8, 8)(rows, counts).dtype == torch.bfloat16
    assert torch.equal(product, grouped_mm(rows.bfloat16(), weights.bfloat16(), counts))


@pytest.mark.parametrize(
    ("rows", "weights", "counts", "message"),
    [
        ((3, 4), (2, 8, 4), [1, 2], r"rows \[3, 4\] and weights \[2, 8, 4\]"),
        ((3, 8), (2, 8, 4), [1, 1, 1], r"counts \[3\] must have one entry for each of 2 experts; .*expert_shard"),
        ((3, 8), (2, 8, 4), [1, 1], "counts sum to 2, but there are 3 rows"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    rows: tuple[int, ...], weights: tuple[int, ...], counts: list[int], message: str
) -> None:
    with pytest.raises(RoutingError, match=message):
        grouped_mm(torch.zeros(rows), torch.zeros(weights), torch.tensor(counts))


def test_two_dtypes_are_refused() -> None:
    with pytest.raises(RoutingError, match=r"rows are torch\.float32 and weights torch\.bfloat16"):
        grouped_mm(torch.zeros(1, 8), torch.zeros(1, 8, 8, dtype=torch.bfloat16), torch.tensor([1]))


def test_experts_of_no_size_are_refused() -> None:
    with pytest.raises(RoutingError, match="hidden_dim = 0 of experts must be at least 1"):
        GatedExperts(2, 8, 0)
    with pytest.raises(RoutingError, match="num_experts = 0"):
        GptExperts(0, 8, 8)


@pytest.mark.parametrize("make", [GatedExperts, GptExperts])
@pytest.mark.parametrize("counts", [[256, 0, 300, 1], [0, 600, 0, 0]])
def test_experts_one_by_one_are_the_experts_together(make: type[GatedExperts | GptExperts], counts: list[int]) -> None:
    experts = make(4, 16, 24)
    rows = torch.randn(sum(counts), 16)
    with torch.no_grad():
        assert runs_expert_by_expert(rows, 4)
        assert not runs_expert_by_expert(rows[:511], 4)
        alone = experts(rows, torch.tensor(counts))
        with pytest.raises(RoutingError, match="counts sum to 5, but there are"):
            experts(rows, torch.tensor([1, 1, 1, 2]))
    assert not runs_expert_by_expert(rows, 4)
    torch.testing.assert_close(alone, experts(rows, torch.tensor(counts)))
