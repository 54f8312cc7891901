"""Stochastic depth (arXiv 1603.09382): a sample goes by a branch at random, in training."""

from __future__ import annotations

from torch import Tensor, nn

from laconic.errors import ModelError


def check_rate(name: str, rate: float) -> None:
    """Raise ModelError unless `rate` is a probability below 1."""
    if not 0.0 <= rate < 1.0:
        raise ModelError(f"{name} is {rate}, but it must be at least 0 and below 1; 0.1 is usual")


class DropPath(nn.Module):
    """Set each sample of a branch to zero with probability `rate` and divide the others by 1 - rate, in training.

    Args:
        rate: in [0, 1).
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """[B, ...] -> [B, ...]."""
        if not self.training or self.rate == 0.0:
            return x
        kept = x.new_empty((len(x),) + (1,) * (x.dim() - 1)).bernoulli_(1.0 - self.rate)
        return x * kept.div_(1.0 - self.rate)

    def extra_repr(self) -> str:
        """The rate, for `print`."""
        return f"rate={self.rate}"
