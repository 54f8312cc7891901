"""Local steps over real processes, held against the algorithm in plain fp64 torch in one process."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.two_tensor import TwoTensor

import laconic
from laconic.collectives import audit
from laconic.errors import ConfigError
from laconic.gradients import LocalSteps, compress_gradients
from laconic.moe.dispatch.flat import FlatDispatcher
from laconic.train.launch.worker import leave
from tests.distributed.processes import run_ranks
from tests.gradients.test_orders import error_of

WORLD = 2
LR = 0.05
Found = dict[str, Any]
PARTS = (("first.weight", "first.bias"), ("last.weight", "last.bias"))
"""Names in two fragments."""


class Net(nn.Module):
    """Two layers of odd sizes and equally many weights, so that fragments are known."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(13, 11)
        self.last = nn.Linear(11, 13)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(4, 13, generator=torch.Generator().manual_seed(1000 * rank + step)).to(dtype)


def inner_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    x = batch(rank, step, next(model.parameters()).dtype)
    (model(x) - x.flip(-1)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def trained(rank: int, steps: int, finish: bool = True, seed: int = 0, **settings: Any) -> tuple[Net, LocalSteps]:
    """The model of this rank after `steps` steps of SGD, each rank on its own batches."""
    model = Net(seed)
    local = LocalSteps(model, **settings)
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.5)
    for step in range(steps):
        inner_step(model, optimizer, rank, step)
        local.step()
    if finish:
        local.finish()
    return model, local


def simulated(
    steps: int, every: int, num_fragments: int = 1, delay: int = 0, lr: float = 0.7, momentum: float = 0.9
) -> list[dict[str, Tensor]]:
    """What each rank's parameters are in fp64, without `finish`: the algorithm parameter by parameter."""
    models = [Net().double() for _ in range(WORLD)]
    optimizers = [torch.optim.SGD(model.parameters(), LR, momentum=0.5) for model in models]
    common = weights(models[0])
    outer = {name: torch.zeros_like(value) for name, value in common.items()}
    parts = PARTS if num_fragments == 2 else (sum(PARTS, ()),)
    due: dict[int, list[tuple[str, Tensor, list[Tensor]]]] = {}
    for done in range(1, steps + 1):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            inner_step(model, optimizer, rank, done - 1)
        for number, names in enumerate(parts):
            if (done - every * (number + 1) // num_fragments) % every == 0:
                for name in names:
                    own = [weights(model)[name] for model in models]
                    due.setdefault(done + delay, []).append((name, common[name] - sum(own) / WORLD, own))
        for name, average, own in due.pop(done, []):
            outer[name] = momentum * outer[name] + average
            common[name] = common[name] - lr * (average + momentum * outer[name])
            for model, start in zip(models, own, strict=True):
                parameter = model.get_parameter(name)
                parameter.data = common[name] + (parameter.data - start)
    return [weights(model) for model in models]


# --- what the two processes do; each function's result is what this rank found ---


def plain_average(rank: int) -> Found:
    """One step between synchronizations, outer rate 1, no momentum, no rounding: parameters are averaged."""
    model = Net()
    local = LocalSteps(model, every=1, outer_lr=1.0, outer_momentum=0.0, bits=32)
    optimizer = torch.optim.SGD(model.parameters(), LR)
    found: Found = {"before": [], "after": []}
    for step in range(3):
        inner_step(model, optimizer, rank, step)
        found["before"].append(weights(model))
        local.step()
        found["after"].append(weights(model))
    return found


def followed(rank: int, bits: int, num_fragments: int, delay: int) -> Found:
    """Parameters after 9 steps as they are, at the common point, and after `finish`."""
    settings = {"every": 4, "bits": bits, "num_fragments": num_fragments, "delay": delay}
    before = audit.snapshot()
    model, local = trained(rank, 9, finish=False, **settings)
    own = weights(model)
    with local.at_common_point():
        common = weights(model)
    back = weights(model)
    local.finish()
    once = weights(model)
    state = local.state_dict()
    local.finish()
    local.load_state_dict(state)
    local.finish()
    assert equal(weights(model), once)
    nbytes = {entry.codec: entry.sent_nbytes for entry in (audit.snapshot() - before).entries}
    same = laconic.verify_replicas(model).num_tensors
    return {"own": own, "common": common, "back": back, "finished": weights(model), "same": same, "nbytes": nbytes}


def went_on(rank: int, folder: str, num_fragments: int, delay: int) -> Found:
    """11 steps without a pause, and with one after each of 5, 6 and 8 of them, in a new model."""
    settings: Found = {"every": 5, "bits": 4, "num_fragments": num_fragments, "delay": delay}
    whole, local = trained(rank, 11, finish=False, **settings)
    found: Found = {"whole": weights(whole), "whole common": local.state_dict()["common"]}
    for pause in (5, 6, 8):
        model = Net()
        local = LocalSteps(model, **settings)
        optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.5)
        for step in range(11):
            if step == pause:
                path = f"{folder}/{num_fragments}-{delay}-{pause}-{rank}.pt"
                torch.save([local.state_dict(), optimizer.state_dict()], path)
                states = torch.load(path)
                model = Net(seed=7)
                local = LocalSteps(model, **settings)
                local.load_state_dict(states[0])
                optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.5)
                optimizer.load_state_dict(states[1])
            inner_step(model, optimizer, rank, step)
            local.step()
        found[f"paused {pause}"] = weights(model)
        found[f"paused {pause} common"] = local.state_dict()["common"]
    return found


