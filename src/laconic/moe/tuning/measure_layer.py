"""Measures a layer as it is, its code and its weights, on all ranks at once: candidates take turns.

The layer is unchanged afterwards: no gradient, no count, no random number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from statistics import median
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from laconic.collectives.policy.microbench import Ranks
from laconic.cost.moe.shape import LayerShape
from laconic.errors import ConfigError
from laconic.formats.shards import local_part
from laconic.moe.layer import MoELayer, num_experts_of
from laconic.moe.pipeline.autograd import without_hooks
from laconic.moe.routing import Routing
from laconic.moe.tuning.elimination import Comparison, compare

T = TypeVar("T")


def shape_of(layer: MoELayer, num_tokens: int, model_dim: int, dtype: torch.dtype, num_shards: int = 1) -> LayerShape:
    """Return the layer's shape for the cost model.

    H follows from the size of one expert's parameters, as three products, or two where no gating is found. A gate that
    does not define how many experts a token gets is a ConfigError.
    """
    gate = layer.gate
    top_k = getattr(gate, "top_k", None)
    if not isinstance(top_k, int):
        raise ConfigError(
            f"the gate is a {type(gate).__name__} without top_k, but predictions count rows of a token; choose the"
            " dispatcher by hand, or give the gate its number of experts per token"
        )
    num_local = num_experts_of(layer.experts)
    gated = any(name.startswith("gate") for name, _ in layer.experts.named_parameters())
    gemms = 3 if gated else 2
    values = sum(local_part(p).numel() for p in layer.experts.parameters())
    hidden = max(1, round(values / num_local / gemms / model_dim)) * num_shards
    factor = getattr(gate, "capacity_factor", None)
    return LayerShape(num_tokens, model_dim, hidden, gate.num_experts, top_k, gemms, dtype.itemsize, factor)


def benchmark_candidates(
    layer: MoELayer,
    x: Tensor,
    installs: Sequence[Callable[[], None]],
    ranks: Ranks,
    routing: Routing | None = None,
    *,
    budget_seconds: float,
    tolerance: float = 0.02,
) -> Comparison:
    """Compare the whole layer on tokens x, forward and backward, after each of `installs`; see `compare`.

    All ranks call it together. Hooks of the layer are disabled, and the state of the last forward is restored.
    `routing` takes the place of the gate's.
    """
    x = x.detach().requires_grad_()
    wanted = [x, *(p for p in layer.parameters() if p.requires_grad)]
    if routing is not None:
        weights = routing.weights.detach().clone().requires_grad_()
        routing, wanted = replace(routing, weights=weights), [*wanted, weights]
    with torch.no_grad():  # which may read losses that have no graph
        left = layer.hooks, layer.losses, layer.load, layer.num_dropped

    def forward(install: Callable[[], None]) -> Tensor:
        install()
        return layer.run(x, routing)

    cases = [Timed(partial(forward, install), partial(_gradients, wanted)) for install in installs]
    layer.hooks = ()
    try:
        with _undisturbed(layer):
            return compare(lambda case: _seconds(ranks, cases[case]), len(cases), budget_seconds, tolerance)
    finally:
        layer.hooks, layer.losses, layer.load, layer.num_dropped = left


@dataclass(frozen=True)
class Timed(Generic[T]):
    """A forward, and the backward that takes its result."""

    forward: Callable[[], T]
    backward: Callable[[T], object]


def medians(samples: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the median of forward and of backward."""
    return median(there for there, _ in samples), median(back for _, back in samples)


def samples_in_turn(
    ranks: Ranks, cases: Sequence[Timed[Any]], repeats: int, warm_ups: int = 1, longest_seconds: float = inf
) -> list[list[tuple[float, float]]]:
    """Measure the slowest rank's seconds of each case and repeat, forward and backward; `warm_ups` rounds do not count.

    Cases take turns, so that each finds the caches as others leave them, as a layer among layers does. All ranks call
    it together, begin each half together, and get the same numbers. After `longest_seconds`, and three repeats, it
    stops.
    """
    found: list[list[tuple[float, float]]] = [[] for _ in cases]
    spent = 0.0
    for round_number in range(-warm_ups, repeats):
        if round_number >= 3 and spent > longest_seconds:
            break
        for case, taken in zip(cases, found, strict=True):
            seconds = _seconds(ranks, case)
            spent += sum(seconds)
            if round_number >= 0:
                taken.append(seconds)
    return found


def _seconds(ranks: Ranks, case: Timed[Any]) -> tuple[float, float]:
    """Run a case on all ranks at once and return the slowest rank's seconds, forward and backward."""
    there, out = _clock(ranks, case.forward)
    back, _ = _clock(ranks, partial(case.backward, out))
    gathered = ranks.exchange([round(there * 1e9), round(back * 1e9)])
    there, back = (max(column) * 1e-9 for column in zip(*gathered, strict=True))
    return there, back


def _clock(ranks: Ranks, run: Callable[[], T]) -> tuple[float, T]:
    ranks.exchange([0])
    started = time.perf_counter()
    out = run()
    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)
    return time.perf_counter() - started, out


def _gradients(wanted: Iterable[Tensor], out: Tensor | None) -> None:
    if out is not None and out.requires_grad:
        torch.autograd.grad(out, [*wanted], torch.ones_like(out), allow_unused=True)


@contextmanager
def _undisturbed(layer: MoELayer) -> Iterator[None]:
    """Restore what a forward in training changes (counts of a gate, random numbers); disable hooks on gradients."""
    gate_trains = layer.gate.training
    layer.gate.eval()
    try:
        with without_hooks(layer.parameters()), torch.random.fork_rng(), torch.enable_grad():
            yield
    finally:
        layer.gate.train(gate_trains)
