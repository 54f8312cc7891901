"""What programs do with a process group, done over any backend: each function returns what it computed.

Tensors are bfloat16 or float32 and long enough to be coded, ranks are 2 or more, and all that is returned is the same,
bit for bit, over gloo and over laconic where two ranks add.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.patience import patient

NUMEL = 6000


# torch 2.13 renamed these; the old names warn there.
def _named(module: Any, new: str, old: str) -> Callable[..., Any]:
    return getattr(module, new, None) or getattr(module, old)


all_gather_single = _named(dist, "all_gather_single", "all_gather_into_tensor")
reduce_scatter_single = _named(dist, "reduce_scatter_single", "reduce_scatter_tensor")
functional_all_gather = _named(functional, "all_gather_single", "all_gather_tensor")
functional_reduce_scatter = _named(functional, "reduce_scatter_single", "reduce_scatter_tensor")
functional_all_gather_coalesced = _named(functional, "all_gather_single_coalesced", "all_gather_into_tensor_coalesced")
functional_reduce_scatter_coalesced = _named(
    functional, "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"
)


def join(
    backend: str, rank: int, world: int, folder: str, name: str, timeout_seconds: float = 60, **options: Any
) -> None:
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/{name}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_seconds if timeout_seconds < 60 else patient(timeout_seconds)),
        **options,
    )


def assert_same(a: Any, b: Any, where: str) -> None:
    """Equal to the last bit."""
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype, where
        assert torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8)), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where} {key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for number, pair in enumerate(zip(a, b, strict=True)):
            assert_same(*pair, f"{where} {number}")
    else:
        assert a == b, where


def values(dtype: torch.dtype = torch.bfloat16, numel: int = NUMEL, seed: int = 0) -> Tensor:
    """Normal values, others on each rank."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randn(numel, generator=generator).to(dtype)


