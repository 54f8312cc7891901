"""The seam between the training loop and what is learned: samples, loss, evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor, nn

__all__ = ["Task"]


class Task(Protocol):
    """Data and loss of a run; the loop decides which samples a process takes and does the rest.

    A batch is whatever `loss` understands; it has `to(device)`.
    """

    @property
    def num_validation(self) -> int:
        """Samples held out for validation; 0: there is no validation."""
        ...

    def training_batch(self, indices: range) -> Any:
        """The samples at `indices` of the run's order (`train.data.sampler`), on the CPU."""
        ...

    def validation_batch(self, samples: Sequence[int]) -> Any:
        """The validation samples with these numbers, on the CPU."""
        ...

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Mean loss of `model` on a batch, fp32, 0-dim."""
        ...

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | None]:
        """Mean loss on a batch and the number of samples classified correctly, both 0-dim; None: nothing to count."""
        ...
