"""All reductions of all dtypes over a laconic group: gloo's results and errors, and averages of integers, too."""

from __future__ import annotations

import itertools
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collectives import Lossless, ProcessGroupOptions
from laconic.collectives.runtime import torch_compat
from laconic.errors import CollectiveError, ConfigError, LaconicError
from laconic.train.launch.worker import leave
from tests.distributed.processes import run_ranks
from tests.grid import covering
from tests.patience import patient

WORLD = 3

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int8, torch.uint8)
OTHERS = (torch.int16, torch.bool, torch.complex64, torch.float8_e4m3fn)

Op = Any


def of_rank(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    drawn = torch.randint(-9, 10, (numel,), generator=torch.Generator().manual_seed(rank))
    return (drawn.abs() if dtype is torch.uint8 else drawn).to(dtype)


def outcome(call: Callable[[], Any]) -> list[Tensor] | str:
    """The tensors that a call returns, or its error."""
    try:
        return torch.utils._pytree.tree_leaves(call())
    except LaconicError as error:
        raise AssertionError("an error of an argument was told as another") from error
    except (RuntimeError, ValueError) as error:
        return str(error).partition("\n")[0].rpartition("RuntimeError: ")[2]


def reductions(rank: int, numel: int, dtype: torch.dtype, op: Op, async_op: bool) -> dict[str, Callable[[], Any]]:
    mine = of_rank(rank, numel, dtype)
    rows = [of_rank(10 * rank + row, numel, dtype) for row in range(WORLD)]

    def done(work: dist.Work | None, result: Any) -> Any:
        if work is not None:
            work.wait()
        return result

    def all_reduce() -> Any:
        x = mine.clone()
        return done(dist.all_reduce(x, op, async_op=async_op), x)

    def strided() -> Any:
        x = torch.stack((mine, mine), 1)[:, 1]
        return done(dist.all_reduce(x, op, async_op=async_op), x)

    def future() -> Any:
        x = mine.clone()
        work = dist.all_reduce(x, op, async_op=True)
        assert work is not None
        return work.get_future().then(lambda done: done.value()[0].clone()).wait()

    def coalesced() -> Any:
        xs = [row.clone() for row in rows]
        return done(dist.all_reduce_coalesced(xs, op, async_op=async_op), xs)

    def reduce() -> Any:
        x = mine.clone()
        return done(dist.reduce(x, 1, op, async_op=async_op), x if rank == 1 else [])

    def reduce_scatter() -> Any:
        out = torch.zeros_like(mine)
        return done(torch_compat._reduce_scatter(out, torch.cat(rows), op, async_op=async_op), out)

    def reduce_scatter_list() -> Any:
        out = torch.zeros_like(mine)
        return done(dist.reduce_scatter(out, rows, op, async_op=async_op), out)

    def reduce_scatter_coalesced() -> Any:
        outs = [torch.zeros_like(mine), torch.zeros_like(mine[:2])]
        with dist._coalescing_manager(group=dist.group.WORLD, async_ops=async_op) as manager:
            for out in outs:
                torch_compat._reduce_scatter(out, torch.cat([row[: len(out)] for row in rows]), op, async_op=async_op)
        return done(manager if async_op else None, outs)

    listed = (all_reduce, strided, future, coalesced, reduce, reduce_scatter, reduce_scatter_list)
    listed += (reduce_scatter_coalesced,)
    return {each.__name__: each for each in listed}


def cases(every: bool) -> Iterator[tuple[int, torch.dtype, str, bool]]:
    """All of them, or some in which every two values meet; beside each average the sum that it is compared with."""
    axes = ((5, 3000), (*FLOATS, *INTEGERS, *OTHERS), ("SUM", "AVG", "MAX", "PRODUCT", "BAND"), (False, True))
    rows = covering([len(axis) for axis in axes], 2)
    rows |= {(size, dtype, 0, how) for size, dtype, op, how in rows if op == 1}
    found = itertools.product(*(range(len(axis)) for axis in axes))
    return (tuple(axis[i] for axis, i in zip(axes, row, strict=True)) for row in found if every or row in rows)  # type: ignore[misc]


def outcomes(rank: int, numel: int, dtype: torch.dtype, op: str, async_op: bool) -> dict[str, list[Tensor] | str]:
    calls = reductions(rank, numel, dtype, getattr(dist.ReduceOp, op), async_op)
    return {name: outcome(call) for name, call in calls.items()}


def cut_off(found: dict[str, list[Tensor] | str]) -> dict[str, list[Tensor] | str]:
    return {
        name: sums if isinstance(sums, str) else [x.div(WORLD, rounding_mode="trunc") for x in sums]
        for name, sums in found.items()
    }


def compare(rank: int, folder: str, every: bool) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=patient(60))
    coded = ProcessGroupOptions(codec=Lossless(), min_nbytes=0)
    groups = {"gloo": None, "laconic": ProcessGroupOptions(), "coded": coded}
    found: dict[str, list[dict[str, list[Tensor] | str]]] = {}
    for name, options in groups.items():
        store = dist.FileStore(f"{folder}/{name}", WORLD)
        backend = "gloo" if options is None else "laconic"
        how = {} if options is None else {"pg_options": options}
        dist.init_process_group(backend, store=store, rank=rank, world_size=WORLD, timeout=timeout, **how)
        # Twice, since calls that are left raw take a shorter path from the second on.
        for _ in range(1 if options is None else 2):
            found[name] = [outcomes(rank, *case) for case in cases(every)]
        dist.destroy_process_group()
    exact = dict(zip(cases(every), found.pop("gloo"), strict=True))
    for name, ours in found.items():
        for (numel, dtype, op, async_op), have in zip(cases(every), ours, strict=True):
            expected = exact[numel, dtype, op, async_op]
            if op == "AVG" and dtype in INTEGERS:
                assert all(isinstance(each, str) for each in expected.values()), "gloo has learnt it"
                expected = cut_off(exact[numel, dtype, "SUM", async_op])
            expected = {**expected, "strided": expected["all_reduce"]}  # gloo takes it for dense
            for call, wanted in expected.items():
                where = (name, call, numel, dtype, op, async_op)
                if isinstance(wanted, str) or isinstance(have[call], str):
                    assert have[call] == wanted, (where, have[call], wanted)
                    continue
                close = 2e-2 if dtype in (torch.bfloat16, torch.float16) else 1e-5  # sums in another order
                for a, b in zip(have[call], wanted, strict=True):
                    torch.testing.assert_close(a, b, rtol=close, atol=close, msg=str(where))
    leave(0)


