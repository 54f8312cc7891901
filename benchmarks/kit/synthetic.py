"""Made-up gradients that are as hard to store and to sum as real ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_REGION = 512
"""Elements whose gradients are of one size."""


def heavy_tailed_gradients(length: int) -> Callable[..., Tensor]:
    """A function that draws fp32 gradients [*shape, length] when it is called with a shape.

    Student's t with 4 degrees of freedom, a size that differs from region to region, and a part of 0.3 that all share.
    """
    torch.manual_seed(0)
    student = torch.distributions.StudentT(4.0)
    size = torch.exp(1.5 * torch.randn(-(-length // _REGION))).repeat_interleave(_REGION)[:length]
    shared = student.sample((length,))
    return lambda *shape: size * (0.3 * shared + student.sample((*shape, length)))
