"""Limits of devices by NVIDIA's data sheets. No torch."""

from __future__ import annotations

BYTES_PER_SECOND = {"H200": 4.8e12, "H100": 3.35e12, "RTX 4090": 1.008e12}
"""Of device memory."""

DENSE_BF16_FLOPS = {"H200": 989e12, "H100": 989e12, "RTX 4090": 165e12}
"""Per second, without sparsity."""