# --- ranks that mean different calls ---

LARGE = 3000


def different() -> dict[str, tuple[Callable[[Any], object], Callable[[Any], object], str | None]]:
    """What the last rank calls where the others call the first, and the setting that differs; None: one is left raw."""
    floats, options = torch.ones(LARGE), dist.ReduceOp
    rows = list(torch.ones(WORLD, LARGE))

    def reduces(x: Tensor, op: Op = options.SUM) -> Callable[[Any], object]:
        return lambda group: dist.all_reduce(x, op, group)

    def broadcasts(src: int) -> Callable[[Any], object]:
        return lambda group: dist.broadcast(floats, src, group)

    return {
        "SUM, AVG": (reduces(floats), reduces(floats, options.AVG), "factor"),
        "dtypes": (reduces(floats), reduces(floats.bfloat16()), "dtype"),
        "sizes": (reduces(floats), reduces(torch.ones(500)), "numel"),
        "functions": (reduces(floats), lambda group: dist.all_gather(rows, floats, group), "function"),
        "roots": (broadcasts(0), broadcasts(1), "src"),
        "SUM, MAX": (reduces(floats), reduces(floats, options.MAX), None),
        "MAX, SUM": (reduces(floats, options.MAX), reduces(floats), None),
        "float, int": (reduces(floats), reduces(floats.long()), None),
        "large, small": (reduces(floats), reduces(torch.ones(5)), None),
    }


def disagree(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store, options = dist.FileStore(f"{folder}/store", WORLD), ProcessGroupOptions(codec=Lossless(), min_nbytes=1000)
    dist.init_process_group(
        "laconic", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=patient(60)), pg_options=options
    )
    for name, (first, last, setting) in different().items():
        seconds = patient(60) if setting else 2.0
        for is_first in (False, True) if setting else (False,):
            dist.barrier()
            group: Any = dist.new_group(timeout=timedelta(seconds=seconds))
            if not is_first:
                dist.all_reduce(torch.ones(LARGE), group=group)
                dist.all_reduce(torch.ones(5), group=group)
            began = time.monotonic()
            with pytest.raises(ConfigError if setting else CollectiveError) as caught:
                (last if rank == WORLD - 1 else first)(group)
            message = str(caught.value)
            if setting:
                assert time.monotonic() - began < seconds / 2
                assert re.match(rf"{setting} is .* on rank 0 and .* on rank", message), message
            elif "timed out" in message.lower():
                assert "or this one with another op, dtype or size" in message, name
            else:
                assert "losed" in message, message  # by a rank that had waited long enough
    dist.barrier()
    leave(0)


@pytest.mark.ci
def test_ranks_that_mean_different_calls(tmp_path: Path) -> None:
    run_ranks(disagree, (str(tmp_path),), WORLD)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.ci
def test_every_reduction_of_every_dtype(every: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(compare, (folder, every), WORLD)
