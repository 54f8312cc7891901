"""Layers inside an MP group on every path: the slow truth in float64, forward and backward, on many grids."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collectives import Lossless, Raw
from laconic.errors import ConfigError, RoutingError
from laconic.moe import (
    Dispatcher,
    ExpertRows,
    GatedExperts,
    HierarchicalDispatcher,
    Hook,
    MoELayer,
    SoftmaxGate,
    expert_shard,
)
from laconic.moe.dispatch.expert_sharded import ShardedDispatcher
from laconic.moe.dispatch.flat import FlatDispatcher
from laconic.moe.dispatch.parm import S1Dispatcher, S2Dispatcher, make_dispatcher
from laconic.moe.parallel.grid import Grid
from tests.moe.parallel import DIM, assert_same_as_whole, close, make_whole, spread_over
from tests.moe.worlds import Scenario, run_world

RAW = Raw()

PATHS = (
    ("baseline", None),
    ("sharded", None),
    ("s1", None),
    ("s2", None),
    ("s1", "s2"),
    ("s2", "s1"),
)


def of_path(grid: Grid, path: str, backward: str | None = None) -> Dispatcher:
    return make_dispatcher(grid, path, backward=backward, codec=RAW)  # type: ignore[arg-type]


def every_path_equals_the_whole(
    mp: int, ep: int, esp: int, kind: str = "gated", num_experts: int | None = None
) -> None:
    grid = Grid(mp, ep, esp)
    whole = make_whole(grid, kind, num_experts=num_experts)
    for path, backward in PATHS:
        # Losses of part of the tokens, or of more than a rank's own, are means of other things.
        losses = (path, backward) in (("s2", None), ("s1", "s2"), ("s2", "s1")) or (
            path == "baseline" and mp % esp == 0
        )
        layer = spread_over(grid, whole, of_path(grid, path, backward))
        assert_same_as_whole(grid, whole, layer, losses=losses)


def ranks_without_tokens_or_rows_take_part(mp: int, ep: int, esp: int) -> None:
    grid = Grid(mp, ep, esp)
    for num_tokens in ((0,), (1,), (0, 3)):
        whole = make_whole(grid, num_tokens=num_tokens)
        for path, backward in PATHS:
            assert_same_as_whole(grid, whole, spread_over(grid, whole, of_path(grid, path, backward)))


def ranks_of_an_mp_group_with_other_tokens_are_refused() -> None:
    """They would get each other's outputs, or break the collective where numbers of tokens differ."""
    grid = Grid(2, 2)
    whole = make_whole(grid)
    mine = torch.randn(5, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(dist.get_rank()))
    for path, backward in PATHS:
        for x, found in ((mine, "other tokens"), (mine[: 3 + 2 * dist.get_rank()], "from 3 to 5 tokens")):
            layer = spread_over(grid, whole, of_path(grid, path, backward))
            for _ in range(2):
                with pytest.raises(RoutingError, match=rf"the ranks \(0, 1\) of an MP group have {found}, but"):
                    layer(x)
            with pytest.raises(RoutingError, match=f"have {found}, but"):
                spread_over(grid, whole, of_path(grid, path, backward))(x, routing=whole.gate(x))


