"""Rows that move: permuted, repeated for a token's experts, summed over them.

Autograd's own backward of `index_select` adds up rows in the gradient's dtype. Here the gradient of a permutation is
the inverse permutation, and rows of one token are added up in fp32, in the order of its entries, and rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["accumulation_dtype", "permuted", "spread", "summed"]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums of `dtype` are made in: fp64 for fp64, otherwise fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def permuted(rows: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    """rows[index] of [a, ...]; `index` and `inverse`, int64 [a], are a permutation and its inverse."""
    result: Tensor = _Permuted.apply(rows, index, inverse)
    return result


def spread(x: Tensor, tokens: Tensor, index: Tensor, inverse: Tensor, choices: int | None) -> Tensor:
    """x[tokens[index]]: the row of x [n, M] for every entry, in the order `index`; [a, M].

    tokens: int64 [a], ascending. choices: k if there are exactly k entries for each token, else None.
    """
    result: Tensor = _Spread.apply(x, tokens, index, inverse, choices)
    return result


def summed(values: Tensor, tokens: Tensor, num_tokens: int, choices: int | None) -> Tensor:
    """Sums [n, M] of values [a, M] over the entries of each token, in their order; zero for a token without any."""
    if choices is not None:
        return values.view(num_tokens, choices, values.shape[1]).sum(1)
    return values.new_zeros(num_tokens, values.shape[1]).index_add(0, tokens, values)


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
        values = permuted(grad, inverse, index).to(accumulation_dtype(grad.dtype))
        return summed(values, tokens, ctx.num_tokens, ctx.choices).to(grad.dtype), None, None, None, None
