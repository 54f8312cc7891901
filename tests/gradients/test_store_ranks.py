"""The gradient store over two real processes: replicas that reduce codes, and shards of FSDP2."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from laconic.errors import ConfigError, ModelError, TrainingError
from laconic.formats import CodedGradient
from laconic.gradients import CompressedGradients, compress_gradients
from laconic.train.launch.worker import leave
from tests.distributed.processes import run_ranks

WORLD = 2
Found = dict[str, Any]


class Net(nn.Module):
    """Layers of odd sizes; `extra` takes part only when asked, `never` not at all."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(13, 11)
        self.extra = nn.Linear(11, 11)
        self.never = nn.Linear(3, 3)
        self.last = nn.Linear(11, 1)
        self.register_buffer("steps", torch.full((2,), seed))
        self.register_buffer("flag", torch.tensor(seed == 0))

    def forward(self, x: Tensor, with_extra: bool = True) -> Tensor:
        y = torch.tanh(self.first(x))
        if with_extra:
            y = y + self.extra(y)
        return self.last(y)


def batch(seed: int) -> Tensor:
    return torch.randn(4, 13, generator=torch.Generator().manual_seed(seed))


def loss(model: nn.Module, seed: int, **arguments: bool) -> Tensor:
    return model(batch(seed), **arguments).square().mean()


def everything(gradients: CompressedGradients) -> dict[str, tuple[Tensor, ...]]:
    """All bytes of all gradients."""
    parts: dict[str, tuple[Tensor, ...]] = {}
    for name, g in gradients.gradients().items():
        each = (g.codes, g.scales, g.residual_codes, g.residual_scales, g.dequantize())
        parts[name] = tuple(part.clone() for part in each if part is not None)
    return parts


def error_of(function: Callable[[], object]) -> str:
    started = time.monotonic()
    try:
        function()
    except (ConfigError, ModelError, TrainingError) as error:
        assert time.monotonic() - started < 20
        return f"{type(error).__name__}: {error}"
    return "no error"


# --- what the two processes do; each function's result is what this rank found ---


def replicas(rank: int, group: dist.ProcessGroup, bits: int, overlap: bool) -> Found:
    model = Net()
    gradients = compress_gradients(model, group, bits=bits, bucket_nbytes=200)
    if overlap:  # once to learn that `never` need not be waited for
        loss(model, rank).backward()
        gradients.reduce()
        gradients.zero_()
    loss(model, rank).backward()
    if overlap:
        with gradients.last_micro_batch():
            loss(model, 10 + rank).backward()
        assert gradients._reduction is not None
        launched = gradients._reduction.buckets.num_launched, len(gradients._reduction.buckets._buckets)
    else:
        loss(model, 10 + rank).backward()
        launched = 0, 0
    early = [error_of(call) for call in (gradients.norm, gradients.dequantize_to_grad)]
    gradients.reduce()
    return {"gradients": everything(gradients), "launched": launched, "norm": gradients.norm(), "early": early}


def several_backwards(rank: int, group: dist.ProcessGroup) -> Found:
    """As a pipeline schedule does it: the last two backwards are announced together. Added up, not averaged."""
    model = Net()
    gradients = compress_gradients(model, group, bucket_nbytes=200, average=False)
    with gradients.last_micro_batch(num_backwards=2):
        loss(model, rank).backward()
        assert gradients._reduction is not None
        before = gradients._reduction.buckets.num_launched
        loss(model, 10 + rank).backward()
    gradients.reduce()
    return {"gradients": everything(gradients), "before": before}


def partly_used(rank: int, group: dist.ProcessGroup) -> Found:
    """`extra` has a gradient on rank 1 only."""
    model = Net()
    gradients = compress_gradients(model, group, bits=12, bucket_nbytes=200)
    with gradients.last_micro_batch():
        loss(model, rank, with_extra=rank == 1).backward()
    gradients.reduce()
    return {"gradients": everything(gradients), "without": gradients.without_gradient}


def not_finite(rank: int, group: dist.ProcessGroup) -> Found:
    """Rank 1 alone meets an infinity; both leave the step out, and the next one is sound."""
    model = Net()
    gradients = compress_gradients(model, group)
    value = loss(model, rank)
    (value * torch.inf if rank == 1 else value).backward()
    gradients.reduce()
    first = gradients.found_nonfinite(), gradients.clip_(1.0)
    gradients.zero_()
    loss(model, rank).backward()
    gradients.reduce()
    return {"first": first, "then": gradients.found_nonfinite()}


