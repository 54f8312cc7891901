"""Layers of experts over two processes: the audit refuses each planted fault on both, and nothing without one."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from functools import partial
from io import StringIO
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.auditing import AuditReport, audit_first_call, audit_loss
from laconic.collectives import api
from laconic.collectives.codec import Blockwise
from laconic.errors import AuditError, ModelError
from laconic.formats import BlockFormat
from laconic.formats.shards import local_part
from laconic.moe import (
    Dispatcher,
    GatedExperts,
    GptExperts,
    Hook,
    MoELayer,
    Routing,
    SoftmaxGate,
    SoftMoEGate,
)
from laconic.moe.dispatch import flat, hierarchical, staged
from laconic.moe.dispatch.base import Buffers, ExpertRows
from laconic.moe.dispatch.expert_sharded import ShardedDispatcher
from laconic.moe.dispatch.flat import FlatDispatcher
from laconic.moe.dispatch.hierarchical import HierarchicalDispatcher
from laconic.moe.dispatch.parm import make_dispatcher
from laconic.moe.experts.shard import expert_shard
from laconic.moe.huggingface import parallelize
from laconic.moe.parallel.expert_mean import ExpertMean
from laconic.moe.parallel.grid import Grid
from laconic.moe.pipeline.schedule import ChunkedSchedule
from tests.activations.models import make_ids, make_model
from tests.distributed.processes import run_ranks

Patch = pytest.MonkeyPatch
Host = Callable[[Callable[[], None]], AuditReport]
DIM, NUM_EXPERTS = 16, 4


@contextmanager
def joined(rank: int, store: str, num_ranks: int = 2) -> Iterator[None]:
    torch.set_num_threads(1)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "RANK": str(rank)}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    yield
    dist.destroy_process_group()


# --- hosts ---


def layer_of(grid: Grid, dispatcher: Dispatcher, dtype: torch.dtype, kind: str = "gated", **options: Any) -> MoELayer:
    torch.manual_seed(0)
    number = NUM_EXPERTS + (kind == "uneven")
    gate: Any = SoftMoEGate(number, DIM, 3) if kind == "soft" else None
    if gate is None:
        gate = SoftmaxGate(number, DIM, 2, capacity_factor=0.8 if kind == "capacity" else None)
    whole = GptExperts(number, DIM, 24, bias=True) if kind == "gpt" else GatedExperts(number, DIM, 24)
    return MoELayer(gate, expert_shard(whole, grid), dispatcher=dispatcher, **options).to(dtype)


class Residual(nn.Module):
    """A layer between a linear one and a sum."""

    def __init__(self, layer: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(1)  # experts of ranks may have drawn other numbers
        self.first, self.layer = nn.Linear(DIM, DIM).to(dtype), layer

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        result: Tensor = x + self.layer(x)
        return result


def own_layers(plant: Callable[[], None], dtype: torch.dtype, **options: Any) -> AuditReport:
    grid = Grid(ep=2)
    model = Residual(layer_of(grid, FlatDispatcher(grid.ep), dtype, **options), dtype)
    x = torch.randn(12, DIM, generator=torch.Generator().manual_seed(2 + dist.get_rank())).to(dtype)
    plant()
    return laconic.audit(model, x)


def levels(plant: Callable[[], None], dtype: torch.dtype) -> AuditReport:
    grid = Grid(ep=2)
    model = Residual(layer_of(grid, HierarchicalDispatcher(grid.levels, 1), dtype), dtype)
    x = torch.randn(12, DIM, generator=torch.Generator().manual_seed(2 + dist.get_rank())).to(dtype)
    plant()
    return laconic.audit(model, x)


def hugging_face(plant: Callable[[], None], dtype: torch.dtype, **options: Any) -> AuditReport:
    """Mixtral under DDP, its activations compressed."""
    plant()  # before hooks are put on parameters
    model: Any = make_model("mixtral").to(dtype).train()
    parallelize(model, Grid(ep=2), **options)
    laconic.compress_activations(model)
    ids = make_ids(2, 16, seed=dist.get_rank())
    return laconic.audit(DistributedDataParallel(model), {"input_ids": ids, "labels": ids})


FLAT32, FLAT16 = partial(own_layers, dtype=torch.float32), partial(own_layers, dtype=torch.bfloat16)
CAPACITY32 = partial(own_layers, dtype=torch.float32, kind="capacity")
CAPACITY16 = partial(own_layers, dtype=torch.bfloat16, kind="capacity")
LEVELS32 = partial(levels, dtype=torch.float32)
MIXTRAL32, MIXTRAL16 = partial(hugging_face, dtype=torch.float32), partial(hugging_face, dtype=torch.bfloat16)


# --- faults ---


def on_rank_1() -> bool:
    return dist.get_rank() == 1


def of_outputs(patch: Patch, change: Callable[[Tensor, ExpertRows], Tensor]) -> None:
    """Change what the experts of rank 1 give a layer; alone they give what they gave."""
    before = MoELayer.compute

    def compute(self: MoELayer, inputs: ExpertRows, *args: Any) -> Tensor:
        out = before(self, inputs, *args)
        return change(out, inputs) if on_rank_1() else out

    patch.setattr(MoELayer, "compute", compute)


def an_expert_is_skipped(patch: Patch) -> None:
    def skip(out: Tensor, inputs: ExpertRows) -> Tensor:
        keep = torch.ones(len(out), 1, dtype=out.dtype)
        keep[: int(inputs.counts[0])] = 0
        return out * keep

    of_outputs(patch, skip)


def rows_reach_the_next_expert(patch: Patch) -> None:
    before = MoELayer.compute

    def compute(self: MoELayer, inputs: ExpertRows, *args: Any) -> Tensor:
        if not on_rank_1():
            return before(self, inputs, *args)
        first, second = inputs.counts.tolist()
        others = replace(inputs, rows=inputs.rows.roll(second, 0), counts=inputs.counts.flip(0))
        return before(self, others, *args).roll(first, 0)

    patch.setattr(MoELayer, "compute", compute)


def rows_are_rerouted_to_the_other_rank(patch: Patch) -> None:
    before = FlatDispatcher.plan

    def plan(self: Any, routing: Routing, *args: Any) -> Any:
        return before(self, replace(routing, experts=NUM_EXPERTS - 1 - routing.experts), *args)

    patch.setattr(FlatDispatcher, "plan", plan)


def rows_of_two_ranks_are_swapped(patch: Patch) -> None:
    before = flat.FlatTransport.pack

    def pack(self: Any, i: int, slices: list[Buffers]) -> Buffers:
        (rows,) = before(self, i, slices)
        return (torch.cat([rows[-1:], rows[1:-1], rows[:1]]),)  # the first is rank 0's, the last rank 1's

    patch.setattr(flat.FlatTransport, "pack", pack)


def a_row_takes_anothers_place_on_arrival(patch: Patch) -> None:
    before = flat.FlatTransport.unpack

    def unpack(self: Any, i: int, buffers: Buffers) -> list[Buffers]:
        made = before(self, i, buffers)
        return [(rows.roll(1, 0),) for (rows,) in made] if on_rank_1() else made

    patch.setattr(flat.FlatTransport, "unpack", unpack)


def weights_are_of_another_assignment(patch: Patch) -> None:
    before = flat.RowsPlan.finish

    def finish(self: Any, out: Tensor) -> Tensor:
        if on_rank_1():
            self.routing = replace(self.routing, weights=self.routing.weights.roll(1, 0))
        return before(self, out)

    patch.setattr(flat.RowsPlan, "finish", finish)


def outputs_are_times_the_world_size(patch: Patch) -> None:
    before = flat.FlatTransport.send_back

    def send_back(self: Any, i: int, buffers: Buffers) -> Buffers:
        return tuple(dist.get_world_size() * one for one in before(self, i, buffers))

    patch.setattr(flat.FlatTransport, "send_back", send_back)


def of_backward(patch: Patch, change: Callable[[bool, tuple[Tensor, ...]], tuple[Tensor, ...]]) -> None:
    """Change what a direction of the exchange passes on in backward; change(was it of the way out, gradients)."""
    before = staged._Exchange.backward

    def backward(ctx: Any, *grads: Tensor) -> Any:
        outward = not ctx.transpose[1]
        found = before(ctx, *grads)
        return (*found[:3], *change(outward, tuple(one for one in found[3:] if one is not None)))

    patch.setattr(staged._Exchange, "backward", staticmethod(backward))


def gradients_at_experts_are_times_the_world_size(patch: Patch) -> None:
    of_backward(patch, lambda outward, made: made if outward else tuple(dist.get_world_size() * one for one in made))


def gradients_of_rows_do_not_come_home(patch: Patch) -> None:
    of_backward(patch, lambda outward, made: tuple(0 * one for one in made) if outward and on_rank_1() else made)


def an_expert_gets_no_gradient_of_half_its_rows(patch: Patch) -> None:
    def half(out: Tensor, inputs: ExpertRows) -> Tensor:
        odd = torch.arange(len(out))[:, None] % 2 == 1
        return torch.where(odd, out.detach(), out)

    of_outputs(patch, half)


def rows_travel_in_eight_bits(patch: Patch) -> None:
    before, coarse = api.all_to_all, {"codec": Blockwise(BlockFormat("int8", 64))}
    patch.setattr(api, "all_to_all", lambda *args, **kwargs: before(*args, **kwargs | coarse))


def a_level_adds_twice(patch: Patch) -> None:
    before = hierarchical._LevelTransport._up

    def up(self: Any, i: int, buffers: Buffers, stages: range) -> Buffers:
        rows, *others = before(self, i, buffers, stages)
        return (2 * rows, *others)

    patch.setattr(hierarchical._LevelTransport, "_up", up)


def gradients_of_experts_are_not_averaged(patch: Patch) -> None:
    patch.setattr(ExpertMean, "of", lambda self, grad: grad)


def gradients_of_experts_are_averaged_twice(patch: Patch) -> None:
    before = ExpertMean.of
    patch.setattr(ExpertMean, "of", lambda self, grad: before(self, before(self, grad)))


def one_rank_does_not_average(patch: Patch) -> None:
    before = ExpertMean.of
    patch.setattr(ExpertMean, "of", lambda self, grad: grad if on_rank_1() else before(self, grad))


OF_EXPERTS: list[Callable[[Patch], None]] = [
    an_expert_is_skipped,
    rows_reach_the_next_expert,
    rows_are_rerouted_to_the_other_rank,
    rows_of_two_ranks_are_swapped,
    a_row_takes_anothers_place_on_arrival,
    weights_are_of_another_assignment,
    outputs_are_times_the_world_size,
    gradients_at_experts_are_times_the_world_size,
    gradients_of_rows_do_not_come_home,
    an_expert_gets_no_gradient_of_half_its_rows,
]
Planted = tuple[str, Host, Callable[[Patch], None]]
FAULTS: list[Planted] = [
    *(("fp32", FLAT32, fault) for fault in OF_EXPERTS),
    ("fp32", FLAT32, rows_travel_in_eight_bits),
    ("levels", LEVELS32, a_level_adds_twice),
    ("mixtral", MIXTRAL32, gradients_of_experts_are_not_averaged),
    ("mixtral", MIXTRAL32, gradients_of_experts_are_averaged_twice),
    ("mixtral", MIXTRAL32, one_rank_does_not_average),
]
AGAIN: list[Planted] = [
    *(("bf16", FLAT16, fault) for fault in OF_EXPERTS),
    *(("capacity", CAPACITY32, fault) for fault in OF_EXPERTS),
    *(("capacity in bf16", CAPACITY16, fault) for fault in OF_EXPERTS[:2]),
    ("mixtral in bf16", MIXTRAL16, gradients_of_experts_are_averaged_twice),
    ("mixtral", MIXTRAL32, an_expert_is_skipped),
    ("mixtral in bf16", MIXTRAL16, rows_of_two_ranks_are_swapped),
]


def plant_each(rank: int, store: str, again: bool) -> None:
    with joined(rank, store):
        for name, host, fault in AGAIN if again else FAULTS:
            patch = Patch()
            said: list[str] = []
            try:
                with pytest.raises(AuditError) as refused:
                    host(partial(fault, patch))
                dist.all_gather_object(said := [""] * 2, str(refused.value))
            except BaseException:
                print(f"planted: {fault.__name__} ({name})", flush=True)
                raise
            finally:
                patch.undo()
            # The rank where it is names the layer and the expert, the other one that rank.
            assert any(re.search(r"the layer of experts '[\w.]*(layer|experts)' .*expert", one) for one in said), said
            assert all("layer of experts" in one or "first step of rank" in one for one in said), said


@pytest.mark.parametrize("again", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.ci
def test_both_ranks_refuse_each_fault(again: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(plant_each, (os.path.join(folder, "store"), again), 2)


class Counter(Hook):
    def __init__(self) -> None:
        self.calls, self.loads = 0, torch.zeros(NUM_EXPERTS, dtype=torch.int64)

    def before_dispatch(self, layer: MoELayer, tokens: Any) -> None:
        self.calls += 1
        self.loads += tokens.routing.counts()


def pass_each(rank: int, store: str) -> None:
    with joined(rank, store):
        hosts = [FLAT32, FLAT16, CAPACITY32, CAPACITY16, LEVELS32, MIXTRAL32, MIXTRAL16]
        hosts += [
            partial(levels, dtype=torch.bfloat16),
            *(partial(own_layers, dtype=torch.float32, kind=kind) for kind in ("gpt", "soft", "uneven")),
        ]
        hosts.append(partial(MIXTRAL32, movable=True, dispatcher=lambda grid: HierarchicalDispatcher(grid.levels, 1)))
        hosts.append(partial(own_layers, dtype=torch.float32, schedule=ChunkedSchedule(2)))
        for host in hosts:
            report = host(lambda: None)
            assert report.num_layers_of_experts == (2 if host.func is hugging_face else 1), (host, report)
            assert not report.left_out, (host, report)
        # Other ways to spread them.
        for make in (
            lambda: (grid := Grid(ep=1, esp=2), FlatDispatcher(grid.joint, num_shards=2)),
            lambda: (grid := Grid(ep=1, esp=2), ShardedDispatcher(grid.ep, grid.esp)),
            lambda: (grid := Grid(ep=2, mp=2), make_dispatcher(grid, "s1")),
            lambda: (grid := Grid(ep=2, mp=2), make_dispatcher(grid, "s2")),
            lambda: (grid := Grid(ep=1, esp=2, mp=2), make_dispatcher(grid, "baseline")),
        ):
            grid, dispatcher = make()
            model = layer_of(grid, dispatcher, torch.float32)
            seed = 5 if grid.layout.mp > 1 else 5 + rank
            report = laconic.audit(model, torch.randn(12, DIM, generator=torch.Generator().manual_seed(seed)))
            assert report.num_layers_of_experts == 1, (dispatcher, report)
            assert all("share tokens" in why for why in report.left_out), (dispatcher, report)
        # What cannot be compared is said, and nothing waits.
        grid = Grid(ep=2)
        model = layer_of(grid, FlatDispatcher(grid.ep, codec=Blockwise(BlockFormat("int4", 64))), torch.float32)
        report = laconic.audit(model, torch.randn(12, DIM))
        assert report.num_layers_of_experts == 0, report
        assert "fewer than eight bits" in str(report), report


@pytest.mark.ci
def test_nothing_is_refused_without_a_fault() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(pass_each, (os.path.join(folder, "store"),), 2)


def change_nothing(rank: int, store: str) -> None:
    with joined(rank, store):
        grid, counter = Grid(ep=2), Counter()
        layer = layer_of(grid, HierarchicalDispatcher(grid.levels, 1), torch.float32, hooks=[counter])
        model = Residual(layer, torch.float32)
        x = torch.randn(12, DIM, generator=torch.Generator().manual_seed(rank))
        model(x).sum().backward()

        def state() -> list[Any]:
            tensors = [*(local_part(p) for p in model.parameters()), *(p.grad for p in model.parameters())]
            held: list[Any] = [None if one is None else one.clone() for one in [*tensors, counter.loads, layer.load]]
            return [*held, torch.get_rng_state(), counter.calls, layer.dispatcher.traffic, sorted(layer.__dict__)]

        before = state()
        assert laconic.audit(model, x + 1).num_layers_of_experts == 1
        for one, other in zip(before, state(), strict=True):
            assert torch.equal(one, other) if isinstance(one, Tensor) else one == other, (one, other)


def test_an_audit_of_spread_experts_changes_nothing() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(change_nothing, (os.path.join(folder, "store"),), 2)


# --- replicas of experts ---


def the_sum_over_replicas_is_forgotten(patch: Patch) -> None:
    patch.setattr(ExpertMean, "of", lambda self, grad: grad / self._divisor)


def a_loop(model: nn.Module, wrong: bool = False) -> str:
    """Training that knows nothing of the audit; what is said while it runs."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said = StringIO()
    with redirect_stderr(said):
        for step in range(2):
            ids = make_ids(2, 16, seed=4 * step + dist.get_rank())
            model(input_ids=ids, labels=ids).loss.backward()
            if wrong and dist.get_rank() == 3:
                local_part(dict(model.named_parameters())[EXPERTS].grad).mul_(1.01)
            optimizer.step()
            optimizer.zero_grad()
    return said.getvalue()