def error_feedback(rank: int) -> Found:
    """All ranks go the same tiny way in every step beside one large value, whose scale the tiny ones share."""
    way = torch.full((64,), 5e-3)
    way[0] = 1.0
    moved = {}
    for feedback in (True, False):
        model = nn.ParameterDict({"x": nn.Parameter(torch.zeros(64))})
        local = LocalSteps(model, every=1, bits=4, outer_lr=1.0, outer_momentum=0.0, error_feedback=feedback)
        for _ in range(40):
            model["x"].data += way
            local.step()
        moved[feedback] = model["x"].detach().clone()
    return moved


def more_bits(rank: int, error_feedback: bool) -> Found:
    """What four bits have dropped goes along with the first difference in 32 if that is asked for, and no other."""
    way = torch.full((64,), 5e-3)
    way[0] = 1.0
    model = nn.ParameterDict({"x": nn.Parameter(torch.zeros(64))})
    settings = {"every": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
    local = LocalSteps(model, bits=4, **settings)
    for step in range(12):
        if step == 10:
            state = local.state_dict()
            local = LocalSteps(model, bits=32, error_feedback=error_feedback, **settings)
            local.load_state_dict(state)
            before = model["x"].detach().clone()
        model["x"].data += way
        local.step()
    return {"before": before, "after": model["x"].detach().clone(), "way": way, "left": local.state_dict()["error"]}


def half(rank: int) -> Found:
    """A bf16 model whose updates are below its resolution: the fp32 common point keeps them."""
    model = nn.ParameterDict({"x": nn.Parameter(torch.ones(8, dtype=torch.bfloat16))})
    local = LocalSteps(model, every=1, bits=32, outer_lr=0.25, outer_momentum=0.0)
    for _ in range(8):
        model["x"].data += 2.0**-7  # a step of bf16 above 1; a quarter of it is none
        local.step()
    return {"x": model["x"].detach().clone(), "common": local.common()["x"].clone()}


def statistics(rank: int, norm: type[nn.Module], delay: int) -> Found:
    """Of 4 channels of one sample where it is an instance normalization."""
    model = nn.Sequential(nn.Linear(13, 4), norm(4, track_running_stats=True))
    local = LocalSteps(model, every=2, delay=delay)
    before = []
    for step in range(2 + delay):
        model(batch(rank, step)[None] if norm is nn.InstanceNorm1d else batch(rank, step))
        before.append(model[1].running_mean.clone())
        local.step()
    return {"before": before[-1], "after": model[1].running_mean.clone()}


def bad_statistics(rank: int) -> str:
    """A batch of rank 1 that is not finite, whose step is left out as GradScaler does."""
    model = nn.Sequential(nn.Linear(13, 5), nn.BatchNorm1d(5))
    local = LocalSteps(model, every=1)
    model(batch(rank, 0).log() if rank == 1 else batch(rank, 0))
    return error_of(local.step)


def fewer_fragments(rank: int) -> Found:
    """Half of the parameters have met when the state is saved."""
    _, local = trained(rank, 2, finish=False, every=4, num_fragments=2)
    state = copy.deepcopy(local.state_dict())
    model = Net(seed=7)
    local = LocalSteps(model, every=4)
    local.load_state_dict(state)
    local.finish()
    return weights(model)


def without_elements(rank: int) -> Found:
    model = nn.ParameterDict({"none": nn.Parameter(torch.zeros(0, 3)), "x": nn.Parameter(torch.zeros(()))})
    local = LocalSteps(model, every=1, outer_lr=1.0, outer_momentum=0.0, bits=32)
    model["x"].data += 1 + rank
    local.step()
    return {"x": model["x"].detach().clone()}


def inside_the_common_point(rank: int) -> Found:
    """What would read or move this rank's own parameters while they are not in their place."""
    model, local = trained(rank, 2, finish=False, every=4)
    own, state, found = weights(model), local.state_dict(), {}
    for name, call in {
        "step": local.step,
        "finish": local.finish,
        "state": local.state_dict,
        "load": lambda: local.load_state_dict(state),
        "change": lambda: model.last.bias.data.add_(1.0),
        "freeze": lambda: model.requires_grad_(False),  # for an evaluation
    }.items():

        def inside(call: Callable[[], object] = call) -> None:
            with local.at_common_point():
                call()

        found[name] = error_of(inside)
    model.requires_grad_(True)
    return {"errors": found, "back": equal(own, weights(model)), "steps": local.steps}


def loaded_later(rank: int, delay: int) -> Found:
    """Rank 1's weights are loaded after LocalSteps was made: all of them, those of a part, the same as before."""
    found: Found = {}
    for name in ("all", "part", "the same", "copied"):
        model = Net()
        local = LocalSteps(model, every=1 + delay, delay=delay)
        if rank == 1:
            if name == "part":
                model.last.load_state_dict(Net(seed=7).last.state_dict())
            elif name == "copied":
                copy.deepcopy(model).load_state_dict(Net(seed=7).state_dict())
            else:
                model.load_state_dict(Net(seed=7 * (name == "all")).state_dict())
        found[name] = error_of(lambda local=local: [local.step() for _ in range(1 + 2 * delay)])
    state = local.state_dict()
    model.load_state_dict(Net(seed=7).state_dict())
    local.load_state_dict(state)
    found["and the state"] = error_of(local.finish)
    return found


def averaged_later(rank: int) -> str:
    model = Net()
    local = LocalSteps(model, every=1)
    compress_gradients(model, dist.group.WORLD)
    return error_of(local.step)


def frozen_but(model: nn.Module, name: str) -> nn.Module:
    for other, parameter in model.named_parameters():
        parameter.requires_grad_(other == name)
    return model


def refusals(rank: int) -> Found:
    """Errors of construction, the same on both ranks."""
    group = dist.group.WORLD
    alone = [dist.new_group([one]) for one in range(WORLD)][rank]
    sharded = fully_shard(Net(), mesh=init_device_mesh("cpu", (WORLD,)))
    spread = nn.Module()
    spread.weight = nn.Parameter(torch.zeros(2))
    spread.dispatcher = FlatDispatcher.__new__(FlatDispatcher)
    averaged = Net()
    compress_gradients(averaged, group)
    makers: dict[str, Callable[[], object]] = {
        "ddp": lambda: LocalSteps(DistributedDataParallel(Net()), every=2),
        "fsdp": lambda: LocalSteps(sharded, every=2),
        "dtensor": lambda: LocalSteps(nn.ParameterList(sharded.parameters()), every=2),
        "experts": lambda: LocalSteps(spread, every=2),
        "averaged": lambda: LocalSteps(averaged, every=2),
        "alone": lambda: LocalSteps(Net(), alone, every=2),
        "double": lambda: LocalSteps(Net().double(), every=2),
        "several": lambda: LocalSteps(nn.ParameterDict({"p": TwoTensor(torch.ones(4), torch.ones(4))}), every=2),
        "frozen": lambda: LocalSteps(frozen_but(Net(), ""), every=2),
        "every": lambda: LocalSteps(Net(), every=0),
        "bits": lambda: LocalSteps(Net(), every=2, bits=12),
        "fragments": lambda: LocalSteps(Net(), every=2, num_fragments=3),
        "parameters": lambda: LocalSteps(Net(), every=9, num_fragments=5),
        "delay": lambda: LocalSteps(Net(), every=2, delay=2),
        "lr": lambda: LocalSteps(Net(), every=2, outer_lr=float("nan")),
        "momentum": lambda: LocalSteps(Net(), every=2, outer_momentum=1.0),
        "other every": lambda: LocalSteps(Net(), every=2 + rank),
        "other bits": lambda: LocalSteps(Net(), every=2, bits=(4, 8)[rank]),
        "other parameters": lambda: LocalSteps(frozen_but(Net(), ("first.bias", "last.bias")[rank]), every=2),
    }
    return {name: error_of(make) for name, make in makers.items()}


def diverged(rank: int, delay: int) -> str:
    model = Net()
    local = LocalSteps(model, every=2, delay=delay)
    if rank == 1:
        model.last.bias.data[3] = float("nan")
    error = error_of(lambda: [local.step() for _ in range(2 + delay)])
    error_of(local.step)  # of a program that goes on
    assert all(x.isfinite().all() for x in local.common().values()), "the next call has merged what was refused"
    return error


def changed(rank: int, delay: int) -> str:
    model = Net()
    local = LocalSteps(model, every=1 + delay, delay=delay)
    if rank == 1:
        model.extra = nn.Linear(2, 2)
    return error_of(lambda: [local.step() for _ in range(1 + 2 * delay)])


def uneven(rank: int) -> str:
    """Rank 1 ends its loop one step earlier."""
    local = LocalSteps(Net(), every=3)
    return error_of(lambda: [local.step() for _ in range(3 - rank)] + [local.finish()] * rank)


def misfit(rank: int) -> Found:
    """States that a model, or a number of fragments, cannot take."""
    _, local = trained(rank, 5, finish=False, every=4, num_fragments=2, delay=2)
    state = local.state_dict()
    missing = copy.deepcopy(state)
    del missing["momentum"]["first.bias"]
    renamed = state | {"error": {f"module.{name}": x for name, x in state["error"].items()}}
    return {
        "error": error_of(lambda: LocalSteps(Net(), every=4, num_fragments=2, delay=2).load_state_dict(renamed)),
        "momentum": error_of(lambda: LocalSteps(Net(), every=4, num_fragments=2, delay=2).load_state_dict(missing)),
        "delay": error_of(lambda: LocalSteps(Net(), every=4, num_fragments=2).load_state_dict(state)),
        "fragments": error_of(lambda: LocalSteps(Net(), every=4, num_fragments=1, delay=2).load_state_dict(state)),
    }


def other_points(rank: int) -> Found:
    """Rank 1 starts from other weights, or from a state of another run."""

    def alone() -> None:
        local = LocalSteps(Net(rank), every=2, broadcast=False)
        local.step()
        local.step()

    def of_another_run() -> None:
        _, local = trained(rank, 4, every=2)
        state = local.state_dict()
        state["momentum"]["last.bias"] += rank
        _, other = trained(rank, 4, every=2)
        other.load_state_dict(state)
        other.step()
        other.step()

    def frozen() -> None:
        frozen_but(model := Net(rank), "last.bias")
        with torch.no_grad():
            model.last.bias.zero_()
        LocalSteps(model, every=2, broadcast=False)

    return {"weights": error_of(alone), "state": error_of(of_another_run), "frozen": error_of(frozen)}


def warned(rank: int, wrap: Callable[[nn.Module], nn.Module], batches_of: int) -> list[str]:
    """What four steps warn of, where local steps have the inner model, and batches are those of a rank."""
    model = Net()
    local = LocalSteps(model, every=2)
    trained = wrap(model)
    optimizer = torch.optim.SGD(trained.parameters(), LR)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            inner_step(trained, optimizer, batches_of, step)
            local.step()
    assert {one.filename for one in caught} <= {__file__}  # the caller of step()
    return [str(one.message) for one in caught]


def resting(rank: int, warmup: int) -> list[str]:
    """What local steps warn of where the first fragment rests, and before any step; `warmup` steps are loaded first."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, local = trained(rank, warmup, every=2, num_fragments=2)
        local.load_state_dict(local.state_dict())
        local.finish()
        optimizer = torch.optim.SGD(model.last.parameters(), 0.0 if rank and warmup else LR)
        for step in range(4):
            inner_step(model, optimizer, rank, step)
            local.step()
        local.state_dict()
    assert {one.filename for one in caught} <= {__file__}
    return [str(one.message) for one in caught]


def idle(rank: int) -> Found:
    """Rank 1 trains a copy of the model that local steps know; then all ranks train alike."""
    return {
        "resting": resting(rank, 0),
        "loaded": resting(rank, 2),
        "copy": warned(rank, copy.deepcopy if rank else nn.Sequential, rank),
        "batches": warned(rank, nn.Sequential, 0),
        "wrapped": warned(rank, DistributedDataParallel, rank),
        "apart": warned(rank, nn.Sequential, rank),
    }


def scenarios(folder: str) -> dict[str, tuple[Callable[..., object], tuple[Any, ...]]]:
    grid = [(bits, *way) for bits in (32, 8, 4) for way in ((1, 0), (2, 0), (1, 3), (2, 1))]
    return {
        "average": (plain_average, ()),
        **{f"followed {one}": (followed, one) for one in grid},
        **{f"went on {way}": (went_on, (folder, *way)) for way in ((1, 0), (2, 0), (2, 2))},
        "feedback": (error_feedback, ()),
        "more bits": (more_bits, (True,)),
        "more bits, forgetting": (more_bits, (False,)),
        "half": (half, ()),
        "statistics": (statistics, (nn.BatchNorm1d, 0)),
        "statistics late": (statistics, (nn.BatchNorm1d, 1)),
        "statistics of instances": (statistics, (nn.InstanceNorm1d, 0)),
        "bad statistics": (bad_statistics, ()),
        "fewer fragments": (fewer_fragments, ()),
        "without elements": (without_elements, ()),
        "inside": (inside_the_common_point, ()),
        "loaded": (loaded_later, (0,)),
        "loaded late": (loaded_later, (1,)),
        "averaged later": (averaged_later, ()),
        "refusals": (refusals, ()),
        "misfit": (misfit, ()),
        "diverged": (diverged, (0,)),
        "changed": (changed, (0,)),
        "changed late": (changed, (1,)),
        "uneven": (uneven, ()),
        "other points": (other_points, ()),
        "idle": (idle, ()),
        "diverged late": (diverged, (1,)),
    }


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD))
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD)
    found = {name: scenario(rank, *arguments) for name, (scenario, arguments) in scenarios(folder).items()}
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    leave(0)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """By rank and scenario."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(work, (str(folder),), WORLD)
    return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(WORLD)]


