"""Training with experts sharded over a grid, under FSDP2 and without, against one process with all tokens."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from laconic.collectives import Raw, api
from laconic.errors import ConfigError, ModelError
from laconic.formats import QuantizedGradient, set_quantized_gradient
from laconic.gradients import compress_gradients
from laconic.moe import (
    GatedExperts,
    HierarchicalDispatcher,
    MoELayer,
    Schedule,
    SoftmaxGate,
    moe_layers,
    replica_gradients,
)
from laconic.moe.dispatch.parm import make_dispatcher
from laconic.moe.experts.shard import expert_shard
from laconic.moe.parallel.grid import Grid
from laconic.moe.replica_gradients import fully_shard_layers, reduce_gradients
from tests.moe.parallel import close
from tests.moe.worlds import Scenario, run_world

DIM, EXPERTS, STEPS = 6, 4, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(DIM, DIM, dtype=torch.float64)
        self.moe = MoELayer(SoftmaxGate(EXPERTS, DIM, 2).double(), GatedExperts(EXPERTS, DIM, 8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(torch.tanh(self.before(x)))


def make_model() -> nn.Sequential:
    torch.manual_seed(11)
    return nn.Sequential(Block(), Block(), nn.Linear(DIM, 1, dtype=torch.float64))


def batches(dp: int) -> list[list[Tensor]]:
    """Tokens of every step and dp rank; one rank has none in the second step."""
    generator = torch.Generator().manual_seed(12)
    rows = [
        [torch.randn(4 + place, DIM, dtype=torch.float64, generator=generator) for place in range(dp)]
        for _ in range(STEPS)
    ]
    if dp > 1:
        rows[1][-1] = rows[1][-1][:0]
    return rows


def losses_are_those_of_one_process(
    mp: int,
    ep: int,
    esp: int,
    path: str,
    fsdp: bool,
    dtype: torch.dtype = torch.float64,
    schedule: Schedule | None = None,
) -> None:
    grid = Grid(mp, ep, esp)
    whole = make_model().to(dtype)
    model = copy.deepcopy(whole)
    for module in model.modules():
        if isinstance(module, MoELayer):
            assert isinstance(module.experts, GatedExperts)
            module.experts = expert_shard(module.experts, grid)
            module.dispatcher = (
                HierarchicalDispatcher(grid.levels, codec=Raw())
                if path == "levels"
                else make_dispatcher(grid, path, codec=Raw())  # type: ignore[arg-type]
            )
            module.schedule = schedule
    if fsdp:
        fully_shard_layers(model, grid, units=list(model)[:2])
    # The usual eps makes steps of gradients that are nothing but rounding.
    ours = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-2)
    theirs = torch.optim.AdamW(whole.parameters(), lr=0.01, eps=1e-2)
    for step in batches(grid.layout.dp):
        step = [x.to(dtype) for x in step]
        loss = model(step[grid.dp.rank()]).sin().sum()
        loss.backward()
        if not fsdp:
            reduce_gradients(model, grid, codec=Raw())
        ours.step()
        ours.zero_grad()
        of_all = torch.stack([whole(x).sin().sum() for x in step])
        same(loss, of_all[grid.dp.rank()], f"loss on {grid}")
        of_all.mean().backward()
        theirs.step()
        theirs.zero_grad()
    expected = copy.deepcopy(whole)
    for module in expected.modules():
        if isinstance(module, MoELayer):
            assert isinstance(module.experts, GatedExperts)
            module.experts = expert_shard(module.experts, grid)
    for (name, one), (_, other) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        found = one.full_tensor() if isinstance(one, DTensor) else one
        same(found, other, f"{name} on {grid}")


def same(found: Tensor, expected: Tensor, what: str) -> None:
    if found.dtype == torch.float64:
        close(found, expected, what)
    else:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=lambda text: f"{what}: {text}")


def models_without_layers_are_refused() -> None:
    grid = Grid(dist.get_world_size())
    for function in (fully_shard_layers, reduce_gradients):
        with pytest.raises(ModelError, match="no MoELayer"):
            function(nn.Linear(2, 2), grid)  # type: ignore[operator]


def spread(grid: Grid) -> nn.Sequential:
    model = make_model()
    for module in model.modules():
        if isinstance(module, MoELayer):
            module.experts = expert_shard(module.experts, grid)
            module.dispatcher = make_dispatcher(grid, "joint", codec=Raw())
    return model


def wrappers_that_take_experts_for_copies_are_refused() -> None:
    """DDP would give all ranks the first one's experts, FSDP2 would cut them as if all had the same."""
    grid = Grid(1, 2, 1)
    x = torch.ones(3, DIM, dtype=torch.float64)
    with pytest.raises(ConfigError, match=r"DDP would give all the first one's; .*moe.reduce_gradients\(model, grid\)"):
        DistributedDataParallel(spread(grid))
    with pytest.raises(ConfigError, match="DDP would give"):
        DistributedDataParallel(next(iter(moe_layers(spread(grid)).values())))
    for of in (lambda model: model, lambda model: model[0]):
        with pytest.raises(ConfigError, match=r"FSDP would shard .* laconic.moe.fully_shard_layers\(model, grid\)"):
            fully_shard(of(spread(grid)))
    with pytest.raises(ModelError, match=r"spreads its experts over ranks, and the group's ranks \[\d\] hold other"):
        compress_gradients(spread(grid).float(), dist.group.WORLD)
    for options in ({}, {"process_group": grid.ep}, {"device_mesh": grid.expert_mesh["ep"]}):
        with pytest.raises(ConfigError, match="replicate would give all the first one's; give it ignored_modules"):
            replicate(spread(grid), **options)(x)
    # What leaves the experts out, or has the same on all its ranks, is fine.
    model = spread(grid)
    replicate(model, ignored_modules=[layer.experts for layer in moe_layers(model).values()])(x).sum().backward()
    replicate(spread(grid), process_group=grid.edp)(x).sum().backward()
    model = spread(grid)
    names = {name: p for name, p in model.named_parameters() if ".experts." in name}
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    DistributedDataParallel(model)(x).sum().backward()
    model = spread(grid)
    experts = {p for name, p in model.named_parameters() if ".experts." in name}
    fully_shard(model, ignored_params=experts)(x).sum().backward()
    DistributedDataParallel(make_model())(x).sum().backward()
    alone = Grid(1, 1, 1)
    DistributedDataParallel(spread(alone))(x).sum().backward()
    fully_shard(spread(alone))(x).sum().backward()


