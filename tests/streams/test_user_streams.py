"""A second stream of the user's own: with the user's events every order is right, without one the race is found."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic.activations import checkpoint, linear_cross_entropy
from laconic.activations.forwards.checkpoint import _shared
from laconic.activations.keep import exact_codes, witnesses
from laconic.activations.keep.kept import keep, pack
from laconic.activations.keep.masked_relu import masked_relu
from laconic.formats import BlockFormat
from laconic.ops import codebooks, dynamic_map
from tests.streams.cuda import CUDA, cuda, lost_waits
from tests.streams.device import Device, RaceError
from tests.streams.test_activations import on_device

DIM = 32
INT8 = BlockFormat("int8", 64)
FEW, MANY = 12, 150


class Branches(nn.Module):
    """Two layers that read the same norm, the second one on a stream of the user's.

    Args:
        early: the user's event says that the norm is done; else that the first layer is, too.
        in_regions: both layers are run again in backward.
    """

    def __init__(self, early: bool = True, in_regions: bool = False) -> None:
        super().__init__()
        self.early, self.in_regions = early, in_regions
        self.first, self.norm = nn.Linear(DIM, DIM), nn.LayerNorm(DIM)
        self.here, self.there = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.side: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x))
        event = torch.cuda.current_stream().record_event()
        here = self.read(self.here, y)
        if not self.early:
            event.record()
        self.side.wait_event(event)
        with torch.cuda.stream(self.side):
            there = self.read(self.there, y).tanh()
        del y  # which torch's own layers hold until backward
        here = here.tanh()
        self.meets()
        return here * there

    def read(self, layer: nn.Module, y: Tensor) -> Tensor:
        found: Tensor = checkpoint(layer, y) if self.in_regions else layer(y)
        return found

    def meets(self) -> None:
        torch.cuda.current_stream().wait_stream(self.side)


def branched(early: bool = True, in_regions: bool = False, **options: Any) -> Branches:
    torch.manual_seed(0)
    model = Branches(early, in_regions)
    laconic.compress_activations(model, **options)
    return model


def trained(model: Branches, device: Device, num_steps: int = 2) -> None:
    on_device(model)
    model.side = torch.cuda.Stream()
    for step in range(num_steps):
        torch.manual_seed(step)
        x = torch.randn(2, 16, DIM).to(CUDA)
        model(x).pow(2).mean().backward()
        for parameter in model.parameters():
            parameter.data.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None


SHARING: dict[str, dict[str, Any]] = {"kept": {}, "packer": {"mode": "hooks"}, "checkpoint": {"in_regions": True}}
"""By module that shares codes: options of a model in which nobody else does."""


@pytest.mark.parametrize(
    ("orders", "options"),
    [
        *((FEW, options) for options in SHARING.values()),
        *(
            pytest.param(MANY, options, marks=pytest.mark.slow)
            for options in (*SHARING.values(), {"bits": 8}, {"mode": "combined"})
        ),
    ],
)
@pytest.mark.parametrize("early", [True, False])
def test_layers_of_two_streams_read_one_tensor(early: bool, orders: int, options: dict[str, Any]) -> None:
    """Codes that the first layer makes are later than the event that the second one has waited for."""
    model = branched(early, **options)
    with cuda() as device:
        trained(model, device)
    device.check(orders)


def module_named(name: str) -> Any:
    """The module of laconic.activations of this name: `checkpoint` in the package is a function."""
    return next(
        m for key, m in sys.modules.items() if key.startswith("laconic.activations.") and key.endswith(f".{name}")
    )


@pytest.mark.parametrize(
    ("sharing", "early"),
    # A region rebuilds its input by itself: only the codes are shared.
    [("kept", True), ("kept", False), ("packer", True), ("packer", False), ("checkpoint", True)],
)
def test_codes_shared_by_two_streams_would_be_a_race(sharing: str, early: bool) -> None:
    model = branched(early, **SHARING[sharing])
    module = module_named(sharing)
    with mock.patch.object(module, "stream_of", return_value=None), cuda() as device:
        trained(model, device)
    with pytest.raises(RaceError):
        device.check(MANY)


def test_each_stream_packs_once() -> None:
    """However they alternate."""
    with cuda() as device:
        x = torch.randn(16, 64).to(CUDA).requires_grad_() * 2
        here, there = torch.cuda.current_stream(), torch.cuda.Stream()
        there.wait_stream(here)
        found: dict[Any, list[Any]] = {here: [], there: []}
        for stream in (here, there, here, there):
            with torch.cuda.stream(stream):
                found[stream].append((keep(x, INT8, "linear").tensors, _shared(x, x, INT8).tensors))
        for stream, other in ((here, there), (there, here)):
            for first, again, elsewhere in zip(*found[stream], found[other][0], strict=True):
                assert all(a is b for a, b in zip(first, again, strict=True))
                assert not any(a is b for a in first for b in elsewhere)
    device.check(FEW)


@pytest.mark.parametrize("function", ["forward", "meets"])
def test_an_event_of_the_users_that_is_left_out_is_found(function: str) -> None:
    model = branched()
    with cuda() as device, lost_waits(function) as dropped:
        trained(model, device)
    assert dropped
    with pytest.raises(RaceError):
        device.check(MANY)


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
    reader = module_named(module)
    record = reader.record_reader if is_recorded else _nothing
    with mock.patch.object(reader, "record_reader", record), cuda() as device:
        read_aside(read)
    if is_recorded:
        device.check(FEW)
    else:
        with pytest.raises(RaceError):
            device.check(MANY)


def test_torch_holds_what_the_user_has_let_go() -> None:
    """The same model without compression."""
    torch.manual_seed(0)
    model = Branches()
    with cuda() as device:
        trained(model, device)
    device.check(MANY)


# --- constants ---

WINDOW = (16, (2, 2), (1, 1))


@pytest.mark.parametrize(
    "make",
    [
        partial(exact_codes._steps_of_offsets, *WINDOW),
        partial(exact_codes._offsets_of_steps, *WINDOW),
        partial(witnesses._places, 100),
        partial(codebooks.codebook_tensor, "nf4"),
        partial(codebooks.bucket_tensor, "nf4", False),
        partial(dynamic_map.dynamic_map_tensor, True),
    ],
)
def test_constants_are_read_by_every_stream(make: Callable[[torch.device], Tensor]) -> None:
    """Also by one that has not waited for the stream on which they were made."""
    with cuda() as device:
        found = make(CUDA)
        with torch.cuda.stream(torch.cuda.Stream()):
            assert make(CUDA) is found
            assert (found * 1).tolist() == make(torch.device("cpu")).tolist()
    device.check(FEW)
