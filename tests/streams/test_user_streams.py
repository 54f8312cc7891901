"""A second stream of the user's own: with the user's events every order is right, without one the race is found."""

from __future__ import annotations

import sys
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic.activations import linear_cross_entropy
from laconic.activations.kept import pack
from laconic.activations.masked_relu import masked_relu
from laconic.formats import BlockFormat
from tests.streams.cuda import CUDA, cuda
from tests.streams.device import RaceError

DIM = 32
INT8 = BlockFormat("int8", 64)
FEW, MANY = 12, 150


# --- memory of tensors whose codes are kept ---


def _packed(x: Tensor) -> object:
    return pack(x, INT8, "linear")


def _packed_in_shared_blocks(x: Tensor) -> object:
    return pack(x.view(-1, 2).T.unsqueeze(-1).expand(-1, -1, 3).transpose(0, 1), INT8, "linear")


def _lost(x: Tensor) -> object:
    weight, labels = torch.ones(5, DIM, device=CUDA), torch.zeros(64, dtype=torch.int64, device=CUDA)
    return linear_cross_entropy(x, weight, labels, format=INT8)


def _masked_in_place(x: Tensor) -> object:
    return masked_relu(x, in_place=True)[1]


def _hooked(*layers: nn.Module) -> Callable[[Tensor], object]:
    model = nn.Sequential(nn.Identity(), *layers)
    laconic.compress_activations(model, mode="hooks")
    return model


def _clipped(x: Tensor) -> object:
    return _hooked(nn.Hardtanh())(x)


def _activated_with_gaps(x: Tensor) -> object:
    return _hooked(nn.SiLU())(x.view(4, 4, 16, 8)[:, :, :, :7])


READERS = {
    "kept": (_packed, _packed_in_shared_blocks),
    "loss": (_lost,),
    "masked_relu": (_masked_in_place,),
    "packer": (_clipped, _activated_with_gaps),
}


def read_aside(read: Callable[[Tensor], object]) -> None:
    """A tensor of the main stream is read on another one and let go, and its memory is the main stream's again."""
    side = torch.cuda.Stream()
    for _ in range(2):  # in the first round constants are made, which the host waits for
        x = torch.randn(64, DIM).to(CUDA).requires_grad_() * 2
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            result = read(x)
        del x
        torch.zeros(64, DIM, device=CUDA)
        torch.cuda.current_stream().wait_stream(side)
        del result


def _nothing(x: Tensor) -> None:  # a mock would hold its arguments
    pass


@pytest.mark.parametrize(("module", "read"), [(name, read) for name, readers in READERS.items() for read in readers])
@pytest.mark.parametrize("is_recorded", [True, False])
def test_memory_is_not_given_away_while_it_is_read(
    module: str, read: Callable[[Tensor], object], is_recorded: bool
) -> None:
    reader = sys.modules[f"laconic.activations.{module}"]
    record = reader.record_reader if is_recorded else _nothing
    with mock.patch.object(reader, "record_reader", record), cuda() as device:
        read_aside(read)
    if is_recorded:
        device.check(FEW)
    else:
        with pytest.raises(RaceError):
            device.check(MANY)
