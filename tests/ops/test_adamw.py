"""The op adamw8bit_: the C++ kernels return the reference's bits, and what does not fit is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from laconic.errors import FormatError
from laconic.ops import native, reference
from tests.ops.adamw_cases import OPTIONS, Case, awkward_gradients, follow, new_case, of_one, quantized
from tests.ops.cases import DTYPES, same_bits

needs_kernels = pytest.mark.skipif(not native.supported_isas(), reason="the C++ kernels are not built")


def assert_same(case: Case, where: object, num_steps: int = 4, **options: object) -> None:
    expected = follow(of_one(reference.adamw8bit_multi_), case.to("cpu"), num_steps, **options)
    for isa in native.supported_isas():
        found = follow(partial(of_one(native.adamw8bit_multi_), isa=isa), case.to("cpu"), num_steps, **options)
        for step, (one, two) in enumerate(zip(found, expected, strict=True), start=1):
            for name in two:
                assert same_bits(one[name], two[name]), (where, isa, step, name)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_bits_are_the_references(dtype: torch.dtype) -> None:
    for name, gradient in awkward_gradients():
        assert_same(new_case(tuple(gradient.shape), dtype, gradient.to(dtype)), name)


@needs_kernels
@pytest.mark.parametrize("bits", [8, 12])
def test_quantized_gradients_give_the_references_bits(bits: int) -> None:
    for name, gradient in awkward_gradients():
        case = quantized(new_case(tuple(gradient.shape), torch.float32, gradient), bits)
        assert_same(replace(case, gradient_factor=torch.tensor(0.3)), name)


@needs_kernels
@pytest.mark.parametrize("signed", [True, False])
def test_every_code_is_found_as_the_reference_finds_it(signed: bool) -> None:
    # With beta 0 a moment is the gradient or its square; numbers around every decision of the map, 12 bits each.
    n = torch.arange(100 << 23, (127 << 23) + 1, 1 << 13, dtype=torch.int32).view(torch.float32)
    n = torch.cat((n, -n)) if signed else n.sqrt()
    blocks = torch.nn.functional.pad(n, (0, -len(n) % 255)).view(-1, 255)
    gradient = torch.cat((torch.ones(len(blocks), 1), blocks), dim=1)
    assert_same(new_case(tuple(gradient.shape), torch.float32, gradient), signed, 1, beta1=0.0, beta2=0.0)


@needs_kernels
def test_threads_do_not_change_bits() -> None:
    gradient = torch.randn(301, 1000)
    case = new_case((301, 1000), torch.float32, gradient)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = follow(of_one(native.adamw8bit_multi_), case.to("cpu"), 2)
        torch.set_num_threads(3)
        many = follow(of_one(native.adamw8bit_multi_), case.to("cpu"), 2)
    finally:
        torch.set_num_threads(before)
    assert all(same_bits(one[-1][name], many[-1][name]) for name in one[-1])


def test_blocks_of_rows_and_of_the_flat_tensor_agree_where_rows_are_whole_blocks() -> None:
    gradient = torch.randn(6, 512)
    rows = new_case((6, 512), torch.float32, gradient)
    flat = rows.to("cpu")
    flat.exp_avg_scales, flat.exp_avg_sq_scales = torch.zeros(1, 12), torch.zeros(1, 12)
    one, two = follow(torch.ops.laconic.adamw8bit_, rows, 2)[-1], follow(torch.ops.laconic.adamw8bit_, flat, 2)[-1]
    assert all(torch.equal(one[name].flatten(), two[name].flatten()) for name in one)


@pytest.mark.parametrize("bits", [None, 12])
def test_op_is_registered_as_torch_expects(bits: int | None) -> None:
    case = new_case((3, 300), torch.float32, torch.randn(3, 300))
    if bits is not None:
        case = replace(quantized(case, bits), gradient_factor=torch.tensor(2.0))
    torch.library.opcheck(torch.ops.laconic.adamw8bit_.default, (*case.arguments(), *OPTIONS.values()))


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
    for op in (of_one(reference.adamw8bit_multi_), of_one(native.adamw8bit_multi_)):
        with pytest.raises(FormatError, match=message):
            op(*case.arguments(), *OPTIONS.values())


def test_steps_are_counted_from_one() -> None:
    case = new_case((3, 300), torch.float32, torch.randn(3, 300))
    with pytest.raises(FormatError, match="step is 0, but it must be at least 1"):
        of_one(reference.adamw8bit_multi_)(*case.arguments(), *(OPTIONS | {"step": 0}).values())
