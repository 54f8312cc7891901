"""Values that stand in for codes in the runs of an audit: the tensor itself, or what its codes rebuild, checked.

The bound of one value is derived, not tuned. A code has levels of which two neighbours lie `gap` apart at most, in
units of the block's scale; rounding to nearest is off by half a gap, stochastic rounding by a whole one. The scale is
the block's largest magnitude over the largest level (two bits: the spread of the block over three), and is rounded to
its dtype, which moves the largest values by eps of that dtype times the largest level; the result is rounded to the
tensor's dtype.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from laconic.activations.keep.rounding import quantized
from laconic.formats import BlockFormat
from laconic.ops.codebooks import AFFINE, ARITHMETIC, LEVEL_MAX, codebook


def unrounded(x: Tensor, format: BlockFormat) -> Tensor:
    """A copy of x."""
    return x.clone()


class Rounding:
    """Keeps what the codes of a tensor rebuild; `fault` says in words where a value first was off by more than allowed.

    It raises nothing itself: in a sharded model other ranks wait for this one's forward.
    """

    def __init__(self) -> None:
        self.fault: str | None = None

    def __call__(self, x: Tensor, format: BlockFormat) -> Tensor:
        """What the codes of x rebuild."""
        values = quantized(x, format).dequantize()
        too_far = (values.float() - x.float()).abs() > _bound(x.float(), format) + _of_dtype(x)
        if self.fault is None and bool(too_far.any()):  # NaN, of blocks that are not finite, is not
            place = tuple(int(i) for i in too_far.nonzero()[0])
            self.fault = (
                f"codes of {format.code} rebuild {values[place].item():.6g} in the place of {x[place].item():.6g} at "
                f"{list(place)} of a tensor {list(x.shape)}, further off than the format allows; likely causes: a "
                "kernel that is wrong on this device, a scale of another block"
            )
        return values


def _of_dtype(x: Tensor) -> Tensor:
    return x.float().abs() * (2 * torch.finfo(x.dtype).eps) + torch.finfo(torch.float32).tiny


def _bound(x: Tensor, format: BlockFormat) -> Tensor:
    if x.dim() == 0:
        return _bound(x.view(1), format).view(())
    length, size = x.shape[-1], format.block_size
    padding = -length % size
    top = F.pad(x, (0, padding), value=-torch.inf).unflatten(-1, (-1, size)).amax(-1)
    bottom = F.pad(x, (0, padding), value=torch.inf).unflatten(-1, (-1, size)).amin(-1)
    largest = torch.maximum(top.abs(), bottom.abs())
    level = LEVEL_MAX[format.code]
    levels = (
        None
        if format.code in ARITHMETIC
        else torch.tensor(codebook(format.code).sorted_levels, dtype=torch.float32, device="cpu")
    )
    gap = 1.0 if levels is None else float(levels.diff().max())
    gap = gap if format.is_stochastic else gap / 2
    eps = torch.finfo(format.scale_dtype).eps
    if format.code in AFFINE:
        bound = (top - bottom) / level * (gap + level * eps) + largest * eps
    else:
        bound = largest / level * (gap + level * eps)
    # fp16 scales below 2**-14 lose precision: half a step is 2**-25.
    smallest = 2.0**-25 if format.scale_dtype == torch.float16 else torch.finfo(torch.float32).tiny
    bound = bound * (1 + 2.0**-7) + smallest * (level + 1)
    return bound.repeat_interleave(size, -1)[..., :length]
