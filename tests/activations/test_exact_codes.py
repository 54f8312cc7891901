"""What backward reads in part is kept in part, and the gradient has the same bits."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import laconic
from laconic.activations import SavedTensorTracker
from laconic.activations.keep.exact_codes import MemoryLayout, as_mask
from tests.grid import grid

SHAPE = (6, 10, 14, 11)
VALUES = SHAPE[0] * SHAPE[1] * SHAPE[2] * SHAPE[3]
MASK = -(-VALUES // 8)


class Computes(nn.Module):
    """A function behind a product with one, so that it works on no leaf."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * 1.0)


# How many bytes each may keep: a bit per value of the input, four bits per value of the output, nothing.
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "relu": (torch.relu, MASK),
    "relu in place": (lambda x: F.relu(x, inplace=True), MASK),
    "relu_": (torch.relu_, MASK),
    "method": (lambda x: x.relu(), MASK),
    "relu6": (F.relu6, MASK),
    "relu6 in place": (lambda x: F.relu6(x, inplace=True), MASK),
    "leaky_relu": (lambda x: F.leaky_relu(x, 0.2), MASK),
    "leaky_relu in place": (lambda x: F.leaky_relu(x, 0.2, inplace=True), MASK),
    "hardtanh": (lambda x: F.hardtanh(x, -0.5, 2.0), MASK),
    "hardtanh by name": (lambda x: F.hardtanh(x, max_val=0.0), MASK),
    "hardsigmoid": (F.hardsigmoid, MASK),
    "hardshrink": (lambda x: F.hardshrink(x, 2.0), MASK),
    "softshrink": (F.softshrink, MASK),
    "threshold": (lambda x: F.threshold(x, -0.5, 7.0), MASK),
    "dropout": (lambda x: F.dropout(x, 0.3), MASK),
    "dropout in place": (lambda x: F.dropout(x, 0.9, inplace=True), MASK),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), -(-60 * 7 * 5 // 2)),
    "max_pool2d of all kinds": (lambda x: F.max_pool2d(x, (3, 2), (2, 1), (1, 0), (2, 3), ceil_mode=True), 60 * 6 * 8),
    "large windows": (lambda x: F.max_pool2d(x, 6, stride=1), 60 * 9 * 6),
    "max_pool2d of torch": (lambda x: torch.max_pool2d(x, [3, 3], [2, 2], [1, 1]), 60 * 7 * 6),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), 0),
    "avg_pool1d": (lambda x: F.avg_pool1d(x.flatten(0, 1), 3), 0),
    "avg_pool3d": (lambda x: F.avg_pool3d(x, 3), 0),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, (4, 3)), 0),
    "adaptive_avg_pool3d": (lambda x: F.adaptive_avg_pool3d(x, (2, 4, 3)), 0),
}  # fmt: skip