def close(found: dict[str, Tensor], expected: dict[str, Tensor], atol: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value.double(), expected[name].double(), rtol=0, atol=atol, msg=name)


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.ci
def test_one_step_at_outer_rate_one_averages_parameters(found: list[Found]) -> None:
    for step in range(3):
        ranks = [one["average"]["before"][step] for one in found]
        mean = {name: (ranks[0][name] + ranks[1][name]) / 2 for name in ranks[0]}
        for one in found:
            close(one["average"]["after"][step], mean, 1e-7)


@pytest.mark.parametrize("way", [(1, 0), (2, 0), (1, 3), (2, 1)])
def test_ranks_follow_the_algorithm_in_plain_torch(found: list[Found], way: tuple[int, int]) -> None:
    expected = simulated(9, 4, *way)
    apart = max((expected[0][name] - expected[1][name]).abs().max().item() for name in expected[0])
    assert apart > 1e-2  # or all that follows says nothing
    for bits, atol in ((32, 1e-6), (8, 2e-3), (4, 3e-2)):
        for one, plain in zip(found, expected, strict=True):
            close(one[f"followed {(bits, *way)}"]["own"], plain, atol)


def test_the_common_point_has_the_same_bits_on_all_ranks_at_any_time(found: list[Found]) -> None:
    for name in [name for name in found[0] if name.startswith("followed")]:
        first, second = (one[name] for one in found)
        assert not equal(first["own"], second["own"])
        assert equal(first["common"], second["common"])
        assert equal(first["finished"], second["finished"])
        assert not equal(first["common"], first["finished"])
        assert equal(first["own"], first["back"])
        assert first["same"] == 4


