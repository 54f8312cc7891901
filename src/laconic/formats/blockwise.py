"""Block-wise formats: a tensor as small codes plus one scale per block, or step and minimum.

`BlockFormat` says how; `BlockTensor` holds the result with what is needed to undo it. The numbers and bytes are
those of `laconic.ops`; docs/formats.md has the layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from laconic.errors import FormatError
from laconic.ops import BITS, dequantize_blockwise, quantize_blockwise
from laconic.ops.codebooks import AFFINE, scales_per_block
from laconic.ops.declarations.blockwise import check_format
from laconic.options import ACTIVATION_BITS, DEFAULT_CODES, listed, takes


@dataclass(frozen=True)
class BlockFormat:
    """How a tensor is quantized: which code, how many elements per scale, and the scale's type.

    Raises:
        FormatError: the code, block size or scale type is not known.
    """

    code: str = "nf4"
    """One of `laconic.ops.BITS`."""
    block_size: int = 64
    """Elements along the last dimension that share one scale (uint2: step and minimum): 16, 32, 64, 128 or 256."""
    scale_dtype: torch.dtype = torch.bfloat16
    """float32, bfloat16 or float16."""

    def __post_init__(self) -> None:
        check_format(self.code, self.block_size, self.scale_dtype)

    @classmethod
    def from_bits(
        cls, bits: int, code: str | None = None, block_size: int = 64, scale_dtype: torch.dtype = torch.bfloat16
    ) -> BlockFormat | None:
        """The format for a number of bits per element: 4 is nf4 unless `code` says otherwise; the others have one code.

        16 gives None, which stands for the identity: the tensor is kept as it is.

        Raises:
            FormatError: there is no format of so many bits, or `code` has another number of them.
        """
        if not takes(ACTIVATION_BITS, bits):
            words = listed(ACTIVATION_BITS)
            raise FormatError(f"bits is {bits!r}, but it must be {words} (16 keeps the tensor as it is)")
        if code is not None and code not in BITS:
            raise FormatError(f"code is {code!r}, but it must be one of {', '.join(BITS)}")
        if code is not None and BITS[code] != bits:
            raise FormatError(f"code is {code!r}, which has {BITS[code]} bits, but bits is {bits}; change one of them")
        if bits == 16:
            return None
        return cls(code=code or DEFAULT_CODES[bits], block_size=block_size, scale_dtype=scale_dtype)

    @property
    def bits(self) -> int:
        """Bits per code, without the scale's share."""
        return BITS[self.code]

    @cached_property
    def is_stochastic(self) -> bool:
        """Whether activations are rounded stochastically in this format: to nearest, two bits lose small values."""
        return self.code in AFFINE

    def nbytes(self, shape: Sequence[int]) -> int:
        """Exact bytes of codes and scales for a tensor of this shape."""
        *leading, length = shape or (1,)
        codes_nbytes = -(-length * self.bits // 8)
        scales_nbytes = -(-length // self.block_size) * scales_per_block(self.code) * self.scale_dtype.itemsize
        return math.prod(leading) * (codes_nbytes + scales_nbytes)

    def quantize(self, x: Tensor, seed: int | None = None, center: Tensor | None = None) -> BlockTensor:
        """Quantize `x` [..., L] (float32, bfloat16 or float16); an integer seed rounds stochastically.

        `center` (fp32 [L]) is subtracted first; the result does not hold it, so `dequantize` takes it, too.
        """
        codes, scales = quantize_blockwise(
            x, code=self.code, block_size=self.block_size, scale_dtype=self.scale_dtype, seed=seed, center=center
        )
        return BlockTensor(codes, scales, self, x.shape, x.dtype)


@dataclass(eq=False, slots=True)  # not frozen, which makes an object in three times the time
class BlockTensor:
    """A quantized tensor: codes and scales, and what it takes to rebuild the values."""

    codes: Tensor
    """uint8 [..., ceil(L * bits / 8)] for a tensor [..., L]."""
    scales: Tensor
    """scale_dtype [..., ceil(L / block_size)]; of uint2 twice as many, each block's step and minimum."""
    format: BlockFormat
    """How it was quantized."""
    shape: torch.Size
    """Shape of the original."""
    dtype: torch.dtype
    """Element type of the original."""

    def dequantize(
        self, dtype: torch.dtype | None = None, after: Tensor | None = None, center: Tensor | None = None
    ) -> Tensor:
        """The values, in the original shape, as `dtype` (None: the original's), plus the `center` they were given.

        In a compiled graph they are not computed before `after` is (see laconic.ops.dequantize_blockwise).
        """
        values = dequantize_blockwise(
            self.codes,
            self.scales,
            length=self.shape[-1] if self.shape else 1,
            code=self.format.code,
            block_size=self.format.block_size,
            dtype=dtype or self.dtype,
            after=after,
            center=center,
        )
        return values if self.shape else values.view(())

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes
