"""Named settings that belong together, to start from: `laconic train --recipe agoq`.

A recipe is a function that gives values for fields of TrainConfig, as nested tables; configuration files and flags go
on top of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from laconic.errors import ConfigError

__all__ = ["RECIPES", "recipe"]


def exact() -> dict[str, Any]:
    """Nothing compressed: the reference to compare with."""
    return {
        "activations": {"bits": 16, "attention": "exact", "loss": "exact"},
        "gradients": {"bits": 32, "reduce": "native"},
        "optimizer": {"kind": "adamw"},
    }


def agoq() -> dict[str, Any]:
    """All of AGoQ (arXiv 2605.00539), activations in about 4 bits, gradients stored and reduced in 8, and moments in 8.

    The loss is computed in chunks where that pays. How attention is kept is left to the library's default, which
    follows its quality benchmark.
    """
    return {
        "activations": {"bits": 4, "loss": "auto"},
        "gradients": {"bits": 8, "reduce": "q8"},
        "optimizer": {"kind": "adamw8bit"},
    }


RECIPES: dict[str, Callable[[], dict[str, Any]]] = {"exact": exact, "agoq": agoq}
"""By name."""


def recipe(name: str) -> dict[str, Any]:
    """The values of the recipe `name`. Raises ConfigError for an unknown one."""
    if name not in RECIPES:
        raise ConfigError(f"recipe is {name!r}, but it must be one of {', '.join(RECIPES)}")
    return RECIPES[name]()
