"""A step of AdamW8bit, and gradients in codes, make the host wait for nothing and leave what the CPU leaves."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from torch import Tensor, nn

from laconic.errors import ConfigError
from laconic.gradients import compress_gradients
from laconic.optim import AdamW8bit
from tests.streams.cuda import CUDA, counted_waits, cuda
from tests.streams.test_activations import capture, on_device


def model() -> nn.Module:
    """Moments in 8 bits in whole and in ragged blocks, and in fp32 (biases)."""
    generator = torch.Generator().manual_seed(0)
    layers = nn.Sequential(nn.Linear(256, 32), nn.Linear(32, 300), nn.Linear(300, 8).bfloat16())
    with torch.no_grad():
        for p in layers.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
    return layers


def loss_of(layers: nn.Module, x: Tensor) -> Tensor:
    first, second, third = layers
    loss: Tensor = third(second(first(x)).bfloat16()).float().square().mean()
    return loss


@pytest.mark.parametrize("bits", [None, 8, 12])
def test_steps_wait_for_nothing(bits: int | None) -> None:
    ends = []
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(1))
    for is_there in (False, True):
        layers = model()
        with ExitStack() as stack:
            device = stack.enter_context(cuda()) if is_there else None
            if device is not None:
                on_device(layers)
            inputs = x.to(CUDA) if is_there else x
            optimizer = AdamW8bit(layers.parameters())
            gradients = None if bits is None else compress_gradients(layers, bits=bits)
            waits = stack.enter_context(counted_waits(device)) if device is not None else []
            for _ in range(3):
                for _ in range(2):
                    loss_of(layers, inputs).backward()
                if gradients is not None:
                    gradients.reduce()
                    gradients.scale_(0.5)
                    gradients.clip_(0.01)
                factor = torch.full((), 0.5, device=inputs.device) if is_there else torch.tensor(0.5)
                optimizer.step(gradient_factor=factor)
                optimizer.zero_grad()
            assert not waits
            assert all(optimizer.state[p]["step"] == 3 for p in layers.parameters())
            ends.append([p.detach().cpu() for p in layers.parameters()])
    assert all(torch.equal(there, here) for there, here in zip(*ends, strict=True))
    assert not torch.equal(ends[0][0], next(model().parameters()))


def test_a_step_that_a_graph_would_repeat_is_refused_and_changes_nothing() -> None:
    with cuda():
        layers = on_device(model())
        loss_of(layers, torch.randn(4, 256, device=CUDA)).backward()
        before = [p.detach().clone() for p in layers.parameters()]
        optimizer = AdamW8bit(layers.parameters())
        with (
            capture(),
            pytest.raises(ConfigError, match="AdamW8bit updates while a CUDA graph is captured"),
        ):
            optimizer.step(closure=lambda: pytest.fail("the closure ran"))
        assert not optimizer.state
        assert all(torch.equal(p, old) for p, old in zip(layers.parameters(), before, strict=True))
        optimizer.step()
        assert not torch.equal(next(layers.parameters()), before[0])


def test_updates_in_backward_wait_for_nothing_and_a_graph_would_repeat_them() -> None:
    ends = []
    for in_backward in (True, False):
        torch.manual_seed(0)
        with cuda() as device:
            layers = on_device(model())
            optimizer = AdamW8bit(layers.parameters())
            if in_backward:
                optimizer.update_in_backward()
            with counted_waits(device) as waits:
                for _ in range(3):
                    loss_of(layers, torch.randn(4, 256, device=CUDA)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                assert not waits
            if in_backward:
                with capture(), pytest.raises(ConfigError, match="AdamW8bit updates while a CUDA graph is captured"):
                    loss_of(layers, torch.randn(4, 256, device=CUDA)).backward()
            else:
                loss_of(layers, torch.randn(4, 256, device=CUDA)).backward()
            ends.append([p.detach().cpu() for p in layers.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*ends, strict=True))
