"""Grouped matrix product: one product per expert, over rows sorted by expert.

Two implementations, one result up to rounding. `torch._grouped_mm` is one call for all experts; it takes fp32, bf16 and
fp16, rows whose bytes are a multiple of 16, and on CUDA an Ampere or newer GPU. Everything else, such as fp64, is one
`mm` per expert. A padded `bmm` would be a third: the benchmark `moe-layer` has it beside these two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from laconic.errors import RoutingError

Way = Literal["grouped", "loop"]

_GROUPED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ALIGNMENT_NBYTES = 16
_MANY_ROWS = 128


def grouped_mm(rows: Tensor, weights: Tensor, counts: Tensor, way: Way | None = None) -> Tensor:
    """Multiply rows by their experts' weights: the first counts[0] rows by weights[0], and so on; [q, N].

    Args:
        rows, weights: [q, M] and [E, M, N], of one dtype; under autocast both become autocast's.
        counts: int64 [E], on the rows' device, summing to q; experts without rows are fine, so are no rows at all.
        way: implementation; None picks `way_of`.

    Raises:
        RoutingError: shapes, dtypes or counts do not fit. (On a GPU the sum of the counts is not checked where
            `torch._grouped_mm` runs, because that would wait. Rows behind it have undefined products.)
    """
    device = rows.device.type
    if torch.is_autocast_enabled(device) and rows.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        rows, weights = rows.to(dtype), weights.to(dtype)
    _check(rows, weights, counts)
    if (way or way_of(rows, weights)) == "grouped":
        # F.grouped_mm is the same operation under another name.
        product = torch._grouped_mm(rows, weights, offs=counts.cumsum(0).to(torch.int32))
        return _Contiguous.apply(product)
    if not len(counts):
        return rows @ weights.sum(0)  # no rows, in a graph with both
    parts = _parts(rows, counts)
    return torch.cat([part @ weight for part, weight in zip(parts, weights.unbind(), strict=True)])


def way_of(rows: Tensor, weights: Tensor) -> Way:
    """Return the implementation by which `grouped_mm` multiplies such rows and weights."""
    # Without rows, its gradient in the weights was seen to be uninitialized memory.
    if rows.dtype not in _GROUPED_DTYPES or rows.shape[0] == 0 or weights.shape[0] == 0:
        return "loop"
    if torch.compiler.is_compiling() and rows.dtype != torch.bfloat16:  # what its fake takes
        return "loop"
    if rows.device.type == "cuda" and torch.cuda.get_device_capability(rows.device) < (8, 0):
        return "loop"
    itemsize = rows.element_size()
    inner, outer = weights.shape[1:]
    if inner * itemsize % _ALIGNMENT_NBYTES or outer * itemsize % _ALIGNMENT_NBYTES:
        return "loop"
    return "grouped"


def runs_expert_by_expert(rows: Tensor, num_experts: int) -> bool:
    """Return whether experts with such rows [q, M] run faster by `expert_by_expert`.

    True on CPUs where nothing is kept for backward and an expert has many rows: intermediate results then stay in the
    cache, and one product for all of them would write it to memory and read it back.
    """
    return (
        rows.device.type == "cpu"
        and len(rows) >= _MANY_ROWS * num_experts
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


def expert_by_expert(rows: Tensor, counts: Tensor, hidden: Callable[[Tensor, int], Tensor], down: Tensor) -> Tensor:
    """Multiply hidden(rows of expert e, e) [q_e, H] by down [E, H, M], expert by expert; [q, M]. Without gradients."""
    _check_counts(rows, down, counts)
    out = rows.new_empty(len(rows), down.shape[2])
    for number, (part, place) in enumerate(zip(_parts(rows, counts), _parts(out, counts), strict=True)):
        if len(part):
            torch.mm(hidden(part, number), down[number], out=place)
    return out


def _parts(rows: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
    return rows.split(counts.tolist())


class _Contiguous(torch.autograd.Function):
    """Identity in forward; in backward it copies an expanded gradient, as of a sum, which `_grouped_mm` refuses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()  # not a view to autograd: FSDP2 warns of modules that return one

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].contiguous()


def _check(rows: Tensor, weights: Tensor, counts: Tensor) -> None:
    if rows.dim() != 2 or weights.dim() != 3 or rows.shape[1] != weights.shape[1]:
        raise RoutingError(
            f"rows {list(rows.shape)} and weights {list(weights.shape)} must be [q, M] and [E, M, N] with one M"
        )
    if rows.dtype != weights.dtype:
        raise RoutingError(f"rows are {rows.dtype} and weights {weights.dtype}; cast one, or run under autocast")
    _check_counts(rows, weights, counts)


def _check_counts(rows: Tensor, weights: Tensor, counts: Tensor) -> None:
    if counts.shape != weights.shape[:1]:
        raise RoutingError(
            f"counts {list(counts.shape)} must have one entry for each of {weights.shape[0]} experts; give a rank as"
            " many experts as rows are routed to, as laconic.moe.expert_shard does"
        )
    if counts.device.type == "cpu" and int(counts.sum()) != rows.shape[0]:
        raise RoutingError(f"counts sum to {int(counts.sum())}, but there are {rows.shape[0]} rows")
