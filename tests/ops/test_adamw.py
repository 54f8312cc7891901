"""AdamW with moments in 8 and 4 bits: the bits of every kernel, of one parameter and of many; refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import laconic.ops
from laconic.errors import FormatError
from laconic.ops import native, reference
from laconic.ops.declarations.adamw import AdamWTensors
from tests.ops.adamw_cases import (
    OPTIONS,
    Case,
    as_lists,
    assert_as_one_by_one,
    awkward_gradients,
    batch,
    follow,
    follow_many,
    new_case,
    of_one,
    quantized,
)
from tests.ops.cases import DTYPES, same_bits, threads
from tests.ops.implementations import Kernels, each_implementation, each_kernel, each_native, few
from tests.ops.interpreter import INTERPRETED, slow_in_interpreter

ONE, MANY = torch.ops.laconic.adamw8bit_.default, torch.ops.laconic.adamw8bit_multi_.default
REFERENCE = of_one(reference.adamw8bit_multi_)
IMPLEMENTATIONS = [reference.adamw8bit_multi_, native.adamw8bit_multi_, MANY]


def assert_same(kernels: Kernels, case: Case, where: object, num_steps: int = 3, **options: object) -> None:
    expected = follow(REFERENCE, case.to("cpu"), num_steps, **options)
    found = follow(of_one(kernels.adamw8bit_multi_), case.to("cpu"), num_steps, **options)
    for step, (one, two) in enumerate(zip(found, expected, strict=True), start=1):
        for name in two:
            assert same_bits(one[name], two[name]), (where, step, name)


@each_kernel
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_bits_are_the_references(kernels: Kernels, dtype: torch.dtype, bits: int) -> None:
    for name, gradient in few(list(awkward_gradients()), 3, DTYPES.index(dtype)):
        assert_same(kernels, new_case(tuple(gradient.shape), dtype, gradient.to(dtype), bits), name, bits=bits)


@each_kernel
@pytest.mark.parametrize("bits", [slow_in_interpreter(8), 12])
def test_quantized_gradients_give_the_references_bits(kernels: Kernels, bits: int) -> None:
    for name, gradient in few(list(awkward_gradients()), 2, bits // 12):
        case = quantized(new_case(tuple(gradient.shape), torch.float32, gradient), bits)
        assert_same(kernels, replace(case, gradient_factor=torch.tensor(0.3)), name)


@each_kernel
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("signed", [True, False])
def test_every_code_is_found_as_the_reference_finds_it(kernels: Kernels, signed: bool, bits: int) -> None:
    # With beta 0 a moment is the gradient or its square; numbers around every decision of the map, 10 or 8 bits each.
    step = 1 << (15 if INTERPRETED else 13)
    n = torch.arange(100 << 23, (127 << 23) + 1, step, dtype=torch.int32).view(torch.float32)
    n = torch.cat((n, -n)) if signed else n.sqrt()
    blocks = torch.nn.functional.pad(n, (0, -len(n) % 255)).view(-1, 255)
    gradient = torch.cat((torch.ones(len(blocks), 1), blocks), dim=1)
    case = new_case(tuple(gradient.shape), torch.float32, gradient, bits)
    assert_same(kernels, case, signed, 1, beta1=0.0, beta2=0.0, bits=bits)


@each_native
def test_threads_do_not_change_bits(kernels: Kernels) -> None:
    gradient = torch.randn(301, 1000)
    case = new_case((301, 1000), torch.float32, gradient)
    with threads(1):
        one = follow(of_one(kernels.adamw8bit_multi_), case.to("cpu"), 2)
    with threads(3):
        many = follow(of_one(kernels.adamw8bit_multi_), case.to("cpu"), 2)
    assert all(same_bits(one[-1][name], many[-1][name]) for name in one[-1])


def test_blocks_of_rows_and_of_the_flat_tensor_agree_where_rows_are_whole_blocks() -> None:
    gradient = torch.randn(6, 512)
    rows = new_case((6, 512), torch.float32, gradient)
    flat = rows.to("cpu")
    flat.exp_avg_scales, flat.exp_avg_sq_scales = torch.zeros(1, 12), torch.zeros(1, 12)
    one, two = follow(ONE, rows, 2)[-1], follow(ONE, flat, 2)[-1]
    assert all(torch.equal(one[name].flatten(), two[name].flatten()) for name in one)


def test_compiled_step_gives_the_same_bits() -> None:
    eager = new_case((4, 300), torch.float32, torch.randn(4, 300))
    compiled = eager.to("cpu")
    op = torch.compile(
        lambda *tensors: torch.ops.laconic.adamw8bit_(*tensors, *OPTIONS.values()), fullgraph=True, backend="aot_eager"
    )
    torch.ops.laconic.adamw8bit_(*eager.arguments(), *OPTIONS.values())
    op(*compiled.arguments())
    assert all(same_bits(compiled.results()[name], value) for name, value in eager.results().items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"parameter": torch.zeros(3, 300, dtype=torch.float64)},
            "parameter.dtype is torch.float64, but it must be one",
        ),
        ({"exp_avg_codes": torch.zeros(3, 300)}, "exp_avg_codes.dtype is torch.float32, but it must be uint8"),
        ({"exp_avg_sq_codes": torch.zeros(300, 3, dtype=torch.uint8)}, r"exp_avg_sq_codes has shape \(300, 3\)"),
        ({"exp_avg_scales": torch.zeros(3, 3)}, r"exp_avg_scales has shape \(3, 3\), but for a parameter with 900"),
        ({"exp_avg_scales": torch.zeros(7, 1)}, r"exp_avg_scales has shape \(7, 1\)"),
        ({"exp_avg_sq_scales": torch.zeros(1, 4)}, r"exp_avg_sq_scales has shape \(1, 4\), but it must be \(3, 2\)"),
        ({"gradient": torch.zeros(900)}, r"gradient has shape \(900,\), but it must be \(3, 300\)"),
        ({"gradient": torch.zeros(300, 3).t()}, r"gradient has strides \(1, 3\), but it must be contiguous"),
        ({"gradient_scales": torch.zeros(8)}, r"gradient has shape \(3, 300\), but it must be \(900,\)"),
        ({"residual_codes": torch.zeros(450, dtype=torch.uint8)}, "residual_codes and residual_scales belong together"),
        (
            {"residual_codes": torch.zeros(450, dtype=torch.uint8), "residual_scales": torch.zeros(8)},
            "residual_codes is given for a dense gradient",
        ),
        ({"gradient_factor": torch.zeros(1)}, r"gradient_factor has shape \(1,\), but it must be \(\)"),
        ({"gradient": torch.zeros(3, 300, device="meta")}, "gradient is on meta, but it must be on cpu"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change: dict[str, torch.Tensor], message: str) -> None:
    case = replace(new_case((3, 300), torch.float32, torch.randn(3, 300)), **change)
    for op in (*map(of_one, IMPLEMENTATIONS), ONE):
        with pytest.raises(FormatError, match=message):
            op(*case.arguments(), *OPTIONS.values())
    with pytest.raises(FormatError) as caught:
        ONE(*case.arguments(), *OPTIONS.values())
    assert "tensor 0" not in str(caught.value)


def test_steps_are_counted_from_one() -> None:
    case = new_case((3, 300), torch.float32, torch.randn(3, 300))
    with pytest.raises(FormatError, match="step is 0, but it must be at least 1"):
        of_one(reference.adamw8bit_multi_)(*case.arguments(), *(OPTIONS | {"step": 0}).values())


@pytest.mark.parametrize("ratio", [0.0, -1.0, float("nan")])
def test_a_bound_of_moments_is_above_zero(ratio: float) -> None:
    case = new_case((3, 300), torch.float32, torch.randn(3, 300))
    for op in (*map(of_one, IMPLEMENTATIONS), ONE):
        with pytest.raises(FormatError, match=f"ratio is {ratio}, but it must be above 0, or None"):
            op(*case.arguments(), *OPTIONS.values(), ratio)


@pytest.mark.parametrize("ratio", [1e-3, 0.5, float("inf")])
def test_a_wider_bound_leaves_the_same_bits_in_every_implementation(ratio: float) -> None:
    found = []
    for op in (*map(of_one, IMPLEMENTATIONS), ONE):
        torch.manual_seed(0)
        case = new_case((3, 300), torch.float32, torch.randn(3, 300))
        for step in (1, 2):
            op(*case.arguments(), *(OPTIONS | {"step": step}).values(), ratio)
        found.append(case.parameter)
    assert all(torch.equal(each, found[0]) for each in found[1:])


# --- many parameters ---


def some(bits: int | None = None) -> list[Any]:
    """The tensor arguments for three small parameters."""
    cases = [new_case(shape, torch.float32, torch.randn(shape)) for shape in ((3, 300), (2, 64), (3, 300))]
    return as_lists([case if bits is None else quantized(case, bits) for case in cases])


MIXED = [(dtype, other, None) for dtype in DTYPES for other in DTYPES]
MIXED += [(dtype, torch.float32, bits) for dtype in DTYPES for bits in (8, 12)]


@each_implementation
@pytest.mark.parametrize(
    ("dtype", "gradient_dtype", "bits"),
    [mixed if mixed[0] == torch.bfloat16 and mixed[2] == 12 else slow_in_interpreter(*mixed) for mixed in MIXED],
)
@pytest.mark.parametrize("moment_bits", [8, slow_in_interpreter(4)])
def test_many_parameters_get_the_bits_of_one_call_each(
    ops: Kernels, dtype: torch.dtype, gradient_dtype: torch.dtype, bits: int | None, moment_bits: int
) -> None:
    cases = batch(dtype, gradient_dtype, bits, moment_bits)
    if bits is not None:
        cases = [replace(case, gradient_factor=torch.tensor(0.3)) for case in cases]
    options = {"weight_decay": 0.0, "beta1": 0.8, "bits": moment_bits}
    assert_as_one_by_one(REFERENCE, ops.adamw8bit_multi_, cases, num_steps=2, **options)


def test_hundreds_of_parameters_and_none_at_all() -> None:
    cases = [new_case((1 + i % 3, 1 + 7 * i), torch.bfloat16, torch.randn(1 + i % 3, 1 + 7 * i)) for i in range(300)]
    assert_as_one_by_one(REFERENCE, MANY, cases, num_steps=1)
    laconic.ops.adamw8bit_multi_([], [], [], [], [], [], **OPTIONS)


def test_compiled_step_of_many_gives_the_same_bits() -> None:
    def cases() -> list[Case]:
        torch.manual_seed(0)
        return batch(torch.float32, torch.bfloat16)[:3]

    op = torch.compile(lambda *a: MANY(*a[:10], *OPTIONS.values()), fullgraph=True, backend="aot_eager")
    eager, compiled = follow_many(MANY, cases(), 1, maximize=False), follow_many(op, cases(), 1)
    for one, two in zip(eager, compiled, strict=True):
        assert all(same_bits(one[0][name], two[0][name]) for name in one[0])


def test_one_number_of_the_step_wrong_is_seen() -> None:
    """The comparison of this file fails when it should."""

    def wrong(*arguments: Any) -> None:
        reference.adamw8bit_multi_(*arguments[:15], arguments[15] + 1, *arguments[16:])

    with pytest.raises(AssertionError):
        assert_as_one_by_one(REFERENCE, wrong, batch(torch.float32, torch.float32))


LISTS = ("parameters", *AdamWTensors._fields[1:5], "gradients", *AdamWTensors._fields[6:])


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
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
def test_arguments_of_many_that_do_not_fit_are_refused(
    op: Any, name: str, index: int | None, value: Any, message: str
) -> None:
    lists = some()
    before = [tensor.clone() for tensor in lists[0]]
    if index is None:
        lists[LISTS.index(name)] = value
    else:
        lists[LISTS.index(name)][index] = value
    with pytest.raises(FormatError, match=message):
        op(*lists, *OPTIONS.values())
    assert all(torch.equal(x, y) for i, (x, y) in enumerate(zip(lists[0], before, strict=True)) if i != index)


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
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
