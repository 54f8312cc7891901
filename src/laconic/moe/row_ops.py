"""Differentiable row operations: permute rows, repeat them for a token's experts, sum over them.

Autograd's own backward of `index_select` adds up rows in the gradient's dtype. Here the gradient of a permutation is
the inverse permutation, and rows of one token are added up in fp32, in the order of its entries, and rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from laconic.ops import DTYPES, sum_rows


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums of `dtype`: fp64 for fp64, otherwise fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def permuted(rows: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    """Return rows[index] of rows [a, ...]; `index` and `inverse`, int64 [a], are a permutation and its inverse."""
    result: Tensor = _Permuted.apply(rows, index, inverse)
    return result


def spread(x: Tensor, tokens: Tensor, index: Tensor, inverse: Tensor, choices: int | None) -> Tensor:
    """Return x[tokens[index]], [a, M]: the row of x [n, M] for every entry, in the order `index`.

    `tokens`, int64 [a], ascend; `index` and `inverse`, int64 [a], are a permutation and its inverse. There are exactly
    `choices` entries for each token, unless it is None.
    """
    result: Tensor = _Spread.apply(x, tokens, index, inverse, choices)
    return result


def summed(values: Tensor, tokens: Tensor, num_tokens: int, choices: int | None) -> Tensor:
    """Sum values [a, M] over the entries of each token, in their order: [n, M]; zero for a token without any."""
    if choices is not None:
        return values.view(num_tokens, choices, values.shape[1]).sum(1)
    return values.new_zeros(num_tokens, values.shape[1]).index_add(0, tokens, values)


def _offsets_of(groups: Tensor, num_groups: int) -> Tensor:
    """Return int64 [num_groups + 1]: g has the entries offsets[g] to offsets[g + 1] of groups, int64 [a] ascending."""
    return torch.searchsorted(groups, torch.arange(num_groups + 1, device=groups.device))


def sum_picked(rows: Tensor, index: Tensor, groups: Tensor, num_groups: int, weights: Tensor | None = None) -> Tensor:
    """Sum rows[index] over the entries of each group, times their weights if any: [num_groups, M].

    Products and sums are in fp32 (fp64 for fp64), in the order of entries on CPUs, rounded once to the rows' dtype. Not
    differentiable. Rows are [q, M], `groups` int64 [a], ascending, `index` int64 [a], weights [a].
    """
    dtype = accumulation_dtype(rows.dtype)
    weights = None if weights is None else weights.to(dtype)
    if rows.device.type == "cpu" and rows.dtype in DTYPES:
        return sum_rows(rows, index, _offsets_of(groups, num_groups), weights)
    values = rows.index_select(0, index).to(dtype)
    return summed(values if weights is None else values * weights[:, None], groups, num_groups, None).to(rows.dtype)


def weighted_sums(rows: Tensor, weights: Tensor, index: Tensor, inverse: Tensor, tokens: Tensor, n: int) -> Tensor:
    """Sum weights[i] * rows[index[i]] over the entries i of each token: [n, M]; `sum_picked`, differentiable.

    `index` and `inverse`, int64 [a], are a permutation and its inverse; `tokens`, int64 [a], ascend.
    """
    result: Tensor = _WeightedSums.apply(rows, weights, index, inverse, tokens, n)
    return result


_DOT_ELEMENTS = 1 << 17
"""Elements multiplied at a time, few enough for the products to stay in the second-level cache."""


class _WeightedSums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor, index: Tensor, inverse: Tensor, tokens: Tensor, n: int
    ) -> Tensor:
        ctx.save_for_backward(rows, weights, index, inverse, tokens)
        return sum_picked(rows, index, tokens, n, weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        rows, weights, index, inverse, tokens = ctx.saved_tensors
        dtype = accumulation_dtype(grad.dtype)
        grad_rows = grad_weights = None
        if torch.is_grad_enabled():  # gradients of gradients: operations that autograd knows
            spread_grad = grad.index_select(0, tokens).to(dtype)
            grad_rows = permuted((spread_grad * weights.to(dtype)[:, None]).to(rows.dtype), inverse, index)
            grad_weights = (spread_grad * permuted(rows, index, inverse).to(dtype)).sum(1).to(weights.dtype)
            return grad_rows, grad_weights, None, None, None, None
        if ctx.needs_input_grad[0]:
            each = torch.arange(len(inverse), device=inverse.device)
            grad_rows = sum_picked(grad, tokens[inverse], each, len(each), weights[inverse])
        if ctx.needs_input_grad[1]:
            step = max(1, _DOT_ELEMENTS // max(1, rows.shape[1])) if rows.device.type == "cpu" else max(1, len(index))
            dots = [
                (rows.index_select(0, i).to(dtype) * grad.index_select(0, t).to(dtype)).sum(1)
                for i, t in zip(index.split(step), tokens.split(step), strict=True)
            ]
            grad_weights = torch.cat(dots).to(weights.dtype)
        return grad_rows, grad_weights, None, None, None, None


class _Permuted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(index, inverse)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        index, inverse = ctx.saved_tensors
        return permuted(grads[0], inverse, index), None, None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, index: Tensor, inverse: Tensor, choices: int | None) -> Tensor:
        ctx.save_for_backward(tokens, index, inverse)
        ctx.num_tokens, ctx.choices = x.shape[0], choices
        return x.index_select(0, tokens.index_select(0, index))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        tokens, index, inverse = ctx.saved_tensors
        if grad.device.type == "cpu" and not torch.is_grad_enabled():
            return sum_picked(grad, inverse, tokens, ctx.num_tokens), None, None, None, None
        values = permuted(grad, inverse, index).to(accumulation_dtype(grad.dtype))
        return summed(values, tokens, ctx.num_tokens, ctx.choices).to(grad.dtype), None, None, None, None
