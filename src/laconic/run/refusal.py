"""The error that ends a run before its first step."""

from __future__ import annotations

from laconic.errors import LaconicError

__all__ = ["Refusal"]


class Refusal(LaconicError):
    """Something that was asked for by name cannot be done in this script."""
