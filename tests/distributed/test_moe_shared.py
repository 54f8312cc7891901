"""Shared experts computed while rows travel: the same bits, in the order that hides them, on every path."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from benchmarks.family_models import inputs_of, model_of, tensors_of
from laconic.activations import compress_activations
from laconic.collectives import Lossless
from laconic.formats.shards import local_part
from laconic.moe import FlatDispatcher, GatedExperts, HierarchicalDispatcher, MoELayer, SoftmaxGate
from laconic.moe.dispatch.in_flight import InFlightExchange
from laconic.moe.huggingface import Parallelized, parallelize
from laconic.moe.parallel.grid import Grid
from laconic.moe.pipeline.schedule import MEANWHILE, ChunkedSchedule
from tests.activations.models import make_ids, make_model
from tests.distributed.test_moe_huggingface import loss_on
from tests.moe.huggingface.test_families import families_with_experts
from tests.moe.worlds import run_world

AFTER, BEFORE = "deepseek_v3", "qwen2_moe"
"""Families that call their shared experts after the routed ones, and before their router."""


def shared_of(model: Any) -> nn.Module:
    """The shared experts of the last block."""
    block = model.model.layers[-1].mlp
    found: nn.Module = block.shared_experts if hasattr(block, "shared_experts") else block.shared_expert
    return found


def tokens(grid: Grid, seed: int = 1) -> Tensor:
    """Other tokens on each process, alike in an MP group."""
    return make_ids(2, 10, seed + 10 * grid.dp.rank())


def trained(done: Parallelized, ids: Tensor, *, seed: int = 0, wrap: str = "") -> dict[str, Tensor]:
    """The loss, and what each process has of all gradients."""
    model: Any = done.model
    model.train()
    wrapped = DistributedDataParallel(model) if wrap == "ddp" else model
    torch.manual_seed(seed)
    loss = wrapped(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    found = {name: local_part(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {"loss": loss.detach(), **found, "drawn": torch.rand(1)}


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@contextmanager
def events_of(model: Any) -> Iterator[list[str]]:
    """What happens, in order: exchanges of the last block that start and arrive, and its shared experts."""
    events: list[str] = []
    start, arrived = InFlightExchange.start, InFlightExchange.arrived

    def started(self: InFlightExchange, buffers: Any) -> None:
        start(self, buffers)
        events.append("back" if self._is_backward else "out")

    def waited(self: InFlightExchange) -> Any:
        events.append("home" if self._is_backward else "in")
        return arrived(self)

    shared = shared_of(model)
    handles = [
        shared.register_forward_pre_hook(lambda *_: events.append("shared begins")),
        shared.register_forward_hook(lambda *_: events.append("shared ends")),
        *(p.register_hook(lambda _: events.append("gradient")) for p in shared.parameters()),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InFlightExchange, "start", started)
        patch.setattr(InFlightExchange, "arrived", waited)
        yield events
    for handle in handles:
        handle.remove()


def made(family: str, grid: Grid, dtype: torch.dtype = torch.float32, **options: Any) -> Parallelized:
    changes = {"num_hidden_layers": 3} if family == AFTER else {}  # the first is dense
    return parallelize(make_model(family, **changes).to(dtype), grid, **options)


def alike(family: str, grid: Grid, dtype: torch.dtype = torch.float32, wrap: str = "", **options: Any) -> None:
    """With the overlap and without it: equal bits of the loss and of all gradients."""
    ids, results = tokens(grid), []
    for overlap in (False, True):
        done = made(family, grid, dtype, overlap_shared=overlap, **options)
        assert {one.place is None for one in done.shared.values()} == {not overlap}
        ran: list[int] = []
        shared_of(done.model).register_forward_hook(lambda *_, ran=ran: ran.append(1))
        results.append(trained(done, ids, wrap=wrap))
        assert len(ran) == 1
    assert_same_bits(*results)


# --- the order of events ---


def shared_experts_run_while_rows_travel() -> None:
    grid = Grid(ep=dist.get_world_size())
    forward = ["out", "shared begins", "shared ends", "in"]
    weights = ["gradient"] * 3
    for family, backward in ((AFTER, ["back", *weights, "home"]), (BEFORE, ["back", "home", *weights])):
        done = made(family, grid)
        with events_of(done.model) as events:
            trained(done, tokens(grid))
        # Forward of the block before the last, of the last, backward of the last, of the one before.
        assert events == ["out", "in", *forward, *backward, "back", "home"], (family, events)
    for family in (AFTER, BEFORE):
        done = made(family, grid, overlap_shared=False)
        with events_of(done.model) as events:
            trained(done, tokens(grid))
        assert events == ["shared begins", "shared ends", *weights]


def chunks_run_them_before_their_first_experts() -> None:
    grid = Grid(ep=dist.get_world_size())
    for family in (AFTER, BEFORE):
        schedule = ChunkedSchedule(2)
        done = made(family, grid, schedule=schedule)
        trained(done, tokens(grid))
        tasks = [task.name for task in schedule.executions["forward"].plan.tasks]
        assert tasks.index("dispatch 1") < tasks.index(MEANWHILE) < tasks.index("experts 0")
        assert MEANWHILE not in [task.name for task in schedule.executions["backward"].plan.tasks]
        assert "forward" in str(next(iter(done.shared.values())))


# --- the same bits ---


def bits_stay() -> None:
    for family in (AFTER, BEFORE):
        alike(family, Grid(ep=2))


def bits_stay_on_two() -> None:
    grid = Grid(ep=2)
    for family in (AFTER, BEFORE, "deepseek_v2"):
        alike(family, grid, torch.bfloat16)
        alike(family, grid, wrap="ddp")
        alike(family, grid, schedule=ChunkedSchedule(2))
        alike(family, grid, dispatcher=lambda grid: HierarchicalDispatcher(grid.levels, 1))
        alike(family, grid, codec=Lossless())
        with torch.autocast("cpu", torch.bfloat16):
            alike(family, grid)


def bits_stay_on_four() -> None:
    for family in (AFTER, BEFORE):
        alike(family, Grid(ep=4))
        leveled = Grid(ep=4, levels=(2,))
        alike(family, leveled, dispatcher=lambda grid: HierarchicalDispatcher(grid.levels))
        alike(
            family,
            leveled,
            dispatcher=lambda grid: HierarchicalDispatcher(grid.levels),
            schedule=ChunkedSchedule(2, 1),
        )
        alike(family, Grid(ep=2, esp=2))
        inside = Grid(mp=2, ep=2, esp=2)
        for path in ("s1", "s2", "sharded", "baseline"):
            alike(family, inside, dispatcher=path)
            alike(family, inside, dispatcher=path, schedule=ChunkedSchedule(2))


# --- beside other things ---


def checkpoints_run_them_again_alike() -> None:
    grid, ids = Grid(ep=2), make_ids(2, 10)
    for family in (AFTER, BEFORE):
        expected = trained(made(family, grid), ids)
        for reentrant in (True, False):
            done = made(family, grid)
            model: Any = done.model
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
            with events_of(model) as events:
                got = trained(done, ids)
            assert_same_bits(expected, got)
            assert events.count("shared begins") == 2
            assert events.index("out") < events.index("shared begins") < events.index("in", 2)


def packed_activations_are_those_of_the_call() -> None:
    grid, ids = Grid(ep=2), make_ids(2, 48)
    for family in (AFTER, BEFORE):
        results = []
        for overlap in (False, True):
            done = made(family, grid, overlap_shared=overlap)
            report = compress_activations(done.model)
            assert any("shared_expert" in str(row) for row in str(report).splitlines())
            with events_of(done.model) as events:
                results.append(trained(done, ids))
            assert ("out" in events) == overlap
        assert_same_bits(*results)


def evaluation_keeps_its_bits() -> None:
    grid = Grid(ep=2)
    for family in (AFTER, BEFORE):
        results = []
        for overlap in (False, True):
            done = made(family, grid, overlap_shared=overlap)
            for mode in (torch.no_grad, torch.inference_mode):
                with mode(), events_of(done.model) as events:
                    results.append(done.model.eval()(input_ids=tokens(grid)).logits)
                assert ("out" in events) == overlap
        assert all(torch.equal(one, results[0]) for one in results)


def dropout_keeps_its_place() -> None:
    """In training the overlap is off where it would change the order of random numbers, in evaluation it is on."""
    grid = Grid(ep=2)
    for family in (AFTER, BEFORE):
        results = []
        for overlap in (False, True):
            done = made(family, grid, overlap_shared=overlap)
            shared: Any = shared_of(done.model)
            shared.act_fn = nn.Sequential(shared.act_fn, nn.Dropout(0.3))
            with events_of(done.model) as events:
                results.append(trained(done, tokens(grid)))
            assert events.index("shared begins") > events.index("in") if overlap and family == AFTER else True
            with torch.no_grad(), events_of(done.model) as events:
                done.model.eval()(input_ids=tokens(grid))
            assert (events[-4:] == ["out", "shared begins", "shared ends", "in"]) == overlap
        assert_same_bits(*results)


def dropout_from_the_start_is_named() -> None:
    model = make_model(BEFORE)
    shared: Any = shared_of(model)
    shared.act_fn = nn.Sequential(shared.act_fn, nn.Dropout(0.3))
    text = str(parallelize(model, Grid(ep=2)))
    assert "shared_expert is not computed while rows travel: it draws random numbers, whose order would change" in text
    assert text.count("computed while rows travel") == 2  # the other block is as it was


def a_hook_that_changes_the_input_is_seen() -> None:
    """The layer has passed another tensor than the block does: the block's own call counts, and it is said."""
    grid, results = Grid(ep=2), []
    for overlap in (False, True):
        done = made(AFTER, grid, overlap_shared=overlap)
        block: Any = done.model.model.layers[-1].mlp

        class Doubling(nn.Module):
            def __init__(self, inner: nn.Module) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, x: Tensor) -> Tensor:
                return self.inner(2 * x)

        block.shared_experts = Doubling(block.shared_experts)
        if overlap:
            with pytest.warns(UserWarning, match="has been replaced in its block, and what took its place is not"):
                results.append(trained(done, tokens(grid)))
        else:
            results.append(trained(done, tokens(grid)))
    assert_same_bits(*results)


