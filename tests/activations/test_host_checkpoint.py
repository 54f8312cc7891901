"""Checkpointing by a host's own function, as in diffusers: regions keep packed inputs, each tensor once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import laconic
from laconic.activations import SavedTensorTracker
from tests.grid import grid


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.first, self.second = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )
        self.time = nn.Linear(width, width)

    def forward(self, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        h: Tensor = self.norm(x) + self.time(time)[:, None] + text.mean(1, keepdim=True)
        h = x + self.second(nn.functional.gelu(self.first(h)))
        return h


class Host(nn.Module):
    """As diffusers' transformers: blocks go to a function that `enable` sets; all read two of their inputs."""

    def __init__(self, width: int = 64, depth: int = 6) -> None:
        super().__init__()
        self.first, self.time, self.text = (nn.Linear(width, width) for _ in range(3))
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.last = nn.Linear(width, width)
        self.gradient_checkpointing = False

    def enable(self, function: Callable[..., Any] | None) -> None:
        self.gradient_checkpointing = function is not None
        self._gradient_checkpointing_func = function

    def forward(self, x: Tensor) -> Tensor:
        time, text = self.time(x.mean(1)), self.text(x)
        h = self.first(x)
        for block in self.blocks:
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                assert self._gradient_checkpointing_func is not None
                h = self._gradient_checkpointing_func(block, h, time, text)
            else:
                h = block(h, time, text)
        y: Tensor = self.last(h)
        return y


def non_reentrant(block: nn.Module, *args: Any) -> Any:
    return torch.utils.checkpoint.checkpoint(block.__call__, *args, use_reentrant=False)


def reentrant(block: nn.Module, *args: Any) -> Any:
    return torch.utils.checkpoint.checkpoint(block.__call__, *args, use_reentrant=True)


def step(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, int]:
    model.zero_grad()
    with SavedTensorTracker(model) as tracker:
        y = model(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(0)))
    return y.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]), tracker.nbytes


@pytest.mark.parametrize(("depth", "when"), grid([1, 4, 9], ["before", "after", "before and after"], strength=1))
def test_inputs_of_regions_are_packed(when: str, depth: int) -> None:
    torch.manual_seed(0)
    host, x = Host(depth=depth), torch.randn(4, 32, 64)
    exact = copy.deepcopy(host)
    exact.enable(non_reentrant)
    value, gradient, before = step(exact, x)
    if when != "after":
        host.enable(non_reentrant)
    laconic.compress_activations(host)
    if when != "before":
        host.enable(non_reentrant)
    found, near, after = step(host, x)
    assert torch.equal(found, value)
    assert (near - gradient).norm() < 0.05 * gradient.norm()
    assert before > 3.8 * after
    assert step(host, x)[2] == after
    laconic.decompress_activations(host)
    assert host._gradient_checkpointing_func is non_reentrant
    assert torch.equal(step(host, x)[1], gradient)


def test_what_many_regions_read_is_kept_once() -> None:
    def kept(depth: int) -> int:
        host = Host(depth=depth)
        host.enable(non_reentrant)
        laconic.compress_activations(host)
        return step(host, torch.randn(4, 32, 64))[2]

    # One more block keeps its own input, in 8 bits and a scale, and nothing more of what all blocks read.
    assert kept(6) - kept(5) == 4 * 32 * (64 + 2)


def test_exact_inputs_and_no_checkpointing_are_the_hosts_own() -> None:
    torch.manual_seed(0)
    host, x = Host(), torch.randn(4, 32, 64)
    exact = copy.deepcopy(host)
    exact.enable(non_reentrant)
    _, gradient, _ = step(exact, x)
    host.enable(non_reentrant)
    laconic.compress_activations(host, checkpoint="exact", policy=lambda site: None)
    assert torch.equal(step(host, x)[1], gradient)
    host.enable(None)
    assert torch.equal(step(host, x)[1], gradient)


def test_reentrant_functions_still_work() -> None:
    torch.manual_seed(0)
    host, x = Host(), torch.randn(4, 32, 64)
    exact = copy.deepcopy(host)
    exact.enable(reentrant)
    value, gradient, _ = step(exact, x)
    host.enable(reentrant)
    laconic.compress_activations(host)
    found, near, _ = step(host, x)
    assert torch.equal(found, value)
    assert (near - gradient).norm() < 0.1 * gradient.norm()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DiTTransformer2DModel", "PixArtTransformer2DModel", "SD3Transformer2DModel"])
def test_diffusers_transformers_under_their_checkpointing(name: str) -> None:
    pytest.importorskip("diffusers")
    from benchmarks.diffusion import made, step_of

    model, arguments = made(name)
    model.enable_gradient_checkpointing()  # type: ignore[operator]
    output, exact, before = step_of(model, arguments)
    exact = {parameter: gradient.clone() for parameter, gradient in exact.items()}
    laconic.compress_activations(model, 4, mode="combined", example_inputs=arguments)
    got, gradients, after = step_of(model, arguments)
    assert torch.equal(got, output)
    one, other = (torch.cat([g[n].flatten() for n in exact]) for g in (exact, gradients))
    assert (one - other).norm() < 0.06 * one.norm()
    assert before > 4 * after
