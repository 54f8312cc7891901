"""Differentiable collectives, with a codec for the data in transit.

Each is the backward of its partner:

    all_gather       <-> reduce_scatter    every rank's values to all; their gradients added
    all_reduce       <-> all_reduce        a sum that ranks use for different things
    split            <-> gather            a part of a tensor that all ranks have alike
    replicate        <-> total             a tensor that all ranks have alike, used for different things

The first two are linear maps between the ranks' different tensors, as laconic.collectives' all-to-all is, and backward
is the adjoint: it adds the gradients of all ranks. The last two are for an MP group, where ranks hold *one* tensor in
copies: gather(split(x)) is x, and since every rank has the whole gradient of such a copy, backward passes on a part and
adds nothing twice.

All ranks of a group call them in the same order, and if one goes backward through them, all do. Reductions add in fp32
(float64: in float64) in the order of ranks and round once. `codec` as in `laconic.collectives`: a lossy one makes
values and gradients inexact. Gradients of gradients use the same collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic.collectives import api
from laconic.collectives.codec import Codec
from laconic.collectives.runtime import failure_diagnosis, torch_compat
from laconic.collectives.runtime.group_facts import ranks_of
from laconic.errors import FormatError

AnyCodec = Codec | str


def exchange_counts(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send row r of counts int64 [W, n] to rank r; return int64 [W, n], row r from rank r. Not differentiable."""
    received = torch.empty_like(counts)
    with losses_named(group):
        torch_compat.all_to_all(received, counts.contiguous(), group).wait()
    return received


def losses_named(group: dist.ProcessGroup) -> AbstractContextManager[None]:
    """Turn an error inside that is due to a lost rank of `group` into a CollectiveError that names the loss."""
    during = "while they exchanged rows of experts"
    return failure_diagnosis.losses_named(lambda: ranks_of(group), during)


def all_gather(x: Tensor, group: dist.ProcessGroup, *, codec: AnyCodec = "auto") -> Tensor:
    """Gather x [n, ...], of the same shape on all ranks: [W * n, ...], rank 0's rows first."""
    return _apply(x, _gathered, _scattered_sum, group, codec)


def reduce_scatter(x: Tensor, group: dist.ProcessGroup, *, codec: AnyCodec = "auto") -> Tensor:
    """Sum x [W * n, ...] over ranks and return this rank's part [n, ...]; FormatError if W parts are not even."""
    if len(x) % group.size():
        raise FormatError(f"x has {len(x)} rows, which {group.size()} ranks cannot share evenly; pad it")
    return _apply(x, _scattered_sum, _gathered, group, codec)


def all_reduce(x: Tensor, group: dist.ProcessGroup, *, codec: AnyCodec = "auto") -> Tensor:
    """Sum all ranks' x [...]; its gradients, different on each rank, are added as well."""
    return _apply(x, _summed, _summed, group, codec)


def split_sizes(num_rows: int, num_parts: int) -> list[int]:
    """Return the rows of each part of `split`: as even as possible, the larger ones first."""
    quotient, rest = divmod(num_rows, num_parts)
    return [quotient + (part < rest) for part in range(num_parts)]


def split(
    x: Tensor, group: dist.ProcessGroup, *, sizes: Sequence[int] | None = None, codec: AnyCodec = "auto"
) -> Tensor:
    """Return this rank's sizes[rank] rows of x [n, ...], which all ranks have alike; by default as even as possible."""
    sizes = _checked(sizes, len(x), group)
    return _apply(x, _Part(sizes), _Whole(sizes), group, codec)


def gather(x: Tensor, group: dist.ProcessGroup, *, sizes: Sequence[int], codec: AnyCodec = "auto") -> Tensor:
    """Join the rows of all ranks, x [sizes[rank], ...] each, to one tensor [sum(sizes), ...] that all have alike.

    Another number of rows than sizes[rank] is a FormatError.
    """
    sizes = _checked(sizes, None, group)
    if len(x) != sizes[group.rank()]:
        raise FormatError(f"x has {len(x)} rows, but sizes[{group.rank()}] is {sizes[group.rank()]}; count again")
    return _apply(x, _Whole(sizes), _Part(sizes), group, codec)


