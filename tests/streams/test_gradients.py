"""Gradients in codes, reduced while backward runs: in every order of streams what the program's order gives."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from laconic.gradients import compress_gradients, ddp_q8_hook
from laconic.gradients.reduction import Reduction
from laconic.optim import AdamW8bit
from tests.grid import grid
from tests.streams.cuda import CUDA, cuda, lost_waits
from tests.streams.device import RaceError
from tests.streams.echo import echo

DIM = 24
FEW, MANY = 12, 150


def small_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, 3)).to(CUDA)


def batch(number: int) -> Tensor:
    torch.manual_seed(number)
    return torch.randn(4, DIM).to(CUDA)


@pytest.mark.parametrize(("bits", "is_prompt"), [(8, False), (12, True)])
def test_a_store_reduces_clips_and_steps(bits: int, is_prompt: bool) -> None:
    with cuda(is_prompt) as device, echo() as group:
        model = small_model()
        gradients = compress_gradients(model, group, bits=bits, bucket_nbytes=600)
        optimizer = AdamW8bit(model.parameters(), lr=1e-2)
        for step in range(2):
            model(batch(2 * step)).pow(2).mean().backward()
            with gradients.last_micro_batch():
                model(batch(2 * step + 1)).pow(2).mean().backward()
            gradients.reduce()
            gradients.scale_(0.5)
            gradients.clip_(0.1)
            optimizer.step()
            gradients.zero_()
    device.check()


class Bucket:
    """What DDP hands to a hook: views of some parameters' gradients in one buffer."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = parameters
        self._buffer = torch.zeros(sum(p.numel() for p in parameters), device=CUDA)

    def buffer(self) -> Tensor:
        return self._buffer

    def parameters(self) -> list[nn.Parameter]:
        return self._parameters


@pytest.mark.parametrize(("error_feedback", "is_prompt"), grid([False, True], [False, True], strength=1))
def test_ddp_reduces_buckets(error_feedback: bool, is_prompt: bool) -> None:
    """As DDP's reducer has it: the hook per bucket in backward, and all futures waited for at its end."""
    with cuda(is_prompt) as device, echo() as group:
        buckets = [Bucket([nn.Parameter(torch.ones(n, device=CUDA)) for n in sizes]) for sizes in ((130, 7), (256,))]
        state, hook = ddp_q8_hook(group, error_feedback=error_feedback, min_nbytes=0)
        for step in range(3):
            futures = []
            for bucket in buckets:
                bucket.buffer().add_(torch.linspace(-1, step + 1, bucket.buffer().numel()).to(CUDA))
                futures.append(hook(state, bucket))
            for future, bucket in zip(futures, buckets, strict=True):
                future.wait()
                for parameter, gradient in zip(
                    bucket.parameters(), bucket.buffer().split([p.numel() for p in bucket.parameters()]), strict=True
                ):
                    parameter.data.sub_(gradient, alpha=0.1)
                bucket.buffer().zero_()
            futures.clear()
    device.check()


# --- streams of the user's ---


def of_two_streams(bits: int, bucket_nbytes: int) -> None:
    """Gradients of one bucket are made on two streams, and the optimizer steps on a third one."""
    torch.manual_seed(1)
    model = nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(3)]).to(CUDA)
    with echo() as group:
        gradients = compress_gradients(model, group, bits=bits, bucket_nbytes=bucket_nbytes)
        optimizer = AdamW8bit(model.parameters(), lr=1e-2)
        main, side, last = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
        for step in range(2):
            y = model[0](batch(step))
            side.wait_stream(main)
            with torch.cuda.stream(side):
                there = model[1](y).tanh()
            here = model[2](y).tanh()
            main.wait_stream(side)
            y.record_stream(side)
            there.record_stream(main)
            with gradients.last_micro_batch():
                (here + there).pow(2).mean().backward()
            del y, here, there
            gradients.reduce()
            gradients.clip_(0.1)
            stepped(optimizer, last)
            gradients.zero_()
            side.wait_stream(main)


def stepped(optimizer: AdamW8bit, last: Any) -> None:
    last.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(last):
        optimizer.step()
    torch.cuda.current_stream().wait_stream(last)


@pytest.mark.parametrize(
    ("bits", "bucket_nbytes", "orders"),
    [
        (8, 1200, FEW),
        *(pytest.param(bits, n, MANY, marks=pytest.mark.slow) for bits in (8, 12) for n in (600, 1200, 1 << 20)),
    ],
)
def test_gradients_of_two_streams_are_reduced_together(bits: int, bucket_nbytes: int, orders: int) -> None:
    with cuda() as device:
        of_two_streams(bits, bucket_nbytes)
    device.check(orders)


def _arrived(reduction: Reduction, number: int, device: torch.device) -> None:
    reduction.buckets.arrived(number)


def test_a_bucket_that_waits_for_its_last_gradient_only_would_be_a_race() -> None:
    with mock.patch.object(Reduction, "arrived", _arrived), cuda() as device:
        of_two_streams(8, 1200)
    with pytest.raises(RaceError, match=r"reduce\.py"):
        device.check(FEW)


@pytest.mark.parametrize("function", ["of_two_streams", "stepped"])
def test_an_event_around_a_step_that_is_left_out_is_found(function: str) -> None:
    with cuda() as device, lost_waits(function) as dropped:
        of_two_streams(8, 1200)
    assert dropped
    with pytest.raises(RaceError):
        device.check(MANY)
