"""The gradients of act(gate) * up from codes, whatever a block does with the parts (see [Note: gated products])."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import laconic
from laconic.activations.backward import functions, gated
from laconic.activations.host.audited import keeping_values
from laconic.activations.keep.choice import Offload
from laconic.activations.keep.kept import found
from laconic.activations.keep.witnesses import NUM_PLACES
from laconic.formats import BlockFormat
from tests.activations.models import are_equal
from tests.grid import grid

WIDTH, WIDE, TOKENS = 64, 192, 40


class QuickGelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "silu": nn.SiLU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "quick_gelu": QuickGelu,
    "gelu": nn.GELU,
}


class Block(nn.Module):
    """down(act(gate(x)) * up(x)); `way` says how it is written."""

    def __init__(self, activation: str = "silu", way: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up = nn.Linear(WIDTH, WIDE), nn.Linear(WIDTH, WIDE)
        self.act, self.down, self.way = ACTIVATIONS[activation](), nn.Linear(WIDE, WIDTH), way
        self.held: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        activated = self.act(self.gate(x))
        if self.way == "hold":
            self.held.append(activated)
        if self.way == "hook":
            activated.register_hook(lambda grad: 2 * grad)
        if self.way == "use twice":
            return self.down(activated * self.up(x)) + activated.sum(-1, keepdim=True)
        if self.way == "in place":
            return self.down(activated.mul_(self.up(x)))
        if self.way == "other order":
            return self.down(self.up(x) * activated)
        product = activated * self.up(x)
        return self.down(product)


class Calls(TorchDispatchMode):
    """Counts operations on whole tensors by name; what witnesses compare is smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(arg, Tensor) and arg.numel() > 8 * NUM_PLACES for arg in args):
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def make(activation: str = "silu", way: str = "plain", dtype: torch.dtype = torch.float32, bits: int = 8) -> nn.Module:
    model = nn.Sequential(Block(activation, way)).to(dtype)
    laconic.compress_activations(model, bits=bits, example_inputs={"input": torch.zeros(2, WIDTH, dtype=dtype)})
    return model


def inputs(dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)) * 3).to(dtype).requires_grad_()


def run(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor], Counter[str]]:
    """Output, gradients, and what backward called."""
    y = model(x)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype)
    with Calls() as calls:
        y.backward(weights)
    assert x.grad is not None
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    grads["x"], x.grad = x.grad, None
    model.zero_grad()
    return y.detach(), grads, calls.counts


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, grad in found.items():
        assert (grad - expected[name]).norm() <= tolerance * expected[name].norm(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "quick_gelu"])
def test_gradients_are_those_of_the_way_step_by_step(activation: str, dtype: torch.dtype) -> None:
    fused, stepwise = make(activation, dtype=dtype), make(activation, "hold", dtype)
    y, grads, calls = run(fused, inputs(dtype))
    theirs, expected, steps = run(stepwise, inputs(dtype))
    assert calls["gated_backward_blockwise"] == 1
    assert calls["mul"] == 0
    assert steps["gated_backward_blockwise"] == 0
    assert steps["mul"] >= 2
    assert torch.equal(y, theirs)
    # What rounds otherwise are the last bits of exp; a change of half a unit of bf16 is rare. CLIP's approximation step
    # by step rounds four times.
    steps_round = 1e-2 if activation == "quick_gelu" else 2e-3
    assert_near(grads, expected, 2e-6 if dtype == torch.float32 else steps_round)


@pytest.mark.parametrize("way", ["plain", "other order", "use twice", "hook", "in place"])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_gradients_are_near_the_unmodified_models_however_it_is_written(activation: str, way: str) -> None:
    exact, x = nn.Sequential(Block(activation, way)), inputs()
    y, expected, _ = run(exact, x)
    found, grads, calls = run(make(activation, way), inputs())
    assert torch.equal(found, y)
    assert_near(grads, expected, 0.02)
    from_codes = activation == "silu" and way in ("plain", "other order", "use twice")
    assert calls["gated_backward_blockwise"] == from_codes


