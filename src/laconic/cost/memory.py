"""Bytes of every rank of a training run, by kind, from sizes alone.

What lasts (parameters, gradients, optimizer state) is counted tensor by tensor. What waits for backward is a sum over
units per micro-batch, times the micro-batches that a replay of the schedule finds waiting at the fullest moment of the
rank. Buffers and workspace (gathered layers, receive buffers, the tensors alive inside of one backward) are estimates
and stand apart under these names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from laconic.cost.model_shape import ModelShape
from laconic.cost.split import balanced_split
from laconic.cost.units import (
    EXACT,
    PRECISIONS,
    Batch,
    Choice,
    Precision,
    Unit,
    head_unit,
    layer_units,
    loss_nbytes,
    mask_nbytes,
    rotary_nbytes,
)
from laconic.errors import PlanError
from laconic.schedule import PipelineSchedule, make_schedule

__all__ = ["Job", "Layout", "Prediction", "RankMemory", "Settings", "Stage", "predict"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a run is spread over processes.

    data_parallel: replicas of the model, or processes it is sharded over. sharded: FSDP2 instead of DDP. stages: ranks
    of the pipeline. stages_per_rank: chunks of layers each holds. split: layers per chunk; empty is balanced by
    parameters. tensor_parallel: with sequence parallelism, for estimates only.
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
        """Pieces that the layers are cut into."""
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
    """What is kept in how many bits, apart from activations.

    precision: "fp32", "bf16" (autocast over fp32 parameters) or "bf16-pure". optimizer: AdamW with fp32 states
    ("adamw") or 8-bit ones. gradient_bits: 32, 16, 12 or 8. loss: "exact" keeps the log-probabilities, "chunked" does
    not.
    """

    precision: Literal["fp32", "bf16", "bf16-pure"] = "bf16"
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    gradient_bits: int = 32
    loss: Literal["exact", "chunked"] = "exact"

    def __post_init__(self) -> None:
        rules: tuple[tuple[str, tuple[object, ...]], ...] = (
            ("precision", tuple(PRECISIONS)),
            ("optimizer", ("adamw", "adamw8bit")),
            ("gradient_bits", (8, 12, 16, 32)),
            ("loss", ("exact", "chunked")),
        )
        for name, allowed in rules:
            if getattr(self, name) not in allowed:
                raise PlanError(
                    f"{name} is {getattr(self, name)!r}, but it must be one of {', '.join(map(str, allowed))}"
                )


@dataclass(frozen=True)
class Job:
    """What is to be predicted: a model, a micro-batch, a layout and settings."""

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
            matrix = shape.embedding_parameters  # also when tied the first and the last chunk need one each
            return balanced_split([shape.layer_parameters] * shape.num_layers, layout.num_chunks, matrix, matrix)
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
        """What can be decided in this chunk."""
        job = self.job
        units = [unit for layer in self.layers for unit in layer_units(job.shape, layer, job.batch, job.precision)]
        return [*units, head_unit(job.shape, job.batch, job.precision)] if self.is_last else units

    def fixed_nbytes(self) -> dict[str, int]:
        """What a waiting micro-batch keeps whatever is decided: by kind."""
        job = self.job
        kept = {"attention": rotary_nbytes(job.shape, job.batch, job.precision)}
        if self.is_first:
            kept["embedding"] = 8 * job.batch.tokens  # the tokens
        if self.is_last:
            kept["logits"] = loss_nbytes(job.shape, job.batch, job.precision, job.settings.loss == "chunked")
        return kept

    def tensors(self) -> list[tuple[int, int]]:
        """Rows and columns of every parameter."""
        shape = self.job.shape
        tensors = [t for _ in self.layers for t in layer_tensors(shape)]
        if self.is_first:
            tensors.append((shape.vocab_size, shape.hidden_size))
        if self.is_last:
            tensors.append((shape.hidden_size, 1))
            if not (shape.tied and self.is_first):
                tensors.append((shape.vocab_size, shape.hidden_size))
        return tensors


def layer_tensors(shape: ModelShape) -> list[tuple[int, int]]:
    """Rows and columns of the parameters of one layer; vectors have one column."""
    hidden, ffn, query, key = shape.hidden_size, shape.intermediate_size, shape.query_size, shape.key_size
    traits = shape.traits
    if traits.fused:
        tensors = [(query + 2 * key, hidden), (hidden, query), (2 * ffn, hidden), (hidden, ffn)]
    else:
        tensors = [(query, hidden), (key, hidden), (key, hidden), (hidden, query)]
        tensors += [(ffn, hidden), (ffn, hidden), (hidden, ffn)]
    if traits.qkv_bias:
        tensors += [(query, 1), (key, 1), (key, 1)]
    if traits.qk_norm == "head":
        tensors += [(shape.head_dim, 1)] * 2
    elif traits.qk_norm == "full":
        tensors += [(query, 1), (key, 1)]
    return [*tensors, *[(hidden, 1)] * (len(traits.input_norms) + len(traits.output_norms))]


@dataclass(frozen=True)
class RankMemory:
    """Predicted bytes of one rank of the pipeline; its data-parallel copies are alike.

    activations: by kind of site, at the fullest moment of the rank. buffers, workspace: estimates. host: offloaded.
    """

    rank: int
    stages: tuple[int, ...]
    in_flight: int
    parameters_nbytes: int
    gradients_nbytes: int
    optimizer_nbytes: int
    activations_nbytes: Mapping[str, int]
    buffers_nbytes: Mapping[str, int]
    workspace_nbytes: int
    host_nbytes: int = 0

    @property
    def kinds(self) -> dict[str, int]:
        """All bytes on the device by kind: a row of a table."""
        activations = dict(self.activations_nbytes)
        logits = activations.pop("logits", 0)
        return {
            "parameters": self.parameters_nbytes,
            "gradients": self.gradients_nbytes,
            "optimizer": self.optimizer_nbytes,
            "activations": sum(activations.values()),
            "logits": logits,
            "buffers": sum(self.buffers_nbytes.values()),
            "workspace": self.workspace_nbytes,
        }

    @property
    def total_nbytes(self) -> int:
        """Predicted peak on the device."""
        return sum(self.kinds.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "stages": list(self.stages), "total_nbytes": self.total_nbytes}


@dataclass(frozen=True)
class Prediction:
    """Bytes of every rank, and what one waiting micro-batch keeps: by unit over all stages, and in sum by stage."""

    ranks: tuple[RankMemory, ...]
    saved_nbytes: Mapping[str, int]
    stage_saved_nbytes: tuple[int, ...]

    @property
    def peak_nbytes(self) -> int:
        """Of the fullest rank."""
        return max(rank.total_nbytes for rank in self.ranks)

    @property
    def saved_total_nbytes(self) -> int:
        """What one micro-batch keeps for backward in the whole model."""
        return sum(self.saved_nbytes.values())


def predict(
    job: Job,
    choices: Mapping[str, Choice] | None = None,
    recomputed: Mapping[int, Choice] | None = None,
) -> Prediction:
    """Bytes of every rank.

    Args:
        job: what runs.
        choices: by name of the unit; units without one are exact.
        recomputed: decoder layers that run again in backward, with how their input is kept.

    Raises:
        PlanError: layers and stages do not fit, or a choice is for a unit that the model does not have.
        ScheduleError: the schedule does not fit the layout.
    """
    choices, recomputed = choices or {}, recomputed or {}
    stages = job.stages()
    unknown = set(choices) - {unit.name for stage in stages for unit in stage.units()}
    if unknown:
        raise PlanError(f"the choices name {min(unknown)!r}, but the model has no such unit")
    kept = [kept_nbytes(stage, choices, recomputed) for stage in stages]
    schedule = job.layout.make_schedule()
    ranks = []
    for rank in range(schedule.num_ranks):
        own = [stages[index] for index in schedule.stages_of(rank)]
        totals = {stage.index: sum(nbytes for _, nbytes, _ in kept[stage.index].values()) for stage in own}
        # The fullest moment; all of them are looked at, as stages of a rank may differ.
        peak = max(schedule.peak_states(rank), key=lambda state: sum(n * totals[i] for i, n in state.items()))
        activations: Counter[str] = Counter()
        host = 0
        for index, count in peak.items():
            for kind, nbytes, on_host in kept[index].values():
                activations[kind] += count * nbytes // job.layout.tensor_parallel
                host += count * on_host // job.layout.tensor_parallel
        lasting = lasting_nbytes(job, own)
        ranks.append(
            RankMemory(
                rank=rank,
                stages=tuple(stage.index for stage in own),
                in_flight=schedule.peak_in_flight()[rank],
                parameters_nbytes=lasting["parameters"],
                gradients_nbytes=lasting["gradients"],
                optimizer_nbytes=lasting["optimizer"],
                activations_nbytes=dict(activations),
                buffers_nbytes=_buffers_nbytes(job, own, schedule, rank),
                workspace_nbytes=_workspace_nbytes(job, own, choices, recomputed),
                host_nbytes=host,
            )
        )
    saved = {name: nbytes for stage in kept for name, (_, nbytes, _) in stage.items() if nbytes}
    return Prediction(tuple(ranks), saved, tuple(sum(nbytes for _, nbytes, _ in one.values()) for one in kept))


def kept_nbytes(
    stage: Stage, choices: Mapping[str, Choice], recomputed: Mapping[int, Choice]
) -> dict[str, tuple[str, int, int]]:
    """What one waiting micro-batch keeps in a stage: name -> (kind, bytes on the device, bytes on the host)."""
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
    packed = any(u.kind == "attention" and choices.get(u.name, EXACT) != EXACT for u in stage.units())
    if packed:  # attention that runs again holds what it was given: mask and positions, shared by all layers
        context = mask_nbytes(job.shape, job.batch) + 8 * job.batch.sequence_length
        kept[f"(attention's arguments in stage {stage.index})"] = ("attention", context, 0)
    for layer in sorted(set(recomputed) & set(stage.layers)):
        kept[f"model.layers.{layer}"] = ("recomputed", recomputed_nbytes(job, recomputed[layer]), 0)
    return kept


def recomputed_nbytes(job: Job, choice: Choice) -> int:
    """What a decoder layer that runs again in backward keeps of its input, per micro-batch."""
    tokens, hidden = job.batch.tokens, job.shape.hidden_size
    if choice.code is None:
        return tokens * hidden * job.precision.residual_nbytes
    return choice.packed_nbytes(tokens, hidden)


def lasting_nbytes(job: Job, stages: list[Stage]) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state of a rank that holds `stages`."""
    layout, settings = job.layout, job.settings
    element = job.precision.parameter_nbytes
    total = Counter({"parameters": 0, "gradients": 0, "optimizer": 0})
    tensors = [t for stage in stages for t in stage.tensors()]
    for rows, columns in tensors:
        rows = -(-rows // layout.data_parallel) if layout.sharded else rows
        numel = -(-rows * columns // layout.tensor_parallel)
        total["parameters"] += numel * element
        total["gradients"] += gradient_nbytes(numel, settings.gradient_bits, element)
        total["optimizer"] += optimizer_nbytes(numel, settings.optimizer, element)
    return dict(total)


def gradient_nbytes(numel: int, bits: int, parameter_nbytes: int = 4) -> int:
    """Bytes of one tensor's gradient: dense in 16 or 32 bits, or codes with an fp32 scale per 128 (docs/formats.md)."""
    if bits >= 16:
        return numel * min(bits // 8, parameter_nbytes)
    scales = -(-numel // 128) * 4
    return numel + scales + (0 if bits == 8 else -(-numel // 2) + scales)


def optimizer_nbytes(numel: int, optimizer: str, parameter_nbytes: int = 4) -> int:
    """Bytes of AdamW's two moments: in the parameter's dtype, or 8 bits with an fp32 scale per 256.

    Tensors below 4096 elements stay in fp32 with the 8-bit optimizer.
    """
    if optimizer == "adamw":
        return 2 * numel * parameter_nbytes
    return 8 * numel if numel < 4096 else 2 * (numel + -(-numel // 256) * 4)


def _buffers_nbytes(job: Job, stages: list[Stage], schedule: PipelineSchedule, rank: int) -> dict[str, int]:
    """Estimate of what communication holds."""
    layout, shape, tokens = job.layout, job.shape, job.batch.tokens
    buffers: dict[str, int] = {}
    if layout.sharded and layout.data_parallel > 1:
        gathered = 4 if job.settings.precision == "fp32" else 2
        ends = sum(rows * columns for stage in stages for rows, columns in stage.tensors())
        ends -= sum(len(stage.layers) for stage in stages) * shape.layer_parameters
        # The rest of the model stays gathered; of the layers one runs, the next arrives, one is being reduced in fp32.
        buffers["gathered parameters"] = gathered * (ends + 2 * shape.layer_parameters)
        buffers["gradient reduction"] = (gathered + 4) * shape.layer_parameters
    elif layout.data_parallel > 1 and job.settings.gradient_bits < 16:
        grads = lasting_nbytes(job, stages)["gradients"]
        buffers["gradient reduction"] = 2 * min(REDUCTION_BUCKET_NBYTES, grads)
    if layout.stages > 1:
        boundary = tokens * shape.hidden_size * job.precision.residual_nbytes // layout.tensor_parallel
        waiting = max(schedule.peak_in_flight()[rank], 1)
        inner = sum(not stage.is_first for stage in stages), sum(not stage.is_last for stage in stages)
        # torch.distributed.pipelining allocates what it receives for all micro-batches at once.
        buffers["pipeline receive"] = sum(inner) * layout.micro_batches * boundary
        buffers["pipeline outputs"] = (waiting if inner[1] else 0) * boundary
    return buffers


REDUCTION_BUCKET_NBYTES = 25 * 2**20
"""Bytes of codes that one reduction of compressed gradients takes at a time."""


def _workspace_nbytes(
    job: Job, stages: list[Stage], choices: Mapping[str, Choice], recomputed: Mapping[int, Choice]
) -> int:
    """Estimate of the tensors alive at once inside of one backward, beside what waits: the largest of the parts."""
    shape, batch, precision, tokens = job.shape, job.batch, job.precision, job.batch.tokens
    element = precision.compute_nbytes
    layers = [layer for stage in stages for layer in stage.layers]
    # Rebuilt gate, up, act(gate), product, and the gradients of gate, up and product.
    largest = 7 * tokens * shape.intermediate_size * element
    if set(layers) & set(recomputed):
        units = layer_units(shape, layers[0], batch, precision)
        largest += sum(unit.exact_nbytes for unit in units)
    attention = 2 * tokens * (2 * shape.query_size + 2 * shape.key_size) * element
    largest = max(largest, attention)
    if any(stage.is_last for stage in stages):
        if job.settings.loss == "chunked":
            largest = max(largest, 8 * min(tokens, 1024) * shape.vocab_size)
        else:
            # Logits, and their gradient in fp32 and in the compute dtype.
            largest = max(largest, (4 + element) * tokens * shape.vocab_size)
    if precision.autocast:
        # The casts of weights live until the forward ends; those of exact units are counted with what they keep.
        cached = sum(
            _cast_nbytes(shape, precision, stage) - sum(u.weight_nbytes for u in stage.units() if u.name not in choices)
            for stage in stages
        )
        largest = max(largest, cached)
    return largest // job.layout.tensor_parallel


def _cast_nbytes(shape: ModelShape, precision: Precision, stage: Stage) -> int:
    numel = len(stage.layers) * shape.layer_linear_parameters
    return (numel + (shape.embedding_parameters if stage.is_last else 0)) * precision.compute_nbytes