def steps(rank: int, group: dist.ProcessGroup) -> Found:
    """Training steps through `grad`, from parameters that differ at the start."""
    model = Net(seed=rank)
    gradients = compress_gradients(model, group, bits=12)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss(model, 10 * step + rank).backward()
        gradients.reduce()
        gradients.clip_(0.5)
        gradients.dequantize_to_grad()
        optimizer.step()
        gradients.zero_()
    return {"start": start, "end": {name: p.detach().clone() for name, p in model.named_parameters()}}


def refusals(rank: int, group: dist.ProcessGroup) -> Found:
    wide = nn.Linear(3, 4 + rank)
    mixed = nn.Linear(3, 3, dtype=torch.float32 if rank else torch.bfloat16)
    inner = Net()
    return {
        "bits": error_of(lambda: compress_gradients(Net(), group, bits=8 if rank else 12)),
        "kind": error_of(lambda: compress_gradients(Net(), group, average=1 if rank else True)),  # type: ignore[arg-type]
        "shape": error_of(lambda: compress_gradients(wide, group)),
        "dtype": error_of(lambda: compress_gradients(mixed, group)),
        "number": error_of(lambda: compress_gradients(nn.Sequential(*[nn.Linear(2, 2)] * 1, *[Net()] * rank), group)),
        "ddp": error_of(lambda: compress_gradients(DistributedDataParallel(inner), group)),
        "fsdp with a group": error_of(lambda: compress_gradients(fully_shard(Net()), group)),
        "reduced already": error_of(lambda: scale_too_early(group)),
        "sharded too late": error_of(lambda: shard_too_late(group)),
    }


def scale_too_early(group: dist.ProcessGroup) -> None:
    model = Net()
    gradients = compress_gradients(model, group, bucket_nbytes=12)
    with gradients.last_micro_batch():
        loss(model, 0).backward()
    try:
        gradients.scale_(0.5)
    finally:
        gradients.reduce()


def shard_too_late(group: dist.ProcessGroup) -> None:
    model = Net()
    gradients = compress_gradients(model, group)
    fully_shard(model)
    loss(model, 0).backward()
    gradients.norm()


def shards(rank: int, group: dist.ProcessGroup, bits: int) -> Found:
    """FSDP2: uneven shards, an empty one on rank 1, and a norm over the mesh."""
    model = Net()
    for module in (model.first, model.last):
        fully_shard(module)
    fully_shard(model)
    gradients = compress_gradients(model, bits=bits)
    for seed in (rank, 10 + rank):
        loss(model, seed).backward()
    shapes = {name: tuple(g.shape) for name, g in gradients.gradients().items()}
    norm = gradients.norm()
    gradients.clip_(norm.item() / 2)
    clipped = gradients.norm()
    gradients.scale_(2.0)
    gradients.dequantize_to_grad()
    full = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        if parameter.grad is not None:
            assert isinstance(parameter.grad, DTensor)
            full[name] = parameter.grad.full_tensor()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    gradients.zero_()
    (loss(model, rank) * (torch.nan if rank == 1 else 1.0)).backward()
    nonfinite = gradients.found_nonfinite()
    return {"shapes": shapes, "norm": norm, "clipped": clipped, "full": full, "nonfinite": nonfinite}


