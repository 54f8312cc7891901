"""Next-token prediction on windows of a token stream."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from laconic.train.data.corpus import TokenDataset
from laconic.train.data.sampler import sample_id
from laconic.train.model_split import mean_loss

__all__ = ["LanguageModeling"]


class LanguageModeling:
    """A `Task`; its batches are int64 [n, T + 1].

    Args:
        train, validation: windows of tokens.
        seed: of the order of samples.
        chunked_loss: whether the loss is computed without holding all logits.
    """

    def __init__(self, train: TokenDataset, validation: TokenDataset | None, seed: int, chunked_loss: bool) -> None:
        self._train = train
        self._validation = validation
        self._seed = seed
        self._chunked_loss = chunked_loss

    @property
    def num_validation(self) -> int:
        """Windows held out."""
        return 0 if self._validation is None else len(self._validation)

    def training_batch(self, indices: range) -> Tensor:
        """Windows at `indices` of the run's order, int64 [n, T + 1]."""
        train = self._train
        return torch.stack([train[sample_id(self._seed, index, len(train))] for index in indices])

    def validation_batch(self, samples: Sequence[int]) -> Tensor:
        """Validation windows, int64 [n, T + 1]."""
        assert self._validation is not None
        return torch.stack([self._validation[sample] for sample in samples])

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Mean cross entropy per token, nats."""
        return mean_loss(model, batch[:, 1:], self._chunked_loss, input_ids=batch[:, :-1])

    def evaluate(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, None]:
        """Mean cross entropy per token, nats."""
        return self.loss(model, batch), None