def numbers(dtype: torch.dtype, channels_last: bool) -> Tensor:
    """Numbers of all sizes, among them kinks, ties, infinities and NaN."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SHAPE, generator=generator) * 3
    special = [0.0, -0.0, 6.0, -3.0, 3.0, -0.5, 2.0, -1.0, float("inf"), -float("inf"), float("nan"), 1e-30]
    x.view(-1)[: 64 * len(special)] = torch.tensor(special).repeat(64)
    x = x[:, :, torch.randperm(SHAPE[2], generator=generator)].to(dtype)
    return x.contiguous(memory_format=torch.channels_last) if channels_last else x.contiguous()


def step(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, int]:
    """Output, gradient of the input, and what was kept."""
    torch.manual_seed(0)
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    with SavedTensorTracker(model) as tracker:
        y = model(x)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    (grad,) = torch.autograd.grad(y, x, weights)
    return y.detach(), grad, tracker.nbytes


@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_gradient_has_the_same_bits_from_a_few_bits(name: str, channels_last: bool) -> None:
    function, most = FUNCTIONS[name]
    model = Computes(function)
    x = numbers(torch.float32, channels_last)
    if any(kind in name for kind in ("hardtanh", "relu6", "shrink")):
        x = x.nan_to_num()  # for NaN the gradient depends on torch's vector width
    y, expected, before = step(model, x)
    twin = copy.deepcopy(model)
    laconic.compress_activations(twin, mode="hooks", example_inputs={"x": x})
    again, got, after = step(twin, x)
    torch.testing.assert_close(again, y, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    assert got.stride() == expected.stride()
    assert after <= most < before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["relu", "relu6", "leaky_relu", "dropout", "max_pool2d"])
def test_half_precision_has_the_same_bits_too(name: str, dtype: torch.dtype) -> None:
    model = Computes(FUNCTIONS[name][0])
    x = numbers(dtype, channels_last=True)
    _, expected, before = step(model, x)
    laconic.compress_activations(model, mode="hooks", example_inputs={"x": x})
    _, got, after = step(model, x)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    assert after < before


_INF = float("inf")
LIMITS: dict[str, Callable[[Tensor], Tensor]] = {
    "no upper end": lambda x: F.hardtanh(x, 0.0, _INF),
    "no lower end": lambda x: F.hardtanh(x, -_INF, 0.7),
    "between the numbers of 16 bits": lambda x: F.hardtanh(x, -0.3, 0.7),
    "nothing inside": lambda x: F.hardtanh(x, 1.0, 1.001),
    "threshold": lambda x: F.threshold(x, 0.1, 7.0),
    "threshold below all": lambda x: F.threshold(x, -1e6, 7.0),
    "softshrink": lambda x: F.softshrink(x, 0.3),
    "hardshrink": lambda x: F.hardshrink(x, 0.7),
    "hardshrink of all": lambda x: F.hardshrink(x, -1.0),
}


@pytest.mark.parametrize(("name", "dtype"), grid(list(LIMITS), [torch.float32, torch.bfloat16, torch.float16]))
def test_any_limits_of_a_step_have_its_gradient(name: str, dtype: torch.dtype) -> None:
    model = Computes(LIMITS[name])
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    x.view(-1)[:1000] = torch.tensor([0.1, 0.3, -0.3, 0.7, -0.7, 1.0, 1.001, 0.0]).repeat(125)
    _, expected, _ = step(model, x.to(dtype))
    laconic.compress_activations(model, mode="hooks", example_inputs={"x": x.to(dtype)})
    _, got, _ = step(model, x.to(dtype))
    assert torch.equal(got, expected)


# Functions whose derivative jumps, where, and how steep it is elsewhere.
JUMPS: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
    "hardswish": (F.hardswish, 3.0, 1 / 3),
    "hardswish in place": (lambda x: F.hardswish(x, inplace=True), 3.0, 1 / 3),
    "elu": (lambda x: F.elu(x, 3.0), 0.0, 3.0),
    "elu in place": (lambda x: F.elu(x, 0.1, inplace=True), 0.0, 1.0),
    "selu": (F.selu, 0.0, 1.8),
    "prelu": (lambda x: F.prelu(x, torch.full((SHAPE[1],), 0.2, dtype=x.dtype)), 0.0, 0.0),
}


@pytest.mark.parametrize(
    ("name", "bits", "dtype"), grid(list(JUMPS), [4, 8], [torch.float32, torch.bfloat16, torch.float16])
)
def test_rounding_carries_no_value_over_a_jump_of_the_derivative(name: str, bits: int, dtype: torch.dtype) -> None:
    function, jump, slope = JUMPS[name]
    model = Computes(function)
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)) * 3
    near = torch.randn(SHAPE, generator=torch.Generator().manual_seed(2)) * 1e-2
    x = torch.where(x.abs() < 1, x.sign() * jump + near, x).to(dtype)
    _, expected, before = step(model, x)
    laconic.compress_activations(model, bits, mode="hooks", example_inputs={"x": x})
    _, got, after = step(model, x)
    assert after < before * (bits + 2.5) / (8 * x.element_size())
    # Of a value that stays on its side the gradient is off by no more than the slope times the error of rounding.
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(dtype).float()
    step_of_format = float(x.abs().max()) * (0.16 if bits == 4 else 0.5 / 127) + 0.02
    off = (got.float() - expected.float()).abs() / weights.abs().clamp(min=1e-3)
    assert float(off.max()) < slope * step_of_format + 0.02
    assert slope == 0.0 or float(off.max()) > 1e-3  # it was rounded


def test_pooling_reads_no_value_of_its_input() -> None:
    x = numbers(torch.float32, channels_last=False).nan_to_num()
    pooling = {name: function for name, (function, _) in FUNCTIONS.items() if "pool" in name}
    expected = {name: step(Computes(function), x)[1] for name, function in pooling.items()}
    try:
        torch.use_deterministic_algorithms(True)  # fills tensors that are not initialized with NaN
        for name, function in pooling.items():
            model = Computes(function)
            laconic.compress_activations(model, mode="hooks", example_inputs={"x": x})
            assert torch.equal(step(model, x)[1], expected[name]), name
    finally:
        torch.use_deterministic_algorithms(False)


@settings(max_examples=50)
@given(
    kernel=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    stride=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    dilation=st.integers(1, 3),
    ceil_mode=st.booleans(),
    size=st.tuples(st.integers(13, 40), st.integers(13, 40)),
    padded=st.booleans(),
)
def test_every_place_of_a_maximum_comes_back(
    kernel: tuple[int, int],
    stride: tuple[int, int],
    dilation: int,
    ceil_mode: bool,
    size: tuple[int, int],
    padded: bool,
) -> None:
    padding = (kernel[0] // 2, kernel[1] // 2) if padded else (0, 0)
    model = Computes(lambda x: F.max_pool2d(x, kernel, stride, padding, dilation, ceil_mode))
    x = torch.randn(8, 16, *size, generator=torch.Generator().manual_seed(0))
    _, expected, _ = step(model, x)
    laconic.compress_activations(model, mode="hooks", example_inputs={"x": x})
    assert torch.equal(step(model, x)[1], expected)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    ("kernel", "padding", "dilation"), [(3, 1, 1), (5, 2, 1), (5, 2, (1, 2)), ((2, 17), (1, 8), 1)]
)
@pytest.mark.parametrize("size", [(1, 1), (2, 1), (3, 2), (9, 3)])
def test_windows_wider_than_their_input_come_back(
    kernel: int | tuple[int, int],
    padding: int | tuple[int, int],
    dilation: int | tuple[int, int],
    size: tuple[int, int],
    channels_last: bool,
) -> None:
    if dilation != 1:  # torch wants an output
        size = (size[0], size[1] + 5)
    model = Computes(lambda x: F.max_pool2d(x, kernel, 1, padding, dilation))
    x = torch.randn(64, 32, *size, generator=torch.Generator().manual_seed(0))
    x[0] = float("nan")
    x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
    _, expected, before = step(model, x)
    laconic.compress_activations(model, mode="hooks", example_inputs={"x": x})
    _, got, after = step(model, x)
    assert torch.equal(got, expected)
    assert after < before / 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_masks_come_back_as_values(dtype: torch.dtype) -> None:
    mask = torch.rand(17, 59, generator=torch.Generator().manual_seed(0)) < 0.3
    for zero, one in ((0.0, 1.0), (-1.0, 1.0), (6.0, 3.0), (0.0, 1.4285714626312256)):
        expected = torch.where(mask, torch.tensor(one, dtype=dtype), torch.tensor(zero, dtype=dtype))
        for bits, layout in ((mask, MemoryLayout.of(expected)), (mask.T, MemoryLayout.of(expected.T))):
            coded = as_mask(bits, layout, one, zero)
            assert [code.numel() for code in coded.tensors] == [126]
            value = coded.decode(coded.tensors)
            assert value.stride() == layout.stride
            assert torch.equal(value, expected if bits is mask else expected.T), (zero, one)


@pytest.mark.parametrize(
    "x",
    [
        torch.arange(120.0).view(2, 3, 4, 5),
        torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.arange(120.0).view(2, 3, 4, 5).permute(3, 0, 2, 1),
        torch.arange(240.0).view(2, 3, 4, 10)[..., ::2],
        torch.arange(3.0).view(1, 3, 1).expand(2, 3, 4),
        torch.arange(200.0)[80:].view(2, 60),
        torch.zeros(0, 3),
        torch.tensor(1.0),
    ],
)
def test_a_layout_gives_back_the_values_and_dense_strides(x: Tensor) -> None:
    layout = MemoryLayout.of(x)
    again = layout.unflatten(layout.flatten(x).clone())
    assert torch.equal(again, x)
    is_dense = len(x.untyped_storage()) // 4 == x.numel()
    assert again.stride() == x.stride() or not is_dense


@pytest.mark.parametrize("mode", ["sites", "hooks"])
@pytest.mark.parametrize("kind", ["sigmoid", "tanh", "logsigmoid"])
def test_what_saturates_is_cancelled_exactly_by_the_loss_behind(kind: str, mode: str) -> None:
    layer = {"sigmoid": nn.Sigmoid, "tanh": nn.Tanh, "logsigmoid": nn.LogSigmoid}[kind]()
    model = nn.Sequential(nn.Linear(32, 32), layer)
    with torch.no_grad():
        model[0].weight.mul_(20)
    generator = torch.Generator().manual_seed(0)
    x, targets = torch.randn(256, 32, generator=generator), torch.rand(256, 32, generator=generator).round()
    losses: dict[str, Callable[[Tensor], Tensor]] = {
        "sigmoid": lambda y: F.binary_cross_entropy(y, targets),
        "tanh": lambda y: (1 - y * y + 1e-6).log().mean(),  # a squashed policy
        "logsigmoid": lambda y: torch.log1p(-y.exp() * 0.999999).mean(),
    }
    twin = copy.deepcopy(model)
    laconic.compress_activations(twin, bits=8, mode=mode, example_inputs={"input": x})
    exact, got = (torch.autograd.grad(losses[kind](each(x)), list(each.parameters())) for each in (model, twin))
    for one, other in zip(exact, got, strict=True):
        assert float((other - one).norm()) < 0.02 * float(one.norm())
