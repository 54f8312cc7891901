"""Collectives in inference mode, under autocast and the like: what a thread's settings are in a call, they are in all
that other threads do for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic import collectives
from laconic.collectives import Blockwise, Codec, Lossless, ProcessGroupOptions, Raw
from laconic.collectives.runtime.thread_state import as_here, thread_state
from laconic.formats import BlockFormat
from laconic.gradients.reduce import all_reduce_q8, reduce_scatter_q8
from laconic.train.launch.worker import leave
from tests.distributed.processes import run_ranks
from tests.patience import patient

NUMEL = 20_000
LOSSY = Blockwise(BlockFormat("int8", 64))


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def autocast_in_inference() -> Iterator[None]:
    with torch.inference_mode(), torch.autocast("cpu", torch.float16):
        yield


MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "enable_grad": torch.enable_grad,
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast off": lambda: torch.autocast("cpu", enabled=False),
    "autocast in inference mode": autocast_in_inference,
    "deterministic": deterministic,
}

# What has been written in one mode is read and written again in another.
ORDERS = [("inference_mode", "enable_grad", "inference_mode", "no_grad"), tuple(MODES)]


def of_rank(rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank))


def join(rank: int, world: int, folder: str, backend: str = "gloo", codec: Codec | str = "auto") -> None:
    torch.set_num_threads(1)
    options = {"pg_options": ProcessGroupOptions(codec=codec, min_nbytes=0)} if backend == "laconic" else {}
    store = dist.FileStore(f"{folder}/{backend}-{codec}", world)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=patient(60)), **options
    )


Call = tuple[Callable[[torch.Tensor, torch.Tensor], Any], torch.Tensor, torch.Tensor, torch.Tensor | None]
"""What is called with an output and an input, and its result; None where a rank gets nothing."""


def calls_of_laconic(rank: int, codec: Codec | str, async_op: bool) -> dict[str, Call]:
    both, mine = torch.stack((of_rank(0, 2, NUMEL), of_rank(1, 2, NUMEL))), of_rank(rank, 2, NUMEL)
    total = (torch.zeros(()) + both[0]) + both[1]
    how: dict[str, Any] = {"codec": codec, "async_op": async_op}
    whole, rows = torch.empty(2, 2, NUMEL), torch.empty(2, NUMEL)
    found: dict[str, Call] = {
        "all_gather": (lambda out, x: collectives.all_gather(out, x, **how), whole, mine, both),
        "reduce_scatter": (lambda out, x: collectives.reduce_scatter(out, x, **how), rows[0], mine, total[rank]),
        "all_to_all": (lambda out, x: collectives.all_to_all(out, x, **how), rows, mine, both[:, rank]),
        "uneven all_to_all": (
            lambda out, x: collectives.all_to_all(out.view(-1), x.view(-1), [NUMEL] * 2, [NUMEL] * 2, **how),
            *(rows, mine, both[:, rank]),
        ),
        "all_reduce": (lambda out, x: collectives.all_reduce(out.copy_(x), **how), rows, mine, total),
        "broadcast": (lambda out, x: collectives.broadcast(out.copy_(x), 1, **how), rows, mine, both[1]),
        "gather": (
            lambda out, x: collectives.gather(out if rank == 0 else None, x, 0, **how),
            *(whole, mine, both if rank == 0 else None),
        ),
        "scatter": (
            lambda out, x: collectives.scatter(out, x if rank == 0 else None, 0, **how),
            *(rows[0], mine, both[0, rank]),
        ),
        "send, recv": (
            lambda out, x: (
                collectives.send(x, 1, **how) if rank == 0 else collectives.recv(out, 0, **how)  # in one order
            ),
            *(rows, mine, both[0] if rank else None),
        ),
    }
    return found


def calls_of_torch(rank: int, async_op: bool) -> dict[str, Call]:
    both, mine = torch.stack((of_rank(0, 2, NUMEL), of_rank(1, 2, NUMEL))), of_rank(rank, 2, NUMEL)
    whole, rows, total = torch.empty(2, 2, NUMEL), torch.empty(2, NUMEL), both.sum(0)
    how = {"async_op": async_op}
    return {
        "all_gather list": (lambda out, x: dist.all_gather(list(out), x, **how), whole, mine, both),
        "all_gather strided": (
            lambda out, x: dist.all_gather([out[0].T, out[1].T], x.T, **how),
            *(whole, mine, both),
        ),
        "all_reduce": (lambda out, x: dist.all_reduce(out.copy_(x), **how), rows, mine, total),
        "all_reduce strided": (lambda out, x: dist.all_reduce(out.copy_(x).T, **how), rows, mine, total),
        "reduce_scatter list": (lambda out, x: dist.reduce_scatter(out, list(x), **how), rows[0], mine, total[rank]),
        "all_to_all": (lambda out, x: dist.all_to_all_single(out, x, **how), rows, mine, both[:, rank]),
        "broadcast": (lambda out, x: dist.broadcast(out.copy_(x), 1, **how), rows, mine, both[1]),
        "isend, irecv": (
            lambda out, x: dist.isend(x, 1) if rank == 0 else dist.irecv(out, 0),
            *(rows, mine, both[0] if rank else None),
        ),
    }


def in_every_order(calls: dict[str, Call], is_coded: bool) -> None:
    """Each call in each order of modes, with tensors that were made in another mode, and in the same."""
    for name, (call, out, x, expected) in calls.items():
        for order in ORDERS:
            kept: list[torch.Tensor] = []
            for mode in order:
                with MODES[mode]():
                    kept.append(out.clone())
                    for written in kept[-3:]:
                        # torch itself refuses, outside of it, what the test does to tensors of inference mode.
                        with torch.inference_mode() if written.is_inference() else torch.no_grad():
                            written.zero_()
                        given = x.clone()
                        # The test itself may not write to it, and gloo refuses it where it receives.
                        is_refused = "copy_" in call.__code__.co_names or not is_coded
                        if is_refused and written.is_inference() and not torch.is_inference_mode_enabled():
                            continue
                        before = thread_state()
                        work = call(written, given)
                        if work is not None:
                            work.wait()
                        assert thread_state() == before
                        if expected is not None:
                            same = torch.equal if is_coded else torch.allclose
                            assert same(written.view(-1), expected.reshape(-1)), (name, order, mode)
            ours = [x for x in kept if not x.is_inference()]
            for each in ours:  # autograd can use it
                (each.clone().requires_grad_() * each).sum().backward()


def every_collective(rank: int, world: int, folder: str) -> None:
    join(rank, world, folder)
    codecs: list[Codec | str] = ["auto", Raw(), Lossless()]
    for codec, async_op in itertools.product(codecs, (False, True)):
        in_every_order(calls_of_laconic(rank, codec, async_op), codec != "auto")
    dist.barrier()
    leave(0)


def every_collective_of_a_group(rank: int, world: int, folder: str) -> None:
    for codec in (Lossless(), "auto"):
        join(rank, world, folder, "laconic", codec)
        for async_op in (False, True):
            in_every_order(calls_of_torch(rank, async_op), is_coded=False)
        dist.barrier()
        dist.destroy_process_group()
    leave(0)


def reductions_in_8_bits(rank: int, world: int, folder: str) -> None:
    join(rank, world, folder)
    mine, total = of_rank(rank, 2, NUMEL), of_rank(0, 2, NUMEL) + of_rank(1, 2, NUMEL)
    bound = mine.abs().max().item() * 4 / 127
    for order in ORDERS:
        for mode in order:
            for async_op in (False, True):
                with MODES[mode]():
                    x, error = mine.clone(), torch.zeros(mine.numel())
                    found: Any = all_reduce_q8(x, op="sum", async_op=async_op, min_nbytes=0, error=error)
                    part: Any = reduce_scatter_q8(mine, op="sum", async_op=async_op, min_nbytes=0)
                    found, part = (each.wait() if async_op else each for each in (found, part))
                    assert (found - total).abs().max() < bound
                    assert (part - total[rank]).abs().max() < bound
                    lossy = torch.empty(2, *mine.shape)
                    collectives.all_gather(
                        lossy, mine, codec=Blockwise(BlockFormat("int8", 64)), async_op=async_op
                    ).wait()
                    assert (lossy[rank] - mine).abs().max() < bound
    dist.barrier()
    leave(0)


def a_refusal_of_torch_is_no_fault_of_a_rank(rank: int, world: int, folder: str) -> None:
    join(rank, world, folder)
    with torch.inference_mode():
        made = torch.empty(2, 100)
    for async_op in (False, True):
        with pytest.raises(RuntimeError, match=r"^Inplace update to inference tensor") as caught:
            collectives.all_gather(made, torch.ones(100), async_op=async_op).wait()
        assert not isinstance(caught.value, laconic.errors.LaconicError)
        dist.all_reduce(torch.ones(1))  # the group is alive
    leave(0)


def callbacks_see_the_callers(rank: int, world: int, folder: str) -> None:
    join(rank, world, folder)
    for codec in ("auto", Lossless()):
        for mode in MODES.values():
            with mode():
                x = torch.zeros(NUMEL)
                work = collectives.all_reduce(x, codec=codec, async_op=True)
                here, seen = thread_state(), work.get_future().then(lambda _: thread_state()).wait()
                assert seen == here
                mapped = work.map(lambda _: thread_state()).wait()
                assert mapped == here._replace(grad=False)
    dist.barrier()
    leave(0)


@pytest.mark.parametrize(
    "work",
    [
        pytest.param(every_collective, marks=pytest.mark.slow),
        pytest.param(every_collective_of_a_group, marks=pytest.mark.ci),
        reductions_in_8_bits,
        a_refusal_of_torch_is_no_fault_of_a_rank,
        callbacks_see_the_callers,
    ],
)
def test_a_call_takes_the_settings_of_its_thread_along(tmp_path: Path, work: Callable[..., object]) -> None:
    run_ranks(work, (2, str(tmp_path)), 2)


# --- models: training and validation in any order ---


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(150, 150) for _ in range(3)), nn.BatchNorm1d(150))
    if kind == "DDP":
        return DistributedDataParallel(model, bucket_cap_mb=0.05)
    for layer in model[:3]:
        fully_shard(layer)
    return fully_shard(model)


def numbers(kind: str, order: str, codec: Codec | str | None) -> list[str]:
    """What a model computes while it is trained and validated in some order; a failure is one of them."""
    model = model_of(kind)
    if codec is not None:
        laconic.zip_collectives(model, codec=codec)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    for step, do in enumerate(order):
        x = of_rank(10 * step + dist.get_rank(), 4, 150)
        model.train(do == "t")
        try:
            if do == "t":
                with torch.autocast("cpu", torch.bfloat16, enabled=step % 2 == 1):
                    loss = model(x).square().sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                with torch.inference_mode() if do == "i" else torch.no_grad():
                    loss = model(x).square().sum()
                    dist.all_reduce(loss)
        except RuntimeError as error:  # FSDP2 itself cannot be trained once its first forward was in inference mode
            return [*found, str(error)]
        found.append(loss.item().hex())
    return found


def models(rank: int, world: int, folder: str) -> None:
    join(rank, world, folder)
    for kind, order in itertools.product(("FSDP2", "DDP"), ("ii", "itt", "tit", "titi", "tint", "nit")):
        expected = numbers(kind, order, None)
        assert kind == "FSDP2" or len(expected) == len(order)
        for codec in ("auto", Lossless(), Raw()):
            assert numbers(kind, order, codec) == expected, (kind, order, codec)
    dist.barrier()
    leave(0)


@pytest.mark.ci
def test_training_and_validation_in_any_order(tmp_path: Path) -> None:
    run_ranks(models, (2, str(tmp_path)), 2)


# --- settings ---


@pytest.mark.parametrize("inner", MODES)
def test_what_is_called_later_has_the_settings_of_then(inner: str) -> None:
    before = thread_state()
    with MODES[inner]():
        expected, later = thread_state(), as_here(thread_state, grad=None)
        off = as_here(thread_state)
    for outer in MODES:
        with MODES[outer]():
            around = thread_state()
            assert later() == expected, outer
            assert off() == expected._replace(grad=False), outer
            assert thread_state() == around, outer
        assert thread_state() == before, outer


def test_what_raises_leaves_the_settings_as_they_were() -> None:
    with autocast_in_inference():
        later = as_here(lambda: 1 / 0)
    before = thread_state()
    with pytest.raises(ZeroDivisionError):
        later()
    assert thread_state() == before
