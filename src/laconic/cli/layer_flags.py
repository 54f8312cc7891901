"""Flags for the shape of a mixture-of-experts layer and for its grid of processes."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from laconic.cli.arguments import at_least
from laconic.cost.comm.rates import ITEM_NBYTES
from laconic.cost.moe.shape import LayerShape

_NUMBERS = {
    "tokens": (1024, "of a process"),
    "model-dim": (1024, "of a token"),
    "hidden-dim": (1024, "of an expert"),
    "experts": (16, "in all"),
    "top-k": (2, "experts of a token"),
    "gemms": (3, "matrix products of an expert: 2, or 3 with a gate"),
    "mp": (1, "ranks with the same tokens"),
    "esp": (1, "ranks that share an expert"),
}
LAYER_FLAGS = (*(f"--{name}" for name in _NUMBERS), "--ep")
"""Flags that `add_layer` adds."""


def add_layer(add: Callable[..., object]) -> None:
    """Add the flags of the layer and of its process groups, except `--dtype`; `add` is argparse's `add_argument`."""
    for name, (default, meaning) in _NUMBERS.items():
        add(f"--{name}", type=at_least(1), default=default, metavar="N", help=f"{meaning} (default: %(default)s)")
    add("--ep", type=at_least(1), metavar="N", help="ranks that experts are spread over (default: all / esp)")


def layer_shape(options: argparse.Namespace) -> LayerShape:
    """Read the layer and the grid that the flags describe.

    Raises:
        ConfigError: the layer is not possible.
    """
    return LayerShape(
        options.tokens,
        options.model_dim,
        options.hidden_dim,
        options.experts,
        options.top_k,
        options.gemms,
        ITEM_NBYTES[options.dtype],
    )