EXPERTS = "module.model.layers.1.mlp.experts.down_proj"


def four_ranks(rank: int, store: str) -> None:
    with joined(rank, store, 4):
        # 1. In the audit: two ranks have the same experts, and average them under DDP.
        report = MIXTRAL32(lambda: None)
        assert report.num_layers_of_experts == 2, report
        assert not report.left_out, report
        with Patch.context() as patch, pytest.raises(AuditError, match=r"times the gradient of|first step of rank"):
            MIXTRAL32(partial(the_sum_over_replicas_is_forgotten, patch))
        # 2. After the first step of a host: the replica of an expert differs.
        for wrong in (False, True):
            model: Any = make_model("mixtral").train()
            parallelize(model, Grid(ep=2))
            laconic.compress_activations(model)
            audit_first_call(model)
            wrapped = DistributedDataParallel(model)
            if wrong:
                with pytest.raises(AuditError, match=r"after the first step replicas differ: ranks 1 and 3 .*experts"):
                    a_loop(wrapped, wrong=True)
            else:
                said = a_loop(wrapped)
                assert ("2 layers of experts" in said) == (rank == 0), said
        # 3. FSDP2 shards experts over their replicas: outputs are compared, and the line says what is not.
        model = make_model("mixtral").train()
        done = parallelize(model, Grid(ep=2))
        laconic.compress_activations(model)
        done.fully_shard(model.model.layers)
        ids = make_ids(2, 16, seed=rank)
        report = laconic.audit(model, {"input_ids": ids, "labels": ids})
        assert report.num_layers_of_experts == 2, report
        assert all("FSDP2 shards its experts" in why for why in report.left_out), report
        with Patch.context() as patch:
            an_expert_is_skipped(patch)
            with pytest.raises(AuditError):
                laconic.audit(model, {"input_ids": ids, "labels": ids})
        for _ in range(2):  # it trains as before
            model(input_ids=ids, labels=ids).loss.backward()


