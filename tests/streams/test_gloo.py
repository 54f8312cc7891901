"""Tensors of a GPU in a group whose backend is gloo: it reads the host's memory alone, so they go through it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from laconic import collectives
from laconic.collectives import Blockwise, Codec, Lossless, Raw
from laconic.formats import BlockFormat
from tests.distributed.processes import run_ranks
from tests.streams.cuda import CUDA, cuda
from tests.streams.test_wrappers import gloo

CODECS: list[Codec] = [Raw(), Lossless(), Blockwise(BlockFormat("int8", 128))]


def called(name: str, x: Tensor, codec: Codec, rank: int) -> Tensor | None:
    """What a call leaves on this rank."""
    rows, part, own = x.new_empty(2 * x.numel()), x.new_empty(x.numel() // 2), x.clone()
    match name:
        case "all_reduce":
            return collectives.all_reduce(own, codec=codec).wait()
        case "all_gather":
            return collectives.all_gather(rows, x, codec=codec).wait()
        case "reduce_scatter":
            return collectives.reduce_scatter(part, x, codec=codec).wait()
        case "all_to_all":
            return collectives.all_to_all(own, x, codec=codec).wait()
        case "broadcast":
            return collectives.broadcast(own, 0, codec=codec).wait()
        case "gather":
            return collectives.gather(rows if rank == 0 else None, x, 0, codec=codec).wait()
        case "scatter":
            return collectives.scatter(part, x if rank == 0 else None, 0, codec=codec).wait()
        case _:
            calls = [collectives.send, collectives.recv]
            for call in calls if rank == 0 else calls[::-1]:
                call(x if call is collectives.send else own, 1 - rank, codec=codec).wait()
            return own


NAMES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "gather", "scatter", "send and recv")


def refuses_devices(method: str) -> Any:
    """gloo's sends and receives as they are on a GPU, where another address than the host's ends the process."""
    original: Callable[..., dist.Work] = getattr(dist.ProcessGroup, method)

    def checked(group: dist.ProcessGroup, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        assert all(x.is_cpu for x in tensors), f"{method}: Bad address"
        return original(group, tensors, peer, tag)

    return mock.patch.object(dist.ProcessGroup, method, checked)


def as_on_the_cpu(rank: int, folder: Path) -> None:
    """Long messages, which have an end, and short ones, which go along with the announcement."""
    with gloo(rank, folder / "store"), refuses_devices("send"), refuses_devices("recv"):
        for numel in (1 << 18, 512):
            x = (0.02 * torch.randn(numel, generator=torch.Generator().manual_seed(rank))).bfloat16()
            for codec in CODECS:
                for name in NAMES:
                    expected = called(name, x, codec, rank)
                    with cuda():
                        found = called(name, x.to(CUDA), codec, rank)
                        found = None if found is None else found.cpu()
                    assert (found is None) == (expected is None)
                    assert found is None or expected is None or torch.equal(found, expected), (name, codec, numel)
                    dist.barrier()


@pytest.mark.ci
def test_calls_leave_what_they_leave_on_the_cpu(tmp_path: Path) -> None:
    run_ranks(as_on_the_cpu, (tmp_path,), 2)