def test_who_holds_the_activations_output_gets_its_gradient() -> None:
    exact = nn.Sequential(Block("silu", "hold"))
    kept = make("silu", "hold")
    found = []
    for model in (exact, kept):
        y = model(inputs())
        (held,) = model[0].held  # type: ignore[union-attr]
        (grad,) = torch.autograd.grad(y.square().sum(), held, retain_graph=True)
        held.retain_grad()
        y.square().sum().backward()
        assert held.grad is not None
        assert torch.equal(held.grad, grad)
        found.append(grad)
    torch.testing.assert_close(found[1], found[0], rtol=0.05, atol=0.02 * float(found[0].abs().max()))


def test_a_graph_that_is_kept_gives_the_same_gradients_again() -> None:
    model, x = make(), inputs()
    y = model(x)
    wanted = [model[0].up.weight, x, model[0].gate.weight]  # type: ignore[union-attr]
    first, second = (torch.autograd.grad(y.sum(), wanted, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))
    (alone,) = torch.autograd.grad(y.sum(), wanted[:1])
    assert torch.equal(alone, first[0])


def test_a_frozen_gate_still_gives_its_input_a_gradient() -> None:
    model, exact = make(), nn.Sequential(Block())
    for net in (model, exact):
        net[0].gate.requires_grad_(False)
    _, grads, calls = run(model, inputs())
    _, expected, _ = run(exact, inputs())
    assert calls["gated_backward_blockwise"] == 1
    assert_near(grads, expected, 0.02)


def test_nothing_rebuilt_is_written_beside_the_product() -> None:
    _, _, calls = run(make(bits=4), inputs())
    # Those of the input of gate and of up, which is a leaf here.
    assert calls["dequantize_blockwise"] == 2
    assert calls["gated_product_blockwise"] == 1
    assert calls["silu"] == calls["silu_backward"] == 0


@pytest.mark.parametrize("is_held", [False, True])
def test_the_gradient_with_a_graph_is_that_without_one(is_held: bool) -> None:
    model, x = make(), inputs()
    held = []
    if is_held:
        act = next(part for part in model.modules() if isinstance(part, nn.SiLU))
        act.register_forward_hook(lambda module, args, output: held.append(output))
    y = model(x).square().sum()
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    (second,) = torch.autograd.grad(y, x)
    torch.testing.assert_close(first, second)


def test_a_copy_of_the_model_and_the_model_without_compression_run_as_before() -> None:
    model = make()
    y, grads, _ = run(copy.deepcopy(model), inputs())
    again, same, _ = run(model, inputs())
    assert torch.equal(y, again)
    assert are_equal(grads, same)
    laconic.decompress_activations(model)
    x = inputs()
    _, _, calls = run(model, x)
    assert calls["gated_backward_blockwise"] == 0
    block = model[0]
    expected = F.silu(block.gate(x)) * block.up(x)  # type: ignore[operator, union-attr]
    assert torch.equal(model(x), block.down(expected))  # type: ignore[operator, union-attr]


def forward_calls(model: nn.Module, x: Tensor) -> tuple[Tensor, Counter[str]]:
    """Output of the forward, and what it called."""
    with Calls() as calls:
        y = model(x)
    return y, calls.counts


