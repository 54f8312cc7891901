"""Layers in pieces on streams, on real processes: any degree is the same layer, in float64 against the slow truth."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from laconic.collectives import Blockwise, Codec, Lossless, Raw
from laconic.errors import ScheduleError
from laconic.formats import BlockFormat
from laconic.moe import (
    BaselineDispatcher,
    ChunkedSchedule,
    Dispatcher,
    ExpertChoiceGate,
    ExpertRows,
    FlatDispatcher,
    Gate,
    GatedExperts,
    Grid,
    HierarchicalDispatcher,
    Hook,
    LocalDispatcher,
    MoELayer,
    S1Dispatcher,
    S2Dispatcher,
    ShardedDispatcher,
    SoftmaxGate,
    SoftMoEGate,
    expert_shard,
)
from laconic.moe.dispatch.parm import Gathered
from laconic.moe.pipeline.schedule import issued_around_compute
from laconic.schedule.moe_pipeline import ChunkTime, LayerTimes, best_degree, pipeline_plan
from tests.moe.parallel import DIM, Whole, assert_same_as_whole, close, make_whole, spread_over
from tests.moe.test_replicas import losses_are_those_of_one_process
from tests.moe.worlds import run_world

RAW = Raw()
GATHERED: tuple[Gathered, ...] = ("tokens", "rows")


def flat(grid: Grid) -> FlatDispatcher:
    return FlatDispatcher(grid.joint, num_shards=grid.layout.esp, codec=RAW)


def sharded(grid: Grid) -> ShardedDispatcher:
    return ShardedDispatcher(grid.ep, grid.esp, codec=RAW)


def in_pieces(grid: Grid, whole: Whole, dispatcher: Dispatcher, schedule: ChunkedSchedule) -> MoELayer:
    layer = spread_over(grid, whole, dispatcher)
    layer.schedule = schedule
    return layer


def any_degree_is_the_whole_layer() -> None:
    world = dist.get_world_size()
    for ep, esp, kind in ((world, 1, "gated"), (world // 2, 2, "gpt")):
        grid = Grid(1, ep, esp)
        whole = make_whole(grid, kind)
        for make in (flat, sharded):
            for degrees in ((1, 1), (2, 3), (4, 1), (1, 9)):
                schedule = ChunkedSchedule(*degrees)
                assert_same_as_whole(grid, whole, in_pieces(grid, whole, make(grid), schedule), losses=True)


def levels(depth: int, grid: Grid) -> HierarchicalDispatcher:
    return HierarchicalDispatcher(grid.levels, depth, codec=RAW)


def rows_without_duplicates_too() -> None:
    """Hierarchical all-to-alls of all depths, in as many rows as without pieces."""
    world = dist.get_world_size()
    grid = Grid(levels=(2,) if world == 4 else ())
    whole = make_whole(grid, num_tokens=(9, 2, 0, 7))
    for depth in range(1, len(grid.levels) + 1):
        plain = levels(depth, grid)
        assert_same_as_whole(grid, whole, spread_over(grid, whole, plain), losses=True)
        for degrees in ((1, 1), (2, 3), (4, 2), (1, 9)):
            dispatcher = levels(depth, grid)
            schedule = ChunkedSchedule(*degrees)
            assert_same_as_whole(grid, whole, in_pieces(grid, whole, dispatcher, schedule), losses=True)
            assert [one.num_rows for one in dispatcher.traffic] == [one.num_rows for one in plain.traffic]
            tasks = [task.name for task in schedule.executions["forward"].plan.tasks]
            assert ("all_gather 0" in tasks) == (depth > 1)
    none = make_whole(grid, num_tokens=(0,))
    assert_same_as_whole(grid, none, in_pieces(grid, none, levels(1, grid), ChunkedSchedule(2, 3)))


def layers_inside_an_mp_group_too() -> None:
    grid = Grid(mp=2, ep=dist.get_world_size() // 2, esp=2)
    whole = make_whole(grid)
    for make in (flat, sharded):
        # Without the gate's losses: S1's are means over shares of the tokens, and balance is not linear in them.
        dispatcher = S1Dispatcher(grid, make(grid), codec=RAW)
        assert_same_as_whole(grid, whole, in_pieces(grid, whole, dispatcher, ChunkedSchedule(2, 3)))
    for tokens in ((5, 3, 4, 7), (1, 0)):
        for esp in (1, 2):
            grid = Grid(mp=2, ep=dist.get_world_size() // esp, esp=esp)
            whole = make_whole(grid, num_tokens=tokens)
            ways: list[Dispatcher] = [
                S2Dispatcher(grid, forward=there, backward=back, codec=RAW) for there in GATHERED for back in GATHERED
            ]
            if esp == 2:
                ways.append(BaselineDispatcher(grid, codec=RAW))
            else:
                ways.append(S1Dispatcher(grid, levels(1, grid), codec=RAW))
            for dispatcher in ways:
                for degrees in ((1, 1), (3, 2)):
                    assert_same_as_whole(grid, whole, in_pieces(grid, whole, dispatcher, ChunkedSchedule(*degrees)))


def ranks_without_tokens_or_rows_take_part() -> None:
    grid = Grid()
    for num_tokens in ((0, 5), (1, 0, 0, 0), (0,)):
        whole = make_whole(grid, num_tokens=num_tokens)
        assert_same_as_whole(grid, whole, in_pieces(grid, whole, flat(grid), ChunkedSchedule(2, 3)))
        assert_same_as_whole(grid, whole, in_pieces(grid, whole, sharded(grid), ChunkedSchedule(3)))


class Forgetful(nn.Module):
    """Experts whose outputs hang on nothing if there are no rows."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.inner = experts

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        return self.inner(rows, counts) if len(rows) else torch.zeros(rows.shape, dtype=rows.dtype)


