"""One exchange to the experts and one back, on real processes, against the slow truth in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic.collectives import Blockwise, Lossless, Raw
from laconic.errors import CollectiveError, ConfigError, RoutingError
from laconic.formats import BlockFormat
from laconic.moe import (
    BaselineDispatcher,
    Dispatcher,
    Gate,
    GatedExperts,
    HierarchicalDispatcher,
    MoELayer,
    Routing,
    S2Dispatcher,
    ShardedDispatcher,
    SoftmaxGate,
)
from laconic.moe.dispatch.flat import FlatDispatcher, added_up, copied
from laconic.moe.experts.shard import expert_shard
from laconic.moe.parallel.grid import Grid
from laconic.train.launch.worker import leave
from tests.distributed.processes import run_ranks
from tests.moe.parallel import DIM, assert_same_as_whole, close, make_whole, spread_over
from tests.moe.reference import layer_output
from tests.moe.worlds import run_world

RAW = Raw()


class Fixed(Gate):
    """Every token goes to the same experts, with weights that learn."""

    def __init__(self, num_experts: int, experts: list[int]) -> None:
        super().__init__()
        self.num_experts, self.experts = num_experts, experts
        self.weights = nn.Parameter(torch.rand(len(experts), dtype=torch.float64))

    def forward(self, x: Tensor) -> Routing:
        chosen = torch.tensor(self.experts).expand(x.shape[0], -1)
        return Routing.of_choices(chosen, self.weights.expand(x.shape[0], -1), self.num_experts)


def flat(grid: Grid) -> FlatDispatcher:
    return FlatDispatcher(grid.joint, num_shards=grid.layout.esp, codec=RAW)


def layers_equal_the_whole() -> None:
    world = dist.get_world_size()
    for ep, esp, kind in ((world, 1, "gated"), (world // 2, 2, "gpt"), (1, 2, "gated"), (1, 1, "gpt"), (2, 1, "gpt")):
        grid = Grid(1, ep, esp)
        whole = make_whole(grid, kind)
        assert_same_as_whole(grid, whole, spread_over(grid, whole, flat(grid)), losses=True)


def ranks_without_tokens_or_rows_take_part() -> None:
    grid = Grid()
    world = grid.layout.num_ranks
    for num_tokens in ((0, 5), (5, 0), (0, 0, 0, 1), (0,)):
        whole = make_whole(grid, num_tokens=num_tokens)
        assert_same_as_whole(grid, whole, spread_over(grid, whole, flat(grid)))
    for experts in ([0], [2 * world - 1], [2 * world - 1, 0]):
        whole = make_whole(grid, gate=Fixed(2 * world, experts))
        assert_same_as_whole(grid, whole, spread_over(grid, whole, flat(grid)))


class Forgetful(nn.Module):
    """Experts whose outputs hang on nothing if there are no rows."""

    def __init__(self, experts: GatedExperts) -> None:
        super().__init__()
        self.inner = experts

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        return self.inner(rows, counts) if len(rows) else torch.zeros(rows.shape, dtype=rows.dtype)


def backward_does_not_wait_for_ranks_whose_experts_have_no_rows() -> None:
    """With inputs that need a gradient, and with those that do not."""
    grid = Grid()
    whole = make_whole(grid, gate=Fixed(2 * grid.layout.ep, [0, 1]))
    assert isinstance(whole.experts, GatedExperts)
    experts = Forgetful(expert_shard(whole.experts, grid))
    layer = MoELayer(whole.gate, experts, dispatcher=flat(grid))
    for needs_gradient in (True, False):
        x = whole.tokens[grid.dp.rank()].clone().requires_grad_(needs_gradient)
        layer(x).sum().backward()
        assert (x.grad is not None) == needs_gradient
        if dist.get_rank():
            assert experts.inner.down.grad is None
    with torch.no_grad():
        assert not layer(x).requires_grad


def codecs_keep_or_bound() -> None:
    grid = Grid()
    torch.manual_seed(3)
    gate = SoftmaxGate(4, 64, 2)
    experts = expert_shard(GatedExperts(4, 64, 32), grid)
    torch.manual_seed(dist.get_rank())
    x = torch.randn(300, 64).to(torch.bfloat16)
    found = {}
    for name, codec in (("raw", RAW), ("lossless", Lossless()), ("8 bits", Blockwise(BlockFormat("int8")))):
        layer = MoELayer(gate, experts, dispatcher=FlatDispatcher(grid.ep, codec=codec)).to(torch.bfloat16)
        leaf = x.clone().requires_grad_()
        out = layer(leaf)
        out.float().pow(2).sum().backward()
        assert leaf.grad is not None
        found[name] = (out.detach(), leaf.grad)
    for exact, ours, near in zip(found["raw"], found["lossless"], found["8 bits"], strict=True):
        assert torch.equal(exact, ours)
        error = (near.float() - exact.float()).norm() / exact.float().norm()
        assert 0 < error < 0.05


def backward_goes_through_twice_and_second_derivatives_travel() -> None:
    """By every dispatcher: the whole layer's gradient penalty, in float64, against the slow truth."""
    world = dist.get_world_size()
    grid, shared = Grid(), Grid(1, world // 2, 2)
    mp = Grid(2, world // 2, 2)
    cases: list[tuple[Grid, Dispatcher]] = [
        (grid, flat(grid)),
        (grid, HierarchicalDispatcher(grid.levels, codec=RAW)),
        (shared, flat(shared)),
        (shared, ShardedDispatcher(shared.ep, shared.esp, codec=RAW)),
        *(
            (mp, S2Dispatcher(mp, forward=there, backward=back, codec=RAW))
            for there, back in (("rows",) * 2, ("tokens", "rows"))
        ),
        (mp, BaselineDispatcher(mp, codec=RAW)),
    ]
    for of_case, dispatcher in cases:
        whole = make_whole(of_case, num_tokens=(5,))
        layer = spread_over(of_case, whole, dispatcher)
        x = whole.tokens[of_case.dp.rank()].clone().requires_grad_()
        out = layer(x)
        (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        (again,) = torch.autograd.grad(out.square().sum(), x, retain_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)

        truth = whole.tokens[of_case.dp.rank()].clone().requires_grad_()
        expected = layer_output(whole.experts, truth, whole.routing(truth))
        (first_truth,) = torch.autograd.grad(expected.square().sum(), truth, create_graph=True)
        (second_truth,) = torch.autograd.grad(first_truth.square().sum(), truth)
        name = type(dispatcher).__name__
        close(first, first_truth, f"{name}: first")
        close(again, first_truth, f"{name}: again")
        close(second, second_truth, f"{name}: second")


def experts_that_do_not_fit_are_refused() -> None:
    """On every rank, before anything travels."""
    grid = Grid()
    world = grid.layout.num_ranks
    whole = make_whole(grid, num_experts=2 * world)
    layer = MoELayer(SoftmaxGate(world - 1, DIM, 1).double(), expert_shard(whole.experts, grid), dispatcher=flat(grid))
    with pytest.raises(RoutingError, match=f"num_experts is {world - 1}, but {world} expert-parallel ranks need"):
        layer(whole.tokens[0])
    with pytest.raises(RoutingError, match="num_experts is 1"):
        expert_shard(GatedExperts(1, 4, 4), grid)
    with pytest.raises(ConfigError, match="hidden_dim"):
        expert_shard(GatedExperts(2, 4, 5), Grid(1, 1, 2))
    with pytest.raises(ConfigError, match="num_shards is 3"):
        FlatDispatcher(grid.joint, num_shards=3)


def _one_rank_has_no_numbers(rank: int, folder: str, levels: bool) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    grid = Grid(device_type="cpu")
    dispatcher = HierarchicalDispatcher(grid.levels) if levels else FlatDispatcher(grid.ep)
    layer = MoELayer(SoftmaxGate(4, DIM, 2), expert_shard(GatedExperts(4, DIM, 8), grid), dispatcher=dispatcher)
    if rank == 1:
        with pytest.raises(RoutingError, match=r"router logits of 3 of 3 tokens are not finite.*look for the layer"):
            layer(torch.full((3, DIM), math.nan))
    else:
        with pytest.raises(CollectiveError, match=r"one of ranks \[0, 1\] ended or stopped while they exchanged rows"):
            layer(torch.randn(3, DIM))
    leave(0)


@pytest.mark.parametrize("levels", [False, True], ids=["flat", "levels"])
def test_logits_that_are_no_numbers_on_one_rank_end_the_others_too(levels: bool, tmp_path: Path) -> None:
    run_ranks(_one_rank_has_no_numbers, (str(tmp_path), levels), 2)


def test_copies_and_sums_are_each_others_transpose() -> None:
    sizes = [2, 0, 3]
    rows = torch.arange(10.0).view(5, 2).double()
    twice = copied(rows, sizes, 2)
    assert twice[:, 0].tolist() == [0, 2, 0, 2, 4, 6, 8, 4, 6, 8]
    assert torch.equal(added_up(twice, sizes, 2), 2 * rows)
    for num_copies in (1, 2, 3):
        other = torch.randn(5 * num_copies, 2, dtype=torch.float64)
        there, back = copied(rows, sizes, num_copies), added_up(other, sizes, num_copies)
        torch.testing.assert_close((there * other).sum(), (rows * back).sum())


def test_parts_are_added_up_in_fp32() -> None:
    parts = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    assert added_up(parts, [1], 3).item() == 258


SCENARIOS: list[Callable[[], None]] = [
    layers_equal_the_whole,
    ranks_without_tokens_or_rows_take_part,
    backward_does_not_wait_for_ranks_whose_experts_have_no_rows,
    codecs_keep_or_bound,
    backward_goes_through_twice_and_second_derivatives_travel,
    experts_that_do_not_fit_are_refused,
]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_experts_spread_over_ranks_are_the_same_layer(world: int, tmp_path: Path) -> None:
    run_world(SCENARIOS, world, tmp_path)
