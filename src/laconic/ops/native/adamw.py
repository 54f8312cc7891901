"""AdamW with 8-bit moments on the CPU."""

from __future__ import annotations

from laconic.ops.reference.adamw import adamw8bit_

__all__ = ["adamw8bit_"]
