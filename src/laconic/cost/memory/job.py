"""The subject of a prediction: a model, a micro-batch, their distribution over processes, and bits per state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from laconic.cost.memory.saved_tensors import EXACT, PRECISIONS, Batch, Choice, Precision, Unit
from laconic.cost.memory.split import balanced_split
from laconic.cost.memory.traced import TracedModel
from laconic.errors import PlanError
from laconic.options import OPTIMIZERS, Optimizer
from laconic.schedule import PipelineSchedule, make_schedule

_MOST_ACTIONS = 1 << 20
"""Forwards of a schedule, which is written out: a file that asks for more would take all memory."""


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
        expert_parallel: of the data-parallel processes, how many share the experts of a layer.
    """

    data_parallel: int = 1
    sharded: bool = False
    stages: int = 1
    stages_per_rank: int = 1
    schedule: str = "1f1b"
    micro_batches: int = 1
    split: tuple[int, ...] = ()
    tensor_parallel: int = 1
    expert_parallel: int = 1

    def __post_init__(self) -> None:
        positive = ("data_parallel", "stages", "stages_per_rank", "micro_batches", "tensor_parallel", "expert_parallel")
        for name in positive:
            if getattr(self, name) < 1:
                raise PlanError(f"{name} is {getattr(self, name)!r}, but it must be at least 1")
        if self.num_chunks * self.micro_batches > _MOST_ACTIONS:
            raise PlanError(
                f"micro_batches is {self.micro_batches} on {self.num_chunks} chunks of layers, but a schedule of at"
                f" most {_MOST_ACTIONS:,} micro-batches over all chunks can be planned"
            )
        if self.data_parallel % self.expert_parallel:
            raise PlanError(
                f"expert_parallel is {self.expert_parallel}, but it must divide data_parallel ({self.data_parallel}), "
                "whose processes share the experts"
            )
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
        optimizer: AdamW with fp32 states ("adamw"), 8-bit ("adamw8bit") or 4-bit ones ("adamw4bit").
        gradient_bits: 32, 16, 12 or 8.
        loss: "exact" keeps the log-probabilities, or 16-bit logits where anything is packed; "chunked" keeps neither.
        device: "cuda" or "cpu", which has no other memory to offload to.
        update_in_backward: an 8- or 4-bit AdamW uses each gradient in backward, so that they are never there together.
    """

    precision: Literal["fp32", "bf16", "bf16-pure"] = "bf16"
    optimizer: Literal["adamw", Optimizer] = "adamw"
    gradient_bits: int = 32
    loss: Literal["exact", "chunked"] = "exact"
    device: Literal["cuda", "cpu"] = "cuda"
    update_in_backward: bool = False

    def __post_init__(self) -> None:
        rules: tuple[tuple[str, tuple[object, ...]], ...] = (
            ("precision", tuple(PRECISIONS)),
            ("optimizer", ("adamw", *OPTIMIZERS)),
            ("gradient_bits", (8, 12, 16, 32)),
            ("loss", ("exact", "chunked")),
            ("device", ("cuda", "cpu")),
        )
        for name, allowed in rules:
            if getattr(self, name) not in allowed:
                raise PlanError(
                    f"{name} is {getattr(self, name)!r}, but it must be one of {', '.join(map(str, allowed))}"
                )
        if self.update_in_backward and self.optimizer == "adamw":
            raise PlanError(
                f"optimizer is 'adamw', but it must be {' or '.join(OPTIMIZERS)} with update_in_backward, which "
                "torch's lacks"
            )
        if self.update_in_backward and self.gradient_bits < 16:
            raise PlanError(
                f"gradient_bits is {self.gradient_bits}, but it must be 32 or 16 with update_in_backward: codes hold "
                "all gradients until backward is over"
            )


def precision_of(settings: Settings, layout: Layout) -> Precision:
    """Element sizes of a run. FSDP2 gathers fp32 parameters in bf16, so nothing is cast by autocast there."""
    precision = PRECISIONS[settings.precision]
    if precision.autocast and layout.sharded and layout.data_parallel > 1:
        return Precision(precision.name, precision.parameter_nbytes, 2, 2)
    return precision


@dataclass(frozen=True)
class Job:
    """The subject of a prediction: a model, a micro-batch, a layout and settings."""

    model: TracedModel
    batch: Batch
    layout: Layout = field(default_factory=Layout)
    settings: Settings = field(default_factory=Settings)

    def __post_init__(self) -> None:
        model, layout, batch, precision = self.model, self.layout, self.batch, self.precision
        check_together(layout, self.settings)
        for layer in range(model.num_layers) if layout.expert_parallel > 1 else ():
            for count, _, _ in model.layer(layer).experts:
                if count % layout.expert_parallel:
                    raise PlanError(
                        f"expert_parallel is {layout.expert_parallel}, but it must divide the {count} experts of "
                        f"{model.names[layer]}"
                    )
        model.check_setting(
            sequences=batch.sequences,
            sequence_length=batch.sequence_length,
            precision=[precision.name, precision.residual_nbytes],
            loss=self.settings.loss,
            expert_parallel=layout.expert_parallel,
        )
        if layout.num_chunks > 1 and not model.is_stack:
            raise PlanError(
                f"stages are {layout.num_chunks}, but the layers of {model.model_class} are no single list that could "
                "be cut; plan with one stage"
            )

    @property
    def precision(self) -> Precision:
        """Element sizes of the run."""
        return precision_of(self.settings, self.layout)

    @property
    def not_counted(self) -> Mapping[str, str]:
        """Settings of `[moe]` whose bytes are in no prediction, if a run has them, and what those bytes are."""
        return _NOT_COUNTED if self.layout.expert_parallel > 1 else {}

    @property
    def split(self) -> tuple[int, ...]:
        """Layers per chunk."""
        layout = self.layout
        if not layout.split:
            model = self.model
            # Looking up an embedding is no work; the head is, as much as so many parameters in the layers.
            head = model.embedding_parameters
            sizes = [model.layers[kind].num_parameters for kind in model.kinds]
            return balanced_split(sizes, layout.num_chunks, last=head)
        if sum(layout.split) != self.model.num_layers:
            raise PlanError(
                f"split is {list(layout.split)}, which makes {sum(layout.split)} layers, but the model has "
                f"{self.model.num_layers}"
            )
        return layout.split

    def arguments_nbytes(self, layers: Sequence[int]) -> int:
        """Bytes that attention which runs again in backward holds besides its tensors, once for these layers."""
        kinds = {self.model.kinds[layer] for layer in layers}
        return sum(self.model.layers[kind].arguments_nbytes for kind in kinds)

    def stages(self) -> list[PlannedStage]:
        """The chunks of the model, first layers first."""
        counts = self.split
        made, start = [], 0
        for index, count in enumerate(counts):
            made.append(
                PlannedStage(self, index, tuple(range(start, start + count)), index == 0, index == len(counts) - 1)
            )
            start += count
        return made


_NOT_COUNTED: Mapping[str, str] = {
    "dispatcher": "hierarchical: rows gathered for the levels",
    "chunks": "rows of chunks that travel while others are computed",
    "copies": "weights and gradients of copied experts",
    "dispatch_codec": "coded rows",
}


def check_together(layout: Layout, settings: Settings) -> None:
    """Check what settings ask of the layout, whatever the model is."""
    if not settings.update_in_backward:
        return
    rules = (
        ("micro_batches", layout.micro_batches == 1, "no gradient is left for the next one to add to"),
        ("stages", layout.stages == 1, "gradients add up over the micro-batches of a pipeline"),
        ("expert_parallel", layout.expert_parallel == 1, "experts' gradients are averaged after backward"),
        ("data_parallel", layout.data_parallel == 1 or layout.sharded, "DDP averages whole gradients; shard them"),
    )
    for name, holds, why in rules:
        if not holds:
            raise PlanError(f"{name} is {getattr(layout, name)}, but it must be 1 with update_in_backward: {why}")


@dataclass(frozen=True)
class PlannedStage:
    """One chunk of the model: its layers, with the embedding if it is the first and the head if it is the last."""

    job: Job
    index: int
    layers: tuple[int, ...]
    is_first: bool
    is_last: bool

    def units(self) -> list[Unit]:
        """The units of this chunk: what a plan decides."""
        model = self.job.model
        units = [unit for layer in self.layers for unit in model.units_of(layer)]
        return [*(model.first_units * self.is_first), *units, *(model.last_units * self.is_last)]

    def fixed_nbytes(self) -> dict[str, int]:
        """Bytes per micro-batch in flight that no choice changes, by kind."""
        model = self.job.model
        # Kinds may share what the first of them is booked with.
        shared = {"attention": sum(layer.shared_nbytes for layer in model.layers)}
        first = {"embedding": model.first_nbytes} if self.is_first else {}
        return shared | first | ({"logits": model.last_nbytes} if self.is_last else {})

    def tensors(self) -> list[tuple[int, int]]:
        """Rows and columns of every parameter but experts'; vectors have one column."""
        model = self.job.model
        tensors = [tensor for layer in self.layers for tensor in model.layer(layer).tensors]
        tensors += model.first_tensors if self.is_first else ()
        if self.is_last:
            tensors += model.last_tensors
            if model.tied_tensor is not None and self.is_first:
                tensors.remove(model.tied_tensor)
        return tensors

    def experts(self) -> list[tuple[int, int, int]]:
        """Experts, rows and columns of each of the parameters that hold all experts of a layer."""
        return [tensor for layer in self.layers for tensor in self.job.model.layer(layer).experts]


def kept_nbytes(
    stage: PlannedStage, choices: Mapping[str, Choice], recomputed: Mapping[int, Choice]
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
        given = job.arguments_nbytes(holding)
        kept[f"(attention's arguments in stage {stage.index})"] = ("attention", given, 0)
    for layer in again:
        kept[job.model.names[layer]] = ("recomputed", recomputed_nbytes(job, recomputed[layer]), 0)
    return kept


def recomputed_nbytes(job: Job, choice: Choice) -> int:
    """Bytes per micro-batch of the saved input of a decoder layer that runs again in backward."""
    tokens, hidden = job.model.layer_input
    if choice.code is None:
        return tokens * hidden * job.precision.residual_nbytes
    return choice.packed_nbytes(tokens, hidden)
