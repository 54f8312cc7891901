"""The planner's prediction for this process, compared with its memory in the third step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from laconic.activations.recognize.plan import ATTENTION
from laconic.cost import Plan, predict
from laconic.errors import PlanError
from laconic.train.config.schema import TrainConfig
from laconic.train.distributed.parallel_state import ParallelState
from laconic.train.memory.check import MemoryCheck, check_memory, choices_of, job_of
from laconic.train.trainer import Trainer

__all__ = ["Forecast"]

_STEP = 3
"""By then an optimizer has its state, and nothing is made for the first time any more."""


class Forecast:
    """Watches a trainer until its third update; then `check` holds prediction and measurement.

    Does nothing for a model or a setting that the planner does not know.

    Args:
        config, parallel_state, trainer: of the run.
        model_config: the model's Hugging Face configuration; empty where it has none.
        plan: that the run follows, if any.
        split: layers of each chunk of a pipeline.
        chunked_loss: whether the loss is computed in chunks.
    """

    def __init__(
        self,
        config: TrainConfig,
        parallel_state: ParallelState,
        model_config: dict[str, Any],
        trainer: Trainer,
        plan: Plan | None,
        split: tuple[int, ...] = (),
        chunked_loss: bool = False,
    ) -> None:
        self.check: MemoryCheck | None = None
        self._parallel_state = parallel_state
        self._trainer = trainer
        self._num_updates = 0
        chosen = config.activations
        if plan is None and chosen.mode != "sites":
            return
        planned = replace(config, pipeline=replace(config.pipeline, split=split))
        world_size = parallel_state.num_stages * parallel_state.num_replicas
        settings: dict[str, Any] = {"optimizer": config.optimizer.kind, "gradient_bits": config.gradients.bits}
        settings["loss"] = "chunked" if chunked_loss else "exact"
        try:
            self._job = job_of(planned, model_config, world_size, **settings)
        except PlanError:
            if plan is None:
                return
            self._job = plan.job  # of a traced model
        if plan is None and chosen.attention == "recompute":
            return  # has no formula
        if plan is None:
            attention = chosen.attention or ("exact" if chosen.bits == 16 else ATTENTION)
            choices = choices_of(self._job, chosen.bits, chosen.format, chosen.block_size, attention)
            self._prediction = predict(self._job, choices)
        else:
            self._prediction = predict(self._job, plan.choices, plan.recomputed)
        trainer.before_update = self._watch

    def _watch(self) -> None:
        self._num_updates += 1
        if self._num_updates < _STEP:
            return
        trainer, parallel_state = self._trainer, self._parallel_state
        trainer.before_update = None
        assert trainer.saved_nbytes is not None
        self.check = check_memory(
            self._job,
            self._prediction,
            saved_nbytes=trainer.saved_nbytes,
            parameters=trainer.model.parameters(),
            optimizer=trainer.optimizer,
            stages=range(parallel_state.stage, self._job.layout.num_chunks, parallel_state.num_stages),
            rank=parallel_state.stage,
        )