def backward_does_not_wait_for_ranks_without_a_graph() -> None:
    grid = Grid()
    whole = make_whole(grid, num_tokens=(4,))
    with torch.no_grad():  # all tokens to the experts of the first rank
        assert isinstance(whole.gate, SoftmaxGate)
    experts = Forgetful(expert_shard(whole.experts, grid))
    few = SoftmaxGate(2 * grid.layout.ep, DIM, 2).double()

    class First(SoftmaxGate):
        def forward(self, x: Tensor) -> Any:
            routing = few(x)
            return type(routing)(
                routing.tokens, routing.experts % 2, routing.weights, routing.num_tokens, routing.num_experts
            )

    gate = First(2 * grid.layout.ep, DIM, 2).double()
    layer = MoELayer(gate, experts, dispatcher=flat(grid), schedule=ChunkedSchedule(2))
    for needs_gradient in (True, False):
        x = whole.tokens[0].clone().requires_grad_(needs_gradient)
        layer(x).sum().backward()
        assert (x.grad is not None) == needs_gradient
    with torch.no_grad():
        assert not layer(x).requires_grad
    with torch.inference_mode():
        layer(x.detach())


class Scale(Hook, nn.Module):
    """A parameter of its own on the experts' outputs; notes who calls."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.rows: list[int] = []
        self.threads: set[threading.Thread] = set()

    def before_combine(self, layer: MoELayer, outputs: ExpertRows) -> ExpertRows:
        self.rows.append(len(outputs.rows))
        self.threads.add(threading.current_thread())
        return replace(outputs, rows=outputs.rows * self.scale)


def hooks_see_slices_and_their_parameters_learn() -> None:
    """In the caller's thread; a parameter gets one gradient, whatever number of slices it took part in."""
    grid = Grid()
    whole = make_whole(grid, num_tokens=(9, 7))
    x, found = whole.tokens[grid.dp.rank()], []
    for schedule in (None, ChunkedSchedule(3, 2)):
        torch.manual_seed(1)
        hook = Scale()
        layer = MoELayer(
            copy.deepcopy(whole.gate), expert_shard(whole.experts, grid), None, flat(grid), schedule=schedule,
            hooks=[hook],
        )  # fmt: skip
        fired: list[Tensor] = []
        for parameter in (*layer.parameters(), hook.scale):
            parameter.register_hook(lambda grad: grad * 3)
            parameter.register_post_accumulate_grad_hook(fired.append)
        (layer(x).pow(2).sum()).backward()
        assert len(fired) == len({id(one) for one in fired}) == len([*layer.parameters()]) + 1
        assert hook.threads == {threading.current_thread()}
        assert len(hook.rows) == (6 if schedule else 1)
        found.append((sum(hook.rows), [one.grad for one in (*layer.parameters(), hook.scale)]))
    (num_rows, grads), (num_in_pieces, in_slices) = found
    assert num_rows == num_in_pieces
    for ours, theirs in zip(in_slices, grads, strict=True):
        close(ours, theirs, "gradient")  # type: ignore[arg-type]