def shared_experts_over_the_same_group_wait() -> None:
    """Tensor parallelism of the shared experts over the group in which rows travel: two threads must not use it."""
    grid = Grid(mp=2, ep=2)
    for mesh, overlaps in ((grid.expert_mesh["ep"], False), (grid.dense_mesh["mp"], grid.mp is not grid.ep)):
        results = []
        for overlap in (False, True):
            done = made(AFTER, grid, overlap_shared=overlap, dispatcher="s1")
            plan = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
            parallelize_module(shared_of(done.model), mesh, plan)
            assert isinstance(next(shared_of(done.model).parameters()), DTensor)
            with events_of(done.model) as events:
                results.append(trained(done, make_ids(2, 10)))
            moved = "in" in events and events.index("shared begins") < len(events) - 1 - events[::-1].index("in")
            assert moved == (overlap and overlaps and mesh is not grid.expert_mesh["ep"]), (events, overlaps)
        assert_same_bits(*results)


def own_layers_overlap_theirs() -> None:
    grid = Grid(ep=2)
    for schedule in (None, ChunkedSchedule(2)):
        results = []
        for overlap in (False, True):
            torch.manual_seed(0)
            layer = MoELayer(
                SoftmaxGate(4, 16, 2),
                GatedExperts(2, 16, 8),
                None,
                FlatDispatcher(grid.ep),
                shared=nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16)),
                overlap_shared=overlap,
                schedule=schedule,
            )
            generator = torch.Generator().manual_seed(dist.get_rank())
            x = torch.randn(2, 9, 16, generator=generator).requires_grad_()
            out = layer(x)
            out.square().sum().backward()
            results.append({"out": out.detach(), "x": x.grad, **{n: p.grad for n, p in layer.named_parameters()}})
            assert layer.meanwhile is None
        assert_same_bits(*results)


