"""Answers to instructions: next-token prediction on examples, whose loss counts the tokens of answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from laconic.train.config.schema import DataConfig, TrainConfig
from laconic.train.config.values import refuse
from laconic.train.data.sampler import evenly, sample_id
from laconic.train.tasks.language_modeling import LanguageModeling

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor, nn

    from laconic.train.distributed.parallel_state import ParallelState
    from laconic.train.distributed.world import World


class ExampleBatch(NamedTuple):
    """Examples, each in a row of its own, filled up behind its end, where a causal model's answers do not look."""

    tokens: Tensor
    """int64 [n, T]."""
    labels: Tensor
    """int64 [n, T]: the next token where it belongs to an answer, else -100."""
    weight: Tensor
    """fp32 0-dim: its tokens of answers over the mean of the batches that are averaged with it."""

    def to(self, device: Any) -> ExampleBatch:
        """The same on `device`."""
        return ExampleBatch(*(tensor.to(device) for tensor in self))


class InstructionTuning(LanguageModeling):
    """A Hugging Face causal language model; batches are `ExampleBatch`.

    The loss of a step is the mean over the tokens of all answers of its batch, however processes and micro-batches
    share them.
    """

    def __init__(self, config: TrainConfig, world: World, parallel_state: ParallelState) -> None:
        from laconic.train.data.instructions import load_examples

        self._begin(config, world, parallel_state)
        self._num_parts = parallel_state.num_replicas * config.micro_batches
        self._examples = examples = load_examples(config.data, config.sequence_length)
        self._vocabulary = examples
        self._lengths, self._num_answers = examples.lengths, examples.num_answers
        self.units_per_sample = max(1, round(float(self._lengths[examples.train].mean())))
        self.num_validation = len(examples.validation) if config.eval_sequences > 0 else 0
        self.fingerprint = examples.fingerprint

    @classmethod
    def check(cls, config: TrainConfig) -> None:
        super().check(config)
        instead = f"with task = {config.task}"
        if config.pipeline.stages > 1:
            refuse(config, "pipeline.stages", f"be 1 {instead}: stages send each other samples of one length")
        if config.moe.expert_parallel is not None:
            refuse(config, "moe.expert_parallel", f"be left out {instead}: what fills up a row would reach experts")
        if config.plan is not None:
            refuse(config, "plan", f"be left out {instead}: it is made for samples of one length")
        if config.data.text_key != DataConfig().text_key:
            refuse(config, "data.text_key", f"be left out {instead}: lines have messages, or prompt and completion")

    def build_model(self) -> nn.Module:
        from laconic.moe.huggingface import find_blocks

        model, moe = super().build_model(), self._config.moe
        for name in ("router_aux_loss_coef", "router_z_loss_coef", "bias_rate"):
            if getattr(moe, name) != 0 and find_blocks(model):
                uneven = "what fills up a row would count as load of experts"
                refuse(
                    self._config,
                    f"moe.{name}",
                    f"be 0 for a mixture of experts with task = {self._config.task}: {uneven}",
                )
        return model

    def training_batch(self, indices: range) -> ExampleBatch:
        size = self._config.batch_size
        begin = indices.start // size * size
        step = self._chosen(range(begin, begin + size))
        return self._batch(self._chosen(indices), self._num_answers[step].sum() / self._num_parts)

    def validation_batch(self, samples: Sequence[int]) -> ExampleBatch:
        held, count = self._examples.validation, self.num_validation
        counted = held[evenly(min(self._config.eval_sequences, count), count)]
        return self._batch(held[list(samples)], self._num_answers[counted].mean() * len(samples))

    def num_units(self, indices: range) -> int:
        """Tokens of the examples, without what fills up their rows."""
        return int(self._lengths[self._chosen(indices)].sum())

    def loss(self, model: nn.Module, batch: ExampleBatch) -> Tensor:
        """Mean cross entropy per token of an answer, nats, times the weight of the batch."""
        from laconic.train.model_split import mean_loss

        return mean_loss(model, batch.labels, self.chunked_loss, input_ids=batch.tokens) * batch.weight

    def bytes_per_token(self) -> None:
        """Not known: the loss counts some of the tokens only."""
        return None

    def _chosen(self, indices: range) -> npt.NDArray[np.int64]:
        train = self._examples.train
        return train[[sample_id(self._config.seed, index, len(train)) for index in indices]]

    def _batch(self, numbers: npt.NDArray[np.int64], mean_answers: float) -> ExampleBatch:
        import torch

        examples = self._examples
        width = int(self._lengths[numbers].max())
        tokens = torch.full((len(numbers), width), examples.end_of_document, device="cpu")
        labels = torch.full((len(numbers), width), -100, device="cpu")
        for row, number in enumerate(numbers):
            part = slice(examples.offsets[number], examples.offsets[number + 1])
            ids, answers = (
                torch.from_numpy(examples.tokens[part].astype("int64")),
                torch.from_numpy(examples.answers[part]),
            )
            tokens[row, : len(ids) - 1] = ids[:-1]
            labels[row, : len(ids) - 1] = torch.where(answers[1:], ids[1:], -100)
        return ExampleBatch(
            tokens,
            labels,
            torch.tensor(self._num_answers[numbers].sum() / mean_answers, dtype=torch.float32, device="cpu"),
        )


TASK = InstructionTuning
