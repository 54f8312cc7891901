"""Recognizes the two parts of a mixture-of-experts block that have weights of their own: router and experts.

Like every site they are recognized by what they compute, tried on a few random numbers with small random weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laconic.activations.recognize.trial import are_close, outcome


@dataclass(frozen=True)
class ExpertsSpec:
    """Experts in fused parameters.

    Their forward takes (hidden [tokens, features], index [tokens, k], weights [tokens, k]), or (rows [q, features]
    sorted by expert, counts [experts]).
    """

    num_experts: int
    hidden_size: int


@dataclass(frozen=True)
class RouterSpec:
    """A linear layer followed by a choice; returns its logits, the experts' weights and their indices."""

    num_experts: int


def experts_of(module: nn.Module) -> ExpertsSpec | None:
    """The description of a module of fused experts, or None if it is no such module.

    Its parameters all begin with the dimension of the experts. Its output is, for each token, the sum over its experts
    times their weights, in whatever order they are named; or for rows sorted by expert, each row's own expert's.
    """
    if any(True for _ in module.buffers()):
        return None
    if _num_arguments(module) == 2:
        return _sorted_experts_of(module)
    if _num_arguments(module) < 3:
        return None
    generator = torch.Generator().manual_seed(0)
    for hidden_size, parameters in _narrow_parameters(module, narrow=8, wide=16):
        num_experts = next(iter(parameters.values())).shape[0]
        x = torch.randn(5, 8, generator=generator)
        index = torch.stack([torch.randperm(num_experts, generator=generator)[:2] for _ in range(5)])
        weights = torch.rand(5, 2, generator=generator) + 0.5
        trials = [
            (index, weights),
            (index.flip(-1), weights.flip(-1)),
            (index, weights * torch.tensor([1.0, 0.0])),
            (index, weights * torch.tensor([0.0, 1.0])),
        ]
        outs = [outcome(module, parameters, x, *trial, training=False) for trial in trials]
        if all(isinstance(out, Tensor) and out.shape == x.shape for out in outs):
            whole, flipped, first, second = outs
            if are_close(flipped, whole) and are_close(first + second, whole) and not are_close(first, second):
                return ExpertsSpec(num_experts, hidden_size)
    return None


def _sorted_experts_of(module: nn.Module) -> ExpertsSpec | None:
    generator = torch.Generator().manual_seed(0)
    for hidden_size, parameters in _narrow_parameters(module, narrow=8, wide=16):
        num_experts = next(iter(parameters.values())).shape[0]
        x = torch.randn(5, 8, generator=generator)
        counts = torch.zeros(3, num_experts, dtype=torch.int64)
        counts[0, 0], counts[1, 1], counts[2, 1] = 3, 2, 3
        trials = ((x, counts[0] + counts[1]), (x[:3], counts[0]), (x[3:], counts[1]), (x[:3], counts[2]))
        outs = [outcome(module, parameters, *trial, training=False) for trial in trials]
        if all(
            isinstance(out, Tensor) and out.shape == trial[0].shape for out, trial in zip(outs, trials, strict=True)
        ):
            whole, first, second, other = outs
            if are_close(torch.cat([first, second]), whole) and not are_close(first, other):
                return ExpertsSpec(num_experts, hidden_size)
    return None


def _narrow_parameters(module: nn.Module, narrow: int, wide: int) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """The hidden size, and small random parameters: hidden size `narrow`, inside of an expert `wide` or twice that.

    Both layouts that are in use are tried: [experts, out, in] and [experts, in, out].
    """
    parameters = {name: p for name, p in module._parameters.items() if p is not None}
    matrices = [name for name, p in parameters.items() if p.dim() == 3]
    if len(matrices) != 2 or len({p.shape[0] for p in parameters.values()}) != 1:
        return
    into, out_of = (parameters[name].shape for name in matrices)
    if into[0] < 2 or not all(p.dim() in (2, 3) for p in parameters.values()):
        return
    for inside, hidden in ((1, 2), (2, 1)):  # of the first matrix; of the second they are the other way round
        if into[hidden] != out_of[inside] or into[inside] not in (out_of[hidden], 2 * out_of[hidden]):
            continue
        width = wide * (into[inside] // out_of[hidden])
        shapes: dict[str, tuple[int, ...]] = {matrices[0]: (width, narrow), matrices[1]: (narrow, wide)}
        if inside == 2:
            shapes = {name: shape[::-1] for name, shape in shapes.items()}
        biases = [name for name, p in parameters.items() if p.dim() == 2]
        shapes |= {name: (size,) for name, size in zip(biases, (width, narrow), strict=False)}
        generator = torch.Generator().manual_seed(0)
        small = {name: torch.randn(into[0], *shapes.get(name, ()), generator=generator) * 0.3 for name in parameters}
        yield into[hidden], small


def router_of(module: nn.Module) -> RouterSpec | None:
    """The description of a router, or None if the module is none.

    A router returns the logits of its weight, and integer choices among them.
    """
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2 or any(True for _ in module.children()) or isinstance(module, nn.Linear):
        return None
    if not set(module._parameters) <= {"weight", "bias"} or type(module).__module__.startswith("torch."):
        return None
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(p.shape, generator=generator) for name, p in module.named_parameters()}
    buffers = {name: torch.zeros(b.shape, dtype=b.dtype) for name, b in module.named_buffers()}
    x = torch.randn(3, weight.shape[1], generator=generator)
    out = outcome(module, {**tensors, **buffers}, x, training=False)
    if not isinstance(out, tuple) or not all(isinstance(part, Tensor) for part in out):
        return None
    logits = F.linear(x, tensors["weight"], tensors.get("bias"))
    chooses = any(not part.is_floating_point() and part.shape[:1] == x.shape[:1] for part in out)
    return RouterSpec(weight.shape[0]) if chooses and any(are_close(part, logits) for part in out) else None


def _num_arguments(module: nn.Module) -> int:
    try:
        return len(inspect.signature(type(module).forward).parameters) - 1
    except (TypeError, ValueError):
        return 0