def outputs_keep_their_bits_where_experts_do() -> None:
    """Experts row by row: outputs and gradients of inputs do not know of the pieces, bit for bit, in bf16."""

    class Doubled(nn.Module):
        num_experts = 2

        def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
            return torch.tanh(rows) * 1.1

    grid = Grid(levels=(2,) if dist.get_world_size() == 4 else ())
    torch.manual_seed(5)
    gate = SoftmaxGate(2 * grid.layout.ep, 16, 2).to(torch.bfloat16)
    torch.manual_seed(dist.get_rank())
    x = torch.randn(33, 16).to(torch.bfloat16)
    ways: list[Callable[[Codec], Dispatcher]] = [
        lambda codec: FlatDispatcher(grid.ep, codec=codec),
        lambda codec: HierarchicalDispatcher(grid.levels, codec=codec),
    ]
    for way in ways:
        found = []
        for schedule in (None, ChunkedSchedule(1), ChunkedSchedule(2, 4)):
            for codec in (RAW, Lossless()):
                leaf = x.clone().requires_grad_()
                layer = MoELayer(gate, Doubled(), None, way(codec), schedule=schedule)
                gate.zero_grad()
                out = layer(leaf)
                out.float().pow(2).sum().backward()
                assert leaf.grad is not None
                found.append((out.detach(), leaf.grad, gate.weight.grad))
        for got in found[1:]:
            assert all(map(torch.equal, got, found[0]))


def codecs_of_few_bits_make_small_errors() -> None:
    """In pieces blocks begin elsewhere, so the bits differ, but not the size of the error."""
    grid = Grid()
    torch.manual_seed(5)
    gate, experts = SoftmaxGate(2 * grid.layout.ep, 16, 2), GatedExperts(2, 16, 8)
    x = torch.randn(33, 16)
    int8 = Blockwise(BlockFormat("int8", 128, torch.float32))
    for exact, short in (
        (flat(grid), FlatDispatcher(grid.ep, codec=int8)),
        (levels(1, grid), HierarchicalDispatcher(grid.levels, codec=int8)),
    ):
        found = []
        for dispatcher, schedule in ((exact, None), (short, None), (short, ChunkedSchedule(2, 3))):
            leaf = x.clone().requires_grad_()
            out = MoELayer(gate, experts, None, dispatcher, schedule=schedule)(leaf)
            out.pow(2).sum().backward()
            assert leaf.grad is not None
            found.append(torch.cat([out.detach(), leaf.grad]))
        errors = [float((one - found[0]).norm() / found[0].norm()) for one in found[1:]]
        assert 0 < errors[0] < 0.03
        assert 0 < errors[1] < 2 * errors[0]


def sums_over_slices_are_rounded_once() -> None:
    """bf16 parameters' gradients in 6 slices are as near to the truth as those of the whole, within one rounding."""
    grid = Grid()
    torch.manual_seed(5)
    gate, experts = SoftmaxGate(2 * grid.layout.ep, 16, 2), GatedExperts(2, 16, 8)
    torch.manual_seed(dist.get_rank())
    x = torch.randn(200, 16)
    truth: dict[str, Tensor] = {}
    for dtype, schedule in ((torch.float64, None), (torch.bfloat16, ChunkedSchedule(2, 3))):
        layer = MoELayer(copy.deepcopy(gate), copy.deepcopy(experts), None, flat(grid), schedule=schedule).to(dtype)
        layer.gate.double()  # the same routing
        layer(x.to(dtype)).double().sum().backward()
        for name, parameter in layer.experts.named_parameters():
            assert parameter.grad is not None
            assert parameter.grad.dtype == dtype
            if name not in truth:
                truth[name] = parameter.grad
            else:
                error = (parameter.grad.double() - truth[name]).norm() / truth[name].norm()
                assert error < 4 * torch.finfo(torch.bfloat16).eps


def autocast_reaches_the_experts() -> None:
    grid = Grid()
    torch.manual_seed(5)
    gate, experts = SoftmaxGate(2 * grid.layout.ep, 16, 2), GatedExperts(2, 16, 8)
    x, found = torch.randn(12, 16), []
    for schedule in (None, ChunkedSchedule(2)):
        layer = MoELayer(copy.deepcopy(gate), copy.deepcopy(experts), None, flat(grid), schedule=schedule)
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(x)
        out.float().sum().backward()
        found.append((out.dtype, [p.grad for p in layer.experts.parameters()]))
    assert found[0][0] == found[1][0]
    for ours, theirs in zip(found[1][1], found[0][1], strict=True):
        assert ours is not None
        assert theirs is not None
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)