@pytest.mark.slow
def test_replicas_of_experts() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(four_ranks, (os.path.join(folder, "store"),), 4)


# --- batches that do not run on one of them ---


def one_rank_cannot(rank: int, store: str) -> None:
    with joined(rank, store):
        model: Any = make_model("mixtral").train()
        parallelize(model, Grid(ep=2))
        laconic.compress_activations(model)
        ids = make_ids(4, 16, seed=rank)
        labels = ids.clone()
        if rank == 1:
            labels[:2] = -100  # no label in the rows that are tried first: their loss is not a number
        report = laconic.audit(model, {"input_ids": ids, "labels": labels})
        assert report.num_layers_of_experts == 2, report
        labels = torch.full_like(ids, -100) if rank == 1 else ids
        said = str(laconic.audit(model, {"input_ids": ids, "labels": labels}))
        assert ("as rank 1 could not run" if rank == 0 else "as the exact loss is not finite") in said, said
        # A batch that raises before ranks meet.
        with pytest.raises(ModelError if rank == 0 else ValueError, match="rank 1" if rank == 0 else "no batch"):
            audit_loss(model, [partial(refuses, model, ids, rank == 1)])


def refuses(model: nn.Module, ids: Tensor, here: bool) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    if here:
        raise ValueError("no batch")
    return loss.detach().requires_grad_()


@pytest.mark.ci
def test_a_batch_that_one_rank_cannot_run_is_no_hang() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(one_rank_cannot, (os.path.join(folder, "store"),), 2)
