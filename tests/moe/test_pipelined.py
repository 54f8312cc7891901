"""Any number of pieces gives what one gives, in one thread, in two, and over two processes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from laconic.errors import ConfigError
from laconic.moe import (
    ExpertChoiceGate,
    FlatDispatcher,
    Gate,
    GatedExperts,
    Hook,
    MoELayer,
    Pipelined,
    Routing,
    SoftmaxGate,
    SoftMoEGate,
    thread_streams,
)
from laconic.moe.pipelined import pieces
from tests.moe.worlds import run_world

EXPERTS, DIM = 4, 6
GATES: dict[str, Any] = {
    "top 2": lambda: SoftmaxGate(EXPERTS, DIM, 2),
    "dropping": lambda: SoftmaxGate(EXPERTS, DIM, 2, capacity_factor=0.5, drop_policy="probability"),
    "expert choice": lambda: ExpertChoiceGate(EXPERTS, DIM, 2),
    "soft": lambda: SoftMoEGate(EXPERTS, DIM, 3),
}


def whole(gate: str) -> MoELayer:
    torch.manual_seed(0)
    made: Gate = GATES[gate]()
    return MoELayer(made, GatedExperts(EXPERTS, DIM, 8)).double()


def results(layer: MoELayer, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out = layer(x)
    return [out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])]


@pytest.mark.parametrize("threads", [False, True], ids=["one thread", "two threads"])
@pytest.mark.parametrize("degree", [1, 2, 3, 8])
@pytest.mark.parametrize("gate", GATES)
def test_any_degree_gives_the_same_layer(gate: str, degree: int, threads: bool) -> None:
    plain = whole(gate)
    x = torch.randn(7, DIM, dtype=torch.float64)
    layer = copy.deepcopy(plain)
    layer.schedule = Pipelined(degree, thread_streams() if threads else None)
    for one, other in zip(results(layer, x), results(plain, x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)
    with torch.no_grad():
        assert not layer(x).requires_grad
    assert layer.load is not None
    assert plain.load is not None
    assert torch.equal(layer.load, plain.load)


def test_sums_of_whole_numbers_are_the_same_bits() -> None:
    """With products that are exact, only the order of a token's sum could differ, and it does not."""

    class Halves(GatedExperts):
        def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
            return rows * torch.arange(1, EXPERTS + 1).repeat_interleave(counts)[:, None]

    layer = MoELayer(SoftmaxGate(EXPERTS, DIM, 3), Halves(EXPERTS, DIM, 8))
    x = torch.randn(13, DIM)
    expected = layer(x)
    for degree in range(1, 15):
        layer.schedule = Pipelined(degree)
        assert torch.equal(layer(x), expected)


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(0, 3), max_size=9), degree=st.integers(1, 12))
def test_pieces_are_the_routing_cut_between_tokens(sizes: list[int], degree: int) -> None:
    tokens = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes, dtype=torch.int64))
    experts, weights = torch.arange(len(tokens)) % 3, torch.rand(len(tokens))
    batch = {"x": torch.randn(len(sizes), 2), "routing": Routing(tokens, experts, weights, len(sizes), 3)}
    parts = pieces(batch, degree)
    assert len(parts) == degree
    assert torch.equal(torch.cat([part["x"] for part in parts]), batch["x"])
    start = 0
    together = []
    for part in parts:
        part["routing"].check()
        together.append(part["routing"].tokens + start)
        start += part["routing"].num_tokens
    assert torch.equal(torch.cat(together), tokens)
    assert torch.equal(torch.cat([part["routing"].weights for part in parts]), weights)
    assert max(part["routing"].num_tokens for part in parts) <= -(-len(sizes) // degree)


def test_hooks_inside_are_called_for_every_piece() -> None:
    class Counting(Hook):
        dispatched = 0

        def after_dispatch(self, layer: MoELayer, batch: dict[str, Any]) -> None:
            self.dispatched += 1

    hook = Counting()
    layer = MoELayer(SoftmaxGate(EXPERTS, DIM, 2), GatedExperts(EXPERTS, DIM, 8), hooks=[hook], schedule=Pipelined(3))
    layer(torch.randn(5, DIM))
    assert hook.dispatched == 3


def test_degree_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="degree = 0"):
        Pipelined(0)


def pieces_over_two_ranks() -> None:
    rank = dist.get_rank()
    plain = whole("top 2")
    for num_tokens in ((5, 9), (0, 4)):
        x = torch.randn(num_tokens[rank], DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
        expected = results(plain, x)
        layer = MoELayer(
            plain.gate,
            GatedExperts(EXPERTS // 2, DIM, 8, dtype=torch.float64),
            dispatcher=FlatDispatcher(dist.group.WORLD),
            schedule=Pipelined(3, thread_streams()),
        )
        mine = slice(2 * rank, 2 * rank + 2)
        assert isinstance(layer.experts, GatedExperts)
        assert isinstance(plain.experts, GatedExperts)
        with torch.no_grad():
            layer.experts.gate_up.copy_(plain.experts.gate_up[mine])
            layer.experts.down.copy_(plain.experts.down[mine])
        ours = results(layer, x)
        for one, other in zip(ours[:3], expected[:3], strict=True):  # out, tokens, gate
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)
        for one, other in zip(ours[3:], expected[3:], strict=True):
            dist.all_reduce(other)
            torch.testing.assert_close(one, other[mine], rtol=1e-12, atol=1e-13)


def test_pieces_travel_between_two_ranks(tmp_path: Path) -> None:
    run_world([pieces_over_two_ranks], 2, tmp_path)
