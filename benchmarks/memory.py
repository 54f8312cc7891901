"""Bytes, peak and step time of a stack of Llama layers: laconic beside every way of recomputing.

`held` is what forward leaves allocated beside its output, `peak` the most that is in use during a step, both as the C
allocator counts them, gradients of the weights not included (they exist before the step).
"""

from __future__ import annotations

import copy
import gc
import shutil
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import laconic
from benchmarks.kit.allocated import allocated_nbytes, peak_nbytes
from benchmarks.kit.models import HEAD_DIM, decoder_layers
from benchmarks.kit.recompute import keeping_products
from benchmarks.kit.timing import UNUSUAL_ROUNDS, seconds_of
from benchmarks.registry import Options, Table, benchmark
from laconic import BlockFormat
from laconic.activations import Recompute, Site
from laconic.activations.keep.choice import Choice

_NUM_LAYERS = 4


class _Stack(nn.Module):
    """Decoder layers one after the other; the first `recomputed` of them keep their input only."""

    def __init__(
        self, layers: list[nn.Module], positions: tuple[Tensor, Tensor], recomputed: int, context: Any
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.positions = positions
        self.recomputed = recomputed
        self.context = context

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            if index < self.recomputed:
                x = checkpoint(self._layer, layer, x, use_reentrant=False, **self.context)
            else:
                x = self._layer(layer, x)
        return x

    def _layer(self, layer: nn.Module, x: Tensor) -> Tensor:
        out = layer(x, position_embeddings=self.positions)
        return out[0] if isinstance(out, tuple) else out

    def compile_layers(self) -> None:
        """Compiles the layers apart from those of other stacks: compiled graphs are kept by code object."""
        plain = type(self)._layer
        own = FunctionType(plain.__code__.replace(), plain.__globals__)
        self._layer = MethodType(torch.compile(own), self)


def _recompute(*kinds: str) -> Callable[[Site], Choice]:
    """A policy that lets sites of these kinds run again, and keeps the others as `bits=4` does."""

    def policy(site: Site) -> Choice:
        if site.kind in kinds:
            return Recompute()
        return BlockFormat("int8" if site.kind == "attention" else "nf4")

    return policy


@benchmark("memory")
def memory(options: Options) -> list[Table]:
    """A stack of Llama layers in bf16, kept in every way."""
    side = 128 if options.small else 1024
    block = decoder_layers("llama", side, side, _NUM_LAYERS, intermediate_size=4 * side)
    x, unit = block.x, block.x.nbytes

    def stack(recomputed: int = 0, context: Any = None, **how: Any) -> nn.Module:
        model = _Stack(copy.deepcopy(block.layers), block.positions, recomputed, context or {})
        if how:
            laconic.compress_activations(model, example_inputs={"x": x}, **how)
        return model

    selective = {"context_fn": keeping_products}
    variants: dict[str, nn.Module] = {
        "unmodified": stack(),
        "selective recompute (torch SAC, products kept)": stack(_NUM_LAYERS, selective),
        "full recompute": stack(_NUM_LAYERS),
        "laconic, nf4, attention exact": stack(bits=4, attention="exact"),
        "laconic, nf4, attention int8": stack(bits=4, attention="int8"),
        "laconic, nf4, attention nf4": stack(bits=4, attention="nf4"),
        "laconic, nf4, attention recompute": stack(bits=4, attention="recompute"),
        "laconic, nf4, attention int8, feed-forward recompute": stack(policy=_recompute("mlp")),
        "laconic, nf4, attention and feed-forward recompute": stack(policy=_recompute("mlp", "attention")),
    }
    for number in range(1, _NUM_LAYERS):
        variants[f"full recompute of {number} of {_NUM_LAYERS} layers"] = stack(number)
    if shutil.which("c++"):
        for budget in (1.0, 0.5, 0.25):
            model = stack()
            model.compile_layers()
            # Read when the graph is made; graphs kept on disk do not know it.
            with torch._functorch.config.patch(activation_memory_budget=budget, enable_autograd_cache=False):
                _step(model, x)()
            name = "compiled" if budget == 1 else f"compiled, activation_memory_budget {budget}"
            variants[name] = model
        model = stack(bits=4, attention="int8")
        model.compile_layers()
        variants["compiled, laconic, nf4, attention int8"] = model

    held = {name: _held_nbytes(model, x) for name, model in variants.items()}
    peak = {name: peak_nbytes(_step(model, x)) for name, model in variants.items()}
    steps = {name: _step(model, x) for name, model in variants.items()}
    seconds = seconds_of(steps, options.rounds, warm_up_rounds=UNUSUAL_ROUNDS)
    first = "unmodified"
    return [
        Table.of(
            f"{_NUM_LAYERS} Llama layers, bf16: hidden {side}, {side // HEAD_DIM} heads, feed-forward {4 * side}, "
            f"{side} tokens, {options.thread_text}",
            variants,
            [
                ("", str),
                ("held per layer", lambda name: f"{held[name] / unit / _NUM_LAYERS:.2f} U"),
                ("of unmodified", lambda name: f"{held[name] / held[first]:.3f}"),
                ("peak", lambda name: f"{peak[name] / unit:.1f} U"),
                ("of unmodified", lambda name: f"{peak[name] / peak[first]:.3f}"),
                ("step", lambda name: f"{seconds[name] * 1e3:.0f} ms"),
                ("of unmodified", lambda name: f"{seconds[name] / seconds[first]:.3f}"),
            ],
            f"U is tokens x hidden x 2 bytes, {unit / 2**20:.0f} MiB.",
        )
    ]


def _step(model: nn.Module, x: Tensor) -> Callable[[], None]:
    """A forward and backward; gradients of weights stay and are added to, as with gradient accumulation."""

    def step() -> None:
        model(x.clone().requires_grad_()).backward(x)

    return step


def _held_nbytes(model: nn.Module, x: Tensor) -> int:
    _step(model, x)()  # weight gradients and whatever is made once
    source = x.clone().requires_grad_()
    gc.collect()
    before = allocated_nbytes()
    out = model(source)
    return allocated_nbytes() - before - out.nbytes
