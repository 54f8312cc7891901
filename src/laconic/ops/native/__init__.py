"""CPU implementation: the C++ kernels of csrc/, or the reference where they were not built.

The extension takes raw pointers only. The files here, one per family of ops, allocate results and pass sizes that
schemas.py has checked.
"""

from laconic.ops.native.accumulate import accumulate_blockwise_, square_sum_blockwise
from laconic.ops.native.adamw import adamw8bit_, adamw8bit_multi_
from laconic.ops.native.bits import pack_bits, select_bits, unpack_bits
from laconic.ops.native.blockwise import dequantize_blockwise, multiply_quantize_blockwise, quantize_blockwise
from laconic.ops.native.gated import gated_backward_blockwise, gated_product_blockwise
from laconic.ops.native.library import SELECTION, supported_isas
from laconic.ops.native.lossless import lossless_decode_, lossless_decode_add_, lossless_encode
from laconic.ops.native.reduce import sum_blockwise, sum_requantize_blockwise
from laconic.ops.native.rows import sum_rows

__all__ = [
    "SELECTION",
    "accumulate_blockwise_",
    "adamw8bit_",
    "adamw8bit_multi_",
    "dequantize_blockwise",
    "gated_backward_blockwise",
    "gated_product_blockwise",
    "lossless_decode_",
    "lossless_decode_add_",
    "lossless_encode",
    "multiply_quantize_blockwise",
    "pack_bits",
    "quantize_blockwise",
    "select_bits",
    "square_sum_blockwise",
    "sum_blockwise",
    "sum_requantize_blockwise",
    "sum_rows",
    "supported_isas",
    "unpack_bits",
]
