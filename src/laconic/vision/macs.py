"""Counts the multiply-accumulates of a forward."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from math import prod
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from laconic.errors import ModelError
from laconic.vision.integration import AFI, Integrated


def _elementwise(*shapes: Any, out_shape: Any, **_: Any) -> int:
    """Operations of a product of two maps, or of maps and their weights, element by element."""
    return 2 * prod(out_shape) if len(out_shape) == 4 else 0


def count_macs(model: nn.Module, *shape: int, attention: Literal["running", "dense"] = "running") -> int:
    """Count the multiply-accumulates of a forward in eval mode.

    Counted are convolutions, matrix products, and the products of features with the weights of attention, one for each
    element of a feature. As usual, norms, activations, pooling and sums do not count. A model on the meta device is
    counted without computing anything.

    Args:
        model: called with one tensor.
        shape: of the images, [batch, channels, height, width].
        attention: "running" counts `integrate` as it runs, one product per level and element; "dense" as its
            definition is written, i products at level i.

    Raises:
        ModelError: attention is neither.
    """
    if attention not in ("running", "dense"):
        raise ModelError(f"attention is {attention!r}, but it must be 'running' or 'dense'")
    levels: Counter[nn.Module] = Counter()
    dense_only = 0

    def count_levels(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Integrated) -> None:
        nonlocal dense_only
        earlier = args[1] if len(args) > 1 else kwargs.get("earlier")
        levels[module] = 1 if earlier is None else levels[module] + 1
        dense_only += (levels[module] - 1) * output.average.numel()

    products = {torch.ops.aten.addcmul: _elementwise, torch.ops.aten.mul: _elementwise}
    parameter = next(model.parameters())
    counter = FlopCounterMode(display=False, custom_mapping=products)
    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
            if isinstance(module, AFI):
                stack.callback(module.register_forward_hook(count_levels, with_kwargs=True).remove)
        model.eval()
        stack.enter_context(torch.no_grad())
        stack.enter_context(counter)
        model(torch.empty(shape, dtype=parameter.dtype, device=parameter.device))
    return counter.get_total_flops() // 2 + (dense_only if attention == "dense" else 0)
