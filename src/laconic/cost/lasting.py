"""Bytes that last from step to step: parameters, gradients, optimizer state, tensor by tensor."""

from __future__ import annotations

from collections import Counter

from laconic.cost.job import Job, Stage

__all__ = ["gradient_nbytes", "lasting_nbytes", "optimizer_nbytes"]


def lasting_nbytes(job: Job, stages: list[Stage]) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state of a rank that holds `stages`."""
    layout, settings = job.layout, job.settings
    element = job.precision.parameter_nbytes
    total = Counter({"parameters": 0, "gradients": 0, "optimizer": 0})
    tensors = [t for stage in stages for t in stage.tensors()]
    for rows, columns in tensors:
        rows = -(-rows // layout.data_parallel) if layout.sharded else rows
        numel = -(-rows * columns // layout.tensor_parallel)
        total["parameters"] += numel * element
        total["gradients"] += gradient_nbytes(numel, settings.gradient_bits, element)
        total["optimizer"] += optimizer_nbytes(numel, settings.optimizer, element)
    return dict(total)


def gradient_nbytes(numel: int, bits: int, parameter_nbytes: int = 4) -> int:
    """Bytes of one tensor's gradient: dense in 16 or 32 bits, or codes with an fp32 scale per 128 (docs/formats.md)."""
    if bits >= 16:
        return numel * min(bits // 8, parameter_nbytes)
    scales = -(-numel // 128) * 4
    return numel + scales + (0 if bits == 8 else -(-numel // 2) + scales)


def optimizer_nbytes(numel: int, optimizer: str, parameter_nbytes: int = 4) -> int:
    """Bytes of AdamW's two moments: in the parameter's dtype, or 8 bits with an fp32 scale per 256.

    Tensors below 4096 elements stay in fp32 with the 8-bit optimizer.
    """
    if optimizer == "adamw":
        return 2 * numel * parameter_nbytes
    return 8 * numel if numel < 4096 else 2 * (numel + -(-numel // 256) * 4)
