"""Measures what a process holds for training by kind, beside the bytes that a plan has predicted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laconic.cost import Plan, Prediction
from laconic.cost.sizes import format_nbytes
from laconic.formats import quantized_gradient
from laconic.formats.shards import local_part
from laconic.optim.in_backward import UsedGradient
from laconic.train.distributed.parallel_state import ParallelState
from laconic.train.trainer import Trainer

_STEP = 3
"""By then an optimizer has its state, and nothing is made for the first time any more."""


@dataclass(frozen=True)
class MemoryCheck:
    """Bytes by kind as measured, and as predicted where there is a plan; it predicts no kind that is not measured."""

    predicted: Mapping[str, int]
    measured: Mapping[str, int]

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured, over all kinds that were predicted; None if none was."""
        measured = sum(self.measured[kind] for kind in self.predicted)
        return sum(self.predicted.values()) / measured - 1 if measured else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"predicted": dict(self.predicted), "measured": dict(self.measured), "error": self.error}

    def __str__(self) -> str:
        if self.error is None:
            return f"memory: {', '.join(f'{kind} {format_nbytes(n)}' for kind, n in self.measured.items())}"
        parts = [
            f"{kind} {format_nbytes(self.predicted[kind])} ({format_nbytes(self.measured[kind])})"
            for kind in self.predicted
        ]
        return f"memory predicted (measured): {', '.join(parts)}; error {self.error:+.1%}"


def check_memory(
    prediction: Prediction | None,
    *,
    saved_nbytes: int,
    parameters: Iterable[Tensor],
    optimizer: torch.optim.Optimizer | None = None,
    stages: Sequence[int] = (0,),
    rank: int = 0,
) -> MemoryCheck:
    """Compare a prediction with the memory of a process. Call it when gradients are there, before they are cleared.

    Args:
        prediction: of the run; None measures only.
        saved_nbytes: saved for backward by one micro-batch's forward on this process, summed over its chunks
            (`SavedTensorTracker.nbytes`).
        parameters: of this process; of DTensors the local shard counts. Their gradients are dense or quantized.
        optimizer: its state counts, once it has made a step; None leaves it out.
        stages: chunks of the model that this process holds.
        rank: of the pipeline, for the allocator's peak on a GPU.
    """
    own = list(parameters)
    if own and own[0].device.type == "cuda":
        # Includes what the others list, so it stands alone.
        predicted = {} if prediction is None else {"peak": prediction.ranks[rank].total_nbytes}
        return MemoryCheck(predicted, {"peak": torch.cuda.max_memory_allocated(own[0].device)})
    measured = {"saved per micro-batch": saved_nbytes, "parameters": sum(local_part(p).nbytes for p in own)}
    if gradients := sum(_gradient_nbytes(parameter) for parameter in own):
        measured["gradients"] = gradients
    if optimizer is not None and optimizer.state:
        measured["optimizer"] = sum(tensor.nbytes for tensor in _state_tensors(optimizer.state))
    if prediction is None:
        return MemoryCheck({}, measured)
    memory = prediction.ranks[rank]
    predicted = {
        "saved per micro-batch": sum(prediction.stage_saved_nbytes[index] for index in stages),
        "parameters": memory.parameters_nbytes,
        "gradients": memory.gradients_nbytes,
        "optimizer": memory.optimizer_nbytes,
    }
    return MemoryCheck({kind: n for kind, n in predicted.items() if kind in measured}, measured)


class Forecast:
    """Watches a trainer until its third update; then `check` holds what was measured, and predicted by a plan."""

    def __init__(self, parallel_state: ParallelState, trainer: Trainer, plan: Plan | None) -> None:
        self.check: MemoryCheck | None = None
        self._parallel_state, self._trainer = parallel_state, trainer
        self._prediction = None if plan is None else plan.prediction
        self._num_chunks = 1 if plan is None else plan.job.layout.num_chunks
        self._num_updates = 0
        trainer.before_update = self._watch

    def _watch(self) -> None:
        self._num_updates += 1
        trainer, parallel_state = self._trainer, self._parallel_state
        if self._num_updates < _STEP or trainer.saved_nbytes is None:
            return
        trainer.before_update = None
        self.check = check_memory(
            self._prediction,
            saved_nbytes=trainer.saved_nbytes,
            parameters=trainer.model.parameters(),
            optimizer=trainer.optimizer,
            stages=range(parallel_state.stage, self._num_chunks, parallel_state.num_stages),
            rank=parallel_state.stage,
        )


def _gradient_nbytes(parameter: Tensor) -> int:
    quantized = quantized_gradient(parameter)
    if quantized is not None:
        return quantized.nbytes
    if parameter.grad is None or isinstance(parameter.grad, UsedGradient):
        return 0
    return local_part(parameter.grad).nbytes


def _state_tensors(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        if state.dim() > 0:
            yield local_part(state)
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from _state_tensors(value)
    elif hasattr(state, "__dict__"):
        yield from _state_tensors(vars(state))