def replicate(x: Tensor, group: dist.ProcessGroup, *, codec: AnyCodec = "auto") -> Tensor:
    """Return x [...], which all ranks have alike, for different uses on each: their gradients are added."""
    return _apply(x, _same, _summed, group, codec)


def total(x: Tensor, group: dist.ProcessGroup, *, codec: AnyCodec = "auto") -> Tensor:
    """Sum all ranks' x [...], for the same use on each: every rank's gradient is that of the sum."""
    return _apply(x, _summed, _same, group, codec)


def replicated_call(module: nn.Module, x: Tensor, group: dist.ProcessGroup, *, codec: AnyCodec = "auto") -> Any:
    """Call module(x) where ranks hold the same parameters and different x; add the parameters' gradients over `group`.

    Parameters that need no gradient, buffers and hooks are those of an ordinary call.
    """
    if group.size() == 1 or not torch.is_grad_enabled():
        return module(x)
    shared = {name: replicate(p, group, codec=codec) for name, p in module.named_parameters() if p.requires_grad}
    return torch.func.functional_call(module, shared, (x,)) if shared else module(x)


# --- communication ---

_Operation = Callable[[Tensor, dist.ProcessGroup, AnyCodec], Tensor]


def _gathered(x: Tensor, group: dist.ProcessGroup, codec: AnyCodec) -> Tensor:
    output = x.new_empty(group.size() * len(x), *x.shape[1:])
    api.all_gather(output, x.contiguous(), group, codec=codec)
    return output


def _scattered_sum(x: Tensor, group: dist.ProcessGroup, codec: AnyCodec) -> Tensor:
    output = x.new_empty(len(x) // group.size(), *x.shape[1:])
    api.reduce_scatter(output, x.contiguous(), group, codec=codec)
    return output


def _summed(x: Tensor, group: dist.ProcessGroup, codec: AnyCodec) -> Tensor:
    output = x.clone(memory_format=torch.contiguous_format)
    api.all_reduce(output, group, codec=codec)
    return output


def _same(x: Tensor, group: dist.ProcessGroup, codec: AnyCodec) -> Tensor:
    return x.view_as(x)


class _Part:
    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes

    def __call__(self, x: Tensor, group: dist.ProcessGroup, codec: AnyCodec) -> Tensor:
        rank = group.rank()
        return x.narrow(0, sum(self.sizes[:rank]), self.sizes[rank])


class _Whole:
    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes

    def __call__(self, x: Tensor, group: dist.ProcessGroup, codec: AnyCodec) -> Tensor:
        most = max(self.sizes)
        if len({*self.sizes}) == 1:
            return _gathered(x, group, codec)
        padded = x.new_zeros(most, *x.shape[1:])
        padded[: len(x)] = x
        rows = _gathered(padded, group, codec).view(group.size(), most, *x.shape[1:])
        return torch.cat([part[:size] for part, size in zip(rows, self.sizes, strict=True)])


# --- autograd ---


def _apply(x: Tensor, there: _Operation, back: _Operation, group: dist.ProcessGroup, codec: AnyCodec) -> Tensor:
    if group.size() == 1:
        return x
    if not torch.is_grad_enabled():
        return there(x, group, codec)
    result: Tensor = _Collective.apply(x, there, back, group, codec)
    return result


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, there: _Operation, back: _Operation, group: dist.ProcessGroup, codec: AnyCodec
    ) -> Tensor:
        ctx.reverse = (back, there, group, codec)
        return there(x, group, codec)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        # Through apply, so that gradients of gradients travel as well.
        return _Collective.apply(grad, *ctx.reverse), None, None, None, None


def _checked(sizes: Sequence[int] | None, num_rows: int | None, group: dist.ProcessGroup) -> Sequence[int]:
    if sizes is None:
        assert num_rows is not None
        return split_sizes(num_rows, group.size())
    wanted = sum(sizes) if num_rows is None else num_rows
    if len(sizes) != group.size() or min(sizes) < 0 or sum(sizes) != wanted:
        raise FormatError(
            f"sizes are {list(sizes)}, but they must be {group.size()} numbers of rows that add up to {wanted}; count"
            " again"
        )
    return sizes
