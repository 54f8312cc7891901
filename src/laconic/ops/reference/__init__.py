"""The specification of every op, in plain torch, one file per family.

All arithmetic is IEEE fp32 with round to nearest even, without fused multiply-add and without flushing subnormals. The
C++ and Triton kernels return the same bits. docs/formats.md specifies the same in words and bytes.
"""

from laconic.ops.reference.accumulate import accumulate_blockwise_, square_sum_blockwise
from laconic.ops.reference.adamw import adamw8bit_, adamw8bit_multi_, dequantize_dynamic, quantize_dynamic
from laconic.ops.reference.bits import pack_bits, select_bits, unpack_bits
from laconic.ops.reference.blockwise import (
    dequantize_blockwise,
    multiply_quantize_blockwise,
    quantize_blockwise,
    seed_key,
    uniform,
)
from laconic.ops.reference.gated import gated_backward_blockwise, gated_product_blockwise
from laconic.ops.reference.lossless import lossless_decode_, lossless_decode_add_, lossless_encode
from laconic.ops.reference.reduce import sum_blockwise, sum_requantize_blockwise
from laconic.ops.reference.rows import sum_rows

__all__ = [
    "accumulate_blockwise_",
    "adamw8bit_",
    "adamw8bit_multi_",
    "dequantize_blockwise",
    "dequantize_dynamic",
    "gated_backward_blockwise",
    "gated_product_blockwise",
    "lossless_decode_",
    "lossless_decode_add_",
    "lossless_encode",
    "multiply_quantize_blockwise",
    "pack_bits",
    "quantize_blockwise",
    "quantize_dynamic",
    "seed_key",
    "select_bits",
    "square_sum_blockwise",
    "sum_blockwise",
    "sum_requantize_blockwise",
    "sum_rows",
    "uniform",
    "unpack_bits",
]
