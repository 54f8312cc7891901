"""laconic inside of training programs that people already have; docs/integrations.md.

Each host has a module of its own, which alone imports it: `laconic.integrations.huggingface` (Trainer, TRL),
`laconic.integrations.accelerate`, `laconic.integrations.lightning`, `laconic.integrations.torchtitan`,
`laconic.integrations.deepspeed`, `laconic.integrations.ray`.
"""

from __future__ import annotations

from laconic.integrations.config import LaconicConfig

__all__ = ["LaconicConfig"]
