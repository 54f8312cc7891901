"""What a run learns: a task owns its settings, data, model, loss and what it writes; the loop does the rest.

A task is one file in `laconic.train.tasks`, which calls its subclass of `Task` TASK; docs and flags find it there. The
class is looked at before anything heavy is loaded, so its file should import torch and transformers in functions only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from laconic.train.config.schema import ImagesConfig, LoraConfig, MoEConfig, TrainConfig
from laconic.train.config.values import refuse

if TYPE_CHECKING:
    from torch import Tensor, nn

    from laconic.train.distributed.parallel_state import ParallelState
    from laconic.train.distributed.world import World


class Task(ABC):
    """Data, model and loss of a run; the loop decides which samples a process takes and does the rest.

    A batch is whatever `loss` understands; it has `to(device)`. The methods that are not abstract fit a model that is
    any module and has no files of its own.

    Raises:
        ConfigError, DataError: the settings or the data cannot be used.
    """

    unit: ClassVar[str] = "sample"
    """What speed and bytes are counted per; a plural is formed with s."""
    classifies: ClassVar[bool] = False
    """Whether `evaluate` counts samples classified correctly."""
    fixed_settings: ClassVar[Mapping[str, Any]] = {
        "pipeline.stages": 1,
        "parallel": "ddp",
        "plan": None,
        "sequence_length": 256,
        "data.tokenizer": None,
        "data.end_of_document": None,
        "data.cache_dir": None,
        "data.text_key": "text",
        "activations.loss": "exact",
        "lora": LoraConfig(),
        "moe": MoEConfig(),
        "images": ImagesConfig(),
    }
    """Settings that the task does not know, by dotted name, with the one value each may have."""
    units_per_sample: int = 1
    """Where samples differ, their mean."""
    num_validation: int = 0
    """Samples held out for validation; 0: there is no validation."""
    fingerprint: str
    """Identity of the data and its split: a run is resumed with the same."""
    chunked_loss: bool = False
    """Whether the loss is computed without holding all logits; known once the model is built."""

    @abstractmethod
    def __init__(self, config: TrainConfig, world: World, parallel_state: ParallelState) -> None: ...

    @classmethod
    def check(cls, config: TrainConfig) -> None:
        """Refuse settings that the task does not know.

        Raises:
            ConfigError: there is one.
        """
        for name, allowed in cls.fixed_settings.items():
            value: Any = config
            for part in name.split("."):
                value = getattr(value, part)
            if value != allowed:
                written = isinstance(allowed, str | int)
                refuse(config, name, f"be {allowed if written else 'left out'} with task = {config.task}")

    @classmethod
    def resolve(cls, config: TrainConfig) -> TrainConfig:
        """Fill in settings whose default something else decides, and log them.

        Raises:
            ConfigError, ModelError: what decides is not certain.
        """
        return config

    def identity(self) -> dict[str, Any]:
        """Settings of the task alone that a resumed run must share with the run that wrote its checkpoint."""
        return {}

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Build the unchanged model: parameters fp32, on the CPU, in training mode; the same bits on every process.

        Raises:
            ConfigError, ModelError, DataError: it cannot be built, or does not fit the data.
        """

    def activation_options(self, model: nn.Module) -> dict[str, Any]:
        """What `compress_activations` needs to know beside `[activations]`; the default is an example of inputs."""
        return {"example_inputs": self.example_inputs(next(model.parameters()).device)}

    def example_inputs(self, device: Any) -> dict[str, Any]:
        """Arguments of a forward of the model on two samples, on `device`.

        Bytes are counted per entry of the first integer tensor among them.
        """
        raise NotImplementedError

    def bf16_nbytes_per_unit(self, model: nn.Module) -> float:
        """Bytes per unit that the unchanged `model` would keep for backward with parameters and inputs in bf16."""
        import copy

        from laconic.activations import saved_nbytes_per_token

        inputs = self.example_inputs(next(model.parameters()).device)
        halved = {name: value.bfloat16() if value.is_floating_point() else value for name, value in inputs.items()}
        in_bf16 = copy.deepcopy(model).bfloat16()  # with its buffers: batch normalization takes no mixture
        return saved_nbytes_per_token(in_bf16, dtype=None, example_inputs=halved)

    @abstractmethod
    def training_batch(self, indices: range) -> Any:
        """The samples at `indices` of the run's order (`train.data.sampler`), on the CPU."""

    def validation_batch(self, samples: Sequence[int]) -> Any:
        """The validation samples with these numbers, on the CPU."""
        raise NotImplementedError

    def num_units(self, indices: range) -> int:
        """Units in the samples at `indices` of the run's order, which speed is counted by."""
        return len(indices) * self.units_per_sample

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Mean loss of `model` on a batch, fp32, 0-dim."""

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | None]:
        """Mean loss on a batch and the number of samples classified correctly, both 0-dim; None: nothing to count."""
        return self.loss(model, batch), None

    def write_files(self, run_dir: Path) -> None:  # noqa: B027 - most tasks have nothing to write
        """Keep with the run what its model needs beside the weights, such as a tokenizer; the main process calls it."""

    def bytes_per_token(self) -> float | None:
        """UTF-8 bytes of text per token of the data; None where there is no text."""
        return None