def sharded_later(rank: int, group: dist.ProcessGroup) -> Found:
    """`fully_shard` after the store, and torch's own norm, clipping and optimizers on shards in codes."""
    model = Net()
    gradients = compress_gradients(model, bits=12)
    for module in (model.first, model.last):
        fully_shard(module)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    kinds, norms = [], []
    for step in range(3):
        for seed in (rank, 10 + rank):
            loss(model, 100 * step + seed).backward()
        own = gradients.norm()
        total = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert isinstance(total, DTensor)
        norms.append((own.item(), total.full_tensor().item(), gradients.norm().item()))
        kinds.append(isinstance(model.first.weight.grad.to_local(), CodedGradient))
        optimizer.step()
        optimizer.zero_grad(set_to_none=step == 0)
    end = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    return {"norms": norms, "kinds": kinds, "end": end}


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(6, 8, bias=False)
        self.down = nn.Linear(8, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def tensor_parallel(rank: int, group: dist.ProcessGroup) -> Found:
    model = parallelize_module(
        TwoLayers(), init_device_mesh("cpu", (WORLD,)), {"up": ColwiseParallel(), "down": RowwiseParallel()}
    )
    gradients = compress_gradients(model, bits=12)
    model(torch.ones(2, 6)).square().sum().backward()
    return {"norm": gradients.norm(), "shape": tuple(gradients.gradients()["up.weight"].shape)}


def two_dimensions(rank: int, group: dist.ProcessGroup, sizes: tuple[int, int], tensor_parallel: bool) -> Found:
    """FSDP2 over tensor parallelism, or over replicas and shards."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("outer", "inner"))
    model: nn.Module = TwoLayers()
    if tensor_parallel:
        model = parallelize_module(model, mesh["inner"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["outer"] if tensor_parallel else mesh)
    gradients = compress_gradients(model, bits=12)
    model(torch.ones(2, 6)).square().sum().backward()
    return {"norm": gradients.norm()}


def stages(rank: int, group: dist.ProcessGroup) -> Found:
    """Each rank holds parameters of its own; the norm is over both."""
    model = nn.Linear(2, 2, bias=False)
    gradients = compress_gradients(model)
    (model.weight * (3.0 + rank)).sum().backward()
    return {"norm": gradients.norm(over=[group])}


class Part(nn.Module):
    """One of four parts of a model; linear maps and tanh."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


MICRO_BATCHES = 4


def pipeline_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def pipeline(rank: int, group: dist.ProcessGroup, schedule_class: type, num_parts: int) -> Found:
    """Micro-batches of a schedule; every part's gradient, in 12 bits, scaled as the schedule would scale `grad`."""
    own = range(rank, num_parts, WORLD)
    parts = nn.ModuleList(Part(index) for index in own)
    gradients = compress_gradients(parts, bits=12)
    stages = [
        PipelineStage(part, index, num_parts, torch.device("cpu"), group=group)
        for index, part in zip(own, parts, strict=True)
    ]
    single = issubclass(schedule_class, PipelineScheduleSingle)
    schedule = schedule_class(stages[0] if single else stages, MICRO_BATCHES, loss_fn=pipeline_loss, scale_grads=False)
    x, target = torch.ones(8, 6) * torch.arange(8).unsqueeze(1) / 8, torch.zeros(8, 6)
    inputs = (x,) if rank == 0 else ()
    targets = {"target": target} if own[-1] == num_parts - 1 else {}
    schedule.step(*inputs, **targets)
    left = sum(not isinstance(parameter.grad, CodedGradient) for parameter in parts.parameters())
    gradients.scale_(1 / MICRO_BATCHES)
    norm = gradients.norm(over=[group])
    found = {own[int(name[0])]: g.dequantize() for name, g in gradients.gradients().items() if "weight" in name}
    return {"weights": found, "norm": norm, "left": left}


SCENARIOS: dict[str, tuple[Callable[..., Found], tuple[Any, ...]]] = {
    "replicas-8": (replicas, (8, False)),
    "replicas-12": (replicas, (12, False)),
    "overlap-8": (replicas, (8, True)),
    "overlap-12": (replicas, (12, True)),
    "several": (several_backwards, ()),
    "partly": (partly_used, ()),
    "nonfinite": (not_finite, ()),
    "steps": (steps, ()),
    "refusals": (refusals, ()),
    "shards-8": (shards, (8,)),
    "shards-12": (shards, (12,)),
    "sharded later": (sharded_later, ()),
    "tensor-parallel": (tensor_parallel, ()),
    "fsdp over tp": (two_dimensions, ((2, 1), True)),
    "shards in replicas": (two_dimensions, ((2, 1), False)),
    "replicas of shards": (two_dimensions, ((1, 2), False)),
    "stages": (stages, ()),
    "1f1b": (pipeline, (Schedule1F1B, 2)),
    "interleaved": (pipeline, (ScheduleInterleaved1F1B, 4)),
    "zero-bubble": (pipeline, (ScheduleInterleavedZeroBubble, 4)),
}


def work(rank: int, directory: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD))
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=WORLD)
    group = dist.group.WORLD
    found = {name: scenario(rank, group, *arguments) for name, (scenario, arguments) in SCENARIOS.items()}
    torch.save(found, f"{directory}/{rank}.pt")
    dist.barrier()
    leave(0)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Found]]:
    """By rank and scenario."""
    directory = tmp_path_factory.mktemp("ranks")
    run_ranks(work, (str(directory),), WORLD)
    return [torch.load(Path(directory) / f"{rank}.pt") for rank in range(WORLD)]


