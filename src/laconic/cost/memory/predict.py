"""Predicted bytes of every rank of a training run, by kind, from a trace of its model.

Persistent memory (parameters, gradients, optimizer state) is counted tensor by tensor. Activations are a sum over units
per micro-batch, times the micro-batches that a replay of the schedule finds in flight. Buffers and workspace (gathered
layers, receive buffers, the tensors alive inside of one forward or backward) are estimates and reported apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from laconic.cost.memory.job import Job, PlannedStage, kept_nbytes
from laconic.cost.memory.peak import PeakPoint, peak_points
from laconic.cost.memory.persistent import persistent_nbytes
from laconic.cost.memory.saved_tensors import Choice
from laconic.errors import PlanError
from laconic.schedule import PipelineSchedule

REDUCTION_BUCKET_NBYTES = 8 * 2**20
"""Bytes of codes that one reduction of compressed gradients takes at a time (laconic.compress_gradients)."""


@dataclass(frozen=True)
class RankMemory:
    """Predicted bytes of one rank of the pipeline at its peak; its data-parallel replicas are alike.

    Attributes:
        rank: of the pipeline.
        stages: that it holds.
        in_flight: most micro-batches in flight, summed over its stages.
        moment: name of its peak point: "forward", "loss", "backward" or "end" of backward.
        parameters_nbytes, optimizer_nbytes: persistent.
        gradients_nbytes: once all are there.
        gradients_now_nbytes: at the peak.
        activations_nbytes: by kind of site, at the peak.
        buffers_nbytes, workspace_nbytes: estimates.
        host_nbytes: offloaded.
    """

    rank: int
    stages: tuple[int, ...]
    in_flight: int
    moment: str
    parameters_nbytes: int
    gradients_nbytes: int
    gradients_now_nbytes: int
    optimizer_nbytes: int
    activations_nbytes: Mapping[str, int]
    buffers_nbytes: Mapping[str, int]
    workspace_nbytes: int
    host_nbytes: int = 0

    @property
    def kinds(self) -> dict[str, int]:
        """All bytes on the device at the peak by kind: a row of a table."""
        activations = dict(self.activations_nbytes)
        logits = activations.pop("logits", 0)
        return {
            "parameters": self.parameters_nbytes,
            "gradients": self.gradients_now_nbytes,
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
    """Predicted bytes of all ranks.

    Attributes:
        ranks: of the pipeline.
        saved_nbytes: saved for backward by one micro-batch, by unit over all stages.
        stage_saved_nbytes: the same, in sum by stage.
    """

    ranks: tuple[RankMemory, ...]
    saved_nbytes: Mapping[str, int]
    stage_saved_nbytes: tuple[int, ...]

    @property
    def peak_nbytes(self) -> int:
        """Peak of the rank that takes most."""
        return max(rank.total_nbytes for rank in self.ranks)

    @property
    def saved_total_nbytes(self) -> int:
        """Bytes that one micro-batch keeps for backward in the whole model."""
        return sum(self.saved_nbytes.values())


def predict(
    job: Job, choices: Mapping[str, Choice] | None = None, recomputed: Mapping[int, Choice] | None = None
) -> Prediction:
    """Predict the bytes of every rank.

    Args:
        job: the run.
        choices: by name of the unit; units without one are exact.
        recomputed: decoder layers that run again in backward, with the format of their saved input.

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
        persistent = persistent_nbytes(job, own)
        candidates = []
        for state in schedule.peak_states(rank):
            for point in peak_points(job, own):
                if state[point.stage] > 0:
                    activations = _activations_nbytes(job, own, kept, state, point)
                    workspace = point.workspace(own, choices, recomputed)
                    total = sum(activations.values()) + workspace + point.gradients_nbytes
                    candidates.append((total, point, activations, workspace))
        _, point, activations, workspace = max(candidates, key=lambda candidate: candidate[0])
        on_host = {stage.index: sum(n for _, _, n in kept[stage.index].values()) for stage in own}
        ranks.append(
            RankMemory(
                rank=rank,
                stages=tuple(stage.index for stage in own),
                in_flight=schedule.peak_in_flight()[rank],
                moment=point.name,
                parameters_nbytes=persistent["parameters"],
                gradients_nbytes=persistent["gradients"],
                gradients_now_nbytes=point.gradients_nbytes,
                optimizer_nbytes=persistent["optimizer"],
                activations_nbytes=dict(activations),
                buffers_nbytes=_buffers_nbytes(job, own, schedule, rank),
                workspace_nbytes=workspace,
                host_nbytes=schedule.peak_nbytes(rank, on_host) // job.layout.tensor_parallel,
            )
        )
    saved = {name: nbytes for stage in kept for name, (_, nbytes, _) in stage.items() if nbytes}
    return Prediction(tuple(ranks), saved, tuple(sum(nbytes for _, nbytes, _ in one.values()) for one in kept))


def _activations_nbytes(
    job: Job,
    stages: list[PlannedStage],
    kept: list[dict[str, tuple[str, int, int]]],
    state: Mapping[int, int],
    point: PeakPoint,
) -> Counter[str]:
    activations: Counter[str] = Counter()
    for stage in stages:
        for name, (kind, nbytes, _) in kept[stage.index].items():
            count = state[stage.index]
            if stage.index == point.stage:
                loss_side = kind in ("logits", "head")
                later = tuple(f"{job.model.names[layer]}." for layer in stage.layers[1:])
                inside = f"{name}.".startswith(later) if later else False
                if (loss_side and not point.loss_is_kept) or (inside and point.only_first_layer):
                    count -= 1
            activations[kind] += count * nbytes // job.layout.tensor_parallel
    return activations


def _buffers_nbytes(job: Job, stages: list[PlannedStage], schedule: PipelineSchedule, rank: int) -> dict[str, int]:
    layout, model = job.layout, job.model
    buffers: dict[str, int] = {}
    if layout.sharded and layout.data_parallel > 1:
        gathered = 4 if job.settings.precision == "fp32" else 2
        own = [layer for stage in stages for layer in stage.layers]
        ends = sum(rows * columns for stage in stages for rows, columns in stage.tensors())
        ends -= sum(rows * columns for layer in own for rows, columns in model.layer(layer).tensors)
        # The rest of the model stays gathered; of the layers one runs, the next arrives, one is being reduced in fp32.
        largest = max(_gathered_parameters(job, layer) for layer in own)
        buffers["gathered parameters"] = gathered * (ends + 2 * largest)
        buffers["gradient reduction"] = (gathered + 4) * largest
    elif layout.data_parallel > 1 and job.settings.gradient_bits < 16:
        grads = persistent_nbytes(job, stages)["gradients"]
        buffers["gradient reduction"] = 2 * min(REDUCTION_BUCKET_NBYTES, grads)
    if layout.stages > 1:
        boundary = prod(job.model.layer_input) * job.precision.residual_nbytes // layout.tensor_parallel
        in_flight = max(schedule.peak_in_flight()[rank], 1)
        inner = sum(not stage.is_first for stage in stages), sum(not stage.is_last for stage in stages)
        # torch.distributed.pipelining allocates what it receives for all micro-batches at once.
        buffers["pipeline receive"] = sum(inner) * layout.micro_batches * boundary
        buffers["pipeline outputs"] = (in_flight if inner[1] else 0) * boundary
    return buffers


def _gathered_parameters(job: Job, layer: int) -> int:
    """Parameters of a layer that a rank has while it runs: of the experts those that are its own."""
    traced = job.model.layer(layer)
    experts = sum(count * rows * columns for count, rows, columns in traced.experts)
    return traced.num_parameters - experts + experts // job.layout.expert_parallel
