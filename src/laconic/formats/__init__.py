"""Compact forms of tensors: block-wise formats with the tensors stored in them, and the lossless format."""

from __future__ import annotations

from laconic.formats.blockwise import BlockFormat, BlockTensor
from laconic.formats.coded_gradient import CodedGradient, quantized_gradient, set_quantized_gradient
from laconic.formats.gradient import QuantizedGradient
from laconic.formats.lossless import Expect, decode, encode
from laconic.formats.zipped import load_zipped

__all__ = [
    "BlockFormat",
    "BlockTensor",
    "CodedGradient",
    "Expect",
    "QuantizedGradient",
    "decode",
    "encode",
    "load_zipped",
    "quantized_gradient",
    "set_quantized_gradient",
]
