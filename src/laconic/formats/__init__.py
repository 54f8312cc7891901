"""What a quantized tensor is: block-wise formats and the tensors stored in them."""

from __future__ import annotations

from laconic.formats.blockwise import BlockFormat, BlockTensor
from laconic.formats.gradient import QuantizedGradient, quantized_gradient, set_quantized_gradient

__all__ = ["BlockFormat", "BlockTensor", "QuantizedGradient", "quantized_gradient", "set_quantized_gradient"]