def all_kinds_of_routing_go_in_pieces() -> None:
    """Tokens with any number of experts; experts learn where nothing before them does."""
    grid = Grid()
    num_experts = 2 * grid.layout.ep
    gates: list[Gate] = [
        SoftmaxGate(num_experts, DIM, 2, capacity_factor=0.5, drop_policy="probability").double(),
        ExpertChoiceGate(num_experts, DIM, 2).double(),
        SoftmaxGate(num_experts, DIM, 2).double().requires_grad_(False),
    ]
    x = torch.randn(7, DIM, dtype=torch.float64)
    experts = GatedExperts(2, DIM, 8, dtype=torch.float64)
    for gate in gates:
        for make in (flat, partial(levels, 1)):
            found = []
            for schedule in (None, ChunkedSchedule(3, 2)):
                layer = MoELayer(copy.deepcopy(gate), copy.deepcopy(experts), None, make(grid), schedule=schedule)
                out = layer(x)
                out.pow(2).sum().backward()
                found.append([out, *(p.grad for p in layer.parameters() if p.requires_grad)])
            for ours, theirs in zip(found[1], found[0], strict=True):
                close(ours, theirs, type(gate).__name__)  # type: ignore[arg-type]


def soft_mixtures_go_in_pieces() -> None:
    grid = Grid()
    torch.manual_seed(5)
    gate = SoftMoEGate(2 * grid.layout.ep, DIM, 3).double()
    experts = GatedExperts(2, DIM, 8, dtype=torch.float64)
    x = torch.randn(7, DIM, dtype=torch.float64)
    outs = [MoELayer(gate, experts, None, flat(grid), schedule=one)(x) for one in (None, ChunkedSchedule(2))]
    close(outs[1], outs[0], "out")


