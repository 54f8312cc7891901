"""Sends and receives that are deferred and start together: each waits for the stream that its tensor is of."""

from __future__ import annotations

import torch

from laconic.collectives.process_group.p2p import Batches
from tests.streams.cuda import CUDA, cuda
from tests.streams.echo import echo


def test_deferred_messages_of_two_streams() -> None:
    with cuda() as device, echo() as group:
        batches = Batches(group)
        for step in range(3):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                sent = torch.full((6,), float(step), device=CUDA) * 2
                works = [batches.add(sent, lambda sent=sent: group.send([sent], 1, 0))]
            received = torch.zeros(6, device=CUDA)
            works.append(batches.add(received, lambda received=received: group.recv([received], 1, 0)))
            for work in works:
                work.wait()
            assert received.sum().item() == 12.0 * step
            with torch.cuda.stream(side):
                works[0].wait()
    device.check()