def gradients_travel_in_buckets() -> None:
    """As many collectives as buckets, one after the other in the same order, with the sums of one per parameter."""
    grid = Grid(1, 2, 1)
    sent: list[int] = []
    plain = api.all_reduce

    def count(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.numel())
        return plain(tensor, *args, **kwargs)

    found: dict[str, dict[str, Tensor]] = {}
    numbers: dict[str, list[int]] = {}
    for kind, nbytes in {"one each": 1, "some": 2000, "default": None}.items():
        model = make_model().to(torch.float64)
        for module in model.modules():
            if isinstance(module, MoELayer):
                assert isinstance(module.experts, GatedExperts)
                module.experts = expert_shard(module.experts, grid)
                module.dispatcher = make_dispatcher(grid, "joint", codec=Raw())
        for number, parameter in enumerate(model.parameters()):
            value = torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(100 * number + dist.get_rank())
            )
            parameter.grad = None if number == 1 else value.double()
        sent.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(api, "all_reduce", count)
            reduce_gradients(model, grid, codec=Raw(), **({} if nbytes is None else {"bucket_nbytes": nbytes}))
        found[kind] = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        numbers[kind] = list(sent)
    assert len(numbers["one each"]) == len(found["default"])
    assert len(numbers["one each"]) > len(numbers["some"]) > len(numbers["default"]) == 2  # dense ones and experts
    assert sum(numbers["one each"]) == sum(numbers["default"])
    for kind in ("some", "default"):
        for name, value in found["one each"].items():
            assert torch.equal(found[kind][name], value), name