def one_of_two_mp_groups_with_other_tokens_is_named_on_all_ranks() -> None:
    """The other MP group would wait in the exchange."""
    for esp in (1, 2):
        grid = Grid(2, 4 // esp, esp)
        whole = make_whole(grid)
        seed = max(1, dist.get_rank())
        mine = torch.randn(5, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        for path, backward in PATHS:
            for x, found in ((mine, "other tokens"), (mine[: 2 + seed], "from 4 to 5 tokens")):
                layer = spread_over(grid, whole, of_path(grid, path, backward))
                with pytest.raises(RoutingError, match=rf"the ranks \(2, 3\) of an MP group have {found}, but"):
                    layer(x)
                assert_same_as_whole(grid, whole, layer)


def groups_that_do_not_lie_in_one_another_are_refused_together() -> None:
    """MP group (0, 1) lies in one joint group; rank 3 of the other one waits for rank 2, which waits for these."""
    grid = Grid(2, 3)
    whole = make_whole(grid)
    mine = torch.randn(5, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(min(1, dist.get_rank())))
    for path, backward in PATHS:
        layer = spread_over(grid, whole, of_path(grid, path, backward))
        with pytest.raises(RoutingError, match=r"the ranks \(0, 1\) of an MP group have other tokens, but"):
            layer(mine)
        assert_same_as_whole(grid, whole, layer)


def experts_see_each_row_once_per_shard() -> None:
    """What Parm saves: with MP paused, N_MP times fewer rows pass the experts than in the baseline."""
    grid = Grid(2, dist.get_world_size() // 2, 2)
    whole = make_whole(grid, num_tokens=(6,))
    rows = {}
    for path, backward in PATHS:

        class Count(Hook):
            def before_combine(self, layer: MoELayer, outputs: ExpertRows) -> None:
                self.rows = outputs.counts.sum()

        count = Count()
        layer = spread_over(grid, whole, of_path(grid, path, backward))
        layer.hooks = (count,)
        layer(whole.tokens[grid.dp.rank()])
        dist.all_reduce(count.rows)
        rows[path, backward] = int(count.rows)
    entries = 6 * 2 * grid.layout.dp * grid.layout.esp
    assert rows.pop(("baseline", None)) == 2 * entries
    assert {*rows.values()} == {entries}


def steps_do_not_change_a_bit(mp: int, ep: int, esp: int) -> None:
    grid = Grid(mp, ep, esp)
    whole = make_whole(grid, num_tokens=(9,))
    found = []
    for num_steps in (1, 2, 100):
        layer = spread_over(grid, whole, S2Dispatcher(grid, num_steps=num_steps, codec=RAW))
        x = whole.tokens[grid.dp.rank()].clone().requires_grad_()
        out = layer(x)
        out.sum().backward()
        found.append((out, x.grad))
    for out, grad in found[1:]:
        assert torch.equal(out, found[0][0])
        assert torch.equal(cast(Tensor, grad), cast(Tensor, found[0][1]))


def dropped_tokens_are_those_of_the_whole() -> None:
    """A capacity counts all tokens in S2; entries of a token may be missing, so parts are uneven."""
    grid = Grid(2, dist.get_world_size() // 2, 2)
    gate = SoftmaxGate(2 * grid.layout.ep, DIM, 2, capacity_factor=0.6).double()
    whole = make_whole(grid, num_tokens=(9, 8), gate=gate)
    for path, backward in (("s2", None), ("s1", "s2"), ("s2", "s1")):
        layer = spread_over(grid, whole, of_path(grid, path, backward))
        assert_same_as_whole(grid, whole, layer)
        assert layer.num_dropped


def shares_of_a_sequence_are_routed_on_their_own() -> None:
    """With sequence parallelism the input is the share: outputs and gradients are the shares of the whole's."""
    grid = Grid(2, dist.get_world_size() // 2, 2)
    whole = make_whole(grid, num_tokens=(6,))
    for path in ("s1", "sharded"):
        plain = spread_over(grid, whole, of_path(grid, path))
        shared = spread_over(grid, whole, make_dispatcher(grid, path, sequence_parallel=True, codec=RAW))
        x = whole.tokens[grid.dp.rank()].clone().requires_grad_()
        out = plain(x)
        (out * whole.grads[grid.dp.rank()]).sum().backward()
        mine = x.detach().chunk(2)[grid.mp.rank()].requires_grad_()
        part = shared(mine)
        (part * whole.grads[grid.dp.rank()].chunk(2)[grid.mp.rank()]).sum().backward()
        assert x.grad is not None
        close(part, out.chunk(2)[grid.mp.rank()], "out")
        close(mine.grad, x.grad.chunk(2)[grid.mp.rank()], "input")
        for (name, one), (_, other) in zip(plain.named_parameters(), shared.named_parameters(), strict=True):
            assert one.grad is not None
            close(other.grad, one.grad, name)


def losses_of_s1_are_the_mean_of_the_shares() -> None:
    grid = Grid(2, dist.get_world_size() // 2, 2)
    whole = make_whole(grid, num_tokens=(5,))
    layer = spread_over(grid, whole, of_path(grid, "s1"))
    x = whole.tokens[grid.dp.rank()].clone().requires_grad_()
    layer(x)
    sum(layer.losses.values(), torch.zeros((), dtype=torch.float64)).backward()
    one = x.detach().clone().requires_grad_()
    expected: dict[str, Tensor] = {}
    for share in one.split([3, 2]):
        for name, loss in whole.routing(share).losses.items():
            expected[name] = expected.get(name, torch.zeros((), dtype=torch.float64)) + loss * len(share) / 5
    assert layer.losses.keys() == expected.keys()
    for name, loss in expected.items():
        close(layer.losses[name], loss, name)
    total = sum(expected.values(), torch.zeros((), dtype=torch.float64))
    grads = torch.autograd.grad(total, [one, *whole.gate.parameters()])
    close(x.grad, grads[0], "input")
    for parameter, grad in zip(layer.gate.parameters(), grads[1:], strict=True):
        close(parameter.grad, grad, "gate")


def a_hierarchy_may_be_inside() -> None:
    world = dist.get_world_size()
    grid = Grid(2, world, levels=(2,))
    whole = make_whole(grid)
    inner = HierarchicalDispatcher(grid.levels, codec=RAW)
    assert_same_as_whole(grid, whole, spread_over(grid, whole, S1Dispatcher(grid, inner, codec=RAW)))


def half_precision_differs_by_rounding_and_lossless_not_at_all() -> None:
    grid = Grid(2, dist.get_world_size() // 2, 2)
    torch.manual_seed(5)
    gate, experts = SoftmaxGate(2 * grid.layout.ep, 64, 2), GatedExperts(2 * grid.layout.ep, 64, 32)
    x = torch.randn(grid.layout.dp, 200, 64)[grid.dp.rank()]
    truth = MoELayer(copy.deepcopy(gate).double(), copy.deepcopy(experts).double())
    one = x.bfloat16().double().requires_grad_()
    for parameter in truth.parameters():
        parameter.data = parameter.data.bfloat16().double()
    expected = truth(one)
    expected.sin().sum().backward()
    for path, backward in PATHS:
        found = []
        for codec in (RAW, Lossless()):
            dispatcher = make_dispatcher(grid, path, backward=backward, codec=codec)  # type: ignore[arg-type]
            layer = MoELayer(copy.deepcopy(gate), expert_shard(experts, grid), dispatcher=dispatcher).bfloat16()
            leaf = x.bfloat16().requires_grad_()
            out = layer(leaf)
            out.float().sin().sum().backward()
            found.append((out.detach(), leaf.grad))
        for raw, coded, right in zip(*found, (expected, one.grad), strict=True):
            assert raw is not None
            assert coded is not None
            assert right is not None
            assert torch.equal(raw, coded), (path, backward)
            error = (raw.double() - right).norm() / right.norm()
            assert error < 0.02, (path, backward, error)


def names_make_what_they_say() -> None:
    grid = Grid(2, 1, 2)
    assert isinstance(of_path(grid, "joint"), FlatDispatcher)
    sharded = of_path(grid, "sharded")
    assert isinstance(sharded, S1Dispatcher)
    assert isinstance(sharded.inner, ShardedDispatcher)
    mixed = of_path(grid, "s1", "s2")
    assert isinstance(mixed, S2Dispatcher)
    assert (mixed.forward, mixed.backward) == ("tokens", "rows")
    for path, backward, named in (("s3", None, "path is 's3'"), ("s1", "baseline", "only s1 and s2 can be mixed")):
        with pytest.raises(ConfigError, match=named):
            of_path(grid, path, backward)
    with pytest.raises(ConfigError, match="sequence_parallel"):
        make_dispatcher(grid, "s2", sequence_parallel=True)
    with pytest.raises(ConfigError, match="forward is"):
        S2Dispatcher(grid, forward="both")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="num_steps is 0"):
        S2Dispatcher(grid, num_steps=0)


TWO: list[Scenario] = [
    partial(every_path_equals_the_whole, 2, 2, 1),
    partial(every_path_equals_the_whole, 2, 1, 2, "gpt"),
    partial(every_path_equals_the_whole, 1, 2, 1, "gpt"),
    partial(every_path_equals_the_whole, 2, 1, 1),
    partial(ranks_without_tokens_or_rows_take_part, 2, 2, 1),
    ranks_of_an_mp_group_with_other_tokens_are_refused,
    experts_see_each_row_once_per_shard,
    partial(steps_do_not_change_a_bit, 2, 2, 1),
    dropped_tokens_are_those_of_the_whole,
    shares_of_a_sequence_are_routed_on_their_own,
    losses_of_s1_are_the_mean_of_the_shares,
    a_hierarchy_may_be_inside,
    half_precision_differs_by_rounding_and_lossless_not_at_all,
    names_make_what_they_say,
]
FOUR: list[Scenario] = [
    partial(every_path_equals_the_whole, 2, 2, 2, "gpt"),
    partial(every_path_equals_the_whole, 4, 2, 2),
    partial(every_path_equals_the_whole, 4, 4, 1),
    partial(every_path_equals_the_whole, 1, 2, 2),  # more shards than ranks of an MP group
    partial(every_path_equals_the_whole, 2, 2, 2, "gpt", 3),  # 2 experts and 1
    partial(every_path_equals_the_whole, 2, 4, 1, "gated", 5),  # 2, 2, 1 and none
    partial(steps_do_not_change_a_bit, 2, 2, 2),
    one_of_two_mp_groups_with_other_tokens_is_named_on_all_ranks,
]
MORE_OF_FOUR: list[Scenario] = [
    partial(every_path_equals_the_whole, 4, 1, 4),
    partial(every_path_equals_the_whole, 2, 4, 1),
    partial(every_path_equals_the_whole, 2, 2, 1),
    partial(every_path_equals_the_whole, 4, 2, 1),
    partial(ranks_without_tokens_or_rows_take_part, 2, 2, 2),
    partial(steps_do_not_change_a_bit, 4, 4, 1),
    experts_see_each_row_once_per_shard,
    dropped_tokens_are_those_of_the_whole,
    shares_of_a_sequence_are_routed_on_their_own,
    a_hierarchy_may_be_inside,
    half_precision_differs_by_rounding_and_lossless_not_at_all,
]
SIX: list[Scenario] = [
    groups_that_do_not_lie_in_one_another_are_refused_together,
    partial(every_path_equals_the_whole, 2, 3, 1),
    partial(every_path_equals_the_whole, 3, 2, 1, "gpt", 5),
]
MORE_OF_SIX: list[Scenario] = [
    partial(every_path_equals_the_whole, 3, 1, 2, "gpt"),
    partial(every_path_equals_the_whole, 2, 3, 2),
    partial(ranks_without_tokens_or_rows_take_part, 2, 3, 1),
    partial(steps_do_not_change_a_bit, 2, 3, 1),
]
EIGHT: list[Scenario] = [
    partial(every_path_equals_the_whole, 2, 2, 4),
    partial(every_path_equals_the_whole, 4, 4, 2, "gpt"),
    partial(every_path_equals_the_whole, 4, 2, 4),
    partial(every_path_equals_the_whole, 2, 4, 2),
    partial(every_path_equals_the_whole, 2, 4, 2, "gpt", 5),
    partial(every_path_equals_the_whole, 2, 2, 2),
    partial(steps_do_not_change_a_bit, 4, 4, 2),
]


@pytest.mark.parametrize(
    ("world", "scenarios"),
    [
        pytest.param(2, TWO, id="2"),
        pytest.param(4, FOUR, id="4", marks=pytest.mark.ci),
        pytest.param(6, SIX, id="6", marks=pytest.mark.ci),  # groups do not lie in one another
        pytest.param(4, MORE_OF_FOUR, id="4-more", marks=pytest.mark.slow),
        pytest.param(6, MORE_OF_SIX, id="6-more", marks=pytest.mark.slow),
        pytest.param(8, EIGHT, id="8", marks=pytest.mark.slow),
    ],
)
def test_every_path_is_the_whole_layer_on_ranks(world: int, scenarios: list[Scenario], tmp_path: Path) -> None:
    run_world(scenarios, world, tmp_path)