def collectives(group: dist.ProcessGroup | None = None) -> dict[str, Tensor]:
    """Every collective of torch.distributed, one after the other."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    found: dict[str, Tensor] = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int32):
        x = (values(torch.float32) * 50).to(dtype)
        rows = (values(torch.float32, world * NUMEL, seed=1) * 50).to(dtype)

        def keep(name: str, tensor: Tensor, dtype: torch.dtype = dtype) -> None:
            found[f"{name} {dtype}"] = tensor.clone()

        for op in ("SUM", "MAX") + (("AVG",) if dtype.is_floating_point else ()):
            y = x.clone()
            dist.all_reduce(y, getattr(dist.ReduceOp, op), group=group)
            keep(f"all_reduce {op}", y)
            y = torch.empty_like(x)
            reduce_scatter_single(y, rows, getattr(dist.ReduceOp, op), group=group)
            keep(f"reduce_scatter_single {op}", y)
        y = torch.empty_like(x)
        dist.reduce_scatter(y, list(rows.clone().chunk(world)), group=group)
        keep("reduce_scatter", y)
        y = torch.empty_like(rows)
        all_gather_single(y, x, group=group)
        keep("all_gather_single", y)
        each = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(each, x, group=group)
        keep("all_gather", torch.cat(each))
        y = torch.empty_like(rows)
        dist.all_to_all_single(y, rows, group=group)
        keep("all_to_all_single", y)
        # Rank r sends r + 1 shares to each rank, so it gets one from rank 0, two from rank 1, ...
        share = NUMEL // world
        sent, shares = x.repeat(world)[: world * (rank + 1) * share], [(r + 1) * share for r in range(world)]
        y = x.new_empty(sum(shares))
        dist.all_to_all_single(y, sent, shares, [(rank + 1) * share] * world, group=group)
        keep("all_to_all_single uneven", y)
        for src in range(world):
            y = x.clone()
            dist.broadcast(y, group_src=src, group=group)
            keep(f"broadcast {src}", y)
        y = x.clone()
        dist.reduce(y, group_dst=0, group=group)
        if rank == 0:
            keep("reduce", y)
        each = [torch.empty_like(x) for _ in range(world)]
        dist.gather(x, each if rank == 1 else None, group_dst=1, group=group)
        keep("gather", torch.cat(each) if rank == 1 else x)
        y = torch.empty_like(x)
        dist.scatter(y, list(rows.chunk(world)) if rank == 1 else None, group_src=1, group=group)
        keep("scatter", y)
    return found


def points(group: dist.ProcessGroup | None = None) -> dict[str, Tensor]:
    """Sends and receives: blocking, in both directions at once, several at a time, from anyone."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    after, before = (rank + 1) % world, (rank - 1) % world
    found: dict[str, Tensor] = {}
    x = values()
    for dtype in (torch.bfloat16, torch.float32, torch.int64):
        y = torch.empty_like(x, dtype=dtype)
        if rank == 0:
            dist.send(x.to(dtype), group_dst=1, group=group)
        elif rank == 1:
            dist.recv(y, group_src=0, group=group)
            found[f"recv {dtype}"] = y
    # Both ends send first: blocking sends would wait for each other.
    y = torch.empty_like(x)
    works = [dist.isend(x, group_dst=after, group=group), dist.irecv(y, group_src=before, group=group)]
    for work in works:
        work.wait()
    found["ring"] = y
    outs = [torch.empty_like(x, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
    sends = [dist.P2POp(dist.isend, x.to(out.dtype), group=group, group_peer=after) for out in outs]
    receives = [dist.P2POp(dist.irecv, out, group=group, group_peer=before) for out in outs]
    for work in dist.batch_isend_irecv([*sends, *receives]):
        work.wait()
    found |= {f"batch {number}": out for number, out in enumerate(outs)}
    if rank == 0:
        y = torch.empty_like(x)
        assert dist.recv(y, group=group) == dist.get_global_rank(group or dist.group.WORLD, 1)
        found["from anyone"] = y
    elif rank == 1:
        dist.send(x, group_dst=0, group=group)
    return found


def at_once(group: dist.ProcessGroup | None = None) -> dict[str, Tensor]:
    """Many collectives under way, of all sizes, with sends between them, and waited for in another order."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    tensors = [values(seed=seed, numel=NUMEL if seed % 2 else 3) for seed in range(8)]
    gathered = [tensor.new_empty(world * tensor.numel()) for tensor in tensors]
    received = torch.empty(NUMEL)
    works = []
    for number, (x, y) in enumerate(zip(tensors, gathered, strict=True)):
        works.append(all_gather_single(y, x.clone(), group=group, async_op=True))
        works.append(dist.all_reduce(x, group=group, async_op=True))
        if number == 3:
            works.append(dist.isend(values(torch.float32), group_dst=(rank + 1) % world, group=group))
            works.append(dist.irecv(received, group_src=(rank - 1) % world, group=group))
    dist.barrier(group=group)
    for work in reversed(works):
        work.wait()
    assert all(work.is_completed() for work in works)
    return {"received": received} | {
        str(n): torch.cat(pair) for n, pair in enumerate(zip(tensors, gathered, strict=True))
    }


def objects(group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Python objects, and what holds several tensors together."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, {"rank": rank, "text": "x" * 50_000}, group=group)
    told = [("from", rank)]
    dist.broadcast_object_list(told, src=0)
    with dist.distributed_c10d._coalescing_manager(group):
        a, b = values(seed=1), values(seed=2)
        dist.all_reduce(a, group=group)
        dist.all_reduce(b, group=group)
    outs = [torch.empty(world * NUMEL, dtype=torch.bfloat16) for _ in range(2)]
    with dist.distributed_c10d._coalescing_manager(group):
        for out, x in zip(outs, (a, b), strict=True):
            all_gather_single(out, x, group=group)
    return {"everyone": everyone, "told": told, "reduced": [a, b], "gathered": outs}


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """About 24,000 parameters, the same on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 100), nn.ReLU(), nn.Linear(100, 32)).to(dtype)


