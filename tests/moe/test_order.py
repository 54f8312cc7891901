"""Routings that are refused, and the sorted order against one-hot matrices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.errors import RoutingError
from laconic.moe import DenseOrder, Routing, SoftRouting, SortedOrder

DIM = 3


@st.composite
def routings(draw: st.DrawFn) -> Routing:
    """Any number of entries for each token, also several for the same expert; sometimes k for all."""
    num_experts = draw(st.integers(1, 6))
    num_tokens = draw(st.integers(0, 7))
    k = draw(st.one_of(st.none(), st.integers(0, 9)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 16)))
    sizes = torch.randint(0, 5, (num_tokens,), generator=generator) if k is None else torch.full((num_tokens,), k)
    tokens = torch.arange(num_tokens).repeat_interleave(sizes)
    experts = torch.randint(0, num_experts, (len(tokens),), generator=generator)
    weights = torch.randn(len(tokens), generator=generator, dtype=torch.float64)
    return Routing(tokens, experts, weights, num_tokens, num_experts, choices=k)


@settings(max_examples=150)
@given(routing=routings())
def test_sorted_order_is_the_one_hot_matrices_gradients_included(routing: Routing) -> None:
    routing.check()
    torch.manual_seed(0)
    x = torch.randn(routing.num_tokens, DIM, dtype=torch.float64, requires_grad=True)
    weights = routing.weights.clone().requires_grad_()
    routing = replace(routing, weights=weights)
    results = []
    for order in (SortedOrder(), DenseOrder()):
        rows, counts = order.permute(x, routing)
        assert counts.tolist() == [routing.experts.tolist().count(e) for e in range(routing.num_experts)]
        out = order.combine(rows * rows, routing)
        grads = torch.autograd.grad(out.sin().sum(), [x, weights], allow_unused=True, materialize_grads=True)
        results.append((rows, out, *grads))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
    rows, _ = SortedOrder().permute(x, routing)
    assert torch.equal(rows, x[routing.tokens[routing.experts.argsort(stable=True)]])


@settings(max_examples=80)
@given(routing=routings(), dtype=st.sampled_from([torch.bfloat16, torch.float32]))
def test_knowing_k_changes_nothing_but_the_last_place(routing: Routing, dtype: torch.dtype) -> None:
    rows = torch.randn(len(routing), DIM).to(dtype)
    unknown = replace(routing, choices=None)
    one, other = (SortedOrder().combine(rows, r).double() for r in (routing, unknown))
    exact = SortedOrder().combine(rows.double(), unknown)
    half = torch.finfo(dtype).eps / 2
    largest = SortedOrder().combine(rows.double().abs(), replace(unknown, weights=routing.weights.abs()))
    for result in (one, other):  # rounding to dtype, and a few roundings of fp32 on the way
        assert bool(((result - exact).abs() <= half * exact.abs() + 16 * 2**-24 * largest).all())


@pytest.mark.parametrize("k", [1, 2, 8])
@pytest.mark.parametrize("dim", [1, 7, 64])
def test_bits_of_a_token_do_not_depend_on_the_others(k: int, dim: int) -> None:
    torch.manual_seed(0)
    experts, weights, rows = torch.randint(0, 4, (40, k)), torch.rand(40, k), torch.randn(40, k, dim)

    def combined(part: slice) -> torch.Tensor:
        routing = Routing.of_choices(experts[part], weights[part], 4)
        return SortedOrder().combine(rows[part].flatten(0, 1)[routing.by_expert], routing)

    whole = combined(slice(None))
    for start, stop in ((0, 1), (1, 4), (4, 40), (39, 40)):
        assert torch.equal(combined(slice(start, stop)), whole[start:stop])


def test_bf16_gradient_of_a_token_is_rounded_once() -> None:
    # 257 gradients of 1: in bf16 the sum would stop at 256.
    zeros = torch.zeros(257, dtype=torch.int64)
    for choices in (257, None):
        routing = Routing(zeros, zeros, torch.ones(257), 1, 1, choices=choices)
        x = torch.ones(1, 2, dtype=torch.bfloat16, requires_grad=True)
        rows, _ = SortedOrder().permute(x, routing)
        scale = torch.ones(257, 1, dtype=torch.bfloat16)
        scale[0] = 3
        (grad,) = torch.autograd.grad((rows * scale).sum(), x)
        assert grad.tolist() == [[260.0, 260.0]]  # 259 to even


def vectors(**changes: Any) -> dict[str, Any]:
    index = torch.tensor([0, 1], dtype=torch.int64)
    usual = {"tokens": index, "experts": index, "weights": torch.ones(2), "num_tokens": 2, "num_experts": 2}
    return usual | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts": torch.zeros(3, dtype=torch.int64)}, "three vectors of one length"),
        ({"weights": torch.ones(2, 1)}, "three vectors of one length"),
        ({"tokens": torch.tensor([0, 1], dtype=torch.int32)}, "must be int64, not torch.int32"),
        ({"weights": torch.ones(2, dtype=torch.int64)}, "must be floating, not torch.int64"),
        ({"choices": 2}, "choices = 2 needs 2 x 2 entries, not 2"),
    ],
)
def test_routings_that_are_none_are_refused(changes: dict[str, Any], message: str) -> None:
    Routing(**vectors())
    with pytest.raises(RoutingError, match=message):
        Routing(**vectors(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": torch.tensor([0, 2])}, r"tokens of a routing go from 0 to 2, but must be in \[0, 2\)"),
        ({"experts": torch.tensor([-1, 0])}, "experts of a routing go from -1 to 0"),
        ({"tokens": torch.tensor([1, 0])}, "must ascend"),
    ],
)
def test_check_looks_at_the_values(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RoutingError, match=message):
        Routing(**vectors(**changes)).check()


def test_soft_routings_need_two_tables_of_one_shape() -> None:
    with pytest.raises(RoutingError, match=r"must both be \[tokens, experts, slots\]"):
        SoftRouting(torch.ones(3, 2, 1), torch.ones(3, 2, 2))
