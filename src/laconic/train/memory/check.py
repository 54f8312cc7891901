"""Compares predicted bytes with measured ones, for a run that is under way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laconic.cost import Batch, Choice, Job, Layout, ModelShape, Prediction, Settings
from laconic.cost.memory.persistent import persistent_nbytes
from laconic.cost.memory.saved_tensors import EXACT
from laconic.cost.sizes import format_nbytes
from laconic.formats import quantized_gradient
from laconic.formats.shards import local_part
from laconic.train.config.schema import TrainConfig

__all__ = ["MemoryCheck", "check_memory", "choices_of", "job_of"]


def job_of(config: TrainConfig, model_config: Mapping[str, Any], world_size: int, **settings: Any) -> Job:
    """The planner's description of a run.

    Args:
        config: of the run.
        model_config: the model's Hugging Face configuration as a dictionary (`model.config.to_dict()`).
        world_size: processes of the run.
        settings: fields of `laconic.cost.Settings` other than precision.

    Raises:
        PlanError: the planner does not know the model's family.
    """
    pipeline = config.pipeline
    replicas = world_size // pipeline.stages
    layout = Layout(
        data_parallel=replicas,
        sharded=config.parallel == "fsdp",
        stages=pipeline.stages,
        stages_per_rank=pipeline.virtual_stages,
        schedule=pipeline.schedule if pipeline.stages > 1 else "1f1b",
        micro_batches=config.micro_batches,
        split=tuple(pipeline.split),
    )
    sequences = config.batch_size // (replicas * config.micro_batches)
    shape = ModelShape.from_config(model_config)
    return Job(
        shape, Batch(sequences, config.sequence_length), layout, Settings(precision=config.precision, **settings)
    )


def choices_of(
    job: Job, bits: int, code: str | None = None, block_size: int = 64, attention: str = "exact"
) -> dict[str, Choice]:
    """The choices of `laconic.compress_activations(model, bits, format=code, attention=attention)`, by unit.

    Args:
        job: whose units.
        bits, code, block_size: as there; behind the layers at least 8 bits.
        attention: "exact" or a code.
    """
    inner = EXACT if bits == 16 else Choice(code or Choice.from_bits(bits).code, block_size)
    head = inner if inner.bits >= 8 else Choice("int8", block_size)
    core = EXACT if attention == "exact" else Choice(attention, block_size)
    by_kind = {"head": head, "attention": core}
    return {unit.name: by_kind.get(unit.kind, inner) for stage in job.stages() for unit in stage.units()}


@dataclass(frozen=True)
class MemoryCheck:
    """Bytes by kind as predicted and as measured; a kind that could not be measured is in neither."""

    predicted: Mapping[str, int]
    measured: Mapping[str, int]

    @property
    def error(self) -> float:
        """(predicted - measured) / measured, over all kinds."""
        return sum(self.predicted.values()) / max(1, sum(self.measured.values())) - 1

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"predicted": dict(self.predicted), "measured": dict(self.measured), "error": self.error}

    def __str__(self) -> str:
        parts = [
            f"{kind} {format_nbytes(self.predicted[kind])} ({format_nbytes(nbytes)})"
            for kind, nbytes in self.measured.items()
        ]
        return f"memory predicted (measured): {', '.join(parts)}; error {self.error:+.1%}"


def check_memory(
    job: Job,
    prediction: Prediction,
    *,
    saved_nbytes: int,
    parameters: Iterable[Tensor],
    optimizer: torch.optim.Optimizer | None = None,
    stages: Sequence[int] = (0,),
    rank: int = 0,
) -> MemoryCheck:
    """Compare a prediction with the memory of a process. Call it when gradients are there, before they are cleared.

    Args:
        job, prediction: of the run.
        saved_nbytes: saved for backward by one micro-batch's forward on this process, summed over its chunks
            (`SavedTensorTracker.nbytes`).
        parameters: of this process; of DTensors the local shard counts. Their gradients are dense or quantized.
        optimizer: its state counts, once it has made a step; None leaves it out.
        stages: chunks of the model that this process holds.
        rank: of the pipeline, for the allocator's peak on a GPU.
    """
    own = list(parameters)
    persistent = persistent_nbytes(job, [job.stages()[index] for index in stages])
    gradients = sum(_gradient_nbytes(parameter) for parameter in own)
    predicted = {
        "saved per micro-batch": sum(prediction.stage_saved_nbytes[index] for index in stages),
        "parameters": persistent["parameters"],
    }
    measured = {"saved per micro-batch": saved_nbytes, "parameters": sum(local_part(p).nbytes for p in own)}
    if gradients:
        predicted["gradients"], measured["gradients"] = persistent["gradients"], gradients
    if optimizer is not None and optimizer.state:
        predicted["optimizer"] = persistent["optimizer"]
        measured["optimizer"] = sum(tensor.nbytes for tensor in _state_tensors(optimizer.state))
    if own and own[0].device.type == "cuda":
        # Includes what the others list, so it stands alone.
        return MemoryCheck(
            {"peak": prediction.ranks[rank].total_nbytes},
            {"peak": torch.cuda.max_memory_allocated(own[0].device)},
        )
    return MemoryCheck(predicted, measured)


def _gradient_nbytes(parameter: Tensor) -> int:
    quantized = quantized_gradient(parameter)
    if quantized is not None:
        return quantized.nbytes
    return 0 if parameter.grad is None else local_part(parameter.grad).nbytes


def _state_tensors(state: Any) -> Iterator[Tensor]:
    """All tensors of an optimizer's state, but the counters of steps."""
    if isinstance(state, Tensor):
        if state.dim() > 0:
            yield local_part(state)
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from _state_tensors(value)
    elif hasattr(state, "__dict__"):
        yield from _state_tensors(vars(state))
