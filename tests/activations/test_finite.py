"""Where the exact gradient is finite, that of packed tensors is finite too, whatever a module computes."""

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
from tests.activations.models import Gated
from tests.grid import few

# Functions of [64, 64] numbers to as many, with poles, kinks, equalities and exponentials in their derivatives.
UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "exp": lambda x: x.exp(),
    "expm1": lambda x: torch.expm1(x),
    "exp of minus": lambda x: (-x).exp(),
    "log": lambda x: x.abs().add(1e-9).log(),
    "log1p": lambda x: x.abs().log1p(),
    "log1p from below": lambda x: (-x.sigmoid()).log1p(),
    "log2": lambda x: torch.log2(x * x + 1e-12),
    "sqrt": lambda x: (x * x + 1e-12).sqrt(),
    "rsqrt": lambda x: (x * x + 1e-8).rsqrt(),
    "reciprocal": lambda x: (1 + x.abs()).reciprocal(),
    "pow -1": lambda x: (x.abs() + 1e-3) ** -1,
    "pow -2": lambda x: torch.pow(x.abs() + 1e-2, -2.0),
    "pow 0.5": lambda x: (x.abs() + 1e-6).pow(0.5),
    "pow 1.5": lambda x: x.abs().pow(1.5),
    "pow 3": lambda x: x**3,
    "pow tensor": lambda x: (x.abs() + 1e-3) ** torch.linspace(-2, 2, 64, dtype=x.dtype),
    "2 pow": lambda x: 2**x,
    "square": lambda x: x.square(),
    "norm": lambda x: x / x.norm(dim=-1, keepdim=True),
    "norm of columns": lambda x: x / torch.linalg.vector_norm(x, dim=0, keepdim=True),
    "norm inf": lambda x: x / x.norm(p=float("inf"), dim=-1, keepdim=True),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "cosine": lambda x: x * F.cosine_similarity(x, x.roll(1, 0), dim=-1).unsqueeze(-1),
    "logsumexp": lambda x: x - x.logsumexp(-1, keepdim=True),
    "logsumexp by hand": lambda x: x - (x - x.amax()).exp().add(1e-9).sum(-1, keepdim=True).log(),
    "sigmoid": lambda x: x.sigmoid(),
    "sigmoid by hand": lambda x: x / (1 + (-x).exp()),
    "logit": lambda x: torch.logit(x.sigmoid() * 0.9999 + 0.00005),
    "tanh": lambda x: x.tanh(),
    "atanh": lambda x: torch.atanh(x.tanh() * 0.9999),
    "acos": lambda x: torch.acos(x.tanh() * 0.9999),
    "asin": lambda x: torch.asin(x.sin() * 0.9999),
    "erfinv": lambda x: torch.erfinv(x.tanh() * 0.999),
    "lgamma": lambda x: torch.lgamma(x.abs() + 0.01),
    "cosh": lambda x: torch.cosh(x),
    "atan2": lambda x: torch.atan2(x, x.roll(1, 0)),
    "hypot": lambda x: torch.hypot(x, x.roll(1, 0)),
    "amax": lambda x: x - x.amax(-1, keepdim=True),
    "max of all": lambda x: x - x.max(),
    "median": lambda x: x - x.median(),
    "std": lambda x: x / (x.std(-1, keepdim=True) + 1e-6),
    "layer_norm": lambda x: F.layer_norm(x, (64,)),
    "rms_norm": lambda x: x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt(),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "relu": lambda x: x.relu(),
    "gelu": lambda x: F.gelu(x),
    "silu": lambda x: F.silu(x),
    "softplus": lambda x: F.softplus(x),
    "elu": lambda x: F.elu(x),
    "prod": lambda x: x * x.prod(-1, keepdim=True),
    "cumprod": lambda x: torch.cumprod(x, -1),
    "logcumsumexp": lambda x: torch.logcumsumexp(x, -1),
    "masked": lambda x: x.masked_fill(x > 1, torch.finfo(x.dtype).min).softmax(-1),
    "masked by infinity": lambda x: (x + torch.full_like(x, -torch.inf).triu(1)).softmax(-1),
    "scores": lambda x: torch.einsum("ij,kj->ik", x, x),
    "attention": lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None])[0, 0],
    "multi-head attention": lambda x: nn.MultiheadAttention(64, 4).to(x.dtype)(x, x, x)[0],
    "sin": lambda x: x.sin(),
    "tan": lambda x: x.tan(),
}  # fmt: skip

BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mul": torch.mul,
    "div": torch.div,
    "div with epsilon": lambda x, y: x / (y.abs() + 1e-6),
    "matmul": torch.matmul,
    "add": torch.add,
    "where": lambda x, y: torch.where(x > y, x, y),
    "maximum": torch.maximum,
    "addcdiv": lambda x, y: torch.addcdiv(x, x, 1 + y * y),
    "pow": lambda x, y: (x.abs() + 1e-2).pow(y.clamp(-3, 3)),
    "xlogy": lambda x, y: torch.xlogy(x, y.abs() + 1e-9),
    "logaddexp": torch.logaddexp,
    "kl_div": lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="none"),
    "binary cross entropy": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid().detach(), reduction="none"),
}