def losses(wrapped: nn.Module, steps: int = 4) -> list[float]:
    """Training on random numbers, other ones on each rank."""
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    found = []
    for step in range(steps):
        x = values(torch.float32, 16 * 64, seed=step).view(16, 64)
        loss = wrapped(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def ddp_losses() -> list[float]:
    return losses(DistributedDataParallel(model(), bucket_cap_mb=0.05))


def joined_losses() -> list[float]:
    """Ranks with different numbers of steps; gradients divide by how many are left, or by all."""
    found = []
    for static in (False, True):
        wrapped = DistributedDataParallel(model())
        with wrapped.join(divide_by_initial_world_size=static):
            found += losses(wrapped, steps=2 + dist.get_rank())
    return found


def fsdp_model(policy: MixedPrecisionPolicy | None = None) -> nn.Module:
    """A unit per linear layer."""
    wrapped = model()
    for module in (*(m for m in wrapped if isinstance(m, nn.Linear)), wrapped):
        fully_shard(module, mp_policy=policy or MixedPrecisionPolicy())
    return wrapped


def fsdp_losses() -> list[float]:
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    return [loss for policy in (None, mixed, half) for loss in losses(fsdp_model(policy))]


def functional_collectives(group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Those of torch.distributed._functional_collectives, which C++ calls."""
    group, x = group or dist.group.WORLD, values()
    world = dist.get_world_size(group)
    return [
        functional.wait_tensor(y)
        for y in (
            functional.all_reduce(x, "sum", group),
            functional.all_reduce(x, "avg", group),
            functional_all_gather(x, 0, group),
            functional_reduce_scatter(x, "sum", 0, group),
            functional.all_to_all_single(x, None, None, group),
            functional.broadcast(x, 0, group),
            *functional.all_reduce_coalesced([x, x + 1], "sum", group),
            *functional_all_gather_coalesced([x, x + 1], group),
            *functional_reduce_scatter_coalesced([x, x + 1], "sum", [0, 0], group),
            functional.all_reduce(x.repeat(world).int(), "sum", group),
        )
    ]


def compiled(backend: str, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Collectives inside of a compiled graph, forward and backward."""
    group = group or dist.group.WORLD
    world = dist.get_world_size(group)

    def program(x: Tensor) -> Tensor:
        total = functional.all_reduce(x * 2, "sum", group)
        rows = functional_all_gather(total[: NUMEL // world] + 1, 0, group)
        mine = functional_reduce_scatter(rows[: NUMEL // world * world], "sum", 0, group)
        return functional.wait_tensor(mine).relu()

    torch._dynamo.reset()
    found = torch.compile(program, backend=backend, fullgraph=True)
    return [found(values(dtype)) for dtype in (torch.bfloat16, torch.float32)]


def compiled_around() -> dict[str, list[Tensor]]:
    """Collectives in compiled functions that Dynamo leaves to Python, of large and of small tensors; DDP with buffers.

    The Python methods that C++ calls then are looked at by Dynamo, too.
    """
    rank = dist.get_rank()

    def started(x: Tensor) -> Tensor:
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        work.wait()
        return x

    def replaced(x: Tensor) -> Tensor:
        dist.broadcast(x, 1)
        return x * 2

    def coalesced(x: Tensor) -> Tensor:
        dist._broadcast_coalesced(dist.group.WORLD, [x], 1 << 20, 0)
        return x

    def sent(x: Tensor) -> Tensor:
        if rank == 1:
            dist.send(x, 0)
        elif rank == 0:
            dist.recv(x, 1)
        return x

    def reduced(x: Tensor) -> Tensor:
        dist.reduce(x, 0)
        return x if rank == 0 else torch.zeros_like(x)

    found = {}
    for function in (started, replaced, coalesced, sent, reduced):
        torch._dynamo.reset()
        call = torch.compile(function, backend="eager")
        found[function.__name__] = [call(values(torch.float32, numel)) for numel in (NUMEL, 16) for _ in range(2)]
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 300), nn.BatchNorm1d(300))
    wrapped = torch.compile(DistributedDataParallel(model), backend="eager")
    for step in range(3):
        wrapped(values(torch.float32, 256, seed=step).view(4, 64)).square().mean().backward()
    found["ddp"] = [p.grad for p in model.parameters() if p.grad is not None] + [*model.buffers()]
    return found


def meshes() -> dict[str, Any]:
    """Groups of a mesh, subgroups with one rank, redistribution."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("outer", "inner"))
    sums = {}
    for name in ("outer", "inner"):
        x = values()
        dist.all_reduce(x, group=mesh[name].get_group())
        sums[name] = x
    alone = dist.new_group([0])
    if dist.get_rank() == 0:
        x = values()
        dist.all_reduce(x, group=alone)
        sums["alone"] = x
    whole = torch.distributed.tensor.distribute_tensor(
        values(torch.float32).view(60, 100), init_device_mesh("cpu", (world,)), [torch.distributed.tensor.Shard(0)]
    )
    return {"sums": sums, "whole": whole.full_tensor(), "sum": (whole * 2).sum().full_tensor()}


def save(folder: Path) -> None:
    """A sharded checkpoint of what FSDP2 trained."""
    wrapped = fsdp_model()
    losses(wrapped)
    dcp.save({"model": wrapped.state_dict()}, checkpoint_id=folder)


def load(folder: Path) -> list[Tensor]:
    """What `save` left, in whole tensors."""
    wrapped = fsdp_model()
    state = {"model": wrapped.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    wrapped.load_state_dict(state["model"])
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in wrapped.parameters()]


EVERYTHING: tuple[Callable[[], Any], ...] = (
    collectives,
    points,
    at_once,
    objects,
    functional_collectives,
    meshes,
    ddp_losses,
    joined_losses,
    fsdp_losses,
)