def test_bytes_are_counted_and_fall_with_bits(found: list[Found]) -> None:
    nbytes = {bits: found[0][f"followed {(bits, 1, 0)}"]["nbytes"] for bits in (32, 8, 4)}
    # Parameters fill blocks of 128: 2 + 1 + 2 + 1 of them. Three synchronizations, two rounds of a half each.
    payload = {bits: 3 * 768 * share // 8 for bits, share in ((32, 32), (8, 8.25), (4, 4.25))}
    heads = 3 * 512  # headers, announcements and, uncoded, what ranks report
    assert payload[4] < nbytes[4]["nf4-b64-bfloat16"] < payload[4] + heads
    assert payload[8] < nbytes[8]["int8-b128-float32"] < payload[8] + heads
    assert payload[32] < nbytes[32]["raw"] < payload[32] + 2 * heads


@pytest.mark.parametrize("way", [(1, 0), (2, 0), (2, 2)])
def test_a_state_goes_on_bit_for_bit(found: list[Found], way: tuple[int, int]) -> None:
    for one in found:
        states = one[f"went on {way}"]
        for pause in (5, 6, 8):
            assert equal(states["whole"], states[f"paused {pause}"]), pause
            assert equal(states["whole common"], states[f"paused {pause} common"]), pause


def test_what_rounding_drops_is_sent_later(found: list[Found]) -> None:
    moved = found[0]["feedback"]
    torch.testing.assert_close(moved[True][1:], torch.full((63,), 0.2), rtol=0, atol=0.1)
    assert moved[False][1:].abs().max() == 0  # 0.005 of the largest value is no level of four bits


def test_what_rounding_has_dropped_is_not_lost_with_more_bits(found: list[Found]) -> None:
    for one in found:
        before, after, way, left = (one["more bits"][name] for name in ("before", "after", "way", "left"))
        assert not torch.allclose(before, 10 * way, rtol=0.1)
        torch.testing.assert_close(after, 12 * way)
        assert not left
        before, after, left = (one["more bits, forgetting"][name] for name in ("before", "after", "left"))
        torch.testing.assert_close(after, before + 2 * way)
        assert not left


def test_a_common_point_in_fp32_keeps_what_bf16_cannot_hold(found: list[Found]) -> None:
    torch.testing.assert_close(found[0]["half"]["common"], torch.full((8,), 1 + 8 * 2.0**-9), rtol=0, atol=0)
    assert found[0]["half"]["x"].dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["statistics", "statistics late", "statistics of instances"])