def average_gradients(backwards: list[list[Tensor]], model: nn.Module) -> dict[str, Tensor]:
    """Exact mean over ranks of the sum over each rank's losses."""
    model.zero_grad()
    for losses in backwards:
        torch.stack(losses).sum().div(len(backwards)).backward()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def two_rounds(model: nn.Module) -> list[list[Tensor]]:
    return [[loss(model, rank), loss(model, 10 + rank)] for rank in range(WORLD)]


def relative_error(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize(("bits", "bound"), [(8, 0.02), (12, 0.002)])
def test_replicas_get_the_average_in_the_same_bytes(found: list[dict[str, Found]], bits: int, bound: float) -> None:
    model = Net()
    expected = average_gradients(two_rounds(model), model)
    ranks = [found[rank][f"replicas-{bits}"] for rank in range(WORLD)]
    assert ranks[0]["gradients"].keys() == expected.keys()
    for name, parts in ranks[0]["gradients"].items():
        assert all(torch.equal(a, b) for a, b in zip(parts, ranks[1]["gradients"][name], strict=True)), name
        assert relative_error(parts[-1], expected[name]) < bound, name
    assert ranks[0]["norm"] == ranks[1]["norm"]
    norm = torch.cat([gradient.flatten() for gradient in expected.values()]).norm().item()
    assert ranks[0]["norm"].item() == pytest.approx(norm, rel=bound)


@pytest.mark.parametrize("bits", [8, 12])
def test_overlapped_reduction_gives_the_same_bytes(found: list[dict[str, Found]], bits: int) -> None:
    for rank in range(WORLD):
        plain, overlapped = found[rank][f"replicas-{bits}"], found[rank][f"overlap-{bits}"]
        for name, parts in plain["gradients"].items():
            assert all(torch.equal(a, b) for a, b in zip(parts, overlapped["gradients"][name], strict=True)), name
        # Only the bucket of `never` had to wait for reduce().
        launched, buckets = overlapped["launched"]
        assert launched == buckets - 1 > 0


def test_use_before_reduction_is_refused(found: list[dict[str, Found]]) -> None:
    for rank in range(WORLD):
        for text in found[rank]["replicas-8"]["early"]:
            assert text == "TrainingError: the gradients of this rank have not been reduced yet; call reduce() first"


def test_announced_backwards_are_counted_and_can_be_added_up(found: list[dict[str, Found]]) -> None:
    for rank in range(WORLD):
        several, plain = found[rank]["several"], found[rank]["replicas-8"]
        assert several["before"] == 0
        for name, parts in plain["gradients"].items():
            assert torch.equal(2 * parts[-1], several["gradients"][name][-1])


def test_parameter_used_on_one_rank_counts_as_zero_on_the_other(found: list[dict[str, Found]]) -> None:
    model = Net()
    expected = average_gradients([[loss(model, 0, with_extra=False)], [loss(model, 1)]], model)
    for rank in range(WORLD):
        result = found[rank]["partly"]
        assert result["without"] == ["never.weight", "never.bias"]
        for name, exact in expected.items():
            assert relative_error(result["gradients"][name][-1], exact) < 0.002, name


def test_all_ranks_skip_a_step_that_one_rank_spoils(found: list[dict[str, Found]]) -> None:
    for rank in range(WORLD):
        nonfinite, norm = found[rank]["nonfinite"]["first"]
        assert nonfinite
        assert not norm.isfinite()
        assert not found[rank]["nonfinite"]["then"]


def test_replicas_start_and_stay_alike(found: list[dict[str, Found]]) -> None:
    first, second = (found[rank]["steps"] for rank in range(WORLD))
    expected = Net(seed=0).state_dict()
    for name, tensor in expected.items():
        assert torch.equal(first["start"][name], tensor)
        assert torch.equal(second["start"][name], tensor)
    for name, tensor in first["end"].items():
        assert torch.equal(tensor, second["end"][name])
        assert name.startswith("never") or not torch.equal(tensor, expected[name])


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("bits", "ConfigError: bits is 12 on rank 0 and 8 on rank 1, but all ranks of a group must agree"),
        ("kind", "average is 'true' on rank 0 and '1' on rank 1, but all ranks of a group must agree"),
        ("shape", "trainable parameter 0 is 'weight [4, 3] float32' on rank 0 and 'weight [5, 3] float32' on rank 1"),
        ("dtype", "'weight [3, 3] bfloat16' on rank 0 and 'weight [3, 3] float32' on rank 1"),
        ("number", "the number of trainable parameters is 2 on rank 0 and 10 on rank 1"),
        ("ddp", "ModelError: the model is a DistributedDataParallel, whose buckets keep every gradient"),
        ("fsdp with a group", "the model is sharded by FSDP2, which reduces gradients itself; pass group=None"),
        ("sharded too late", "the model is sharded by FSDP2, which reduces gradients itself; pass group=None"),
        ("reduced already", "gradients are being reduced; call reduce(), on every rank, before this"),
    ],
)
def test_refusal_is_the_same_on_every_rank(found: list[dict[str, Found]], case: str, message: str) -> None:
    texts = {found[rank]["refusals"][case] for rank in range(WORLD)}
    assert len(texts) == 1
    assert message in texts.pop()


