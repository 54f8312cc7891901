"""Gated products and gradients from codes: the specification beside torch's own functions, every kernel's bits."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from laconic.errors import FormatError
from laconic.ops import (
    dequantize_blockwise,
    gated_backward_blockwise,
    gated_product_blockwise,
    quantize_blockwise,
    reference,
)
from laconic.ops.gated_activations import CURVES
from tests.ops.cases import BLOCK_SIZES, DTYPES, SYMMETRIC, same_bits
from tests.ops.implementations import Kernels, each_implementation, each_kernel, each_native, num_examples

FUNCTIONS = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}
Packed = tuple[Tensor, Tensor, Tensor, Tensor]


def pair(rows: int, length: int, code: str, block_size: int, scale_dtype: torch.dtype, seed: int = 0) -> Packed:
    """Gate and up over many magnitudes, with blocks that are all NaN."""
    generator = torch.Generator().manual_seed(seed)
    packed: list[Tensor] = []
    for spread in (3, 6):
        x = torch.randn(rows, length, generator=generator)
        x = x * torch.exp2(spread * torch.randn(rows, length, generator=generator))
        if rows > 1:
            x[-1, -1] = float("nan")
        packed += reference.quantize_blockwise(x, code, block_size, scale_dtype, None)
    return tuple(packed)  # type: ignore[return-value]


def gradient(rows: int, length: int, dtype: torch.dtype) -> Tensor:
    """With NaN and infinities."""
    grad = torch.randn(rows, length, generator=torch.Generator().manual_seed(length)) * 3
    grad.view(-1)[::17] = float("inf")
    grad.view(-1)[1::19] = float("nan")
    grad.view(-1)[2::5] *= 1e-5
    return grad.to(dtype)


@pytest.mark.parametrize("activation", CURVES)
def test_results_are_those_of_torchs_functions(activation: str) -> None:
    # In fp64 by autograd, from the very values that the codes stand for.
    codes = pair(1, 4096, "int8", 64, torch.float32)
    gate, up = (
        dequantize_blockwise(*part, length=4096, code="int8", dtype=torch.float32) for part in (codes[:2], codes[2:])
    )
    grad = torch.randn(1, 4096, generator=torch.Generator().manual_seed(1))
    exact = [x.double().requires_grad_() for x in (gate, up)]
    product = FUNCTIONS[activation](exact[0]) * exact[1]
    product.backward(grad.double())
    found = gated_product_blockwise(*codes, length=4096, activation=activation, code="int8", dtype=torch.float32)
    torch.testing.assert_close(found.double(), product.detach(), rtol=2e-6, atol=2e-4)
    for mine, theirs in zip(
        gated_backward_blockwise(grad, *codes, activation=activation, code="int8"), exact, strict=True
    ):
        scale = theirs.grad.abs().max()
        assert scale > 1
        torch.testing.assert_close(mine.double(), theirs.grad, rtol=4e-6, atol=2e-6 * float(scale))


def test_in_bfloat16_nearly_all_bits_are_those_of_separate_operations() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(64, 1024, generator=generator).bfloat16() for _ in range(3)]
    packed = [torch.ops.laconic.quantize_blockwise(x, "nf4", 64, torch.bfloat16, None) for x in parts[:2]]
    gate, up = (dequantize_blockwise(*x, length=1024) for x in packed)
    grad, activated = parts[2], F.silu(gate)
    expected = (activated * up, torch.ops.aten.silu_backward(grad * up, gate), grad * activated)
    codes = (*packed[0], *packed[1])
    found = (
        gated_product_blockwise(*codes, length=1024, activation="silu"),
        *gated_backward_blockwise(grad, *codes, activation="silu"),
    )
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine != theirs).float().mean() < 1e-3
        torch.testing.assert_close(mine, theirs, rtol=2**-7, atol=0)


@pytest.mark.parametrize("activation", CURVES)
def test_far_from_zero_the_activation_is_x_or_nothing(activation: str) -> None:
    # The largest number whose square overflows, and what saturates the sigmoid.
    x = torch.tensor([[-1e30, -500.0, 500.0, 1e30] * 16])
    codes, scales = reference.quantize_blockwise(x[:, :16], "int8", 16, torch.float32, None)
    gate = dequantize_blockwise(codes, scales, length=16, code="int8", block_size=16, dtype=torch.float32)
    ones = reference.quantize_blockwise(torch.ones(1, 16), "int8", 16, torch.float32, None)
    kwargs = {"activation": activation, "code": "int8", "block_size": 16}
    product = gated_product_blockwise(codes, scales, *ones, length=16, dtype=torch.float32, **kwargs)
    torch.testing.assert_close(product, gate.clamp_min(0), rtol=1e-6, atol=1e-30)
    slope, _ = gated_backward_blockwise(torch.ones(1, 16), codes, scales, *ones, **kwargs)
    assert slope[gate > 0].tolist() == [1.0] * int((gate > 0).sum())
    torch.testing.assert_close(slope[gate < 0], torch.zeros(int((gate < 0).sum())), rtol=0, atol=1e-25)


@each_kernel
@settings(max_examples=num_examples(40))
@given(
    st.sampled_from(SYMMETRIC),
    st.sampled_from(BLOCK_SIZES),
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
    st.sampled_from(sorted(CURVES)),
    st.integers(1, 4),
    st.integers(1, 300),
)
@example("nf4", 64, torch.bfloat16, torch.bfloat16, "silu", 5, 1024)  # of each width of codes, and of each activation
@example("int8", 32, torch.float16, torch.float32, "gelu_tanh", 3, 77)
@example("int5", 128, torch.float32, torch.float16, "quick_gelu", 2, 261)
def test_all_bits_are_the_references(
    kernels: Kernels,
    code: str,
    block_size: int,
    dtype: torch.dtype,
    scale_dtype: torch.dtype,
    activation: str,
    rows: int,
    length: int,
) -> None:
    packed, grad = pair(rows, length, code, block_size, scale_dtype, length), gradient(rows, length, dtype)
    arguments = (*packed, code, block_size, length, dtype, activation)
    product = reference.gated_product_blockwise(*arguments)
    grads = reference.gated_backward_blockwise(grad, *packed, code, block_size, activation)
    assert same_bits(kernels.gated_product_blockwise(*arguments), product)
    found = kernels.gated_backward_blockwise(grad, *packed, code, block_size, activation)
    assert all(map(same_bits, found, grads))


@each_native
def test_kernels_agree_on_every_gate_of_bfloat16(kernels: Kernels) -> None:
    # A scale for each number, and the code of 1: gate is every number whose block is not broken.
    scales = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16).view(-1, 1)
    codes = torch.ones(1 << 16, 1, dtype=torch.uint8)
    ones = torch.ones_like(scales)
    arguments = (codes, scales, codes, ones, "int8", 16)
    grad = torch.full((1 << 16, 1), 0.7).bfloat16()
    product = reference.gated_product_blockwise(*arguments, 1, torch.bfloat16, "silu")
    grads = reference.gated_backward_blockwise(grad, *arguments, "silu")
    finite = scales.isfinite()
    # One last place: torch's exp is another.
    torch.testing.assert_close(product[finite], F.silu(scales)[finite], rtol=2**-7, atol=1e-35)
    assert same_bits(kernels.gated_product_blockwise(*arguments, 1, torch.bfloat16, "silu"), product)
    found = kernels.gated_backward_blockwise(grad, *arguments, "silu")
    assert all(map(same_bits, found, grads))


def test_a_gradient_may_have_any_strides() -> None:
    packed = pair(6, 100, "nf4", 64, torch.bfloat16)
    grad = gradient(100, 6, torch.bfloat16).t()
    found = gated_backward_blockwise(grad, *packed, activation="silu")
    expected = gated_backward_blockwise(grad.contiguous(), *packed, activation="silu")
    assert all(map(same_bits, found, expected))


@each_implementation
def test_there_may_be_no_rows(ops: Kernels) -> None:
    packed = tuple(part[:0] for part in pair(2, 64, "nf4", 64, torch.bfloat16))
    assert ops.gated_product_blockwise(*packed, "nf4", 64, 64, torch.bfloat16, "silu").shape == (0, 64)
    grad = torch.zeros(0, 64, dtype=torch.bfloat16)
    assert ops.gated_backward_blockwise(grad, *packed, "nf4", 64, "silu")[1].shape == (0, 64)


@each_implementation
@pytest.mark.parametrize("leading", [(), (6,), (2, 3), (3, 1, 2)], ids=str)
def test_gradients_of_any_leading_dimensions_are_those_of_rows(leading: tuple[int, ...], ops: Kernels) -> None:
    rows = math.prod(leading)
    codes = pair(rows, 70, "int8", 64, torch.float32)
    grad = gradient(rows, 70, torch.float32)
    options = "int8", 64, "silu"
    expected = ops.gated_backward_blockwise(grad, *codes, *options)
    shaped = [part.reshape(*leading, part.shape[-1]) for part in codes]
    found = ops.gated_backward_blockwise(grad.reshape(*leading, 70), *shaped, *options)
    for a, b in zip(found, expected, strict=True):
        assert a.shape == (*leading, 70)
        assert same_bits(a.reshape(rows, 70), b)


def test_what_is_not_supported_is_refused_by_name() -> None:
    packed = pair(2, 128, "nf4", 64, torch.bfloat16)
    grad = torch.zeros(2, 128)
    with pytest.raises(FormatError, match=r"activation is 'gelu', but it must be one of silu, quick_gelu, gelu_tanh"):
        gated_product_blockwise(*packed, length=128, activation="gelu")
    with pytest.raises(FormatError, match=r"up_scales are torch\.float32 .* must be like gate_scales"):
        gated_product_blockwise(*packed[:3], packed[3].float(), length=128, activation="silu")
    with pytest.raises(FormatError, match=r"up_codes .*\(1, 64\).* must be like gate_codes"):
        gated_backward_blockwise(grad, *packed[:2], packed[2][:1], packed[3], activation="silu")
    with pytest.raises(FormatError, match=r"grad has shape \(3, 128\)"):
        gated_backward_blockwise(torch.zeros(3, 128), *packed, activation="silu")
    with pytest.raises(FormatError, match=r"grad\.dtype is torch\.float64"):
        gated_backward_blockwise(grad.double(), *packed, activation="silu")
    with pytest.raises(FormatError, match="length 127 in nf4"):
        gated_product_blockwise(*packed[:3], packed[3], length=127, block_size=32, activation="silu")


def test_two_bits_are_refused() -> None:
    codes, scales = quantize_blockwise(torch.randn(4, 64), code="uint2")
    with pytest.raises(FormatError, match="gated products read codes of 4 bits or more"):
        gated_product_blockwise(codes, scales, codes, scales, length=64, activation="silu", code="uint2")