def gradients_around_the_model_are_named() -> None:
    """A head beside a part of a model: nobody reduces its gradients but the user."""
    grid = Grid(ep=2)

    def stepped() -> tuple[nn.Module, nn.Sequential, nn.Module]:
        body, head = spread(grid), nn.Linear(1, 3, dtype=torch.float64)
        whole = nn.Sequential(nn.ModuleDict({"body": body, "head": head}))
        head(body(batches(2)[0][dist.get_rank()])).sin().sum().backward()
        return whole, body, head

    whole, body, head = stepped()
    with pytest.warns(UserWarning, match=r"^head.weight, head.bias are trained outside of the Sequential"):
        reduce_gradients(body, grid, codec=Raw())
    body.zero_grad()
    reduce_gradients(body, grid, codec=Raw())  # once is enough
    whole, body, head = stepped()
    reduce_gradients(whole, grid, codec=Raw())
    whole, body, head = stepped()
    for parameter in head.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
    reduce_gradients(body, grid, codec=Raw())


def a_look_around_the_model_ends_whatever_is_there() -> None:
    """A module that its own child holds, a look that fails on one rank, a model without parameters."""
    grid = Grid(ep=2)
    body, head, notes = spread(grid), nn.Linear(1, 3, dtype=torch.float64), nn.Module()
    notes.around = whole = nn.ModuleDict({"body": body, "head": head, "notes": notes})
    head(body(batches(2)[0][dist.get_rank()])).sin().sum().backward()
    assert {*replica_gradients._gradients_around(body)} == {"head.weight", "head.bias"}
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank():
            patch.setattr(replica_gradients, "_holders", lambda module: whole[module])
        reduce_gradients(body, grid, codec=Raw())  # the other rank knows of no other gradients
    replica_gradients._warn_of_others(nn.Identity(), grid)


def refused_gradients() -> None:
    grid = Grid(1, 2, 1)
    model = spread(grid)
    with pytest.raises(ConfigError, match="bucket_nbytes is 0, but it must be positive"):
        reduce_gradients(model, grid, bucket_nbytes=0)
    *_, parameter = model.parameters()
    set_quantized_gradient(parameter, QuantizedGradient.zeros(parameter.shape, 8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica_gradients, "_warn_of_others", lambda *_: pytest.fail("nothing is sent then"))
        with pytest.raises(ModelError, match=r"is in codes, .* call remove\(\) of what"):
            reduce_gradients(model, grid)
    assert all(p.grad is None for p in model.parameters() if p is not parameter)


def trained(*layouts: tuple[int, int, int, str]) -> list[Scenario]:
    return [partial(losses_are_those_of_one_process, *layout, fsdp) for layout in layouts for fsdp in (False, True)]


TWO = [
    *trained((1, 2, 1, "joint"), (1, 1, 1, "joint"), (2, 2, 1, "s1"), (1, 1, 2, "sharded")),
    partial(losses_are_those_of_one_process, 1, 2, 1, "joint", True, torch.float32),
    partial(losses_are_those_of_one_process, 1, 1, 1, "joint", True, torch.float32),
    models_without_layers_are_refused,
    wrappers_that_take_experts_for_copies_are_refused,
    gradients_travel_in_buckets,
    refused_gradients,
    gradients_around_the_model_are_named,
    a_look_around_the_model_ends_whatever_is_there,
]
FOUR = trained((1, 2, 1, "joint"), (2, 2, 1, "s2"), (2, 2, 2, "s1"), (2, 1, 2, "baseline"), (2, 2, 1, "sharded"))


@pytest.mark.ci
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_training_is_that_of_one_process(world: int, tmp_path: Path) -> None:
    run_world(TWO if world == 2 else FOUR, world, tmp_path)
