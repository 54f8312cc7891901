"""Gradients in few bytes: stored in 8 or 12 bits."""

from __future__ import annotations

from laconic.gradients.store import CompressedGradients, compress_gradients

__all__ = ["CompressedGradients", "compress_gradients"]
