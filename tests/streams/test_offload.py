"""Packed bytes offloaded to the host and prefetched in backward, over three streams."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from laconic.activations.keep.offload import offloader_of
from tests.streams.cuda import CUDA, cuda


@pytest.mark.parametrize("is_prompt", [False, True])
def test_values_go_and_come_back(is_prompt: bool) -> None:
    with cuda(is_prompt) as device:
        offloader = offloader_of(CUDA)
        for step in range(2):
            saved = []
            x = torch.linspace(-1, 1, 12, device=CUDA) if step else torch.ones(12, device=CUDA)
            for layer in range(5):
                x = x * 1.5 + layer
                codes, scales = (x * 16).to(torch.int8), x.abs().mean().view(1)
                saved.append(offloader.send((codes, scales)))
                del codes, scales
            gradient = torch.ones(12, device=CUDA)
            while saved:
                codes, scales = offloader.fetch(*saved.pop())
                gradient = gradient + codes.float() * scales
                del codes, scales
            assert gradient.isfinite().all().item()
    device.check()


def test_a_value_is_fetched_twice_where_the_graph_is_retained() -> None:
    with cuda() as device:
        offloader = offloader_of(CUDA)
        host, handle = offloader.send((torch.arange(6, device=CUDA) * 2,))
        found: list[Tensor] = [offloader.fetch(host, handle)[0] * 1 for _ in range(2)]
        assert found[0].tolist() == found[1].tolist() == [0, 2, 4, 6, 8, 10]
    device.check()
