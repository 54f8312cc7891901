"""What inference workers compute, attention's side and the experts': all on the stream of the caller."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from laconic.infer.expert_share import ExpertShare
from laconic.infer.messages import Rows
from laconic.infer.remote_experts import RemoteExperts
from laconic.infer.split import Split
from laconic.moe.huggingface.experts import FusedExperts
from laconic.schedule.inference import InferencePlan
from tests.infer.test_remote_experts import NUM_EXPERTS, ORIGINAL, WIDTH
from tests.streams.cuda import CUDA, cuda
from tests.streams.device import RaceError

NUM_WORKERS = 2


class Link:
    """An expert worker in this thread, the only one that the simulated device records."""

    def __init__(self, share: ExpertShare) -> None:
        self._share = share
        self._answers: dict[int, Tensor] = {}

    def send(self, rows: Rows) -> None:
        self._answers[id(rows)] = self._share.run(rows)

    def receive(self, rows: Rows) -> Tensor:
        return self._answers.pop(id(rows))


def remote(device: torch.device) -> RemoteExperts:
    split = Split(1, NUM_WORKERS)
    ranges = [split.expert_range(worker, NUM_EXPERTS) for worker in range(NUM_WORKERS)]
    links: list[Any] = []
    for held in ranges:
        part = {
            name: torch.nn.Parameter(p[held.start : held.stop].clone().to(device), requires_grad=False)
            for name, p in ORIGINAL.named_parameters()
        }
        links.append(Link(ExpertShare([FusedExperts(ORIGINAL, part)])))
    return RemoteExperts(links, [ranges], InferencePlan(num_slices=2))


def layers(experts: RemoteExperts, device: torch.device) -> Tensor:
    """Hidden states behind three layers with a residual."""
    torch.manual_seed(0)
    hidden = torch.randn(6, WIDTH).to(device)
    for _ in range(3):
        weights, index = torch.rand(6, NUM_EXPERTS).topk(2)
        experts.begin_forward(5)
        try:
            hidden = hidden + experts.run(0, hidden * 0.5, index.to(device), weights.to(device))
        finally:
            experts.end_forward()
    return hidden


@pytest.mark.parametrize("waits", [True, False])
def test_rows_go_to_expert_workers_and_back_on_one_stream(waits: bool) -> None:
    expected = layers(remote(torch.device("cpu")), torch.device("cpu"))
    with cuda() as device:
        experts = remote(CUDA)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        num_before = len(device.defaults[0].nodes)
        with torch.cuda.stream(side):
            hidden = layers(experts, CUDA)
        assert len(device.defaults[0].nodes) == num_before
        assert device.num_streams == 1  # that of the caller
        if waits:
            torch.cuda.current_stream().wait_stream(side)
        found = (hidden * 1).cpu()
    assert torch.equal(found, expected)
    if waits:
        device.check(40)
    else:
        with pytest.raises(RaceError):
            device.check(40)
