"""Hierarchical dispatch between real processes: a dense float64 reference, all depths, codecs, counts, odd routings."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collectives.codec import Blockwise, Codec, Lossless, Raw
from laconic.cost.comm.rates import Line
from laconic.cost.moe.hierarchy import RowCounts, count_vector, level_nbytes
from laconic.cost.moe.rates import MoERates
from laconic.errors import CollectiveError, ConfigError, RoutingError
from laconic.formats import BlockFormat
from laconic.moe.dispatch.base import Dispatcher
from laconic.moe.dispatch.hierarchical import HierarchicalDispatcher
from laconic.moe.parallel.grid import Grid
from laconic.moe.permute import SortedOrder
from laconic.moe.placement.consensus import agree_on_depth, gather_counts
from laconic.moe.routing import Routing
from laconic.train.launch.worker import leave
from tests.distributed.processes import is_running, run_ranks, wait_until
from tests.patience import patient

M, E_LOCAL = 8, 2
SLOW_BETWEEN = {
    "all": {"all_to_all": Line(0.0, 1e-3)},
    "across": {"all_to_all": Line(0.0, 1e-3)},
    "node": {"all_to_all": Line(0.0, 1e-6)},
}
LATE = {kind: {"all_to_all": Line(0.0 if kind == "all" else 1.0, 1e-9)} for kind in SLOW_BETWEEN}
INT8 = Blockwise(BlockFormat("int8", 128, torch.float32))


def tokens_of(rank: int, num_tokens: int, num_experts: int, rate: float, dtype: torch.dtype) -> tuple[Tensor, Routing]:
    """The same on every process that asks. Tokens have any number of experts, also none."""
    generator = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(num_tokens, M, generator=generator, dtype=torch.float64).to(dtype)
    mask = torch.rand(num_tokens, num_experts, generator=generator) < rate
    tokens, experts = mask.nonzero().unbind(1)
    # By token, but experts in no order.
    shuffled = torch.randperm(len(tokens), generator=generator)
    order = shuffled[tokens[shuffled].argsort(stable=True)]
    weights = torch.rand(len(tokens), generator=generator, dtype=torch.float64).to(dtype)
    return x, Routing(tokens[order], experts[order], weights, num_tokens, num_experts)


def expert_weights(num_experts: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(num_experts, M, M, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(dtype)


def run_experts(rows: Tensor, counts: Tensor, weights: Tensor) -> Tensor:
    parts = [torch.tanh(part @ weight) for part, weight in zip(rows.split(counts.tolist()), weights, strict=True)]
    return torch.cat(parts)


def dense(x: Tensor, routing: Routing, weights: Tensor) -> Tensor:
    """Every token by itself."""
    outputs = 0 * x
    for token, expert, weight in zip(routing.tokens.tolist(), routing.experts.tolist(), routing.weights, strict=True):
        outputs = outputs.index_add(0, torch.tensor(token), weight * torch.tanh(x[token] @ weights[expert])[None])
    return outputs


class Checks:
    """What each process checks, with the groups of `grid`."""

    def __init__(self, grid: Grid) -> None:
        self.grid, self.rank, self.world = grid, grid.ep.rank(), grid.ep.size()
        self.num_experts = E_LOCAL * self.world

    def depths(self, codec: Codec | str = "auto") -> list[HierarchicalDispatcher]:
        most = HierarchicalDispatcher(self.grid.levels).levels.max_depth
        return [HierarchicalDispatcher(self.grid.levels, depth, codec=codec) for depth in range(1, most + 1)]

    def routed(self, num_tokens: int, rate: float, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Routing]:
        return tokens_of(self.rank, num_tokens, self.num_experts, rate, dtype)

    def through(self, dispatcher: Dispatcher, x: Tensor, routing: Routing, weights: Tensor) -> Tensor:
        dispatched = dispatcher.dispatch(x, routing, SortedOrder())
        assert int(dispatched.counts.sum()) == len(dispatched.rows)
        return dispatcher.combine(run_experts(dispatched.rows, dispatched.counts, weights), dispatched)

    def mine(self, weights: Tensor) -> Tensor:
        return weights[E_LOCAL * self.rank :][:E_LOCAL]

    def every_depth_equals_the_dense_reference_with_gradients(self) -> None:
        for sizes, rate in (
            ([5] * self.world, 0.3),
            ([3 * (rank % 3) for rank in range(self.world)], 0.6),  # rank 0 has no token
            ([4] * self.world, 1.0),
            ([4] * self.world, 0.0),
        ):
            for dispatcher in self.depths():
                self._compare(dispatcher, sizes, rate)

    def _compare(self, dispatcher: Dispatcher, sizes: list[int], rate: float) -> None:
        everything = [tokens_of(rank, n, self.num_experts, rate, torch.float64) for rank, n in enumerate(sizes)]
        weights = expert_weights(self.num_experts, torch.float64).requires_grad_()
        weights.grad = torch.zeros_like(weights)
        mine = self.mine(weights.detach()).clone().requires_grad_()
        leaves, outputs = [], []
        for rank, (x, routing) in enumerate(everything):
            x.requires_grad_()
            routing.weights.requires_grad_()
            reference = dense(x, routing, weights)
            # A loss that is another function of every output.
            (reference * (rank + 1 + torch.arange(M))).sum().backward()
            leaves.append((x.grad, routing.weights.grad))
            outputs.append(reference.detach())
        x, routing = tokens_of(self.rank, sizes[self.rank], self.num_experts, rate, torch.float64)
        x.requires_grad_()
        routing.weights.requires_grad_()
        output = self.through(dispatcher, x, routing, mine)
        torch.testing.assert_close(output.detach(), outputs[self.rank], rtol=0, atol=1e-10)
        (output * (self.rank + 1 + torch.arange(M))).sum().backward()
        for got, expected in (
            (x.grad, leaves[self.rank][0]),
            (routing.weights.grad, leaves[self.rank][1]),
            (mine.grad, self.mine(weights.grad)),
        ):
            assert got is not None
            expected = torch.zeros_like(got) if expected is None else expected
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)

    def all_tokens_to_one_expert_is_exact(self) -> None:
        x, _ = self.routed(3, 0.0)
        experts = torch.full((3, 1), self.num_experts - 1)
        routing = Routing.of_choices(experts, torch.ones(3, 1, dtype=torch.float64), self.num_experts)
        weights = expert_weights(self.num_experts, torch.float64)
        for dispatcher in self.depths():
            output = self.through(dispatcher, x, routing, self.mine(weights))
            # How a product of matrices is summed depends on the number of rows; nothing else may differ.
            torch.testing.assert_close(output, torch.tanh(x @ weights[-1]), rtol=0, atol=1e-14)

    def gradients_of_gradients_travel_too(self) -> None:
        dispatcher = self.depths()[-1]
        x, routing = self.routed(2, 0.5)
        x.requires_grad_()
        output = self.through(dispatcher, x, routing, self.mine(expert_weights(self.num_experts, torch.float64)))
        (first,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        reference = x.detach().clone().requires_grad_()
        expected = dense(reference, routing, expert_weights(self.num_experts, torch.float64))
        (first,) = torch.autograd.grad(expected.square().sum(), reference, create_graph=True)
        torch.testing.assert_close(second, torch.autograd.grad(first.square().sum(), reference)[0])

    def lossless_codecs_change_no_bit(self) -> None:
        x, routing = self.routed(40, 0.5, torch.bfloat16)
        weights = self.mine(expert_weights(self.num_experts, torch.bfloat16))
        for raw, auto, coded in zip(self.depths(Raw()), self.depths("auto"), self.depths(Lossless()), strict=True):
            expected = self.through(raw, x, routing, weights)
            assert torch.equal(self.through(auto, x, routing, weights), expected)
            assert torch.equal(self.through(coded, x, routing, weights), expected)

    def coarse_codecs_are_close(self) -> None:
        x, routing = self.routed(40, 0.5, torch.float32)
        weights = self.mine(expert_weights(self.num_experts, torch.float32))
        for dispatcher, coded in zip(self.depths(Raw()), self.depths(INT8), strict=True):
            expected, got = (self.through(one, x, routing, weights) for one in (dispatcher, coded))
            assert (got - expected).norm() <= 0.05 * expected.norm()
            if self.world > 1:
                assert not torch.equal(got, expected)
            inside = HierarchicalDispatcher(self.grid.levels, dispatcher.depth, codec=Raw(), inner_codec=INT8)
            assert torch.equal(self.through(inside, x, routing, weights), expected) == (dispatcher.depth == 1)

    def sums_of_short_floats_are_made_in_fp32(self) -> None:
        # 256 + 1 + 1 ...: bfloat16 would lose every 1 that is added alone.
        ranks = torch.arange(self.world)
        x = torch.ones(1, M, dtype=torch.bfloat16)
        routing = Routing.of_choices(
            E_LOCAL * ranks[None], torch.ones(1, self.world, dtype=torch.bfloat16), self.num_experts
        )
        for dispatcher in self.depths(Raw()):
            dispatched = dispatcher.dispatch(x, routing, SortedOrder())
            rows = dispatched.rows * (256 if self.rank == 0 else 1)
            sums = torch.tensor([256.0] + [1.0] * (self.world - 1), dtype=torch.bfloat16)
            for stage, _ in reversed(dispatcher.stages()):
                sums = sums.view(-1, stage.fanout).float().sum(1).bfloat16()
            assert torch.equal(dispatcher.combine(rows, dispatched), sums.expand_as(x))

    def traffic_is_the_sum_of_the_masks(self) -> None:
        rate, n = 0.4, 6
        masks = []
        for rank in range(self.world):
            _, routing = tokens_of(rank, n, self.num_experts, rate, torch.float64)
            mask = torch.zeros(n, self.num_experts, dtype=torch.bool)
            mask[routing.tokens, routing.experts] = True
            masks.append(mask)
        x, routing = self.routed(n, rate)
        for dispatcher in self.depths():
            dispatcher.dispatch(x, routing, SortedOrder())
            levels = dispatcher.levels
            chain = (*levels.num_groups[1 : dispatcher.depth], levels.num_ranks)
            for (stage, group), traffic, num_groups in zip(dispatcher.stages(), dispatcher.traffic, chain, strict=True):
                assert dist.get_process_group_ranks(group) == [*stage.peers(dist.get_rank())]
                told = torch.tensor([traffic.num_rows, traffic.num_entries, traffic.num_sent_rows])
                dist.all_reduce(told, group=self.grid.ep)
                rows = sum(int(mask.view(n, num_groups, -1).any(-1).sum()) for mask in masks)
                entries = sum(int(mask.sum()) for mask in masks)
                assert told[:2].tolist() == [rows, entries]
                assert int(told[2]) < rows
                assert traffic.row_nbytes == traffic.num_sent_rows * M * 8
                if traffic.num_entries:
                    assert traffic.duplicate_rate == 1 - traffic.num_rows / traffic.num_entries

    def traffic_is_what_the_model_predicts(self) -> None:
        for dispatcher in self.depths():
            levels = dispatcher.levels
            x, routing = self.routed(6, 0.4)
            counts = gather_counts(routing, levels, dispatcher.group)
            everything = [tokens_of(rank, 6, self.num_experts, 0.4, torch.float64)[1] for rank in range(self.world)]
            vectors = [
                count_vector(one.tokens.numpy(), one.experts.numpy(), self.num_experts, levels) for one in everything
            ]
            expected = RowCounts.of_vectors(vectors, levels)
            assert all((counts.rows[g] == expected.rows[g]).all() for g in expected.rows)
            dispatcher.dispatch(x, routing, SortedOrder())
            sent = torch.tensor([traffic.row_nbytes for traffic in dispatcher.traffic])
            dist.all_reduce(sent, group=self.grid.ep)
            assert sent.tolist() == [*level_nbytes(counts, dispatcher.depth, M * 8).values()]

    def ranks_agree_on_the_predicted_depth(self) -> None:
        _, routing = self.routed(40, 1.0)
        dispatcher = self.depths()[0]
        deepest = dispatcher.levels.max_depth
        # Bytes are dear between groups, or messages are.
        for lines, depth in ((SLOW_BETWEEN, min(2, deepest)), (LATE, 1)):
            choice = agree_on_depth(dispatcher, routing, 64.0, MoERates.of_lines(lines, Line(0.0, 0.0)))
            assert choice.depth == dispatcher.depth == depth
            assert {*choice.candidates} == {*range(1, deepest + 1)}

    def ranks_that_ask_for_different_depths_are_refused(self) -> None:
        dispatcher = self.depths()[-1]
        deepest = dispatcher.levels.max_depth
        with pytest.raises(ConfigError, match=f"depth is {deepest + 1}, but it must be from 1 to {deepest}"):
            dispatcher.set_depth(deepest + 1)
        dispatcher.set_depth(1)
        assert (dispatcher.depth, len(dispatcher.stages())) == (1, 1)
        if deepest > 1:
            with pytest.raises(ConfigError, match="but all ranks must take the same"):
                dispatcher.set_depth(2 if self.rank == 1 else 1)
            assert dispatcher.depth == 1

    def experts_that_cannot_be_spread_are_refused(self) -> None:
        if self.world == 1:
            return
        x, routing = tokens_of(0, 1, self.world - 1, 1.0, torch.float64)
        with pytest.raises(RoutingError, match=f"num_experts is {self.world - 1}, but {self.world} expert-par"):
            self.depths()[-1].dispatch(x, routing, SortedOrder())


def work(rank: int, world: int, levels: tuple[int, ...], directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/rendezvous",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=patient(60)),
    )
    checks: Any = Checks(Grid(levels=levels, device_type="cpu"))
    for name, check in vars(Checks).items():
        if not name.startswith("_") and name not in ("depths", "routed", "through", "mine"):
            call: Callable[[Any], None] = check
            call(checks)
    dist.barrier()
    leave(0)


def _lose_a_rank(rank: int, directory: str, is_gone_before: bool) -> None:
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=2)
    dispatcher = HierarchicalDispatcher(Grid(device_type="cpu").levels, codec=Raw())
    x, routing = tokens_of(rank, 4, 4, 0.5, torch.float32)
    dispatched = dispatcher.dispatch(x, routing, SortedOrder())
    pid = Path(directory) / "pid"
    if rank == 1:
        pid.write_text(str(os.getpid()))
        os._exit(0)
    if is_gone_before:  # then messages to it cannot even be started
        wait_until(lambda: pid.exists() and not is_running(int(pid.read_text() or os.getpid())))
        time.sleep(0.2)  # gloo's thread reads that the connection is closed
    with pytest.raises(CollectiveError, match=r"one of ranks \[0, 1\] ended or stopped"):
        dispatcher.combine(dispatched.rows, dispatched)
    leave(0)


@pytest.mark.parametrize("is_gone_before", [False, True])
def test_a_rank_that_is_lost_between_dispatch_and_combine_is_noticed(tmp_path: Path, is_gone_before: bool) -> None:
    run_ranks(_lose_a_rank, (str(tmp_path), is_gone_before), 2)


@pytest.mark.ci
def test_levels_of_four_processes_agree_with_a_dense_reference(tmp_path: Path) -> None:
    run_ranks(work, (4, (2,), str(tmp_path)), 4)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "levels"), [(1, ()), (2, (2,)), (8, (2, 4)), (6, (3,))])
def test_levels_of_other_worlds_agree_with_a_dense_reference(
    world: int, levels: tuple[int, ...], tmp_path: Path
) -> None:
    run_ranks(work, (world, levels, str(tmp_path)), world)