def test_running_statistics_are_averaged(found: list[Found], name: str) -> None:
    before = [one[name]["before"] for one in found]
    assert not torch.equal(*before)
    for one in found:
        torch.testing.assert_close(one[name]["after"], (before[0] + before[1]) / 2)


def test_statistics_that_are_not_finite_are_named_on_all_ranks(found: list[Found]) -> None:
    for one in found:
        assert one["bad statistics"].startswith("TrainingError: 1.running_mean of rank 1 is not finite after 1 steps")


def test_a_state_of_more_fragments_is_finished_whole(found: list[Found]) -> None:
    assert equal(*(one["fewer fragments"] for one in found))


def test_parameters_without_elements_are_left_as_they_are(found: list[Found]) -> None:
    assert [one["without elements"]["x"].item() for one in found] == [1.5, 1.5]


def test_what_needs_this_ranks_own_parameters_is_refused_at_the_common_point(found: list[Found]) -> None:
    for one in found:
        errors = one["inside"]["errors"]
        for name, call in {
            "step": "step",
            "finish": "finish",
            "state": "state_dict",
            "load": "load_state_dict",
        }.items():
            assert errors[name].startswith(f"TrainingError: {call}() inside of at_common_point()"), errors[name]
        assert errors["change"].startswith("TrainingError: last.bias was changed inside of at_common_point()")
        assert errors["freeze"] == "no error"
        assert one["inside"]["back"]
        assert one["inside"]["steps"] == 2


