"""Training with attention's tensors at four bits and its log-sum-exp saved: what goes wrong with four bits everywhere.

    python -m benchmarks.saved_statistic train ...

is `laconic train ...` with a scaled dot-product attention that keeps query, key, value and output at nf4 and, unlike
laconic, uses the statistic of the exact tensors in backward. CPU only, one process.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from laconic.cli.main import main
from laconic.formats import BlockFormat, BlockTensor

_FORMAT = BlockFormat("nf4")


class _SavedStatistic(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: Any):
        output, log_sum_exp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=mask, scale=scale
        )
        packed = [_FORMAT.quantize(x) for x in (query, key, value, output)]
        ctx.save_for_backward(*(part for x in packed for part in (x.codes, x.scales)), log_sum_exp)
        ctx.shapes = [x.shape for x in packed]
        ctx.dtype, ctx.mask, ctx.causal, ctx.scale = query.dtype, mask, causal, scale
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):
        *parts, log_sum_exp = ctx.saved_tensors
        tensors = [
            BlockTensor(codes, scales, _FORMAT, shape, ctx.dtype).dequantize()
            for codes, scales, shape in zip(parts[::2], parts[1::2], ctx.shapes, strict=True)
        ]
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, *tensors, log_sum_exp, 0.0, ctx.causal, attn_mask=ctx.mask, scale=ctx.scale
        )
        return (*gradients, None, None, None)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    assert dropout_p == 0.0, "made for models without dropout"
    assert not enable_gqa, "made for models with one key per query head"
    output: Tensor = _SavedStatistic.apply(query, key, value, attn_mask, is_causal, scale)
    return output


if __name__ == "__main__":
    F.scaled_dot_product_attention = _attention
    sys.exit(main())