def graphs_can_be_retained_and_are_freed() -> None:
    grid = Grid()
    whole = make_whole(grid, num_tokens=(5,))
    layer = in_pieces(grid, whole, flat(grid), ChunkedSchedule(2))
    x = whole.tokens[0].clone().requires_grad_()
    out = layer(x).sum()
    out.backward(retain_graph=True)
    assert x.grad is not None
    once = x.grad.clone()
    out.backward()
    close(x.grad, 2 * once, "twice")
    with pytest.raises((RuntimeError, ScheduleError)):
        out.backward()
    x.grad = None
    checkpoint(layer, x, use_reentrant=True).sum().backward()  # type: ignore[no-untyped-call]
    close(x.grad, once, "computed again")
    (slope,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    with pytest.raises(ScheduleError, match="second derivative"):
        (x * slope).sum().backward()
    for wanted in (x, next(layer.parameters())):
        (slope,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
        with pytest.raises(ScheduleError, match="second derivative"):
            torch.autograd.grad(slope.sum(), wanted, allow_unused=True)
    x.grad = None
    with pytest.warns(UserWarning, match="use_reentrant"):
        checkpoint(layer, x, use_reentrant=False).sum().backward()  # type: ignore[no-untyped-call]
    close(x.grad, once, "computed again in one piece")


def streams_run_what_was_planned() -> None:
    grid = Grid(1, dist.get_world_size() // 2, 2)
    whole = make_whole(grid)
    times = LayerTimes(*[ChunkTime(1.0, 2.0)] * 5)
    schedule = ChunkedSchedule(3, 2, times=(times, times.backward()))
    layer = in_pieces(grid, whole, sharded(grid), schedule)
    layer(whole.tokens[grid.dp.rank()].clone().requires_grad_()).sum().backward()
    for direction, degree, seconds in (("forward", 3, times), ("backward", 2, times.backward())):
        execution = schedule.executions[direction]
        assert {*execution.plan.tasks} == {*pipeline_plan(seconds, degree).tasks}
        spans = execution.timeline.spans
        for stream in ("inter", "intra", "compute"):
            own = [spans[task.name] for task in execution.plan.tasks if task.stream == stream]
            assert all(one.end_seconds <= other.start_seconds for one, other in pairwise(own))
    assert copy.deepcopy(schedule).executions == {}
    with pytest.raises(ScheduleError, match="all_gather"):
        in_pieces(grid, whole, flat(Grid()), schedule)(whole.tokens[0])


def what_cannot_be_cut_is_refused() -> None:
    class Own:
        dispatch = combine = None

    grid = Grid()
    whole = make_whole(grid)
    with pytest.raises(ScheduleError, match="is Own"):
        in_pieces(grid, whole, Own(), ChunkedSchedule(2))(whole.tokens[0])  # type: ignore[arg-type]


def training_is_that_of_one_process(fsdp: bool) -> None:
    """Also where FSDP2 shards the experts: their parameters are gathered, and their gradients reduced, once."""
    world = dist.get_world_size()
    layouts = [(1, world, 1, "joint"), (2, world // 2, 2, "sharded")] + ([(1, 2, 1, "joint")] if world == 4 else [])
    for layout in layouts:
        losses_are_those_of_one_process(*layout, fsdp, schedule=ChunkedSchedule(2, 3))
    losses_are_those_of_one_process(1, world, 1, "levels", fsdp, torch.float32, ChunkedSchedule(2, 3))
    if fsdp:  # experts without replicas are sharded in fp32 only
        losses_are_those_of_one_process(*layouts[0], fsdp, torch.float32, ChunkedSchedule(2, 3))


SCENARIOS: list[Callable[[], None]] = [
    any_degree_is_the_whole_layer,
    rows_without_duplicates_too,
    layers_inside_an_mp_group_too,
    codecs_of_few_bits_make_small_errors,
    ranks_without_tokens_or_rows_take_part,
    backward_does_not_wait_for_ranks_without_a_graph,
    hooks_see_slices_and_their_parameters_learn,
    outputs_keep_their_bits_where_experts_do,
    sums_over_slices_are_rounded_once,
    autocast_reaches_the_experts,
    all_kinds_of_routing_go_in_pieces,
    soft_mixtures_go_in_pieces,
    graphs_can_be_retained_and_are_freed,
    streams_run_what_was_planned,
    what_cannot_be_cut_is_refused,
]


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.ci), pytest.param(4, marks=pytest.mark.slow)])
def test_layers_in_pieces_are_the_same_layer(world: int, tmp_path: Path) -> None:
    run_world(SCENARIOS, world, tmp_path)


@pytest.mark.ci
def test_pieces_go_through_nodes(tmp_path: Path) -> None:
    """Two nodes of two ranks: the stage between nodes and the one inside are tasks of their own."""
    run_world([rows_without_duplicates_too], 4, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_training_in_pieces_is_that_of_one_process(world: int, tmp_path: Path) -> None:
    run_world([partial(training_is_that_of_one_process, fsdp) for fsdp in (False, True)], world, tmp_path)


def test_a_local_layer_has_nothing_to_cut() -> None:
    layer = MoELayer(SoftmaxGate(2, 4, 1), GatedExperts(2, 4, 4), dispatcher=LocalDispatcher())
    x = torch.randn(5, 4)
    whole = layer(x)
    layer.schedule = ChunkedSchedule(4)
    assert torch.equal(layer(x), whole)


def test_degrees_come_from_the_simulator() -> None:
    times = LayerTimes(ChunkTime(0.01, 1.0), ChunkTime(0.001, 1.0), ChunkTime(0.01, 1.0))
    schedule = ChunkedSchedule.best(times, times.backward())
    assert schedule.forward == best_degree(times).degree > 1
    assert schedule.backward == best_degree(times.backward()).degree
    assert schedule.num_slices % schedule.forward == schedule.num_slices % schedule.backward == 0


@pytest.mark.parametrize("degrees", [(0, 1), (1, 0), (-2, None)])
def test_degrees_below_one_are_refused(degrees: tuple[int, int | None]) -> None:
    with pytest.raises(ScheduleError, match="at least one chunk"):
        ChunkedSchedule(*degrees)


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("gradients", [None, 1.0])
def test_issuing_around_compute_changes_no_stream(shards: bool, gradients: float | None) -> None:
    times = LayerTimes(*[ChunkTime(1.0, 2.0)] * (5 if shards else 3))
    plan = pipeline_plan(times, 3, gradients)
    issued = issued_around_compute(plan)
    for stream in plan.streams:
        assert [t for t in issued.tasks if t.stream == stream] == [t for t in plan.tasks if t.stream == stream]
    assert issued.in_order() == issued.tasks
    names = [task.name for task in issued.tasks]
    assert all(names.index(f"dispatch {i}") < names.index("experts 0") for i in range(3))
    assert names.index("combine 0") < names.index("experts 1")
