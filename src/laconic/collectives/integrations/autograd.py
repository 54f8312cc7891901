"""Differentiable collectives: the exchange of rows with experts on other ranks, and its inverse in backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collectives import api
from laconic.collectives.codec import Codec


def all_to_all(
    x: Tensor,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    codec: Codec | str = "auto",
    table: Sequence[Sequence[int]] | None = None,
) -> Tensor:
    """Send rows of `x` to every rank of `group`, W of them, and return their rows, rank 0's first, differentiably.

    All ranks call it, and if the gradient of one is needed, all of them run backward through it; with a lossless codec
    it is linear and its gradient exact. A lossy one makes both inexact.

    Args:
        x: [n, ...]; its first input_splits[0] rows go to rank 0, the next input_splits[1] to rank 1 and so on.
        output_splits, input_splits: rows from and to each rank; None means n / W.
        group, codec: as in `api.all_to_all`; gradients are sent over it too, the other way.
        table: rows from each rank to each, [from][to], if all ranks know them; saves the exchange of sizes.
    """
    result: Tensor = _AllToAll.apply(x, output_splits, input_splits, group, codec, table)
    return result


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
        group: dist.ProcessGroup | None,
        codec: Codec | str,
        table: Sequence[Sequence[int]] | None,
    ) -> Tensor:
        ctx.reverse = (input_splits, output_splits, group, codec, table and list(zip(*table, strict=True)))
        num_rows = len(x) if output_splits is None else sum(output_splits)
        output = x.new_empty(num_rows, *x.shape[1:])
        received, sent = (None if splits is None else list(splits) for splits in (output_splits, input_splits))
        api.all_to_all(output, x.contiguous(), received, sent, group, codec=codec, table=table)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        # Through apply, so that gradients of gradients are exchanged as well.
        return _AllToAll.apply(grad, *ctx.reverse), None, None, None, None, None