@pytest.mark.parametrize("name", ["loaded", "loaded late"])
def test_weights_that_no_common_point_knows_of_are_refused_on_all_ranks(found: list[Found], name: str) -> None:
    for case, parameter in {"all": "first.weight", "part": "last.weight"}.items():
        assert found[0][name][case].startswith("ConfigError: the parameters of rank 1 are others than when")
        assert found[1][name][case].startswith(f"ModelError: other values of parameter {parameter} were loaded since")
    for one in found:
        assert [one[name][case] for case in ("the same", "copied", "and the state")] == ["no error"] * 3


def test_gradients_that_are_averaged_later_are_refused(found: list[Found]) -> None:
    for one in found:
        assert one["averaged later"].startswith("ModelError: the gradient of first.weight is averaged over ranks in")


REFUSALS = {
    "ddp": "ModelError: the model is a DistributedDataParallel",
    "fsdp": "ModelError: the model is sharded by FSDP2",
    "dtensor": "ModelError: parameter 0 is a DTensor",
    "experts": "ModelError: the model spreads its experts over ranks",
    "averaged": "ModelError: the gradient of first.weight is averaged over ranks in every step by compress_gradients",
    "alone": "ConfigError: group has 1 rank, but local steps are averaged over at least 2",
    "double": "ModelError: parameter first.weight is float64",
    "several": "ModelError: parameter p is a TwoTensor, which consists of several tensors",
    "frozen": "ModelError: the model has no parameter that requires a gradient",
    "every": "ConfigError: every is 0",
    "bits": "ConfigError: bits is 12, but it must be one of 4, 8, 32",
    "fragments": "ConfigError: num_fragments is 3, but it must be an integer from 1 to every (2)",
    "parameters": "ConfigError: num_fragments is 5, but it must be at most the number of trainable parameters (4)",
    "delay": "ConfigError: delay is 2, but it must be below every (2)",
    "lr": "ConfigError: outer_lr is nan",
    "momentum": "ConfigError: outer_momentum is 1.0",
    "other every": "ConfigError: every is 2 on rank 0 and 3 on rank 1",
    "other bits": "ConfigError: bits is 4 on rank 0 and 8 on rank 1",
    "other parameters": "ConfigError: parameter first.bias is 'float32 [11]' on rank 0 and missing on rank 1",
}


