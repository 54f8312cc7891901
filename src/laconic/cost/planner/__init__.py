"""Chooses bits, recomputation and offload under a memory budget; the plan file."""
