"""Recipes: named settings to start from, as in `laconic train --recipe agoq`; files and flags override them."""

from __future__ import annotations

from typing import Any

RECIPES: dict[str, dict[str, Any]] = {
    # Nothing is compressed: the reference for comparisons.
    "exact": {
        "activations": {"bits": 16, "attention": "exact", "loss": "exact"},
        "gradients": {"bits": 32, "reduce": "native"},
        "optimizer": {"kind": "adamw"},
    },
    # AGoQ (arXiv 2605.00539). The library's default decides how attention is kept; it follows the quality benchmark.
    "agoq": {
        "activations": {"bits": 4, "loss": "auto"},
        "gradients": {"bits": 8, "reduce": "q8"},
        "optimizer": {"kind": "adamw8bit"},
    },
}
"""Values for fields of TrainConfig by name of the recipe, as nested tables."""
