"""The layer against every token's experts one by one: values, gradients, empty experts, no tokens, hooks."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from laconic.errors import RoutingError
from laconic.moe import (
    DenseOrder,
    ExpertRows,
    Gate,
    GatedExperts,
    GptExperts,
    Hook,
    MoELayer,
    Order,
    Routing,
    SoftmaxGate,
    SortedOrder,
    auxiliary_losses,
)
from tests.moe.reference import layer_output

EXPERTS, DIM, HIDDEN = 5, 6, 4


class Fixed(Gate):
    """A gate that sends tokens where a list says."""

    def __init__(self, choices: list[list[int]], weights: Tensor) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.choices = choices
        self.weights = nn.Parameter(weights)

    def forward(self, x: Tensor) -> Routing:
        tokens = [token for token, experts in enumerate(self.choices) for _ in experts]
        experts = [expert for experts in self.choices for expert in experts]
        index = torch.tensor(tokens, dtype=torch.int64), torch.tensor(experts, dtype=torch.int64)
        return Routing(*index, self.weights, x.shape[0], EXPERTS)


def experts_of_kind(kind: str, dtype: torch.dtype = torch.float64) -> GatedExperts | GptExperts:
    torch.manual_seed(3)
    if kind == "gated":
        return GatedExperts(EXPERTS, DIM, HIDDEN, dtype=dtype)
    return GptExperts(EXPERTS, DIM, HIDDEN, bias=kind == "gpt with bias", dtype=dtype)


ROUTES = {
    "usual": [[0, 2], [4, 1], [2, 0], [3, 2]],
    "all to one": [[3], [3], [3], [3]],
    "one token": [[1, 4]],
    "experts without tokens": [[0], [4], [0]],
    "uneven": [[], [0, 1, 2, 3, 4], [], [2], [2, 1]],
    "nothing": [[], [], []],
    "no tokens": [],
}


@pytest.mark.parametrize("order", [SortedOrder(), DenseOrder()], ids=["sorted", "dense"])
@pytest.mark.parametrize("kind", ["gated", "gpt", "gpt with bias"])
@pytest.mark.parametrize("route", ROUTES)
def test_layer_equals_every_token_on_its_own(route: str, kind: str, order: Order) -> None:
    choices = ROUTES[route]
    entries = sum(map(len, choices))
    weights = torch.rand(entries, dtype=torch.float64)
    layer = MoELayer(Fixed(choices, weights), experts_of_kind(kind), order)
    x = torch.randn(len(choices), DIM, dtype=torch.float64, requires_grad=True)
    grad = torch.randn_like(x)

    out = layer(x)
    expected = layer_output(layer.experts, x, layer.gate(x))
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    assert layer.load is not None
    assert layer.load.tolist() == [sum(experts.count(e) for experts in choices) for e in range(EXPERTS)]

    leaves = [x, *layer.parameters()]
    ours = torch.autograd.grad(out, leaves, grad, allow_unused=True, materialize_grads=True)
    if not entries:
        assert all(not bool(g.any()) for g in ours)
        return
    theirs = torch.autograd.grad(expected, leaves, grad, allow_unused=True, materialize_grads=True)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["gated", "gpt with bias"])
def test_layer_is_right_within_rounding_of_its_dtype(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate = SoftmaxGate(8, 16, 2)
    experts = GatedExperts(8, 16, 8) if kind == "gated" else GptExperts(8, 16, 8, bias=True)
    layer = MoELayer(gate, experts).to(dtype)
    x = torch.randn(40, 16).to(dtype)
    truth = copy.deepcopy(layer).double()
    expected = layer_output(truth.experts, x.double(), truth.gate(x.double()))
    out = layer(x.view(4, 10, 16))
    assert out.dtype == dtype
    assert out.shape == (4, 10, 16)
    # Three roundings in a row, each half a unit in the last place of numbers about 1.
    torch.testing.assert_close(out.view(40, 16).double(), expected, rtol=0, atol=8 * torch.finfo(dtype).eps)


def test_gradients_pass_gradcheck_also_the_second_time() -> None:
    torch.manual_seed(1)
    layer = MoELayer(Fixed(ROUTES["usual"], torch.rand(8, dtype=torch.float64)), experts_of_kind("gated"))
    x = torch.randn(4, DIM, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, (x,))
    assert torch.autograd.gradgradcheck(layer, (x,))
    uneven = MoELayer(Fixed(ROUTES["uneven"], torch.rand(8, dtype=torch.float64)), experts_of_kind("gpt"))
    x = torch.randn(5, DIM, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(uneven, (x,))
    assert torch.autograd.gradgradcheck(uneven, (x,))


def test_shared_experts_are_added() -> None:
    layer = MoELayer(SoftmaxGate(4, 8, 2), GatedExperts(4, 8, 8), shared=nn.Linear(8, 8))
    x = torch.randn(3, 8)
    assert layer.shared is not None
    shared = layer.shared(x)
    whole = layer(x)
    layer.shared = None
    torch.testing.assert_close(whole, layer(x) + shared)


def test_placement_renames_experts_and_changes_nothing() -> None:
    torch.manual_seed(0)
    slot_of = torch.tensor([2, 0, 3, 1])
    gate, experts = SoftmaxGate(4, 8, 2), GatedExperts(4, 8, 8)
    moved = copy.deepcopy(experts)
    with torch.no_grad():
        for logical, slot in enumerate(slot_of.tolist()):
            moved.gate_up[slot] = experts.gate_up[logical]
            moved.down[slot] = experts.down[logical]
    plain, placed = MoELayer(gate, experts), MoELayer(gate, moved, placement=lambda logical: slot_of[logical])
    x = torch.randn(12, 8)
    assert torch.equal(plain(x), placed(x))
    assert plain.load is not None
    assert placed.load is not None
    assert torch.equal(plain.load, placed.load)


class Recorder(Hook):
    """Writes down where it was and what it saw."""

    def __init__(self) -> None:
        self.places: list[str] = []
        self.seen: list[Any] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith(("before_", "after_")):
            return lambda layer, flowing: (self.places.append(name), self.seen.append(flowing))[2:] or None
        return super().__getattribute__(name)


def test_hooks_are_called_at_their_six_places() -> None:
    recorder = Recorder()
    MoELayer(SoftmaxGate(4, 8, 2), GatedExperts(4, 8, 8), hooks=[recorder])(torch.randn(3, 8))
    places = ["before_start", "before_dispatch", "after_dispatch", "before_combine", "after_combine", "after_end"]
    assert recorder.places == places
    x, tokens, inputs, outputs, *outs = recorder.seen
    assert x.shape == tokens.x.shape == outs[0].shape == outs[1].shape == (3, 8)
    assert isinstance(tokens.routing, Routing)
    assert inputs.rows.shape == outputs.rows.shape == (6, 8)
    assert torch.equal(inputs.counts, tokens.routing.counts())


def test_what_hooks_change_is_used() -> None:
    class Changes(Hook):
        def before_start(self, layer: MoELayer, x: Tensor) -> Tensor:
            return x * 2

        def after_dispatch(self, layer: MoELayer, inputs: ExpertRows) -> ExpertRows:
            return replace(inputs, rows=inputs.rows * 3)

        def before_combine(self, layer: MoELayer, outputs: ExpertRows) -> ExpertRows:
            return replace(outputs, rows=outputs.rows * 5)

        def after_combine(self, layer: MoELayer, out: Tensor) -> Tensor:
            return out + 7

        def after_end(self, layer: MoELayer, out: Tensor) -> Tensor:
            return out * 11

    experts = GptExperts(4, 8, 8, activation=lambda t: t, dtype=torch.float64)
    gate = SoftmaxGate(4, 8, 4, dtype=torch.float64)
    x = torch.randn(3, 8, dtype=torch.float64)
    routing = gate(2 * x)
    plain = layer_output(experts, x, routing)
    out = MoELayer(gate, experts, hooks=[Changes()])(x)
    torch.testing.assert_close(out, (plain * 2 * 3 * 5 + 7) * 11)


def test_losses_of_all_layers_are_summed_by_name() -> None:
    def layer() -> MoELayer:
        return MoELayer(SoftmaxGate(4, 8, 2, balance_coef=0.1, z_coef=0.01), GatedExperts(4, 8, 8))

    model = nn.Sequential(layer(), nn.GELU(), layer())
    assert auxiliary_losses(model) == {}
    model(torch.randn(6, 8))
    losses = auxiliary_losses(model)
    assert set(losses) == {"balance", "z"}
    torch.testing.assert_close(losses["z"], model[0].losses["z"] + model[2].losses["z"])
    sum(losses.values()).backward()
    assert model[2].gate.weight.grad is not None
    copy.deepcopy(model)  # the losses' graphs stay behind


def test_wrong_number_of_experts_is_refused() -> None:
    with pytest.raises(RoutingError, match="num_experts = 4, but 5 experts are here"):
        MoELayer(SoftmaxGate(4, 8, 2), GatedExperts(5, 8, 8))


def test_no_tokens_train_without_error() -> None:
    layer = MoELayer(SoftmaxGate(4, 8, 2, balance_coef=0.1, z_coef=0.1), GatedExperts(4, 8, 8))
    out = layer(torch.randn(2, 0, 8))
    assert out.shape == (2, 0, 8)
    (out.sum() + sum(auxiliary_losses(layer).values())).backward()
    assert [n for n, p in layer.named_parameters() if p.grad is None or bool(p.grad.any())] == []


def test_autocast_leaves_gate_and_sums_exact() -> None:
    torch.manual_seed(0)
    layer = MoELayer(SoftmaxGate(8, 16, 2), GatedExperts(8, 16, 8))
    x = torch.randn(12, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
        routing = layer.gate(x)
        rows, counts = layer.order.permute(x, routing)
        outputs = layer.experts(rows, counts)
    assert out.dtype == torch.float32
    assert outputs.dtype == torch.bfloat16
    assert torch.equal(routing.weights, layer.gate(x).weights)
    assert torch.equal(out, layer.order.combine(outputs, routing).float())
    truth = DenseOrder().combine(outputs.double(), routing)
    torch.testing.assert_close(out.double(), truth, rtol=2**-8, atol=2**-20)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at it between graphs,
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # and makes objects of autograd functions
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_torch_compile_gives_the_same_layer(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = MoELayer(SoftmaxGate(4, 8, 2), GatedExperts(4, 8, 8)).to(dtype)
    compiled = torch.compile(layer, backend="aot_eager", dynamic=True)
    x = torch.randn(12, 8, dtype=dtype)
    ours, theirs = [], []
    for run, results in ((compiled, ours), (layer, theirs)):
        source = x.clone().requires_grad_()
        out = run(source)
        results += [out, *torch.autograd.grad(out.square().sum(), [source, *layer.parameters()])]
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=8 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)


def test_losses_that_would_train_nothing_are_refused_or_warned_of() -> None:
    layer = MoELayer(SoftmaxGate(4, 8, 2, balance_coef=0.5, z_coef=0.1), GptExperts(4, 8, 12))
    x = torch.randn(6, 8, requires_grad=True)
    out = checkpoint(layer, x, use_reentrant=True)
    with pytest.raises(RoutingError, match=r"its losses \(balance, z\) have no gradient and would train nothing; che"):
        auxiliary_losses(layer)
    with torch.no_grad():
        assert {*auxiliary_losses(layer)} == {"balance", "z"}
    out.sum().backward()
    assert layer.losses["z"].requires_grad
    layer(x)
    assert layer.losses
    with pytest.warns(UserWarning, match=r"before anybody has read the losses of its last run \(balance, z\), which"):
        layer(layer(x))
    assert auxiliary_losses(layer)

    class Sum(Hook):
        total: torch.Tensor | float = 0.0

        def after_end(self, layer: MoELayer, out: torch.Tensor) -> None:
            self.total = self.total + sum(layer.losses.values())

    layer.hooks = (added := Sum(),)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(layer(x))
        for _ in range(2):  # runs again in backward
            out = checkpoint(layer, x, use_reentrant=False)
            (out.sum() + sum(auxiliary_losses(layer).values())).backward()
        with torch.no_grad():
            layer(layer(x))
        layer.eval()(layer(x))
    assert isinstance(added.total, torch.Tensor)
    assert added.total.requires_grad