@pytest.mark.parametrize(
    ("way", "activation", "dtype"),
    grid(["plain", "other order"], ["silu", "gelu"], [torch.float32, torch.bfloat16, torch.float16]),
)
def test_the_other_factor_is_packed_where_the_product_reads_it(
    way: str, activation: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = inputs(dtype)
    y, calls = forward_calls(make(activation, way, dtype), x)
    assert (calls["multiply_quantize_blockwise"], calls["mul"]) == (1, 0)
    exact = nn.Sequential(Block(activation, way)).to(dtype)
    assert torch.equal(y, exact(x))
    _, grads, _ = run(make(activation, way, dtype), inputs(dtype))
    # In a pass of its own the product has the same bits, forward and backward.
    monkeypatch.setattr(gated.PackedProduct, "__call__", lambda *_: None)
    apart, before = forward_calls(make(activation, way, dtype), x)
    assert (before["multiply_quantize_blockwise"], before["mul"]) == (0, 1)
    assert before["quantize_blockwise"] == calls["quantize_blockwise"] + 1
    assert torch.equal(apart, y)
    _, expected, _ = run(make(activation, way, dtype), inputs(dtype))
    assert are_equal(grads, expected)


class Strided(Block):
    """Gate and up are halves of each row of one tensor."""

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat((self.gate(x), self.up(x)), -1)
        return self.down(self.act(both[..., :WIDE].contiguous()) * both[..., WIDE:])


@pytest.mark.parametrize("case", ["two bits", "offload", "strided", "short rows", "flushed subnormals", "stand-in"])
def test_where_one_pass_cannot_do_both_the_product_is_the_hosts(case: str) -> None:
    block = Strided() if case == "strided" else Block()
    if case == "short rows":  # of 12 values, which share blocks
        block.gate, block.up, block.down = nn.Linear(WIDTH, 12), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
    model, x = nn.Sequential(block), inputs()
    expected = model(x)
    format = BlockFormat("uint2") if case == "two bits" else BlockFormat("int8")
    choice = Offload(format) if case == "offload" else format
    laconic.compress_activations(model, policy=lambda site: choice, example_inputs={"input": torch.zeros(2, WIDTH)})
    with keeping_values(lambda x, *_: x.clone()) if case == "stand-in" else nullcontext():
        if case == "flushed subnormals" and not torch.set_flush_denormal(True):
            pytest.skip("this CPU cannot flush subnormals")
        try:
            y, calls = forward_calls(model, x)
        finally:
            torch.set_flush_denormal(False)
    assert (calls["multiply_quantize_blockwise"], calls["mul"]) == (0, 1)
    assert torch.equal(y, expected)
    y.sum().backward()


def test_codes_that_are_not_the_other_factors_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = gated.multiply_quantize_blockwise

    def wrong(a: Tensor, b: Tensor, **format: Any) -> tuple[Tensor, ...]:
        return (right(a, b, **format)[0], *right(b, a, **format)[1:])

    monkeypatch.setattr(gated, "multiply_quantize_blockwise", wrong)
    y = make()(inputs())
    with pytest.raises(laconic.errors.ModelError, match="is not what the layer consumed in forward"):
        y.sum().backward()


def test_a_second_product_finds_the_codes_of_the_first() -> None:
    gate, up = inputs() * 2, inputs() * 3
    activated = functions.activate(gate, F.silu(gate.detach()), "silu", BlockFormat("int8"))
    with Calls() as calls:
        first, second = (functions.multiply(activated, up, BlockFormat("int8")) for _ in range(2))
    assert (calls.counts["multiply_quantize_blockwise"], calls.counts["mul"]) == (1, 1)
    assert calls.counts["quantize_blockwise"] == 0
    assert torch.equal(first, second)
    kept = found(up)
    assert kept is not None
    # After a write the note no longer counts, and the product that reads the tensor packs what it reads.
    up.detach().numpy()[...] = 7
    with Calls() as calls:
        functions.multiply(activated, up, BlockFormat("int8"))
    assert calls.counts["multiply_quantize_blockwise"] == 1
    again = found(up)
    assert again is not None
    assert not torch.equal(again.tensors[0], kept.tensors[0])


def test_what_would_not_become_smaller_stays_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated, "multiply_quantize_blockwise", None)  # is not called
    gate, up = (torch.randn(1, 1, dtype=torch.bfloat16).requires_grad_() * 2 for _ in range(2))
    activated = functions.activate(gate, F.silu(gate.detach()), "silu", BlockFormat("int8"))
    product = functions.multiply(activated, up, BlockFormat("int8"))
    assert torch.equal(product, activated * up)
    assert found(up) is None
