"""Peak points of a rank: the moments at which its memory can be largest, and the workspace alive at each.

The peak occurs while a chunk computes and as many micro-batches are in flight as the schedule ever has. The candidates
are the end of its forward (the last layer's tensors are there, the loss's not yet), the loss, the start of its backward
(the loss's tensors are gone, the last layer's are rebuilt) and its end.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from laconic.cost.memory.job import Job, PlannedStage
from laconic.cost.memory.persistent import expert_gradients_nbytes, gradient_nbytes, persistent_nbytes
from laconic.cost.memory.saved_tensors import EXACT, Choice


@dataclass(frozen=True)
class PeakPoint:
    """One candidate for the peak.

    Attributes:
        name: for tables.
        stage: the chunk that computes.
        loss_is_kept: whether tensors of head and loss of its current micro-batch are alive.
        only_first_layer: whether only the first layer of the current micro-batch is still alive.
        gradients_nbytes: gradients that are there.
        workspace_nbytes: workspace if every feed-forward block is exact and no layer runs again.
        packed_nbytes: added to it if the inside of a feed-forward block, or of experts, is not exact.
        again_nbytes: added to it if a layer runs again.
        casts: whether autocast's copies of weights are alive, which exact units include already.
        rebuilt_nbytes: added to `packed_nbytes` if a feed-forward block is offloaded or recomputed.
    """

    name: str
    stage: int
    loss_is_kept: bool
    only_first_layer: bool
    gradients_nbytes: int
    workspace_nbytes: int
    packed_nbytes: int
    again_nbytes: int
    casts: bool
    rebuilt_nbytes: int = 0

    def workspace(
        self, stages: Sequence[PlannedStage], choices: Mapping[str, Choice], recomputed: Collection[int]
    ) -> int:
        """Bytes of workspace for these choices."""
        total = self.workspace_nbytes
        units = [unit for stage in stages for unit in stage.units() if unit.layer not in recomputed]
        inner = {choices.get(unit.name, EXACT) for unit in units if unit.rebuilds and unit.num_elements is not None}
        if inner - {EXACT}:
            total += self.packed_nbytes
        if any(choice.offload or choice.recompute for choice in inner):
            total += self.rebuilt_nbytes
        if any(layer in recomputed for stage in stages for layer in stage.layers):
            total += self.again_nbytes
        if self.casts:
            total -= sum(unit.weight_nbytes for unit in units if choices.get(unit.name, EXACT) == EXACT)
        return max(0, total // stages[0].job.layout.tensor_parallel)


def peak_points(job: Job, stages: Sequence[PlannedStage]) -> list[PeakPoint]:
    """The peak points of a rank that holds `stages`. Workspace holds gradients of one tensor before they are added."""
    model = job.model
    units = [unit for stage in stages for unit in stage.units()]
    casts = sum(unit.weight_nbytes for unit in units)
    again = max(sum(unit.exact_nbytes for unit in model.layers[kind].units) for kind in model.kinds)
    rebuilt = max((unit.exact_nbytes * 3 // 4 for unit in units if unit.kind == "mlp"), default=0)
    all_gradients = persistent_nbytes(job, list(stages))["gradients"]
    # Gradients of earlier micro-batches are there, and DDP and FSDP2 keep what they have allocated. DDP leaves experts
    # that are spread over processes alone: their gradients come one after the other in backward.
    layout, start = job.layout, all_gradients
    if layout.micro_batches == 1 and layout.data_parallel == 1:
        start = 0
    elif layout.micro_batches == 1 and layout.expert_parallel > 1 and not layout.sharded:
        start -= expert_gradients_nbytes(job, list(stages))
    element = job.precision.parameter_nbytes
    head = model.embedding_parameters * element
    # What is no gradient yet is workspace: the embedding's while it is made, and a tied head's, which waits for that.
    last = 0
    if start == 0 and job.settings.gradient_bits >= 16:
        last = max(
            (gradient_nbytes(prod(x), job.settings.gradient_bits, element) for x in model.first_tensors), default=0
        )
        if model.tied_tensor is not None and job.layout.num_chunks == 1:
            head -= prod(model.tied_tensor) * element
    found = []
    for stage in stages:
        with_head = start or min(all_gradients, head if stage.is_last else 0)
        end = max(0, all_gradients - last * stage.is_first)
        for name, gradients in (("forward", start), ("loss", start), ("backward", with_head), ("end", end)):
            if (name == "loss" and not stage.is_last) or (name == "end" and start != 0 and not stage.is_first):
                continue
            space, forward, loss = model.workspace[name], name == "forward", name == "loss"
            point = PeakPoint(
                name,
                stage.index,
                loss_is_kept=loss,
                only_first_layer=name == "end",
                gradients_nbytes=gradients,
                workspace_nbytes=space.exact + (casts if forward or loss else 0),
                packed_nbytes=space.packed,
                again_nbytes=0 if loss else again,
                casts=forward or loss,
                rebuilt_nbytes=0 if forward or loss else rebuilt,
            )
            found.append(point)
    return found
