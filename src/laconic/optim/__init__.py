"""Optimizers with small states that read small gradients."""

from __future__ import annotations

from laconic.optim.adamw import OPTIMIZER_CLASSES, AdamW4bit, AdamW8bit
from laconic.optim.convert import from_adamw_state, from_bitsandbytes_state, to_adamw_state, to_bitsandbytes_state

__all__ = [
    "OPTIMIZER_CLASSES",
    "AdamW4bit",
    "AdamW8bit",
    "from_adamw_state",
    "from_bitsandbytes_state",
    "to_adamw_state",
    "to_bitsandbytes_state",
]
