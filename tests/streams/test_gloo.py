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

from benchmarks.gpu_day.exchange import OPERATIONS, call
from laconic.collectives import Blockwise, Codec, Lossless, Raw
from laconic.formats import BlockFormat
from tests.distributed.processes import run_ranks
from tests.streams.cuda import CUDA, cuda
from tests.streams.test_wrappers import gloo

CODECS: list[Codec] = [Raw(), Lossless(), Blockwise(BlockFormat("int8", 128))]


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
                for name in OPERATIONS:
                    expected = call(name, x, rank, codec)
                    with cuda():
                        found = call(name, x.to(CUDA), rank, codec)
                        found = None if found is None else found.cpu()
                    assert (found is None) == (expected is None)
                    assert found is None or expected is None or torch.equal(found, expected), (name, codec, numel)
                    dist.barrier()


@pytest.mark.ci
def test_calls_leave_what_they_leave_on_the_cpu(tmp_path: Path) -> None:
    run_ranks(as_on_the_cpu, (tmp_path,), 2)
