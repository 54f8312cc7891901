"""Capacity against a loop over tokens, and properties of dropping."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.moe import GatedExperts, MoELayer, Routing, SoftmaxGate
from laconic.moe.gates.capacity import DropPolicy, capacity_of, dropped
from tests.moe.reference import layer_output


def entries(routing: Routing) -> list[tuple[int, int, float]]:
    return list(zip(routing.tokens.tolist(), routing.experts.tolist(), routing.weights.tolist(), strict=True))


@st.composite
def routings(draw: st.DrawFn) -> Routing:
    num_experts = draw(st.integers(1, 5))
    choices = draw(st.lists(st.lists(st.integers(0, num_experts - 1), unique=True, max_size=num_experts), max_size=12))
    pairs = [(token, expert) for token, experts in enumerate(choices) for expert in experts]
    weights = draw(st.lists(st.sampled_from([0.1, 0.2, 0.3, 0.4]), min_size=len(pairs), max_size=len(pairs)))
    tokens, experts = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).unbind(1)
    return Routing(tokens, experts, torch.tensor(weights), len(choices), num_experts)


@settings(max_examples=200)
@given(routing=routings(), capacity=st.integers(0, 6), policy=st.sampled_from(["position", "probability"]))
def test_an_expert_keeps_its_first_or_its_heaviest_entries(routing: Routing, capacity: int, policy: DropPolicy) -> None:
    everything = list(enumerate(entries(routing)))
    kept = set()
    for expert in range(routing.num_experts):
        mine = [(i, weight) for i, (_, e, weight) in everything if e == expert]
        if policy == "probability":
            mine.sort(key=lambda pair: -pair[1])
        kept |= {i for i, _ in mine[:capacity]}
    result = dropped(routing, capacity, policy)
    result.check()
    assert entries(result) == [entry for i, entry in everything if i in kept]
    assert result.num_dropped == len(everything) - len(kept)


@pytest.mark.parametrize(
    ("factor", "num_tokens", "num_experts", "expected"),
    [(1.2, 10, 3, 4), (2.0, 8, 8, 2), (0.1, 1, 8, 1), (1.0, 0, 4, 0)],
)
def test_capacity_is_rounded_up(factor: float, num_tokens: int, num_experts: int, expected: int) -> None:
    assert capacity_of(factor, num_tokens, num_experts) == expected


@pytest.mark.parametrize("policy", ["position", "probability"])
def test_layer_with_capacity_is_exact_for_what_stays(policy: DropPolicy) -> None:
    torch.manual_seed(0)
    gate = SoftmaxGate(4, 8, 2, capacity_factor=0.5, drop_policy=policy, balance_coef=1.0, dtype=torch.float64)
    layer = MoELayer(gate, GatedExperts(4, 8, 8, dtype=torch.float64))
    x = torch.randn(16, 8, dtype=torch.float64, requires_grad=True)
    out = layer(x)
    routing = gate(x)
    expected = layer_output(layer.experts, x, routing)
    torch.testing.assert_close(out, expected)
    assert layer.load is not None
    assert int(layer.load.max()) <= 4  # ceil(0.5 * 2 * 16 / 4)
    assert layer.num_dropped == 32 - int(layer.load.sum()) > 0
    ours, theirs = (torch.autograd.grad(y.square().sum(), [x, *layer.parameters()]) for y in (out, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_balance_loss_counts_also_what_is_dropped() -> None:
    torch.manual_seed(0)
    gate = SoftmaxGate(4, 8, 2, balance_coef=1.0)
    x = torch.randn(16, 8)
    whole = gate(x).losses["balance"]
    gate.capacity_factor = 0.25
    assert torch.equal(gate(x).losses["balance"], whole)


def test_enough_capacity_drops_nothing() -> None:
    gate = SoftmaxGate(4, 8, 2, capacity_factor=2.0)
    routing = gate(torch.randn(16, 8))
    assert routing.num_dropped == 0
    assert routing.choices == 2


def test_evaluation_may_have_another_capacity() -> None:
    gate = SoftmaxGate(4, 8, 2, capacity_factor=0.5)
    x = torch.randn(16, 8)
    assert gate.eval()(x).num_dropped == gate.train()(x).num_dropped > 0
    gate.eval_capacity_factor = math.inf
    assert gate.eval()(x).num_dropped == 0
    gate.eval_capacity_factor = 0.25
    assert int(gate.eval()(x).counts().max()) == 2
    assert int(gate.train()(x).counts().max()) == 4
    gate.capacity_factor = None
    assert gate.train()(x).num_dropped == 0
    assert gate.eval()(x).num_dropped > 0
