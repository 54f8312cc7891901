"""Optimizers with small states that read small gradients."""

from __future__ import annotations

from laconic.optim.adamw import AdamW8bit

__all__ = ["AdamW8bit"]