def gradients_of_gradients_travel() -> None:
    grid = Grid(ep=2)
    results = []
    for overlap in (False, True):
        torch.manual_seed(0)
        shared = nn.Linear(8, 8).double()
        experts = GatedExperts(2, 8, 4, dtype=torch.float64)
        gate = SoftmaxGate(4, 8, 2).double()
        layer = MoELayer(gate, experts, None, FlatDispatcher(grid.ep), shared=shared, overlap_shared=overlap)
        x = torch.randn(5, 8, dtype=torch.float64).requires_grad_()
        (first,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        first.square().sum().backward()
        results.append({"first": first.detach(), "x": x.grad})
    for name, tensor in results[0].items():
        assert torch.allclose(tensor, results[1][name], rtol=1e-12, atol=1e-12), name


def an_error_in_between_leaves_the_groups_usable() -> None:
    grid = Grid(ep=2)
    for family in (AFTER, BEFORE):
        done, expected = made(family, grid), trained(made(family, grid), tokens(grid))

        def fail(*_: Any) -> None:
            raise ValueError("on all ranks")

        handle = shared_of(done.model).register_forward_pre_hook(fail)
        with pytest.raises(ValueError, match="on all ranks"):
            trained(done, tokens(grid))
        handle.remove()
        assert_same_bits(expected, trained(done, tokens(grid)))


def fsdp_frozen_parameters_hooks_and_a_second_backward_keep_bits() -> None:
    grid = Grid(ep=2)
    for family in (AFTER, BEFORE):
        results: list[dict[str, Tensor]] = []
        for overlap in (False, True):
            result = {}
            done = made(family, grid, overlap_shared=overlap)
            done.fully_shard(done.model.model.layers)
            result |= {f"fsdp {name}": value for name, value in trained(done, tokens(grid)).items()}

            done = made(family, grid, overlap_shared=overlap)
            for name, parameter in done.model.named_parameters():
                parameter.requires_grad_("shared" in name or "lm_head" in name)
            result |= {f"frozen {name}": value for name, value in trained(done, tokens(grid)).items()}

            done = made(family, grid, overlap_shared=overlap)
            seen: list[Tensor] = []
            for module in (shared_of(done.model), done.model.model.layers[-1].mlp):
                module.register_full_backward_hook(lambda *given, seen=seen: seen.append(given[1][0].clone()))
            loss = loss_on(done.model, tokens(grid))
            loss.backward(retain_graph=True)
            loss.backward()
            assert len(seen) == 4
            result |= {f"seen {number}": tensor for number, tensor in enumerate(seen)}
            result |= {name: local_part(p.grad) for name, p in done.model.named_parameters()}
            results.append(result)
        assert_same_bits(*results)


def loaded_from_files_and_generating() -> None:
    """On the meta device only the structure of a block is tried."""
    grid = Grid(ep=2)
    for family in (AFTER, BEFORE):
        with torch.device("meta"):
            model: Any = make_model(family)
        on_meta = parallelize(model, grid)
        assert all(one.place is not None for one in on_meta.shared.values())
        written = []
        for overlap in (False, True):
            done = made(family, grid, overlap_shared=overlap)
            model = done.model.eval()
            written.append(model.generate(tokens(grid), max_new_tokens=4, do_sample=False))
        assert torch.equal(*written)


STRANGERS = [
    *(
        "afmoe",
        "aria_text",
        "cohere2_moe",
        "ernie4_5_moe",
        "exaone_moe",
        "glm4_moe",
        "granitemoeshared",
        "hunyuan_v1_moe",
    ),
    *("hy_v3", "inkling_text", "kimi_linear", "laguna", "minimax_m3_vl_text", "nemotron_h"),
    *("qwen3_next", "qwen3_moe"),
]
NOT_MOVED = {"granitemoeshared", "inkling_text"}


def strangers(names: list[str], dtype: torch.dtype) -> None:
    """Families in training and evaluation, built by their configurations alone: the same bits with the overlap."""
    found = {family.name: family for family in families_with_experts()}
    grid = Grid(ep=2)
    for name in names:
        results = []
        original = model_of(found[name]).to(dtype)
        for overlap in (False, True):
            model = copy.deepcopy(original)
            inputs = inputs_of(found[name], model)
            done = parallelize(model, grid, overlap_shared=overlap)
            moved = [one.place for one in done.shared.values() if one.place is not None]
            if overlap:
                assert bool(moved) == (name not in {*NOT_MOVED, "qwen3_moe"}), name
            ran = []
            handle = pytest.MonkeyPatch()
            start = InFlightExchange.start
            handle.setattr(
                InFlightExchange, "start", lambda *given, ran=ran, start=start: ran.append(1) or start(*given)
            )
            result = {}
            for training in (True, False):
                model.train(training)
                torch.manual_seed(0)
                output = model(**inputs)
                output.loss.backward()
                result |= {f"{training} {n}": t.detach() for n, t in enumerate(tensors_of(output))}
                result |= {
                    f"{training} {n}": local_part(p.grad) for n, p in model.named_parameters() if p.grad is not None
                }
                result[f"{training} drawn"] = torch.rand(1)
                model.zero_grad()
            handle.undo()
            # Dropout in training keeps them in place; forward and backward of both modes otherwise.
            assert len(ran) in (4 * len(moved), 2 * len(moved)), (name, len(ran), len(moved))
            results.append(result)
        assert_same_bits(*results)


@pytest.mark.slow
def test_families_that_nobody_built_for_keep_all_bits(tmp_path: Path) -> None:
    run_world(
        [partial(strangers, STRANGERS, torch.float32), partial(strangers, STRANGERS[:6], torch.bfloat16)], 2, tmp_path
    )


@pytest.mark.ci
def test_shared_experts_run_while_rows_travel_and_bits_stay(tmp_path: Path) -> None:
    quick = [shared_experts_run_while_rows_travel, bits_stay, own_layers_overlap_theirs, gradients_of_gradients_travel]
    run_world(quick, 2, tmp_path)


@pytest.mark.ci
def test_dropout_hooks_and_errors(tmp_path: Path) -> None:
    scenarios = [
        dropout_keeps_its_place,
        dropout_from_the_start_is_named,
        a_hook_that_changes_the_input_is_seen,
        an_error_in_between_leaves_the_groups_usable,
    ]
    run_world(scenarios, 2, tmp_path)


@pytest.mark.slow
def test_two_processes_keep_all_bits_beside_everything_else(tmp_path: Path) -> None:
    scenarios = [
        chunks_run_them_before_their_first_experts,
        bits_stay_on_two,
        checkpoints_run_them_again_alike,
        packed_activations_are_those_of_the_call,
        evaluation_keeps_its_bits,
        shared_experts_over_the_same_group_wait,
        fsdp_frozen_parameters_hooks_and_a_second_backward_keep_bits,
        loaded_from_files_and_generating,
    ]
    run_world(scenarios, 2, tmp_path)


@pytest.mark.slow
def test_four_processes_keep_all_bits_on_every_path(tmp_path: Path) -> None:
    run_world([shared_experts_run_while_rows_travel, bits_stay_on_four], 4, tmp_path)
