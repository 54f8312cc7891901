"""Step time and peak memory of whole language models, head and loss included: laconic beside checkpointing.

A step is forward, loss and backward of a model of transformers in bf16. Checkpointing is transformers' own, of every
layer. Peak is the most that is in use during a step as the C allocator counts it; gradients exist before the step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import laconic
from benchmarks.kit.allocated import peak_nbytes
from benchmarks.kit.models import causal_model
from benchmarks.kit.timing import UNUSUAL_ROUNDS, seconds_of
from benchmarks.registry import Options, Table, benchmark

_FAMILIES = ("llama", "qwen3", "gpt_neox")
_SIZES = ((256, 4), (512, 6), (768, 8))
"""Hidden size and number of layers."""

_VOCAB, _SEQUENCES, _LENGTH = 16384, 2, 128


@benchmark("model-step")
def model_step(options: Options) -> Iterator[Table]:
    """Three families in three sizes, each exact, with checkpointing, and with activations in 4 bits."""
    length = 32 if options.small else _LENGTH
    for hidden, layers in ((64, 2),) if options.small else _SIZES:
        for family in _FAMILIES[:1] if options.small else _FAMILIES:
            yield _table(family, hidden, layers, length, options)


def _table(family: str, hidden: int, layers: int, length: int, options: Options) -> Table:
    vocab = 512 if options.small else _VOCAB
    exact = causal_model(
        family, hidden, vocab_size=vocab, num_hidden_layers=layers, intermediate_size=4 * hidden, use_cache=False
    ).bfloat16()
    tokens = torch.randint(vocab, (_SEQUENCES, length), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": tokens, "labels": tokens}
    checkpointed: Any = copy.deepcopy(exact)
    enable = (
        getattr(checkpointed, "activation_checkpointing_enable", None) or checkpointed.gradient_checkpointing_enable
    )
    enable({"use_reentrant": False})
    variants: dict[str, Any] = {"exact": exact, "checkpointing": checkpointed}
    variants["laconic, 4 bits"] = copy.deepcopy(exact)
    laconic.compress_activations(variants["laconic, 4 bits"], bits=4, example_inputs=inputs)
    variants["laconic, 4 bits, chunked loss"] = copy.deepcopy(exact)
    laconic.compress_activations(
        variants["laconic, 4 bits, chunked loss"], bits=4, loss="chunked", example_inputs=inputs
    )
    steps = {name: _step(model.train(), inputs) for name, model in variants.items()}
    for step in steps.values():
        step()
    peak = {name: peak_nbytes(step) for name, step in steps.items()}
    seconds = seconds_of(steps, options.rounds, warm_up_rounds=UNUSUAL_ROUNDS, shuffle=True)
    first = seconds["exact"]
    parameters = sum(parameter.numel() for parameter in exact.parameters())
    return Table.of(
        f"{family}, hidden {hidden}, {layers} layers, {parameters / 1e6:.0f} M parameters, bf16, "
        f"{_SEQUENCES} x {length} tokens, {options.thread_text}",
        variants,
        [
            ("", str),
            ("step, ms", lambda name: f"{seconds[name] * 1e3:.0f}"),
            ("of exact", lambda name: f"{seconds[name].over(first):.3f}"),
            ("lowest to highest of the rounds", lambda name: _range(seconds[name].samples, first.samples)),
            ("peak, MB", lambda name: f"{peak[name] / 1e6:.0f}"),
            ("of exact", lambda name: f"{peak[name] / peak['exact']:.3f}"),
        ],
    )


def _step(model: nn.Module, inputs: dict[str, torch.Tensor]) -> Callable[[], None]:
    def step() -> None:
        model(**inputs).loss.backward()

    return step


def _range(samples: tuple[float, ...], exact: tuple[float, ...]) -> str:
    quotients = [mine / theirs for mine, theirs in zip(samples, exact, strict=True)]
    return f"{min(quotients):.3f} to {max(quotients):.3f}"
