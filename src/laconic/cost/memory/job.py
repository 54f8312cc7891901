"""The subject of a prediction: a model, a micro-batch, their distribution over processes, and bits per state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Literal

from laconic.cost.memory.model_shape import ModelShape
from laconic.cost.memory.saved_tensors import (
    EXACT,
    PRECISIONS,
    Batch,
    Choice,
    Precision,
    Unit,
    arguments_nbytes,
    head_unit,
    layer_units,
    loss_nbytes,
    rotary_nbytes,
)
from laconic.cost.memory.split import balanced_split
from laconic.errors import PlanError
from laconic.schedule import PipelineSchedule, make_schedule

__all__ = ["Job", "Layout", "Settings", "Stage", "kept_nbytes", "recomputed_nbytes"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Distribution of a run over processes.

    Attributes:
        data_parallel: replicas of the model, or processes it is sharded over.
        sharded: FSDP2 instead of DDP.
        stages: ranks of the pipeline.
        stages_per_rank: chunks of layers each holds.
        schedule: name of the pipeline schedule.
        micro_batches: of one optimizer step and replica.
        split: layers per chunk; empty is balanced by parameters.
        tensor_parallel: with sequence parallelism, for estimates only.
    """

    data_parallel: int = 1
    sharded: bool = False
    stages: int = 1
    stages_per_rank: int = 1
    schedule: str = "1f1b"
    micro_batches: int = 1
    split: tuple[int, ...] = ()
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        for name in ("data_parallel", "stages", "stages_per_rank", "micro_batches", "tensor_parallel"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} is {getattr(self, name)!r}, but it must be at least 1")
        if self.split and (len(self.split) != self.num_chunks or min(self.split) < 1):
            raise PlanError(
                f"split is {list(self.split)}, but it must give each of {self.num_chunks} chunks at least one layer"
            )

    @property
    def num_chunks(self) -> int:
        """Chunks of layers over all ranks of the pipeline."""
        return self.stages * self.stages_per_rank

    @property
    def world_size(self) -> int:
        """Processes of the run."""
        return self.data_parallel * self.stages * self.tensor_parallel

    def make_schedule(self) -> PipelineSchedule:
        """The order of forwards and backwards; without a pipeline, one micro-batch after the other."""
        return make_schedule(self.schedule, self.stages, self.micro_batches, self.stages_per_rank)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Precision and optimizer of a run: bits of everything but activations.

    Attributes:
        precision: "fp32", "bf16" (autocast over fp32 parameters) or "bf16-pure".
        optimizer: AdamW with fp32 states ("adamw") or 8-bit ones ("adamw8bit").
        gradient_bits: 32, 16, 12 or 8.
        loss: "exact" keeps the log-probabilities, "chunked" does not.
        device: "cuda" or "cpu", which has no other memory to offload to.
    """

    precision: Literal["fp32", "bf16", "bf16-pure"] = "bf16"
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    gradient_bits: int = 32
    loss: Literal["exact", "chunked"] = "exact"
    device: Literal["cuda", "cpu"] = "cuda"

    def __post_init__(self) -> None:
        rules: tuple[tuple[str, tuple[object, ...]], ...] = (
            ("precision", tuple(PRECISIONS)),
            ("optimizer", ("adamw", "adamw8bit")),
            ("gradient_bits", (8, 12, 16, 32)),
            ("loss", ("exact", "chunked")),
            ("device", ("cuda", "cpu")),
        )
        for name, allowed in rules:
            if getattr(self, name) not in allowed:
                raise PlanError(
                    f"{name} is {getattr(self, name)!r}, but it must be one of {', '.join(map(str, allowed))}"
                )


@dataclass(frozen=True)
class Job:
    """The subject of a prediction: a model, a micro-batch, a layout and settings."""

    shape: ModelShape
    batch: Batch
    layout: Layout = field(default_factory=Layout)
    settings: Settings = field(default_factory=Settings)

    @property
    def precision(self) -> Precision:
        """Element sizes of the run. FSDP2 gathers fp32 parameters in bf16, so nothing is cast by autocast there."""
        precision = PRECISIONS[self.settings.precision]
        if precision.autocast and self.layout.sharded and self.layout.data_parallel > 1:
            return Precision(precision.name, precision.parameter_nbytes, 2, 2)
        return precision

    @property
    def split(self) -> tuple[int, ...]:
        """Layers per chunk."""
        shape, layout = self.shape, self.layout
        if not layout.split:
            # Looking up an embedding is no work; the head is, as much as so many parameters in the layers.
            head = shape.embedding_parameters
            return balanced_split([shape.layer_parameters] * shape.num_layers, layout.num_chunks, last=head)
        if sum(layout.split) != shape.num_layers:
            raise PlanError(
                f"split is {list(layout.split)}, which makes {sum(layout.split)} layers, but the model has "
                f"{shape.num_layers}"
            )
        return layout.split

    def stages(self) -> list[Stage]:
        """The chunks of the model, first layers first."""
        counts = self.split
        made, start = [], 0
        for index, count in enumerate(counts):
            made.append(Stage(self, index, tuple(range(start, start + count)), index == 0, index == len(counts) - 1))
            start += count
        return made


@dataclass(frozen=True)
class Stage:
    """One chunk of the model: its layers, with the embedding if it is the first and the head if it is the last."""

    job: Job
    index: int
    layers: tuple[int, ...]
    is_first: bool
    is_last: bool

    def units(self) -> list[Unit]:
        """The units of this chunk: what a plan decides."""
        job = self.job
        units = [unit for layer in self.layers for unit in layer_units(job.shape, layer, job.batch, job.precision)]
        chunked = job.settings.loss == "chunked"
        return [*units, head_unit(job.shape, job.batch, job.precision, chunked)] if self.is_last else units

    def fixed_nbytes(self) -> dict[str, int]:
        """Bytes per micro-batch in flight that no choice changes, by kind."""
        job = self.job
        kept = {"attention": rotary_nbytes(job.shape, job.batch, job.precision, self.layers)}
        if self.is_first:
            kept["embedding"] = 8 * job.batch.tokens  # the tokens
        if self.is_last:
            kept["logits"] = loss_nbytes(job.shape, job.batch, job.precision, job.settings.loss == "chunked")
        return kept

    def tensors(self) -> list[tuple[int, int]]:
        """Rows and columns of every parameter; vectors have one column, stacked matrices the rows of all."""
        shape = self.job.shape
        of_layer = [(prod(t[:-1]), t[-1]) if len(t) > 1 else (t[0], 1) for t in shape.layer_tensors]
        tensors = of_layer * len(self.layers)
        if self.is_first:
            tensors.append((shape.vocab_size, shape.hidden_size))
        if self.is_last:
            tensors += [(shape.hidden_size, 1)] * shape.tensors_of_a_norm
            if not (shape.tied and self.is_first):
                tensors.append((shape.vocab_size, shape.hidden_size))
        return tensors


def kept_nbytes(
    stage: Stage, choices: Mapping[str, Choice], recomputed: Mapping[int, Choice]
) -> dict[str, tuple[str, int, int]]:
    """Saved bytes of one micro-batch in flight in a stage: name -> (kind, bytes on the device, bytes on the host)."""
    job = stage.job
    kept: dict[str, tuple[str, int, int]] = {}
    for kind, nbytes in stage.fixed_nbytes().items():
        kept[f"({kind} of stage {stage.index})"] = (kind, nbytes, 0)
    for unit in stage.units():
        choice = choices.get(unit.name, EXACT)
        if unit.layer in recomputed:
            continue
        beside = choices.get(unit.rebuilt_with or "", EXACT)
        kept[unit.name] = (unit.kind, unit.nbytes_beside(choice, beside), unit.host_nbytes(choice))
    again = sorted(set(recomputed) & set(stage.layers))
    packed = [u.layer for u in stage.units() if u.kind == "attention" and choices.get(u.name, EXACT) != EXACT]
    if holding := sorted({*again, *(layer for layer in packed if layer is not None)}):
        given = arguments_nbytes(job.shape, job.batch, job.precision, holding)
        kept[f"(attention's arguments in stage {stage.index})"] = ("attention", given, 0)
    for layer in again:
        kept[job.shape.layer_name(layer)] = ("recomputed", recomputed_nbytes(job, recomputed[layer]), 0)
    return kept


def recomputed_nbytes(job: Job, choice: Choice) -> int:
    """Bytes per micro-batch of the saved input of a decoder layer that runs again in backward."""
    tokens, hidden = job.batch.tokens, job.shape.hidden_size
    if choice.code is None:
        return tokens * hidden * job.precision.residual_nbytes
    return choice.packed_nbytes(tokens, hidden)
