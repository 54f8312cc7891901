"""Tensors of every layout through every call of torch.distributed: whether a call is coded makes no difference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collectives import Lossless, ProcessGroupOptions, Raw
from laconic.errors import FormatError
from laconic.train.launch.worker import leave
from tests.distributed.over_backend import all_gather_single, assert_same, join, reduce_scatter_single
from tests.distributed.processes import run_ranks

SHAPE = (4, 6, 2, 2)

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.float64, torch.complex64)

Layout = Callable[[Tensor], Tensor]

LAYOUTS: dict[str, Layout] = {
    "contiguous": lambda x: x.clone(),
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "steps": lambda x: torch.stack((x, x), -1).flatten(-2)[..., ::2],
    "inside of a larger one": lambda x: torch.nn.functional.pad(x, (1, 1, 2, 0))[:, :, 2:, 1:-1],
    "channels last": lambda x: x.clone(memory_format=torch.channels_last),
    "permuted": lambda x: x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
    "negated": lambda x: torch._neg_view(-x),
}
"""Each makes a tensor with the values of a contiguous one, in memory of another layout."""

READ_ONLY: dict[str, Layout] = {
    "expanded": lambda x: x[:1].expand(SHAPE),
    "constant": lambda x: x[0, 0, 0, 0].expand(SHAPE),
}


def values(rank: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """[4, 6, 2, 2]; those of every rank are known to all."""
    generator = torch.Generator().manual_seed(7 * seed + rank)
    x = torch.randint(-50, 50, SHAPE, generator=generator).to(dtype)
    return x * (1 + 2j) if dtype.is_complex else x


def calls(both: list[Tensor], mine: Callable[[], Tensor], out: Layout) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Names, what was found, and what it must be.

    both: what the two ranks have, contiguous; mine: makes this rank's in some layout; out: makes results' places.
    """
    rank, dtype = dist.get_rank(), both[0].dtype

    def empty(*shape: int) -> Tensor:
        return out(torch.full(shape or SHAPE, -99).to(dtype))

    # What is updated has the layout of outputs: it must be writable.
    x = out(both[rank])
    dist.all_reduce(x)
    yield "all_reduce", x, both[0] + both[1]
    x = out(both[rank])
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    work.get_future().wait()
    yield "all_reduce's future", x, both[0] + both[1]
    x = out(both[rank])
    dist.broadcast(x, 1)
    yield "broadcast", x, both[1]
    x = out(both[rank])
    dist.reduce(x, 0)
    if rank == 0:
        yield "reduce", x, both[0] + both[1]
    rows = [empty(), empty()]
    dist.all_gather(rows, mine())
    yield "all_gather", torch.stack(rows), torch.stack(both)
    x = empty(8, *SHAPE[1:])
    all_gather_single(x, mine())
    yield "all_gather_single", x, torch.cat(both)
    x = empty(2, *SHAPE[1:])
    reduce_scatter_single(x, mine())
    yield "reduce_scatter_single", x, (both[0] + both[1])[2 * rank :][:2]
    x = empty()
    dist.reduce_scatter(x, [mine(), mine()])
    yield "reduce_scatter", x, both[0] + both[1]
    x = empty()
    dist.all_to_all_single(x, mine())
    yield "all_to_all_single", x, torch.cat([each[2 * rank :][:2] for each in both])
    # Rank 0 keeps a row and gives three, rank 1 gives one.
    x = empty(2 if rank == 0 else 6, *SHAPE[1:])
    dist.all_to_all_single(x, mine(), [1, 1] if rank == 0 else [3, 3], [1, 3])
    parts = [each[:1] for each in both] if rank == 0 else [each[1:] for each in both]
    yield "all_to_all_single uneven", x, torch.cat(parts)
    if not dtype.is_complex:  # which gloo refuses here
        places = [empty(), empty()] if rank == 0 else None
        dist.gather(mine(), places, 0)
        if places:
            yield "gather", torch.stack(places), torch.stack(both)
        x = empty()
        dist.scatter(x, [mine(), mine()] if rank == 1 else None, 1)
        yield "scatter", x, both[1]
    x = empty()
    if rank == 0:
        dist.send(mine(), 1)
        dist.recv(x, 1)
    else:
        dist.recv(x)
        dist.send(mine(), 0)
    yield "send and recv", x, both[1 - rank]


def refused(rank: int, dtype: torch.dtype) -> None:
    """A result needs a place for each element, whatever carries it."""
    x = values(rank, dtype)
    for place in (
        torch.zeros((), dtype=dtype).expand(SHAPE),
        torch.zeros(1, *SHAPE[1:], dtype=dtype).expand(SHAPE),
        torch.zeros(200, dtype=dtype).as_strided(SHAPE, (3, 2, 1, 1)),
    ):
        calls: list[Callable[[], object]] = [
            partial(dist.all_reduce, place),
            partial(dist.broadcast, place, 0),
            partial(dist.all_gather, [place, x], x),
            partial(dist.all_to_all_single, place, x),
            partial(dist.recv, place, 1 - rank),
        ]
        for call in calls:
            with pytest.raises(FormatError, match="some of its elements share memory, but a result must have a place"):
                call()


def odd_sizes() -> None:
    """No element, one without dimensions, and one."""
    rank = dist.get_rank()
    for shape in ((), (1,), (0,), (3, 0), (1, 1, 1)):
        x = torch.full(shape, float(rank + 1))
        dist.all_reduce(x)
        assert_same(x, torch.full(shape, 3.0), f"all_reduce {shape}")
        dist.broadcast(x, 0)
        rows = [torch.empty(shape) for _ in range(2)]
        dist.all_gather(rows, torch.full(shape, float(rank)))
        assert_same(rows, [torch.full(shape, 0.0), torch.full(shape, 1.0)], f"all_gather {shape}")


def layouts(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    for name, options in {
        "coded": ProcessGroupOptions(Lossless(), min_nbytes=1),
        "ordered": ProcessGroupOptions(Raw(), min_nbytes=1),
        "raw": ProcessGroupOptions(min_nbytes=1 << 30),
    }.items():
        join("laconic", rank, 2, folder, name, pg_options=options)
        for dtype in DTYPES:
            for layout_name, layout in (LAYOUTS | READ_ONLY).items():
                both = [layout(values(r, dtype)).clone(memory_format=torch.contiguous_format) for r in range(2)]
                both = [x.resolve_conj().resolve_neg() for x in both]
                out = LAYOUTS["transposed"] if layout_name in READ_ONLY else layout
                # Twice: the second time a call is known.
                for _ in range(2):
                    for call, found, expected in calls(both, partial(layout, values(rank, dtype)), out):
                        assert torch.equal(found, expected), f"{name} {dtype} {layout_name} {call}"
            refused(rank, dtype)
        odd_sizes()
        dist.destroy_process_group()
    leave(0)


@pytest.mark.ci
def test_every_layout_gives_what_a_contiguous_tensor_gives_coded_or_raw(tmp_path: Path) -> None:
    run_ranks(layouts, (str(tmp_path),), 2)
