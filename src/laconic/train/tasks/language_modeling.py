"""Next-token prediction on windows of a token stream."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laconic.errors import ConfigError
from laconic.train.config.schema import ImagesConfig, TrainConfig
from laconic.train.config.values import refuse
from laconic.train.model_source import check_path, own_tokenizer, tokenizer_files
from laconic.train.task import Task

if TYPE_CHECKING:
    from torch import Tensor, nn

    from laconic.train.data.corpus import TokenCorpus
    from laconic.train.data.instructions import Examples
    from laconic.train.distributed.parallel_state import ParallelState
    from laconic.train.distributed.world import World

logger = logging.getLogger(__name__)

_SAMPLE_TOKENS = 1 << 18


class LanguageModeling(Task):
    """A Hugging Face causal language model; batches are tokens, int64 [n, T + 1]."""

    unit = "token"
    _vocabulary: TokenCorpus | Examples

    def __init__(self, config: TrainConfig, world: World, parallel_state: ParallelState) -> None:
        from laconic.train.data.corpus import TokenDataset, prepare

        self._begin(config, world, parallel_state)
        self._corpus = self._vocabulary = prepare(config.data, verify=world.local_rank == 0)
        self._train = TokenDataset(self._corpus.train, config.sequence_length)
        self._validation = None
        if config.eval_sequences > 0 and len(self._corpus.validation) > 0:
            self._validation = TokenDataset(self._corpus.validation, config.sequence_length)
        self.units_per_sample = config.sequence_length
        self.num_validation = 0 if self._validation is None else len(self._validation)
        self.fingerprint = self._corpus.fingerprint

    def _begin(self, config: TrainConfig, world: World, parallel_state: ParallelState) -> None:
        _check_batch(config, parallel_state.num_replicas)
        self._config = config
        self._device_type = world.device.type
        self._micro_batch_size = config.batch_size // (parallel_state.num_replicas * config.micro_batches)

    @classmethod
    def check(cls, config: TrainConfig) -> None:
        if config.images != ImagesConfig():
            refuse(config, "images", "be left out unless task = image-classification")

    @classmethod
    def resolve(cls, config: TrainConfig) -> TrainConfig:
        check_path(config.model)
        path = config.model.path
        if config.data.tokenizer is None:
            tokenizer = "bytes" if path is None else own_tokenizer(path, config.model.allow_download)
            config = replace(config, data=replace(config.data, tokenizer=tokenizer))
            if path is not None:
                logger.info("tokenizer: %s", tokenizer if tokenizer != "bytes" else f"bytes, as {path} has none")
        elif path is not None and Path(path).is_dir() and (found := tokenizer_files(Path(path))):
            logger.info("tokenizer: %s, as data.tokenizer says, not %s of %s", config.data.tokenizer, found[0], path)
        return config

    def build_model(self) -> nn.Module:
        """The model that `[model]` describes, with an embedding for every token of the data."""
        from laconic.train.data.corpus import check_vocab
        from laconic.train.model import build_model

        config, data = self._config, self._vocabulary
        model = build_model(config.model, data.vocab_size, config.sequence_length, config.seed, data.end_of_document)
        num_entries = next(model.get_input_embeddings().parameters()).shape[0]
        check_vocab(data, num_entries)
        self.chunked_loss = self._chunks_loss(num_entries)
        return model

    def activation_options(self, model: nn.Module) -> dict[str, Any]:
        return {"sequence_length": self._config.sequence_length, "loss": "chunked" if self.chunked_loss else "exact"}

    def bf16_nbytes_per_unit(self, model: nn.Module) -> float:
        from laconic.activations import saved_nbytes_per_token

        return saved_nbytes_per_token(model, sequence_length=self._config.sequence_length)

    def training_batch(self, indices: range) -> Any:
        """Windows at `indices` of the run's order, int64 [n, T + 1]."""
        return self._train.drawn(self._config.seed, indices)

    def validation_batch(self, samples: Sequence[int]) -> Any:
        """Validation windows, int64 [n, T + 1]."""
        import torch

        assert self._validation is not None
        return torch.stack([self._validation[sample] for sample in samples])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        from laconic.train.model_split import mean_loss

        return mean_loss(model, batch[:, 1:], self.chunked_loss, input_ids=batch[:, :-1])

    def write_files(self, run_dir: Path) -> None:
        from laconic.train.data.tokenizer import load_tokenizer
        from laconic.train.report.run_dir import copy_tokenizer

        copy_tokenizer(load_tokenizer(self._tokenizer, self._config.data.end_of_document), run_dir)

    def bytes_per_token(self) -> float | None:
        from laconic.train.data.tokenizer import bytes_per_token, load_tokenizer

        stream = self._corpus.validation if len(self._corpus.validation) else self._corpus.train
        tokenizer = load_tokenizer(self._tokenizer, self._config.data.end_of_document)
        return bytes_per_token(tokenizer, stream.read(0, min(len(stream), _SAMPLE_TOKENS)))

    @property
    def _tokenizer(self) -> str:
        return self._config.data.tokenizer or "bytes"

    def _chunks_loss(self, num_entries: int) -> bool:
        from laconic.activations.whole_model.loss import TILES

        chosen = self._config.activations
        if chosen.loss != "auto":
            return chosen.loss == "chunked"
        tokens = self._micro_batch_size * self._config.sequence_length
        _, tile_numel = TILES[self._device_type]
        return chosen.mode == "sites" and tokens * num_entries > tile_numel


def _check_batch(config: TrainConfig, num_replicas: int) -> None:
    """Check that the token ids of a step alone fit into this machine's memory."""
    import psutil

    sequences = config.batch_size // num_replicas
    nbytes, memory = 8 * sequences * (config.sequence_length + 1), psutil.virtual_memory().total
    if nbytes > memory:
        raise ConfigError(
            f"batch_size is {config.batch_size}, but the tokens of {sequences} sequences of {config.sequence_length} "
            f"take {nbytes:,} bytes on a process, and this machine has {memory:,}; lower batch_size"
        )


TASK = LanguageModeling
