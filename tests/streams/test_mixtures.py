"""Compressed mixtures of experts, a part of each block on a second stream: the bits of one CPU, in every order."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic.activations.keep import kept
from laconic.collectives import Raw
from laconic.moe import ChunkedSchedule, FlatDispatcher, GatedExperts, MoELayer, SoftmaxGate
from tests.activations.models import MIXTURES, are_equal, gradients_of, make_ids, make_model
from tests.grid import grid
from tests.streams.cuda import CUDA, cuda, lost_waits
from tests.streams.device import RaceError
from tests.streams.echo import echo
from tests.streams.test_activations import on_device, step

DIM = 32
FEW, MANY = 5, 25


class Aside(nn.Module):
    """Runs a module on a second stream, if there is one, from the place where its block began."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.side: Any = None
        self.begun: Any = None

    def forward(self, *args: Any) -> Any:
        if self.side is None:
            return self.inner(*(x.clone() for x in args))  # of which nobody knows codes, as on a second stream
        args = tuple(x.view_as(x) for x in args)  # gradients are added up in the same order
        self.side.wait_event(self.begun)
        with torch.cuda.stream(self.side):
            found = self.inner(*args)
        current = torch.cuda.current_stream()
        current.wait_stream(self.side)
        for x in found if isinstance(found, tuple) else (found,):
            x.record_stream(current)
        return found


class Begun(nn.Module):
    """A block that says where it begins."""

    def __init__(self, inner: nn.Module, aside: Aside) -> None:
        super().__init__()
        self.inner, self.aside = inner, aside

    def forward(self, x: Tensor) -> Any:
        if self.aside.side is not None:
            self.aside.begun = torch.cuda.current_stream().record_event()
        return self.inner(x)


PARTS = ("shared_experts", "shared_expert", "router", "gate")


def mixture(family: str, implementation: str, **options: Any) -> nn.Module:
    """A compressed model whose shared experts, or else routers, are `Aside`."""
    # Heads of one size: torch's attention for others makes its mask in C++, on the CPU.
    sizes = {"v_head_dim": 32} if family.startswith("deepseek") else {}
    model = make_model(family, experts_implementation=implementation, **sizes)
    laconic.compress_activations(model, sequence_length=4, **options)
    for layer in model.model.layers:
        name = next((name for name in PARTS if hasattr(layer.mlp, name)), None)
        if name is not None:
            aside = Aside(getattr(layer.mlp, name))
            setattr(layer.mlp, name, aside)
            layer.mlp = Begun(layer.mlp, aside)
    return model


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, sums of gradients of one row have one order on the CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def two_steps(model: nn.Module, ids: Tensor) -> list[dict[str, Tensor]]:
    found = []
    for _ in range(2):
        step(model, ids)
        found.append({name: grad.cpu() for name, grad in gradients_of(model).items()})
    return found


def set_aside(model: nn.Module) -> None:
    side = torch.cuda.Stream()
    for module in model.modules():
        if isinstance(module, Aside):
            module.side = side


@pytest.mark.parametrize(
    ("family", "implementation", "orders"),
    [
        ("deepseek_v3", "grouped_mm", FEW),
        pytest.param("qwen3_moe", "grouped_mm", FEW, marks=pytest.mark.ci),
        *(
            pytest.param(family, implementation, MANY, marks=pytest.mark.slow)
            for family in MIXTURES
            for implementation in ("grouped_mm", "batched_mm", "eager")
        ),
    ],
)
def test_a_part_of_each_block_runs_on_a_second_stream(family: str, implementation: str, orders: int) -> None:
    model, ids = mixture(family, implementation), make_ids(length=8)
    twin = copy.deepcopy(model)
    with one_thread():
        expected = two_steps(model, ids)
        with cuda() as device:
            set_aside(on_device(twin))
            found = two_steps(twin, ids.to(CUDA))
        assert all(map(are_equal, found, expected))
        device.check(orders)


def aside_once(family: str) -> Any:
    twin, ids = mixture(family, "grouped_mm"), make_ids(length=8)
    with one_thread(), cuda() as device:
        set_aside(on_device(twin))
        two_steps(twin, ids.to(CUDA))
    return device


def test_codes_shared_with_the_second_stream_would_be_a_race() -> None:
    """A router waits for its experts in backward, and they for it in forward; shared experts for neither."""
    with mock.patch.object(kept, "stream_of", return_value=None):
        device = aside_once("deepseek_v3")
    with pytest.raises(RaceError):
        device.check(MANY)


@pytest.mark.parametrize("family", ["deepseek_v3", pytest.param("qwen3_moe", marks=pytest.mark.ci)])
def test_a_block_that_does_not_wait_for_its_part_is_found(family: str) -> None:
    with lost_waits("forward") as dropped:
        device = aside_once(family)
    assert dropped
    with pytest.raises(RaceError):
        device.check(MANY)


# --- this package's own layer ---


def layered(group: Any, chunks: int) -> nn.Module:
    """A compressed model with a layer whose exchange and experts run in chunks, on streams of their own."""
    torch.manual_seed(2)
    gate, experts = SoftmaxGate(4, DIM, 2), GatedExperts(4 // group.size(), DIM, 48)
    layer = MoELayer(gate, experts, dispatcher=FlatDispatcher(group, codec=Raw()))
    layer.schedule = ChunkedSchedule(chunks, chunks)
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.LayerNorm(DIM), layer, nn.Linear(DIM, DIM))
    laconic.compress_activations(model)
    return model


def trained(model: nn.Module) -> list[Tensor]:
    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        model(torch.randn(12, DIM).to(CUDA)).pow(2).mean().backward()
        found += [grad.cpu() for grad in gradients_of(model).values()]
    return found


@pytest.mark.parametrize(("chunks", "size"), grid([1, 2, 3], [1, 2], strength=1))
def test_a_layer_in_chunks_in_a_compressed_model(chunks: int, size: int) -> None:
    """The bits of a device with one stream (on the CPU the layer runs other operations)."""
    with one_thread(), cuda() as device, echo(size) as group:
        default = torch.cuda.default_stream()
        with mock.patch.object(torch.cuda, "Stream", return_value=default):
            expected = trained(on_device(layered(group, chunks)))
        assert device.num_streams == 0
    with one_thread(), cuda() as device, echo(size) as group:
        found = trained(on_device(layered(group, chunks)))
        assert device.num_streams > 0
    assert all(map(torch.equal, found, expected))
    device.check(MANY)
