"""Recipes: named settings to start from, as in `laconic train --recipe agoq`.

A recipe is a function that returns values for fields of TrainConfig, as nested tables; configuration files and flags
override them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from laconic.errors import ConfigError


def exact() -> dict[str, Any]:
    """Compress nothing: the reference for comparisons."""
    return {
        "activations": {"bits": 16, "attention": "exact", "loss": "exact"},
        "gradients": {"bits": 32, "reduce": "native"},
        "optimizer": {"kind": "adamw"},
    }


def agoq() -> dict[str, Any]:
    """Compress as AGoQ (arXiv 2605.00539): activations in about 4 bits; gradients, their reduction and moments in 8.

    The loss is computed in chunks where that pays. The library's default decides how attention is kept; it follows the
    quality benchmark.
    """
    return {
        "activations": {"bits": 4, "loss": "auto"},
        "gradients": {"bits": 8, "reduce": "q8"},
        "optimizer": {"kind": "adamw8bit"},
    }


RECIPES: dict[str, Callable[[], dict[str, Any]]] = {"exact": exact, "agoq": agoq}
"""Recipes by name."""


def recipe(name: str) -> dict[str, Any]:
    """Return the values of the recipe `name`, as nested tables.

    Raises:
        ConfigError: there is no such recipe.
    """
    if name not in RECIPES:
        raise ConfigError(f"recipe is {name!r}, but it must be one of {', '.join(RECIPES)}")
    return RECIPES[name]()