@pytest.mark.parametrize(("bits", "bound"), [(8, 0.02), (12, 0.002)])
def test_shards_are_stored_and_normed_over_the_mesh(found: list[dict[str, Found]], bits: int, bound: float) -> None:
    model = Net()
    expected = average_gradients(two_rounds(model), model)
    norm = torch.cat([gradient.flatten() for gradient in expected.values()]).norm().item()
    for rank in range(WORLD):
        result = found[rank][f"shards-{bits}"]
        assert result["shapes"]["first.weight"] == ((6, 13), (5, 13))[rank]
        assert result["shapes"]["last.weight"] == ((1, 11), (0, 11))[rank]
        assert result["norm"].item() == pytest.approx(norm, rel=bound)
        assert result["clipped"].item() == pytest.approx(result["norm"].item() / 2, rel=1e-5)
        for name, exact in expected.items():
            assert relative_error(result["full"][name], exact) < bound, name
        assert result["nonfinite"]
    assert found[0][f"shards-{bits}"]["norm"] == found[1][f"shards-{bits}"]["norm"]


def test_shards_in_codes_are_tensors_to_torch(found: list[dict[str, Found]]) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        pairs = [[loss(model, 100 * step + r), loss(model, 100 * step + 10 + r)] for r in range(WORLD)]
        torch.stack([torch.stack(pair).sum() for pair in pairs]).mean().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for rank in range(WORLD):
            own, total, clipped = found[rank]["sharded later"]["norms"][step]
            assert own == pytest.approx(norm.item(), rel=0.005)
            assert total == pytest.approx(own, rel=1e-5)
            assert clipped == pytest.approx(min(own, 0.1), rel=1e-4)
        optimizer.step()
        optimizer.zero_grad()
    for rank in range(WORLD):
        assert found[rank]["sharded later"]["kinds"] == [True, True, True]
        for name, parameter in model.named_parameters():
            if "never" not in name:
                torch.testing.assert_close(
                    found[rank]["sharded later"]["end"][name], parameter.detach(), rtol=0, atol=2e-3
                )


@pytest.mark.parametrize("mesh", ["tensor-parallel", "fsdp over tp", "shards in replicas", "replicas of shards"])
def test_norm_over_a_mesh_is_that_of_the_whole_model(found: list[dict[str, Found]], mesh: str) -> None:
    model = TwoLayers()
    model(torch.ones(2, 6)).square().sum().backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm().item()
    for rank in range(WORLD):
        assert found[rank][mesh]["norm"].item() == pytest.approx(norm, rel=1e-3)
    assert found[0]["tensor-parallel"]["shape"] == (4, 6)


def test_norm_over_stages_is_that_of_all(found: list[dict[str, Found]]) -> None:
    for rank in range(WORLD):
        assert found[rank]["stages"]["norm"].item() == pytest.approx((4 * 9 + 4 * 16) ** 0.5, rel=1e-3)


@pytest.mark.parametrize(("schedule", "num_parts"), [("1f1b", 2), ("interleaved", 4), ("zero-bubble", 4)])
def test_micro_batches_of_a_pipeline_are_folded(found: list[dict[str, Found]], schedule: str, num_parts: int) -> None:
    model = nn.Sequential(*[Part(index) for index in range(num_parts)])
    x = torch.ones(8, 6) * torch.arange(8).unsqueeze(1) / 8
    pipeline_loss(model(x), torch.zeros(8, 6)).backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm().item()
    for rank in range(WORLD):
        result = found[rank][schedule]
        assert sorted(result["weights"]) == list(range(rank, num_parts, WORLD))
        for index, gradient in result["weights"].items():
            assert relative_error(gradient, model[index].linear.weight.grad) < 0.002
        assert result["norm"].item() == pytest.approx(norm, rel=0.002)
        # Zero-bubble schedules leave weight gradients in `grad`, where the store finds them.
        assert (result["left"] == 0) == (schedule != "zero-bubble")
