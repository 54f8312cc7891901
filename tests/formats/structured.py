"""Tensors with a structure that windows around one exponent do not see, and the entropy of what they hold."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.ops.lossless import BLOCK_NUMEL, LAYOUTS, words_of
from laconic.ops.reference.lossless_ranked import split_planes

N = 3 * BLOCK_NUMEL + 77


def _floats() -> dict[str, Tensor]:
    """Values in float64, to be rounded to whatever type."""
    generator = torch.Generator().manual_seed(11)
    index = torch.arange(N)
    normal = torch.randn(N, generator=generator, dtype=torch.float64)
    small = torch.randint(-100, 101, (N,), generator=generator).double()
    uniform = torch.rand(N, generator=generator)
    rare = uniform < 0.01
    return {
        "two far modes": torch.where(index % 2 == 0, normal * 2.0**-6, normal * 2.0**7),
        "two far modes at random": torch.where(uniform < 0.5, normal * 2.0**-6, normal * 2.0**7),
        "three far modes": normal * torch.tensor([2.0**-7, 1.0, 2.0**7])[index % 3],
        "every third infinite": torch.where(index % 3 == 0, torch.inf, normal),
        "every third NaN": torch.where(index % 3 == 0, torch.nan, normal),
        "both infinities": torch.where(uniform < 0.4, torch.inf, torch.where(uniform < 0.8, -torch.inf, normal)),
        "every second zero": torch.where(index % 2 == 0, 0.0, normal),
        "minus zeros": torch.where(uniform < 0.7, -0.0, normal),
        "both zeros": torch.where(uniform < 0.4, -0.0, torch.where(uniform < 0.8, 0.0, normal)),
        "mask": (uniform < 0.5).double(),
        "rare mask": rare.double(),
        "minus infinity where masked": torch.where(uniform < 0.5, 0.0, -torch.inf),
        "positive": normal.abs(),
        "negative": -normal.abs(),
        "integers": small,
        "natural numbers": index.double() % 120,
        "few levels": torch.tensor([-1.0, -0.31, 0.17, 0.83])[torch.randint(0, 4, (N,), generator=generator)].double(),
        "sixteen levels": (torch.randint(0, 16, (N,), generator=generator) - 7.5) * 0.3,
        "constant": torch.full((N,), 0.7, dtype=torch.float64),
        "constant but for a few": torch.where(rare, normal, 0.7),
        "repeated rows": normal[:96].repeat(N // 96 + 1)[:N],
        "coarse mantissas": (normal * 4).round() / 4,
        "bfloat16 values": normal.bfloat16().double(),
        "bfloat16 values but for a few": torch.where(rare, normal, normal.bfloat16().double()),
        "half denormal": torch.where(index % 2 == 0, normal, normal * 1e-42),
    }


def structured(dtype: torch.dtype) -> dict[str, Tensor]:
    """Name -> tensor [N] of that dtype."""
    found = {}
    for name, x in _floats().items():
        if dtype == torch.bool:
            found[name] = x > 0.5
        elif dtype.is_complex:
            found[name] = torch.complex(x.float(), x.flip(0).float()).to(dtype)
        elif dtype.is_floating_point and dtype != torch.float8_e8m0fnu:
            found[name] = x.to(dtype)
        elif dtype.is_floating_point:
            found[name] = (
                (x.nan_to_num(0, 100, 100).abs().log2().clamp(-120, 120).nan_to_num(0, 0, 0) + 127)
                .to(torch.uint8)
                .view(dtype)
            )
        else:
            lowest = 0 if not dtype.is_signed else -100
            found[name] = x.nan_to_num(3, 100, -100).round().clamp(lowest, 100).to(torch.int64).to(dtype)
    return found


def entropy_bits(x: Tensor) -> float:
    """Bits that a code needs which knows, of every block and byte plane, how often each value comes; and no more."""
    layout = LAYOUTS[x.dtype]
    data = words_of(x).contiguous().view(-1).view(torch.uint8).view(-1, layout.nbytes)
    total = 0.0
    for block in data.split(BLOCK_NUMEL):
        for plane in split_planes(block, layout):
            share = torch.bincount(plane.long()).double() / len(plane)
            total += len(plane) * float(-(share * share.clamp(min=1e-300).log2()).sum())
    return total
