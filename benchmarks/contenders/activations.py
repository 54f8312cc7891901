"""What is kept for backward: laconic's codes beside recomputing, compiling, offload and fp8."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import laconic
from benchmarks.contenders.training import EXACT, Change, Contender, Training
from benchmarks.kit.recompute import keeping_products


def compressed(**how: Any) -> Change:
    """laconic.compress_activations."""

    def change(training: Training, ids: Tensor) -> None:
        laconic.compress_activations(training.model, example_inputs={"input_ids": ids, "labels": ids}, **how)

    return change


def checkpointed(**how: Any) -> Change:
    """Every layer keeps its input and runs again in backward, as transformers does it."""

    def change(training: Training, ids: Tensor) -> None:
        training.model.gradient_checkpointing_enable({"use_reentrant": False, **how})

    return change


class _Segment(nn.Module):
    """Decoder layers of which only the first one's input is kept: what torch's checkpoint_sequential does to a list."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, hidden: Tensor, **inputs: Any) -> Tensor:
        return checkpoint(self._run, hidden, use_reentrant=False, **inputs)

    def _run(self, hidden: Tensor, **inputs: Any) -> Tensor:
        for layer in self.layers:
            out = layer(hidden, **inputs)
            hidden = out[0] if isinstance(out, tuple) else out
        return hidden


def _segments(training: Training, ids: Tensor) -> None:
    inner = training.model.model
    layers = list(inner.layers)
    inner.layers = nn.ModuleList(_Segment(layers[i : i + 2]) for i in range(0, len(layers), 2))


def compiled(budget: float) -> Change:
    """torch.compile of the model, loss included, with a share of the bytes that it would keep for backward."""

    def change(training: Training, ids: Tensor) -> None:
        training.model.compile(backend=_backend(budget))

    return change


def compiled_layers() -> Change:
    """`layer.compile()` for each decoder layer, as docs/activations.md has it."""

    def change(training: Training, ids: Tensor) -> None:
        for layer in training.model.model.layers:
            layer.compile()

    return change


def _backend(budget: float) -> Callable[[Any, Any], Any]:
    # A backend of its own for each: copies of a model that share one get the code that was compiled for the first.
    def backend(graph: Any, inputs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx

        with torch._functorch.config.patch(activation_memory_budget=budget, enable_autograd_cache=False):
            return compile_fx(graph, inputs)

    return backend


def batch_in_halves(training: Training, ids: Tensor) -> None:
    """The same sums in another order: how far a run goes astray by rounding alone."""
    model = training.model
    training.loss_of = lambda ids: sum(model(input_ids=half, labels=half).loss for half in ids.chunk(2)) / 2


def _save_on_cpu(training: Training, ids: Tensor) -> None:
    training.around_forward = partial(torch.autograd.graph.save_on_cpu, pin_memory=False)


def _float8(emulate: bool) -> Change:
    def change(training: Training, ids: Tensor) -> None:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        # As in torchao's README: the output projection stays as it is.
        convert_to_float8_training(
            training.model,
            config=Float8LinearConfig(emulate=emulate),
            module_filter_fn=lambda module, name: name != "lm_head",
        )

    return change


def contenders() -> list[Contender]:
    """The rows of the table."""
    rows = [
        Contender(EXACT),
        Contender("exact, the batch in two halves", [batch_in_halves]),
        Contender("laconic, 8 bits", [compressed(bits=8)]),
        Contender("laconic, 4 bits", [compressed(bits=4)]),
        Contender("laconic, 4 bits, attention exact", [compressed(bits=4, attention="exact")]),
        Contender("laconic, 4 bits, attention nf4", [compressed(bits=4, attention="nf4")]),
        Contender("laconic, 4 bits + recompute of layers", [checkpointed(), compressed(bits=4)]),
        Contender("torch, recompute of each layer", [checkpointed()]),
        Contender("torch, recompute of pairs of layers", [_segments]),
        Contender("torch, selective recompute (products kept)", [checkpointed(context_fn=keeping_products)]),
        Contender("torch, save_on_cpu", [_save_on_cpu]),
        Contender("torchao, float8 training", [_float8(emulate=False)], package="torchao"),
        Contender("torchao, float8 training, emulated", [_float8(emulate=True)], package="torchao"),
    ]  # fmt: skip
    if shutil.which("c++"):
        rows += [
            Contender("torch.compile", [compiled(1.0)], compiled=True),
            Contender("torch.compile, memory budget 0.5", [compiled(0.5)], compiled=True),
            Contender("torch.compile, memory budget 0.25", [compiled(0.25)], compiled=True),
            Contender("torch.compile, laconic, 4 bits", [compressed(bits=4), compiled(1.0)], compiled=True),
            Contender("layers compiled, laconic, 4 bits", [compressed(bits=4), compiled_layers()], compiled=True),
        ]
    return rows
