"""What a process holds in the third step, beside what its plan has predicted."""

from __future__ import annotations

from laconic.cost import Plan
from laconic.train.distributed.parallel_state import ParallelState
from laconic.train.memory.check import MemoryCheck, check_memory
from laconic.train.trainer import Trainer

_STEP = 3
"""By then an optimizer has its state, and nothing is made for the first time any more."""


class Forecast:
    """Watches a trainer until its third update; then `check` holds what was measured, and predicted if there is a plan.

    Args:
        parallel_state, trainer: of the run.
        plan: that the run follows, if any.
    """

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