class Expression(nn.Module):
    """A chain of functions of the weight, each second one of two earlier values."""

    def __init__(self, weight: Tensor, unary: list[str], binary: list[str], back: list[int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.steps = list(zip(unary, binary, back, strict=True))

    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(0)
        values = [x * self.weight]
        for unary, binary, back in self.steps:
            y = UNARY[unary](values[-1])
            values.append(BINARY[binary](y, values[-1 - back % len(values)]))
        return values[-1]


def gradient(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The value, and the gradients of input and weight."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    value = module(x)
    value.float().mean().backward()
    assert x.grad is not None
    return value.detach(), x.grad, module.weight.grad  # type: ignore[return-value]


def check(module: nn.Module, x: Tensor, bits: int) -> bool:
    """Whether the exact gradient is finite; fails if that of packed tensors is not although the exact one is."""
    value, *exact = gradient(module, x)
    # Within a few powers of two of the largest number, twice as much is no longer finite.
    limit = torch.finfo(x.dtype).max / 1024
    if not all(bool((g.abs() < limit).all()) for g in (value, *exact)):
        return False
    twin = copy.deepcopy(module)
    laconic.compress_activations(twin, bits=bits, mode="hooks", example_inputs={"x": x})
    again, *got = gradient(twin, x)
    assert torch.equal(again, value)
    assert all(bool(g.isfinite().all()) for g in got)
    return True


def numbers(seed: int, scale: float, dtype: torch.dtype, outliers: bool) -> Tensor:
    """[64, 64] random numbers, some of them far larger than the others and some zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 64, generator=generator)
    if outliers:
        x = x * 10 ** (2 * torch.randn(64, 64, generator=generator))
    return (x * scale).to(dtype)


@pytest.mark.parametrize("name", few(UNARY, 16))
def test_a_finite_gradient_stays_finite_behind_every_function(name: str) -> None:
    weight = numbers(0, 1.0, torch.float32, False)
    finite = [
        check(Expression(weight, [name], [binary], [1]), numbers(1, scale, torch.float32, outliers), 4)
        for binary in ("div with epsilon", "mul")
        for scale, outliers in ((1.0, False), (0.03, True), (20.0, False))
    ]
    assert any(finite)


class Shifted(nn.Module):
    """A function of x and a weight, whose sum saves nothing."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.zeros(64)), function

    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return self.function(x + self.weight)


@pytest.mark.parametrize(
    "function",
    [torch.sin, torch.cos, lambda x: F.rrelu(x, training=True)],  # rrelu saves its slopes before it has drawn them
    ids=["sin", "cos", "rrelu"],
)
def test_a_function_that_rounding_gives_another_gradient_stays_exact(function: Callable[[Tensor], Tensor]) -> None:
    model, x = Shifted(function), numbers(0, 30.0, torch.float32, False)
    twin = copy.deepcopy(model)
    laconic.compress_activations(twin, mode="hooks", example_inputs={"x": x})
    assert all(map(torch.equal, gradient(twin, x), gradient(model, x)))


@settings(max_examples=25)
@given(
    chain=st.lists(
        st.tuples(st.sampled_from(sorted(UNARY)), st.sampled_from(sorted(BINARY)), st.integers(0, 3)),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 2**16),
    scale=st.sampled_from([1e-6, 1e-2, 1.0, 30.0, 1e4]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    outliers=st.booleans(),
    bits=st.sampled_from([4, 8]),
)
def test_a_finite_gradient_stays_finite_in_any_expression(
    chain: list[tuple[str, str, int]], seed: int, scale: float, dtype: torch.dtype, outliers: bool, bits: int
) -> None:
    unary, binary, back = (list(column) for column in zip(*chain, strict=True))
    module = Expression(numbers(seed, 1.0, dtype, False), unary, binary, back)
    try:
        value, *_ = gradient(module, numbers(seed + 1, scale, dtype, outliers))
    except (RuntimeError, NotImplementedError):  # torch has no kernel of this dtype
        return
    del value
    check(module, numbers(seed + 1, scale, dtype, outliers), bits)


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(64, 64),
    "layer_norm": lambda: nn.LayerNorm(64),
    "rms_norm": lambda: nn.RMSNorm(64, eps=1e-6),
    "mlp": lambda: Gated(64, 96),
}


@settings(max_examples=40)
@given(
    blocks=st.lists(st.sampled_from(sorted(BLOCKS)), min_size=1, max_size=4),
    seed=st.integers(0, 2**16),
    # The largest float16 is 65504, and the next power of two is no float16.
    largest=st.sampled_from([1e-6, 1.0, 250.0, 6e4, 65504.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    code=st.sampled_from(["nf4", "e2m1", "int8"]),
    constant=st.booleans(),
)
def test_a_finite_gradient_stays_finite_in_sites(
    blocks: list[str], seed: int, largest: float, dtype: torch.dtype, code: str, constant: bool
) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(*(BLOCKS[block]() for block in blocks)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.1)
    twin = copy.deepcopy(model)
    bits = 8 if code == "int8" else 4
    laconic.compress_activations(twin, bits=bits, format=code)
    x = torch.randn(32, 64)
    x = (x / x.abs().amax() * largest).to(dtype)
    if constant:
        x[:16] = largest
    for each in (model, twin):
        each(x.requires_grad_()).float().mul(1e-3).mean().backward()
        each.input_grad, x.grad = x.grad, None  # type: ignore[assignment]
    exact = [model.input_grad, *(p.grad for p in model.parameters())]
    got = [twin.input_grad, *(p.grad for p in twin.parameters())]
    if all(g is not None and bool((g.abs() < torch.finfo(dtype).max / 1024).all()) for g in exact):
        assert all(g is not None and bool(g.isfinite().all()) for g in got)
