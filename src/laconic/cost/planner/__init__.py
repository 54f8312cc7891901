"""The choice of bits, recomputation and offload under a budget, and the plan file."""
