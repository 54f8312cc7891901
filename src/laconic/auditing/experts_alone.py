"""Layers of experts against every token on its own.

While a forward runs, each layer's first tokens, their routing and its outputs for them are noted. Afterwards each of
these tokens passes its experts alone, one expert at a time, with the weights that the gate gave it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from laconic.errors import AuditError
from laconic.moe.dispatch.base import LocalDispatcher
from laconic.moe.layer import MoELayer, moe_layers, num_experts_of
from laconic.moe.routing import RoutedTokens, Routing

__all__ = ["ExpertsWatch", "watching_experts"]

_TOKENS = 8
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2.0**-6, torch.bfloat16: 2.0**-4}


class ExpertsWatch:
    """The layers that were compared; `compared` is how many."""

    compared: int = 0


@contextmanager
def watching_experts(model: nn.Module) -> Iterator[ExpertsWatch]:
    """Compare, when the block ends, the first call of each layer of experts that computes in this process.

    Layers whose experts lie on several ranks are compared where rows meet them: each rank's rows with its own experts.

    Raises:
        AuditError: an output differs.
    """
    watch, noted = ExpertsWatch(), []
    changed = []
    for name, layer in moe_layers(model).items():
        if not isinstance(layer.dispatcher, LocalDispatcher):
            continue
        own = layer._routed

        def routed(tokens: RoutedTokens, layer: MoELayer = layer, name: str = name, own: Any = own) -> Tensor:
            out: Tensor = own(tokens)
            routing = tokens.routing
            if isinstance(routing, Routing) and torch._C._current_graph_task_id() == -1:
                noted.append(
                    (name, layer, tokens.x[:_TOKENS].detach().clone(), routing, out[:_TOKENS].detach().clone())
                )
            return out

        layer.__dict__["_routed"] = routed
        changed.append(layer)
    try:
        yield watch
    finally:
        for layer in changed:
            layer.__dict__.pop("_routed", None)
    seen: set[str] = set()
    for name, layer, x, routing, out in noted:
        if name not in seen:
            seen.add(name)
            _compare(name, layer, x, routing, out)
    watch.compared = len(seen)


@torch.no_grad()
def _compare(name: str, layer: MoELayer, x: Tensor, routing: Routing, out: Tensor) -> None:
    expected = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    number = num_experts_of(layer.experts)
    experts = routing.experts if layer.placement is None else layer.placement(routing.experts)
    for token, expert, weight in zip(routing.tokens.tolist(), experts.tolist(), routing.weights.tolist(), strict=True):
        if token < len(x):
            counts = torch.zeros(number, dtype=torch.int64, device=x.device)
            counts[expert] = 1
            expected[token] += weight * layer.experts(x[token : token + 1], counts)[0].float()
    error = float((out.float() - expected).norm())
    if error > _TOLERANCE.get(x.dtype, 2.0**-4) * float(expected.norm()) + 1e-6:
        off = (out.float() - expected).norm(dim=-1)
        token = int(off.argmax())
        raise AuditError(
            f"the layer of experts {name!r} does not give what every token gets from its experts alone: token {token} "
            f"is off by {float(off[token] / expected[token].norm()):.2g}; likely causes: an expert that was skipped, a "
            "row that reached another expert or token, weights of another assignment"
        )
