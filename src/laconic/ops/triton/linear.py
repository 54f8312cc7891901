"""Rows times a matrix that is held as codes in Triton: the same bits as `reference/linear.py`.

One program multiplies one row by a few rows of the matrix. The arithmetic is that of blockwise.py: no fused
multiply-add.
"""

# The parameters of kernels have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.ops.codebooks import BITS, codebook_tensor
from laconic.ops.declarations.linear import check_linear_blockwise
from laconic.ops.reference.linear import SUMS
from laconic.ops.triton.blockwise import _bits, _code, _look_up, _name, _narrow, _on_device, _widen, _widen_bits

_OUTPUTS = 16
"""Rows of the matrix per program; with 4 warps, each thread adds to eight sums."""


@triton.jit
def _halved(sums, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr):
    """The upper half of sums [OUTPUTS, WIDTH] added to the lower."""
    return tl.sum(tl.reshape(sums, [OUTPUTS, 2, WIDTH // 2]), axis=1)


@triton.jit
def _linear_blockwise_kernel(
    x_ptr, length, codes_ptr, codes_per_row, scales_ptr, scales_per_row, table_ptr, num_outputs, out_ptr,
    BITS: tl.constexpr, TYPE: tl.constexpr, BLOCK_SIZE: tl.constexpr, OUTPUTS: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    # 1. Which row, which outputs. CUDA has 2**31 - 1 programs in the first dimension of a grid, 65535 in the others.
    programs_per_row = tl.cdiv(num_outputs, OUTPUTS)
    row = (tl.program_id(0) // programs_per_row).to(tl.int64)
    output = (tl.program_id(0) % programs_per_row).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = output < num_outputs
    codes_ptr += output[:, None] * codes_per_row
    scales_ptr += output[:, None] * scales_per_row

    # 2. Product k is added to sum k % SUMS.
    sums = tl.zeros([OUTPUTS, SUMS], tl.float32)
    for start in range(0, length, SUMS):
        column = start + tl.arange(0, SUMS)
        exists = is_output[:, None] & (column < length)[None, :]
        code = _code(codes_ptr, column[None, :], exists, BITS)
        if BITS == 4:
            level = tl.reshape(_look_up(table_ptr, tl.reshape(code & 15, [OUTPUTS * SUMS]), 16), [OUTPUTS, SUMS])
        else:
            level = ((code << (32 - BITS)) >> (32 - BITS)).to(tl.float32)
        scale = _widen(tl.load(scales_ptr + column[None, :] // BLOCK_SIZE, mask=exists, other=0))
        x = _widen_bits(tl.load(x_ptr + row * length + column, mask=column < length, other=0), TYPE)
        sums += level * scale * x[None, :]

    # 3. One sum of them all.
    sums = _halved(sums, OUTPUTS, 64)
    sums = _halved(sums, OUTPUTS, 32)
    sums = _halved(sums, OUTPUTS, 16)
    sums = _halved(sums, OUTPUTS, 8)
    sums = _halved(sums, OUTPUTS, 4)
    sums = _halved(sums, OUTPUTS, 2)
    total = tl.reshape(sums, [OUTPUTS])
    tl.store(out_ptr + row * num_outputs + output, _narrow(total, TYPE), mask=is_output)


def linear_blockwise(x: Tensor, codes: Tensor, scales: Tensor, code: str, block_size: int) -> Tensor:
    """`reference.linear_blockwise` in Triton, the same bits."""
    shape = check_linear_blockwise(x, codes, scales, code, block_size)
    x, codes, scales = x.detach().contiguous(), codes.contiguous(), scales.contiguous()
    out = x.new_empty(shape)
    if out.numel():
        with _on_device(x):
            _linear_blockwise_kernel[(math.prod(shape[:-1]) * -(-len(codes) // _OUTPUTS),)](
                _bits(x), x.shape[-1], codes, codes.shape[-1],
                _bits(scales) if scales.dtype == torch.bfloat16 else scales, scales.shape[-1],
                codebook_tensor(code, x.device), len(codes), _bits(out),
                BITS=BITS[code], TYPE=_name(x.dtype), BLOCK_SIZE=block_size, OUTPUTS=_OUTPUTS, SUMS=SUMS,
                enable_fp_fusion=False,
            )  # fmt: skip
    return out
