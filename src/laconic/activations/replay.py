"""Runs forward code for its value alone, and a second time, in backward, in the state it ran in the first time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Replay", "forgets", "forgetting"]


def forgetting() -> AbstractContextManager[Any]:
    """Inside, code runs as it would for backward, and nothing is kept for it.

    Not without gradients: torch picks some of its kernels by whether a gradient is wanted, and their bits differ. In a
    graph of torch.compile, which has bits of its own, it is without gradients.
    """
    if torch.compiler.is_compiling():
        return torch.no_grad()
    return torch.autograd.graph.saved_tensors_hooks(_forget, _forgotten)


def forgets() -> bool:
    """Whether what runs now is inside of `forgetting`."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and hooks[0] is _forget


def _forget(tensor: Tensor) -> None:
    return None


def _forgotten(nothing: None) -> Tensor:
    raise RuntimeError("laconic: backward through a value that is computed without keeping anything for it")


class Replay:
    """A computation's surroundings: the random state it started from, whether autocast was on, and a module's mode.

    Args:
        device: where the computation runs.
        module: whose code runs, in training or in evaluation.

    `run` calls a function for the first time. `state` are the tensors that `again` wants back: the states of the random
    generators (uint8, on the CPU), or none if the function drew nothing. They are held by whoever saves tensors for
    backward, so that they are counted and freed like any of those.
    """

    def __init__(self, device: torch.device, module: nn.Module) -> None:
        self._device = device
        self._modes = [(part, part.training) for part in module.modules()]
        self._autocast = {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in {device.type, "cpu"}
        }
        self._cache = torch.is_autocast_cache_enabled()

    def run(self, function: Callable[[], Any]) -> tuple[Any, tuple[Tensor, ...]]:
        """The value of `function()`, and the state to give to `again`."""
        before = self._generators()
        value = function()
        drew = any(not torch.equal(old, new) for old, new in zip(before, self._generators(), strict=True))
        return value, before if drew else ()

    @contextmanager
    def again(self, state: tuple[Tensor, ...]) -> Iterator[None]:
        """Inside, code draws and casts as it did in `run`; outside, the random state is as if nothing had happened."""
        with ExitStack() as stack:
            if state:
                devices = [self._device] if self._device.type == "cuda" else []
                stack.enter_context(torch.random.fork_rng(devices=devices))
                torch.set_rng_state(state[0])
                if devices:
                    torch.cuda.set_rng_state(state[1], self._device)
            for kind, (enabled, dtype) in self._autocast.items():
                stack.enter_context(torch.autocast(kind, dtype, enabled, self._cache))
            for part, training in self._modes:
                if part.training != training:
                    stack.callback(setattr, part, "training", part.training)
                    part.training = training
            yield

    def _generators(self) -> tuple[Tensor, ...]:
        if self._device.type == "cuda":
            return torch.get_rng_state(), torch.cuda.get_rng_state(self._device)
        return (torch.get_rng_state(),)
