"""Mixture-of-experts layers, and where their rows travel."""

from __future__ import annotations

from laconic.moe.grid import Grid, GridLayout, Level

__all__ = ["Grid", "GridLayout", "Level"]
