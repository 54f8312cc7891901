"""Seeds for activations that are rounded stochastically.

At two bits a value is rounded up or down at random, so that what backward computes from it is right on average (Chen et
al., "ActNN", ICML 2021, theorem 1). Every tensor of every step needs random numbers of its own. They may not come from
torch's generators: forward draws from these (dropout), and a model with packed activations has to draw what the
unmodified one draws. So tensors are numbered in the order in which they are packed, and a number is hashed together
with torch's seed, which reading does not change. Numbers begin anew when the seed has changed: a loop that calls
`torch.manual_seed` with another seed in each step, as `laconic train` does, rounds alike when it is resumed at a step.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.activations.host.cuda_graph import is_captured
from laconic.errors import ModelError
from laconic.formats import BlockFormat, BlockTensor


class _Seeds:
    """Numbers the tensors that are rounded, and makes a seed of each number."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.fixed: int | None = None
        self.base: int | None = None
        self.count = 0

    def next(self) -> int:
        """A seed for one more tensor: 64 bits, signed."""
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        with self._lock:
            base = torch.initial_seed() if self.fixed is None else self.fixed
            if base != self.base:
                self.base, self.count = base, 0
            number, self.count = self.count, self.count + 1
        seed = _mix64(_mix64(base + rank) + number)
        return seed - (1 << 64) if seed >> 63 else seed

    def restart(self, fixed: int | None) -> None:
        """Begin with the first number again."""
        with self._lock:
            self.fixed, self.base, self.count = fixed, None, 0


def _mix64(z: int) -> int:
    """SplitMix64 (Steele, Lea, Flood 2014): one step and the finalizer, in unsigned 64 bits."""
    z = (z + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


_MASK = (1 << 64) - 1
_SEEDS = _Seeds()


def seed_rounding(seed: int | None) -> None:
    """Begin the random numbers of stochastic rounding anew in this process.

    Only formats of two bits round stochastically. Without this call the numbers follow from `torch.manual_seed` and
    from how many tensors have been packed since the seed last changed. Call it at the start of each step, with the
    step's number, if a resumed run is to give the same bits as one that was never interrupted.

    Args:
        seed: 64 bits, signed; the numbers follow from it and from the rank until the next call. None: from torch's
            seed again.

    Raises:
        ModelError: the seed is no integer of 64 bits.
    """
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not -(1 << 63) <= seed < 1 << 63):
        raise ModelError(f"seed is {seed!r}, but it must be None or an integer that fits in 64 bits, signed")
    _SEEDS.restart(seed)


@contextmanager
def seeds_restored() -> Iterator[None]:
    """After the block the numbers go on as if it had not run."""
    before = _SEEDS.base, _SEEDS.count
    try:
        yield
    finally:
        _SEEDS.base, _SEEDS.count = before


def quantized(x: Tensor, format: BlockFormat) -> BlockTensor:
    """`x` in a format, as activations are kept: rounded to nearest, in two bits stochastically.

    Args:
        x: [..., L].
        format: how to pack it.

    Raises:
        ModelError: in two bits in a graph of torch.compile or CUDA, which would repeat the random numbers in each step.
            Dynamo breaks its graph there and runs the site's code as it is; with fullgraph=True it refuses.
    """
    if not format.is_stochastic:
        return format.quantize(x)
    if torch.compiler.is_compiling() or is_captured(x.device):
        kind = "compiled" if torch.compiler.is_compiling() else "CUDA"
        raise ModelError(
            f"{format.code} rounds each tensor of each step with random numbers of its own, but a {kind} graph would "
            f"repeat them in every step; keep what is in the graph at 4 bits or more, or leave it out of the graph"
        )
    return format.quantize(x, seed=_SEEDS.next())
