"""Persistent memory: parameters, gradients, optimizer state, tensor by tensor."""

from __future__ import annotations

from collections import Counter

from laconic.cost.memory.job import Job, PlannedStage
from laconic.options import MOMENT_BITS, MOMENT_BLOCK_SIZES


def persistent_nbytes(job: Job, stages: list[PlannedStage]) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state of a rank that holds `stages`."""
    layout, settings = job.layout, job.settings
    element = job.precision.parameter_nbytes
    total = Counter({"parameters": 0, "gradients": 0, "optimizer": 0})
    parts = layout.data_parallel if layout.sharded else 1
    tensors = [(rows, columns, parts) for stage in stages for rows, columns in stage.tensors()]
    tensors += _experts(job, stages)
    total["parameters"] += job.model.buffers_nbytes
    for rows, columns, parts in tensors:
        local_rows = -(-rows // (parts * layout.tensor_parallel))
        numel = local_rows * columns
        total["parameters"] += numel * element
        if not settings.update_in_backward:  # else the one that is there is workspace
            total["gradients"] += gradient_nbytes(numel, settings.gradient_bits, element)
        if settings.optimizer in MOMENT_BITS and _has_coded_moments(rows, columns):
            total["optimizer"] += _coded_nbytes(local_rows, columns, MOMENT_BITS[settings.optimizer])
        else:
            total["optimizer"] += 2 * numel * (element if settings.optimizer == "adamw" else 4)
    return dict(total)


def expert_gradients_nbytes(job: Job, stages: list[PlannedStage]) -> int:
    """Bytes of the gradients of experts of a rank that holds `stages`."""
    bits, element, tensor_parallel = (
        job.settings.gradient_bits,
        job.precision.parameter_nbytes,
        job.layout.tensor_parallel,
    )
    numels = [-(-rows // (parts * tensor_parallel)) * columns for rows, columns, parts in _experts(job, stages)]
    return sum(gradient_nbytes(numel, bits, element) for numel in numels)


def _experts(job: Job, stages: list[PlannedStage]) -> list[tuple[int, int, int]]:
    # Experts are cut over the processes that share them, and what each of these has is sharded over the rest.
    cut = max(job.layout.data_parallel if job.layout.sharded else 1, job.layout.expert_parallel)
    return [(count * rows, columns, cut) for stage in stages for count, rows, columns in stage.experts()]


def gradient_nbytes(numel: int, bits: int, parameter_nbytes: int = 4) -> int:
    """Bytes of one tensor's gradient: dense in 16 or 32 bits, or codes with an fp32 scale per 128 (docs/formats.md)."""
    if bits >= 16:
        return numel * min(bits // 8, parameter_nbytes)
    scales = -(-numel // 128) * 4
    return numel + scales + (0 if bits == 8 else -(-numel // 2) + scales)


def _coded_nbytes(rows: int, columns: int, bits: int) -> int:
    """Bytes of the two moments of a matrix in an AdamW8bit: codes, and an fp32 scale per block of a row."""
    return 2 * rows * (-(-columns * bits // 8) + -(-columns // MOMENT_BLOCK_SIZES[bits]) * 4)


def _has_coded_moments(rows: int, columns: int) -> bool:
    """Whether a whole parameter is large enough for AdamW8bit to keep its moments in codes; vectors stay in fp32."""
    return columns >= 16 and rows * columns >= 4096
