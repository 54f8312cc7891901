"""Orders: expand tokens to rows sorted by expert, and sum rows back to tokens with the gate's weights."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from laconic.moe.routing import Routing
from laconic.moe.row_ops import accumulation_dtype, permuted, spread, summed, weighted_sums


class Order(Protocol):
    """Expansion of tokens to rows of experts, and the weighted sums back.

    Both halves are differentiable in the tokens or rows, `combine` in the routing's weights as well.
    """

    def permute(self, x: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        """Return rows [a, M] of tokens x [n, M], one per entry, sorted by expert, stable, and counts, int64 [E]."""

    def combine(self, rows: Tensor, routing: Routing) -> Tensor:
        """Return tokens [n, M] of rows [a, M] in the order of `permute`: each token's sum of weight times row.

        Products and sums are in fp32 (fp64 for fp64), in the order of the routing's entries, rounded once to the rows'
        dtype; a token's bits depend on its own entries alone. A token without entries gets zeros.
        """


class SortedOrder(Order):
    """Order by a stable sort: gathers rows, and sums over each token in the order of its entries."""

    def permute(self, x: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        rows = spread(x, routing.tokens, routing.by_expert, routing.row_of_entry, routing.choices)
        return rows, routing.counts()

    def combine(self, rows: Tensor, routing: Routing) -> Tensor:
        if rows.device.type == "cpu":
            index, inverse = routing.row_of_entry, routing.by_expert
            return weighted_sums(rows, routing.weights, index, inverse, routing.tokens, routing.num_tokens)
        return self.multiplied(rows, routing)

    def multiplied(self, rows: Tensor, routing: Routing) -> Tensor:
        """Return what `combine` does, by torch's own products and sums, as on GPUs."""
        dtype = accumulation_dtype(rows.dtype)
        values = permuted(rows, routing.row_of_entry, routing.by_expert).to(dtype)
        weights = routing.weights.to(dtype)
        if routing.choices is not None:  # one row-matrix product per token, without intermediate products
            num_tokens, k = routing.num_tokens, routing.choices
            with torch.autocast(rows.device.type, enabled=False):
                sums = torch.bmm(weights.view(num_tokens, 1, k), values.view(num_tokens, k, rows.shape[1]))
            return sums.squeeze(1).to(rows.dtype)
        return summed(values * weights[:, None], routing.tokens, routing.num_tokens, None).to(rows.dtype)


class DenseOrder(Order):
    """Reference order of one-hot matrices and matrix products, as GShard's einsums; for tests, O(a * n) memory.

    Only for finite values: zero times infinity is not zero.
    """

    def permute(self, x: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        return self._token_of_row(routing, x.dtype) @ x, routing.counts()

    def combine(self, rows: Tensor, routing: Routing) -> Tensor:
        """See `Order.combine`; the order of sums is that of the matrix product."""
        dtype = accumulation_dtype(rows.dtype)
        weights = self._entry_of_row(routing, dtype) @ routing.weights.to(dtype)
        one_hot = self._token_of_row(routing, dtype)
        return ((one_hot * weights[:, None]).T @ rows.to(dtype)).to(rows.dtype)

    @staticmethod
    def _entry_of_row(routing: Routing, dtype: torch.dtype) -> Tensor:
        """Return one-hot [a, a]: row j comes from the entry with the j-th place by expert, then by position."""
        place = routing.experts * len(routing) + torch.arange(len(routing), device=routing.experts.device)
        rank = (place[None, :] < place[:, None]).sum(1)
        return _one_hot(rank, len(routing), dtype).T

    def _token_of_row(self, routing: Routing, dtype: torch.dtype) -> Tensor:
        """Return one-hot [a, n]: row j is of its token."""
        return self._entry_of_row(routing, dtype) @ _one_hot(routing.tokens, routing.num_tokens, dtype)


def _one_hot(index: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Return one-hot [len(index), size]; unlike torch's also for a size of 0."""
    return (index[:, None] == torch.arange(size, device=index.device)).to(dtype)
