"""What a quantized tensor is: block-wise formats and the tensors stored in them."""

from __future__ import annotations

from laconic.formats.blockwise import BlockFormat, BlockTensor

__all__ = ["BlockFormat", "BlockTensor"]
