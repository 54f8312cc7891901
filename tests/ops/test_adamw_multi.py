"""The op adamw8bit_multi_: what adamw8bit_ leaves of each parameter, bit for bit, and what does not fit is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import laconic.ops
from laconic.errors import FormatError
from laconic.ops import native, reference
from tests.grid import slow_but
from tests.ops.adamw_cases import (
    OPTIONS,
    Case,
    as_lists,
    assert_as_one_by_one,
    batch,
    follow_many,
    new_case,
    of_one,
    quantized,
)
from tests.ops.cases import DTYPES, same_bits

OP = torch.ops.laconic.adamw8bit_multi_.default


def some(bits: int | None = None) -> list[Any]:
    """The tensor arguments for three small parameters."""
    cases = [new_case(shape, torch.float32, torch.randn(shape)) for shape in ((3, 300), (2, 64), (3, 300))]
    return as_lists([case if bits is None else quantized(case, bits) for case in cases])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gradient_dtype", DTYPES)
def test_dense_gradients_give_the_bits_of_one_call_each(dtype: torch.dtype, gradient_dtype: torch.dtype) -> None:
    cases = batch(dtype, gradient_dtype)
    assert_as_one_by_one(of_one(reference.adamw8bit_multi_), reference.adamw8bit_multi_, cases)
    assert_as_one_by_one(of_one(reference.adamw8bit_multi_), OP, cases)
    for isa in native.supported_isas():
        assert_as_one_by_one(of_one(reference.adamw8bit_multi_), partial(native.adamw8bit_multi_, isa=isa), cases)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 12])
def test_quantized_gradients_give_the_bits_of_one_call_each(dtype: torch.dtype, bits: int) -> None:
    cases = [replace(case, gradient_factor=torch.tensor(0.3)) for case in batch(dtype, torch.float32, bits)]
    for op in (OP, reference.adamw8bit_multi_):
        assert_as_one_by_one(of_one(reference.adamw8bit_multi_), op, cases, weight_decay=0.0, beta1=0.8)


def test_hundreds_of_parameters_and_none_at_all() -> None:
    cases = [new_case((1 + i % 3, 1 + 7 * i), torch.bfloat16, torch.randn(1 + i % 3, 1 + 7 * i)) for i in range(300)]
    assert_as_one_by_one(of_one(reference.adamw8bit_multi_), OP, cases, num_steps=1)
    laconic.ops.adamw8bit_multi_([], [], [], [], [], [], **OPTIONS)


@pytest.mark.parametrize("bits", slow_but([None, 12], 12))
def test_op_is_registered_as_torch_expects(bits: int | None) -> None:
    torch.library.opcheck(OP, (*some(bits), *OPTIONS.values()))


def test_compiled_step_gives_the_same_bits() -> None:
    def cases() -> list[Case]:
        torch.manual_seed(0)
        return batch(torch.float32, torch.bfloat16)[:3]

    op = torch.compile(lambda *a: OP(*a[:10], *OPTIONS.values()), fullgraph=True, backend="aot_eager")
    eager, compiled = follow_many(OP, cases(), 1, maximize=False), follow_many(op, cases(), 1)
    for one, two in zip(eager, compiled, strict=True):
        assert all(same_bits(one[0][name], two[0][name]) for name in one[0])


def test_one_number_of_the_step_wrong_is_seen() -> None:
    """The comparison of this file fails when it should."""

    def wrong(*arguments: Any) -> None:
        reference.adamw8bit_multi_(*arguments[:15], arguments[15] + 1, arguments[16])

    with pytest.raises(AssertionError):
        assert_as_one_by_one(of_one(reference.adamw8bit_multi_), wrong, batch(torch.float32, torch.float32))


LISTS = {
    name: number
    for number, name in enumerate(
        (
            "parameters",
            "exp_avg_codes",
            "exp_avg_scales",
            "exp_avg_sq_codes",
            "exp_avg_sq_scales",
            "gradients",
            "gradient_scales",
            "residual_codes",
            "residual_scales",
        )
    )
}


@pytest.mark.parametrize("op", [reference.adamw8bit_multi_, native.adamw8bit_multi_, OP])
@pytest.mark.parametrize(
    ("name", "index", "value", "message"),
    [
        ("gradients", None, [], "gradients has 0 tensors, but it must have 3, one for each parameter"),
        ("exp_avg_codes", None, [], "exp_avg_codes has 0 tensors, but it must have 3, one for each parameter"),
        ("gradient_scales", None, [torch.zeros(8)], "gradient_scales has 1 tensors, but .* 3, .* or 0"),
        ("gradients", 1, torch.zeros(64, 2), r"tensor 1: gradient has shape \(64, 2\), but it must be \(2, 64\)"),
        (
            "gradients",
            2,
            torch.zeros(3, 300).bfloat16(),
            "tensor 2: gradient.dtype is torch.bfloat16, .* torch.float32",
        ),
        (
            "parameters",
            1,
            torch.zeros(2, 64).half(),
            "tensor 1: parameter.dtype is torch.float16, .* torch.float32, as",
        ),
        ("exp_avg_scales", 2, torch.zeros(3, 3), r"tensor 2: exp_avg_scales has shape \(3, 3\)"),
        ("residual_codes", None, [torch.zeros(1)] * 3, "tensor 0: residual_codes and residual_scales belong together"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(op: Any, name: str, index: int | None, value: Any, message: str) -> None:
    lists = some()
    before = [tensor.clone() for tensor in lists[0]]
    if index is None:
        lists[LISTS[name]] = value
    else:
        lists[LISTS[name]][index] = value
    with pytest.raises(FormatError, match=message):
        op(*lists, *OPTIONS.values())
    assert all(torch.equal(x, y) for i, (x, y) in enumerate(zip(lists[0], before, strict=True)) if i != index)


@pytest.mark.parametrize("op", [reference.adamw8bit_multi_, native.adamw8bit_multi_, OP])
def test_parameters_that_share_memory_are_refused(op: Any) -> None:
    lists = some()
    whole = torch.zeros(5, 300)
    for overlap in ((whole[:3], whole[2:]), (whole[:3], whole[:3])):
        lists[0][0], lists[0][2] = overlap
        with pytest.raises(FormatError, match="two of the parameters share memory"):
            op(*lists, *OPTIONS.values())
    both = torch.randn(6, 300)
    lists[0][0], lists[0][2] = both[:3], both[3:]  # neighbours
    op(*lists, *OPTIONS.values())
