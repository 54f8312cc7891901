"""Two devices of one process: pipeline stages on one each, whose activations are compressed, with copies between."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic.activations.keep.choice import Offload
from laconic.activations.keep.offload import CudaCopier
from laconic.formats import BlockFormat
from laconic.gradients import compress_gradients
from laconic.optim import AdamW8bit
from tests.streams.cuda import CUDA, cuda, lost_waits
from tests.streams.device import RaceError

OTHER = torch.device("cuda", 1)
CPU = torch.device("cpu")
INT8 = BlockFormat("int8", 64)
DIM = 32
FEW, MANY = 10, 150


def stages_of(options: dict[str, Any]) -> list[nn.Module]:
    torch.manual_seed(0)
    stages: list[nn.Module] = []
    for _ in range(2):
        stages.append(nn.Sequential(nn.Linear(DIM, DIM), nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.GELU()))
        laconic.compress_activations(stages[-1], **options)
    return stages


def moved(stage: nn.Module, device: torch.device) -> None:
    for module in stage.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.detach().to(device))


def sent(x: Tensor, device: torch.device, copies: Any) -> Tensor:
    """A copy of `x` on another device, made on a stream of the user's; its device's stream waits for it."""
    if copies is None:
        return x.to(device) if x.device != device else x.clone()  # of which no layer knows codes either
    copies.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(copies):
        there = x.to(device)
        x.record_stream(copies)
    return there


def trained(stages: Sequence[nn.Module], devices: Sequence[torch.device], copies: Any = None) -> list[Tensor]:
    """The parameters after two steps of two micro-batches, gradients in codes."""
    for stage, device in zip(stages, devices, strict=True):
        moved(stage, device)
    gradients = compress_gradients(nn.ModuleList(stages))
    # One for each device: torch's C++, which groups tensors by device, sees those of the CPU only.
    optimizers = [AdamW8bit(stage.parameters(), lr=1e-2) for stage in stages]
    for step in range(2):
        for number in range(2):
            torch.manual_seed(2 * step + number)
            x = stages[0](torch.randn(2, 16, DIM).to(devices[0]))
            stages[1](sent(x, devices[1], copies)).pow(2).mean().backward()
        gradients.clip_(0.1)
        for optimizer in optimizers:
            optimizer.step()
        gradients.zero_()
    return [p.detach().cpu() for stage in stages for p in stage.parameters()]


OPTIONS: list[dict[str, Any]] = [{}, {"policy": lambda site: Offload(INT8)}, {"mode": "hooks"}]


@pytest.mark.parametrize(
    ("options", "orders", "has_stream"),
    [(OPTIONS[0], FEW, True), (OPTIONS[1], FEW, False)]
    + [pytest.param(one, MANY, has, marks=pytest.mark.slow) for one in OPTIONS for has in (False, True)],
    ids=lambda value: str(value) if isinstance(value, int) else "-".join(value) or "sites",
)
def test_stages_on_two_devices(options: dict[str, Any], orders: int, has_stream: bool) -> None:
    """They end with the bits of one CPU, in every order."""
    expected = trained(stages_of(options), [CPU, CPU])
    stages = stages_of(options)
    with cuda(num_devices=2) as device:
        found = trained(stages, [CUDA, OTHER], torch.cuda.Stream(CUDA) if has_stream else None)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    device.check(orders)


def test_a_copy_that_does_not_wait_for_the_stage_is_found() -> None:
    stages = stages_of({})
    with cuda(num_devices=2) as device, lost_waits("sent") as dropped:
        trained(stages, [CUDA, OTHER], torch.cuda.Stream(CUDA))
    assert dropped
    with pytest.raises(RaceError):
        device.check(MANY)


def test_a_wait_for_another_devices_stream_is_none() -> None:
    """What offload fetches has to be waited for by the stream of the device that it is fetched to."""

    def wait(copier: CudaCopier, tensors: tuple[Tensor, ...], fetched: Any) -> None:
        torch.cuda.default_stream(1 - tensors[0].device.index).wait_event(fetched)

    stages = stages_of(OPTIONS[1])
    with mock.patch.object(CudaCopier, "wait", wait), cuda(num_devices=2) as device:
        trained(stages, [CUDA, OTHER])
    with pytest.raises(RaceError):
        device.check(MANY)


def test_tensors_of_two_devices_do_not_meet() -> None:
    with cuda(num_devices=2):
        here, there = torch.ones(3, device=CUDA), torch.ones(3, device=OTHER)
        assert (here.device.index, there.device.index, (there * 2).device.index) == (0, 1, 1)
        with pytest.raises(RuntimeError, match="same device"):
            here + there
        with torch.cuda.device(1):
            assert torch.cuda.current_stream().device == torch.ones(1, device="cuda").device == OTHER
        assert (there.to(CUDA) + here).tolist() == [2.0] * 3


@pytest.mark.parametrize("is_read_late", [False, True])
def test_a_peer_copy_waits_for_both_devices(is_read_late: bool) -> None:
    """The stream of neither device is ahead of the copy: the copied tensor may change, and the copy may be read."""
    with cuda(num_devices=2) as device:
        x = torch.zeros(4, device=CUDA)
        for number in range(3):
            x.add_(number)
            there = x.to(OTHER)
            with torch.cuda.stream(torch.cuda.Stream(OTHER)) if is_read_late else nullcontext():
                there.mul_(2)
            x.add_(1)
    if is_read_late:  # on a stream that does not wait
        with pytest.raises(RaceError, match="mul_"):
            device.check(FEW)
    else:
        device.check(FEW)