def test_what_cannot_be_trained_apart_is_refused_on_all_ranks(found: list[Found]) -> None:
    for one in found:
        assert one["refusals"].keys() == REFUSALS.keys()
        for name, beginning in REFUSALS.items():
            assert one["refusals"][name].startswith(beginning), one["refusals"][name]


def test_a_rank_that_diverged_is_named_on_all_ranks(found: list[Found]) -> None:
    for one in found:
        assert one["diverged"].startswith("TrainingError: last.bias of rank 1 is not finite")
        assert "after 2 steps" in one["diverged"]
        assert one["diverged late"] == one["diverged"]


def test_parameters_that_changed_are_refused_on_all_ranks(found: list[Found]) -> None:
    for name in ("changed", "changed late"):
        assert found[0][name].startswith("ConfigError: the parameters of rank 1 are others than when")
        assert found[1][name].startswith("ModelError: parameter extra.weight is new or trainable since")


def test_ranks_that_made_other_numbers_of_steps_are_told(found: list[Found]) -> None:
    for one in found:
        assert one["uneven"].startswith(
            "ConfigError: rank 1 has made 2 steps and synchronizes fragment 0, but rank 0 has"
        )


def test_common_points_that_differ_are_refused_on_all_ranks(found: list[Found]) -> None:
    for one in found:
        for case in ("weights", "state"):
            assert one["other points"][case].startswith("ConfigError: the common point of rank 1 is not that of rank 0")
        assert one["other points"]["frozen"].startswith("ConfigError: the hash of frozen parameter first.weight is ")


def test_a_rank_whose_parameters_stand_still_is_named(found: list[Found]) -> None:
    for one in found:
        for case in ("copy", "loaded"):
            assert [text.partition(":")[0] for text in one["idle"][case]] == [
                "no parameter of rank 1 had changed when it was synchronized, in 2 steps"
            ]
        assert not one["idle"]["apart"]
        assert not one["idle"]["resting"]


def test_ranks_that_make_the_same_progress_are_told(found: list[Found]) -> None:
    for one in found:
        for case in ("batches", "wrapped"):
            first, second = one["idle"][case]
            assert first == second  # so Python's filter shows it once
            assert first.startswith("all ranks have made the very same progress since")


def test_states_that_do_not_fit_are_refused(found: list[Found]) -> None:
    errors = found[0]["misfit"]
    assert errors["momentum"].startswith("ConfigError: first.bias of 'momentum' is missing in the state and [11] in")
    assert errors["error"].startswith(
        "ConfigError: module.first.weight of 'error' is [11, 13] in the state and missing in"
    )
    for name in ("delay", "fragments"):
        assert "the state has a synchronization of" in errors[name], errors[name]


def test_without_processes_local_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="no process group exists"):
        LocalSteps(Net(), every=2)
