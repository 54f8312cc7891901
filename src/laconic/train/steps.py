"""The steps of a run: a trainer with all that takes part in its steps, with evaluations, checkpoints and the log."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch import nn

from laconic.errors import ConfigError, TrainingError
from laconic.gradients import LocalSteps
from laconic.train.checkpoint.save_load import Checkpoint, load_checkpoint
from laconic.train.config.schema import TrainConfig
from laconic.train.conversion import Conversion
from laconic.train.distributed import comm_compression
from laconic.train.distributed.data_parallel import wrap_model
from laconic.train.distributed.parallel_state import ParallelState
from laconic.train.distributed.replica_votes import ReplicaVotes
from laconic.train.distributed.world import World
from laconic.train.gradients import make_gradients
from laconic.train.lr_schedule import learning_rate
from laconic.train.memory.check import Forecast
from laconic.train.pipeline import Pipeline
from laconic.train.report.run_logger import RunLogger
from laconic.train.signals import StopRequest
from laconic.train.step_timeline import recorded_step
from laconic.train.task import Task
from laconic.train.trainer import StepResult, Trainer, make_optimizer

_MAX_SKIPPED_STEPS = 5
_MAX_LOAD_ROWS = 100
"""Steps of a run that say how many tokens each expert got; all of them would outgrow the other metrics."""


class Steps:
    """A trainer, and the components that take part in its steps; all processes make it and call its methods together.

    Attributes:
        routers, experts: as of the conversion.
        votes: compares replicas bit by bit.
        messages: lines for the log: how routers are balanced and how processes communicate.
        comm_state: of the comm compression, for checkpoints; None if there is nothing to keep.
    """

    def __init__(
        self,
        plain: nn.Module,
        converted: Conversion,
        task: Task,
        config: TrainConfig,
        world: World,
        parallel_state: ParallelState,
        checkpoint: Checkpoint | None,
    ) -> None:
        """Wrap `plain` or cut it into stages, choose the codecs of its messages, and make its optimizer."""
        self.config, self.world = config, world
        self.routers, self.experts = converted.routers, converted.experts
        spread = None if self.experts is None else self.experts.model
        pipeline = None
        if parallel_state.num_stages > 1:
            pipeline = Pipeline(config, world, parallel_state, plain, task.chunked_loss)
        wrapped = wrap_model(plain, config, world, parallel_state, spread) if pipeline is None else pipeline.parts
        self.messages = [] if converted.router_message is None else [converted.router_message]
        if config.optimizer.warmup_steps > config.steps:
            reached = learning_rate(config.optimizer, config.steps - 1, config.steps)
            self.messages.append(
                f"learning rate: the run ends within its {config.optimizer.warmup_steps} steps of warm-up, at "
                f"{reached:.3g} instead of {config.optimizer.peak_learning_rate:.3g}; lower optimizer.warmup_steps"
            )
        self.comm_state: str | None = None
        local = None
        if config.local_steps:
            local = _local_steps(wrapped, converted, config)
            self.messages.append(_local_words(config))
        elif config.parallel != "ddp" or not config.moe.overlap_grad_reduce:  # else gradients choose their codec
            saved = None if checkpoint is None else checkpoint.text(comm_compression.STATE_FILE)
            modules = [wrapped] if pipeline is None else pipeline.wrapped
            lines, self.comm_state = comm_compression.zip_model(modules, config, world, parallel_state, saved)
            self.messages += lines
        if pipeline is not None:
            self.messages.append(pipeline.sends)
        gradients = make_gradients(config, parallel_state, wrapped, spread)
        optimizer = make_optimizer(wrapped, config.optimizer)
        self.trainer = Trainer(
            *(config, world, parallel_state, wrapped, gradients, optimizer, task, pipeline), *(self.routers, local)
        )
        self._forecast = Forecast(parallel_state, self.trainer, converted.plan)
        self.votes = ReplicaVotes(config, world, parallel_state, wrapped, optimizer, spread, local)

    def restore(self, checkpoint: Checkpoint | None) -> int:
        """Load `checkpoint`, if any, and set up migration and copies of experts; return the number of steps done."""
        trainer, experts = self.trainer, self.experts
        if checkpoint is not None:
            adapters = self.config.lora.r is not None
            load_checkpoint(checkpoint, self.world, trainer.model, trainer.optimizer, adapters, trainer.local)
            if trainer.local is not None and checkpoint.world_size != self.world.size:
                self.messages.append(
                    f"local steps of {checkpoint.world_size} processes go on in {self.world.size}: process r takes the "
                    f"weights and moments of process r modulo {checkpoint.world_size}, and what rounding had dropped "
                    "from differences is forgotten"
                )
        if experts is not None:
            experts.prepare(trainer.optimizer, (lambda name: None) if checkpoint is None else checkpoint.text)
        return 0 if checkpoint is None else checkpoint.step

    def texts(self) -> dict[str, str]:
        """State beside model and optimizer that a checkpoint keeps, by file name."""
        states = {} if self.experts is None else self.experts.states()
        return states if self.comm_state is None else {**states, comm_compression.STATE_FILE: self.comm_state}

    def in_logical_order(self) -> AbstractContextManager[object]:
        """Bring experts home while the block runs, as checkpoints have them."""
        return nullcontext() if self.experts is None else self.experts.in_logical_order()

    def begin(self, run_logger: RunLogger) -> None:
        """Log what the steps run with: experts, routers, communication."""
        lines: list[str] = []
        if self.experts is not None:
            self.experts.begin()
            lines += [*self.experts.messages(), str(self.experts)]
        for line in [*lines, *self.messages]:
            run_logger.message(line)

    def run(
        self,
        run_logger: RunLogger,
        stop: StopRequest,
        first_step: int,
        save: Callable[[int], None],
        begin_step: Callable[[int], None],
    ) -> tuple[int, bool]:
        """Run the steps after `first_step`, with evaluations and checkpoints.

        Args:
            save: writes a checkpoint after so many steps.
            begin_step: called with the number of each step, from 1, when it begins.

        Returns:
            The number of steps done, and whether a stop was requested.

        Raises:
            TrainingError: loss or gradient was not finite in several steps in a row.
            AuditError: replicas differ after the first step.
            CorruptionError: replicas differ.
        """
        config, votes = self.config, self.votes
        skipped_in_a_row, audited = 0, not config.audit
        recorded = recorded_step(first_step, config.steps)
        load_stride = math.ceil(config.steps / _MAX_LOAD_ROWS)
        for done in range(first_step + 1, config.steps + 1):
            begin_step(done)
            result = self._step(done, run_logger, stop, done == recorded, done % load_stride == 0)
            meets = self.trainer.meets(done)
            if meets and not audited:
                audited = True
                if number := votes.audit(done):
                    run_logger.message(f"audit: after step {done}, {number} replicated tensors have the same bits")
            skipped_in_a_row = skipped_in_a_row + 1 if result.skipped else 0
            last = done == config.steps
            # A rate that ruins the weights in the first update leaves no step of a short run that counts.
            all_but_one = last and not first_step and skipped_in_a_row >= max(1, config.steps - 1)
            error = None
            if skipped_in_a_row >= _MAX_SKIPPED_STEPS or all_but_one:
                error = (
                    f"loss or gradient was not finite in {skipped_in_a_row} steps in a row, "
                    f"{done - skipped_in_a_row + 1} to {done}; lower optimizer.learning_rate or look at the data of "
                    "these steps, then continue from the last checkpoint with --resume"
                )
            if self.trainer.local is not None:  # each process leaves out its own steps, and tells where all meet
                error = self.world.first_error(error) if meets else None
            if error is not None:
                raise TrainingError(error)
            stopped = result.stop and not last
            saves = last or stopped or (config.checkpoint.every > 0 and done % config.checkpoint.every == 0)
            if votes.due(done, saves) and (line := votes.vote(done)):
                run_logger.message(line)
            if last or (config.eval_every and done % config.eval_every == 0):
                run_logger.validation(done, self.trainer.evaluate(), self.trainer.validation_accuracy)
            if saves:
                save(done)
            if stopped:
                return done, True
        return config.steps, False

    def _step(self, done: int, run_logger: RunLogger, stop: StopRequest, record: bool, count_loads: bool) -> StepResult:
        """Run the step after which `done` are done, and log its metrics and messages.

        `record`: also its timeline. `count_loads`: also the tokens of each expert.
        """
        trainer, forecast, routers, experts = self.trainer, self._forecast, self.routers, self.experts
        started = time.perf_counter()
        result = trainer.step(done - 1, stop, record)
        of_experts: dict[str, float | int | str] = {}
        if routers is not None:
            of_experts |= routers.after_step(result.skipped, count_loads and experts is None)
        if experts is not None:
            of_experts |= experts.after_step(done, result.skipped)
        seconds = time.perf_counter() - started
        counted = experts if experts is not None else routers
        loads = counted.loads if counted is not None and count_loads else None
        run_logger.step(done, result, seconds, trainer, of_experts, loads)
        if record:
            run_logger.timeline(done, trainer, {} if experts is None else experts.executed())
        for line in [] if experts is None else experts.messages():
            run_logger.message(line)
        if forecast.check is not None:
            run_logger.memory(forecast.check)
            forecast.check = None
        if result.skipped:
            run_logger.message(f"step {done}: loss or gradient is not finite on some process; no update")
        return result


def _local_steps(model: nn.Module, converted: Conversion, config: TrainConfig) -> LocalSteps:
    """What brings processes together that train `model` apart; all of them call it together."""
    if converted.routers is not None:
        raise ConfigError(
            f"local_steps is {config.local_steps}, but routers of a mixture-of-experts model are counted and balanced "
            "over all processes in every step; leave it out, or take a gate in their place (moe.gate)"
        )
    outer = config.outer
    return LocalSteps(
        model,
        every=config.local_steps,
        bits=outer.bits,
        outer_lr=outer.learning_rate,
        outer_momentum=outer.momentum,
        num_fragments=outer.fragments,
        delay=outer.delay,
    )


def _local_words(config: TrainConfig) -> str:
    outer = config.outer
    parts = f" in {outer.fragments} fragments" if outer.fragments > 1 else ""
    merged = f", merged {outer.delay} steps later" if outer.delay else ""
    return (
        f"local steps: processes are synchronized every {config.local_steps} steps{parts}, differences in "
        f"{outer.bits} bits{merged}; a request to stop waits for that, and losses between are those of rank 0"
    )
