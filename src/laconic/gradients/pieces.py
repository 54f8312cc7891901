"""One piece of a reduction, from quantizing to the result.

A piece is a generator that yields where it waits for the network; see laconic.collectives.engine.overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collectives.runtime import torch_compat
from laconic.gradients.message import Message, Parts, num_blocks
from laconic.ops import dequantize_blockwise, quantize_blockwise, sum_blockwise, sum_requantize_blockwise
from laconic.ops.codebooks import GRADIENT_BLOCK_SIZE

__all__ = ["Agree", "codes_piece", "scatter_piece", "tensor_piece"]

Agree = Callable[[], None]
"""Waits until all ranks are known to mean the same, before the first payload is sent."""


def scatter_piece(
    rows: Tensor, chunk: Tensor, group: dist.ProcessGroup, factor: float, agree: Agree | None
) -> Iterator[None]:
    """Columns of every rank's chunk, rows [W, m] -> chunk fp32 [m]."""
    message = Message(rows.shape[1], bits=8)
    sent = message.zeros(group.size(), rows.device)
    codes, scales = _quantize(rows)
    views = message.parts(sent)
    views.codes.copy_(codes)
    views.scales.copy_(scales)
    received = yield from _exchange(sent, group, agree)
    chunk.copy_(sum_blockwise(*message.parts(received), factor=factor))


def tensor_piece(
    x: Tensor, group: dist.ProcessGroup, factor: float, error: Tensor | None, agree: Agree | None
) -> Iterator[None]:
    """Flat values x [m], replaced by their reduction."""
    exact = x if error is None else x.float() + error
    parts = Parts(*_quantize(exact))
    if error is not None:
        error.copy_((exact - _dequantize(parts, torch.float32)).nan_to_num_(0.0, 0.0, 0.0))
    reduced = yield from _sum_everywhere(parts, group, factor, agree)
    x.copy_(_dequantize(reduced, x.dtype))


def codes_piece(parts: Parts, group: dist.ProcessGroup, factor: float, agree: Agree | None) -> Iterator[None]:
    """Flat codes and scales, replaced by those of their reduction."""
    reduced = yield from _sum_everywhere(parts, group, factor, agree)
    for old, new in zip(parts, reduced, strict=True):
        if old is not None and new is not None:
            old.copy_(new)


def _sum_everywhere(
    parts: Parts, group: dist.ProcessGroup, factor: float, agree: Agree | None
) -> Generator[None, None, Parts]:
    """Flat parts of m elements on each rank -> the parts of their sum times `factor`, on every rank."""
    world, length = group.size(), parts.codes.numel()
    bits = 8 if parts.residual_codes is None else 12
    # Equal chunks of whole blocks; those of the last ranks may hold nothing.
    message = Message(-(-num_blocks(length) // world) * GRADIENT_BLOCK_SIZE, bits)
    sent = message.zeros(world, parts.codes.device)
    message.write(parts, sent)
    received = yield from _exchange(sent, group, agree)
    mine = message.zeros(1, parts.codes.device)
    message.write(Parts(*sum_requantize_blockwise(*message.parts(received), factor=factor)), mine)
    work = torch_compat.all_gather(received, mine, group)
    yield
    work.wait()
    return message.read(received, length)


def _exchange(sent: Tensor, group: dist.ProcessGroup, agree: Agree | None) -> Generator[None, None, Tensor]:
    """The messages of all ranks to this one, of rows that are messages to each."""
    if agree is not None:
        agree()
    received = torch.empty_like(sent)
    work = torch_compat.all_to_all(received, sent, group)
    yield
    work.wait()
    return received


def _quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    return quantize_blockwise(x, code="int8", block_size=GRADIENT_BLOCK_SIZE, scale_dtype=torch.float32)


def _dequantize(parts: Parts, dtype: torch.dtype) -> Tensor:
    return dequantize_blockwise(
        parts.codes,
        parts.scales,
        length=parts.codes.numel(),
        code="int8",
        block_size=GRADIENT_BLOCK_SIZE,
        dtype=dtype,
    )
