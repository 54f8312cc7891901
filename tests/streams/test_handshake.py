"""Announcements between ranks on CUDA: which calls make the host wait, and that copies to the host are in order."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import pytest
import torch

from laconic.collectives import all_reduce
from laconic.collectives.codec import Raw
from laconic.collectives.engine import device_handshake
from laconic.gradients import all_reduce_q8
from tests.streams.cuda import CUDA, cuda
from tests.streams.device import Node
from tests.streams.echo import echo


@pytest.mark.parametrize("size", [2, 3])
def test_the_host_waits_in_the_first_call_of_a_kind_whatever_the_sizes(size: int) -> None:
    with cuda() as device, echo(size) as group:
        waits = [0]
        wait = device.wait

        def count(nodes: Sequence[Node]) -> None:
            waits[0] += 1
            wait(nodes)

        found = []
        with mock.patch.object(device, "wait", count):
            for numel in (768, 768, 1536, 384):
                waits[0] = 0
                x = torch.ones(numel, device=CUDA)
                all_reduce_q8(x, group, op="sum", min_nbytes=0)
                all_reduce(x, group, codec=Raw(), async_op=True).wait()
                found.append(waits[0])
        assert found == [2, 0, 0, 0]
        assert x[0].item() == size**2  # the host waits here
        device_handshake.poll(group)
        assert len(device_handshake._pending) == 0
    device.check()
