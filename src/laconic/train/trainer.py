"""One optimizer step and one evaluation, the same code for one process and many.

Everything random in step s of rank r is seeded by (seed, s, r), and samples are a function of (seed, s), so a step
needs nothing from the steps before it but weights and optimizer moments.

The loss is the mean over all tokens of the global batch: micro-batches are equally large, so the mean of their means is
that. Before the update all processes add up three numbers (loss, non-finite values, requests to stop) in one small
all-reduce, and therefore always take the same decision.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from laconic.activations import SavedTensorTracker, seed_rounding
from laconic.auditing import AuditReport, audit_loss, first_rows
from laconic.collectives import audit
from laconic.errors import AuditError, TrainingError
from laconic.gradients import LocalSteps
from laconic.optim import OPTIMIZER_CLASSES
from laconic.train.config.schema import OptimizerConfig, TrainConfig
from laconic.train.data.sampler import evenly, global_indices, split_mix
from laconic.train.distributed.data_parallel import RunningStatistics, autocast, plain_model
from laconic.train.distributed.parallel_state import ParallelState
from laconic.train.distributed.traffic import WireCounter
from laconic.train.distributed.world import World
from laconic.train.gradients import ExpertParallelGradients, Gradients, PassingGradients
from laconic.train.lr_schedule import learning_rate
from laconic.train.moe.router_balance import Routers
from laconic.train.pipeline import Pipeline
from laconic.train.signals import StopRequest
from laconic.train.step_timeline import TaskTime
from laconic.train.task import Task


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step, the same on every process; with local steps only what says so."""

    loss: float
    """Mean over the tokens of the global batch, nats per token, before the update. Local steps: of this process's own
    tokens, but where a synchronization begins."""
    grad_norm: float
    """2-norm of all gradients before clipping. Local steps: of this process's own."""
    learning_rate: float
    skipped: bool
    """Whether the update was left out, because loss (a router's, too) or gradient of some process was not finite. Local
    steps: of this one."""
    stop: bool
    """Whether some process was asked to stop, the same on every process. Local steps: since the last synchronization,
    and False between two."""


class Trainer:
    """Owns the model, its optimizer and the data, and runs steps and evaluations.

    `model` may be plain, DDP- or FSDP2-wrapped, or the local chunks of a `pipeline`. `task` has the data and the loss;
    without validation samples `evaluate` returns None.
    """

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        parallel_state: ParallelState,
        model: nn.Module,
        gradients: Gradients,
        optimizer: torch.optim.Optimizer,
        task: Task,
        pipeline: Pipeline | None = None,
        routers: Routers | None = None,
        local: LocalSteps | None = None,
    ) -> None:
        self._routers = routers
        self.local = local
        """What brings the processes together, where each trains by itself."""
        self._stops = False  # whether this process was asked to, and has not told the others yet
        self._audited: audit.Snapshot | None = None  # local steps: messages may end between two steps
        self._config = config
        self._world = world
        self._parallel_state = parallel_state
        self._pipeline = pipeline
        self._gradients = gradients
        self.model = model
        self.optimizer = optimizer
        self._task = task
        self._statistics = RunningStatistics(model, world, parallel_state.num_replicas)
        self.micro_batch_size = config.batch_size // (parallel_state.num_replicas * config.micro_batches)
        """Samples in a micro-batch."""
        self.unit, self.classifies = task.unit, task.classifies
        """What speed and bytes are counted per, and whether a sample is classified."""
        self.saved_nbytes: int | None = None
        """Bytes kept for backward by one micro-batch on this process; measured in the first step, and once layers are
        compiled."""
        self.saved_units = self.micro_batch_size * task.units_per_sample
        """Units of that micro-batch, or of a usual one where the measurement is of a pipeline."""
        self._micro_units = self.saved_units
        self.wire_nbytes: int | None = None
        """Bytes this process sent in the last step."""
        self.wire_raw_nbytes: int | None = None
        """Bytes it would have sent in the last step if nothing had been shortened losslessly."""
        self.overlapped_nbytes: int | None = None
        """Bytes of dense gradients that the last step averaged during expert layers; None without that overlap."""
        self.validation_accuracy: float | None = None
        """Share of the samples of the last evaluation classified correctly; None if there is nothing to classify."""
        self.passes: list[TaskTime] | None = None
        """Passes of this process through its stages in the last step that was recorded, by `time.perf_counter`."""
        self.synced_at = 0.0
        """When the last step's small all-reduce ended, by the same clock: everywhere at nearly the same moment."""
        self._other_nbytes: int | None = None  # what torch's own collectives send, the same in each step
        self._num_counted = 0  # steps whose messages were counted; a run counts two
        self._measured_compiled = False
        self._audits_reduction = False
        self.before_update: Callable[[], None] | None = None
        """Called in each step that updates, between backward and the update."""

    def rebuild_ddp_buckets(self) -> None:
        """Run one discarded backward so that DDP rebuilds its buckets before step 1; all processes call it together.

        DDP lays out its buckets anew after its first backward. The place of an element in its bucket decides in which
        order more than two processes add it up, and, in codes, which values share its scale. Without this, the first
        step after resuming would add or quantize otherwise than the same step of a run that was never interrupted.
        """
        parts = [self.model] if self._pipeline is None else self._pipeline.wrapped
        buckets_matter = self._parallel_state.num_replicas > 2 or self._config.reduce == "q8"
        if not buckets_matter or not any(isinstance(part, DistributedDataParallel) for part in parts):
            return
        statistics = self._statistics.copy()
        if self._pipeline is None:
            self._losses(self.model, next(self._micro_batches(0)))[1].backward()
        else:
            with self._gradients.last_backward(self._config.micro_batches):
                self._pipeline.forward_backward(torch.cat(list(self._micro_batches(0))))
        if self._routers is not None:
            self._routers.clear()
        self._statistics.restore(statistics)
        self._gradients.clear()

    def audit(self, step: int) -> AuditReport | None:
        """Compare some rows of step `step` (0-based) with the exact computation; all processes call it together.

        The next step compares how it averages gradients of experts, too.

        None where the configuration leaves it out. Weights, statistics and random states stay as they are.

        Raises:
            AuditError: something differs; on every process.
        """
        if not self._config.audit:
            return None
        self._audits_reduction = True
        if self._pipeline is not None:
            return AuditReport(left_out=("all, as no process of a pipeline has the whole model",))
        samples = next(self._micro_batches(step))
        model = self.model if isinstance(self.model, FSDPModule) else plain_model(self.model)
        losses = [lambda part=part: self._losses(model, part, False)[1] for part in (first_rows(samples, 2), samples)]
        try:
            return audit_loss(model, losses, optimizer=self.optimizer)
        finally:
            if self._routers is not None:
                self._routers.clear()

    def step(self, step: int, stop: StopRequest, record: bool = False) -> StepResult:
        """Run optimizer step `step` (0-based). All processes call it together; a stop requested of one stops all.

        `record`: note in `passes` when the stages of a pipeline work.

        Raises:
            AuditError: in the first step, gradients of experts are not averaged as they should be.
            TrainingError: a gradient that backward has used for its update is not finite.
        """
        config, world = self._config, self._world
        rate = learning_rate(config.optimizer, step, config.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        torch.manual_seed(split_mix(split_mix(split_mix(config.seed) ^ step) ^ world.rank))
        seed_rounding(None)  # two bits: what this process rounded before does not count

        before, statistics = self._audited or audit.snapshot(), self._statistics.copy()
        with ExitStack() as measuring:
            counter = None
            if self._num_counted < 2:
                if config.compile:  # what Dynamo meets below a dispatch mode it leaves to Python for ever
                    measuring.enter_context(torch.compiler.set_stance("force_eager"))
                counter = measuring.enter_context(WireCounter(world.size))
            elif config.compile and not self._measured_compiled:
                self._measured_compiled = True
                self.saved_nbytes = None
                if self._pipeline is not None:
                    self._pipeline.measure_again()
            loss = self._forward_backward(step, record)
            counted = self.model.parameters() if self._pipeline is None else self._pipeline.counted
            norm = self._gradients.norm([*counted])
            bad = ~(torch.isfinite(norm) & torch.isfinite(loss))
            self._stops |= stop.requested
            meets = self.meets(step + 1)
            num_voters = self._parallel_state.num_replicas if meets else 1
            stops = torch.full_like(loss, float(self._stops and meets))
            votes = [loss / num_voters, bad.to(loss.dtype), stops]
            if self._pipeline is not None:
                # Each stage knows the norm of its own part; its replicas all know the same.
                votes.append(norm.double() ** 2 / self._parallel_state.num_replicas)
            summed = world.sum(torch.stack(votes)) if meets else torch.stack(votes)
            mean_loss, num_bad, num_stop, *squares = summed.tolist()
            self.synced_at = time.perf_counter()
            if self.local is None:
                self._statistics.average()
            else:
                num_bad = float(bad)
        coded = audit.snapshot() - before
        if counter is not None:
            # The lesser of two steps counts: the first may have measured links, in the second DDP lays out its buckets.
            sent = max(0, counter.nbytes - coded.sent_nbytes)
            self._other_nbytes = sent if self._other_nbytes is None else min(self._other_nbytes, sent)
            self._num_counted += 1
        assert self._other_nbytes is not None
        if squares:
            norm = torch.tensor(math.sqrt(squares[0]), dtype=torch.float32, device=world.device)

        skipped = num_bad > 0
        if isinstance(self._gradients, PassingGradients):
            if not self._gradients.are_used:  # a router's loss can overflow alone, with a gradient that does not
                skipped = True
            elif skipped:
                raise TrainingError(
                    f"a gradient of step {step + 1} is not finite, and has updated its parameter in backward "
                    "(optimizer.update_in_backward); continue from the last checkpoint with --resume and "
                    "--no-optimizer.update-in-backward, which leaves such a step out, or a lower "
                    "optimizer.learning_rate"
                )
        if skipped:
            self._statistics.restore(statistics)
        else:
            self._gradients.clip(norm, config.optimizer.clip_norm)
            if self.before_update is not None:
                self.before_update()
            self._gradients.prepare_update()
            self.optimizer.step()
        self.overlapped_nbytes = self._gradients.overlapped_nbytes
        self._gradients.clear()
        if self.local is not None:
            self.local.step()
            if step + 1 == config.steps:
                self.local.finish()
            self._audited = audit.snapshot()
            coded = self._audited - before
        self.wire_nbytes = self._other_nbytes + coded.sent_nbytes
        # Differences are not shortened losslessly.
        self.wire_raw_nbytes = self._other_nbytes + (coded.raw_nbytes if self.local is None else coded.sent_nbytes)
        return StepResult(mean_loss, float(norm), rate, skipped, num_stop > 0)

    def meets(self, done: int) -> bool:
        """Whether all processes exchange something in the step after which `done` are done."""
        return self.local is None or self.local.is_due(done) or done == self._config.steps

    def num_units(self, first: int, last: int) -> int:
        """Units in the samples of steps [first, last), 0-based, over all processes."""
        return self._task.num_units(range(first * self._config.batch_size, last * self._config.batch_size))

    def _forward_backward(self, step: int, record: bool) -> torch.Tensor:
        """Gradients of this process's share of the batch, and its mean loss, fp64 0-dim on the device.

        In a pipeline the last stage has the loss and the others 0.
        """
        config, gradients, pipeline = self._config, self._gradients, self._pipeline
        total = torch.zeros((), dtype=torch.float64, device=self._world.device)
        if pipeline is not None:
            tokens = torch.cat(list(self._micro_batches(step)))
            recording = pipeline.recorded() if record else nullcontext()
            with gradients.last_backward(config.micro_batches), recording as self.passes:
                total += pipeline.forward_backward(tokens)
            self.saved_nbytes = pipeline.saved_nbytes
        else:
            for micro, samples in enumerate(self._micro_batches(step)):
                last = micro == config.micro_batches - 1
                with gradients.last_backward() if last else gradients.earlier_backward():
                    loss, whole = self._losses(self.model, samples)
                    if isinstance(gradients, PassingGradients):  # after backward it is too late to leave updates out
                        gradients.are_used = not self._world.sum((~whole.detach().isfinite()).float()).item()
                    (whole / config.micro_batches).backward()
                total += loss.detach().double() / config.micro_batches
        audits, self._audits_reduction = self._audits_reduction, False
        if audits and isinstance(gradients, ExpertParallelGradients):
            error = self._world.first_error(gradients.reduce_audited())
            if error is not None:
                raise AuditError(f"in the first step {error}; likely causes: replicas that were not averaged, or twice")
        else:
            gradients.reduce()
        copies_group = self._parallel_state.embedding_group
        if pipeline is not None and copies_group is not None:
            gradients.add_copies(pipeline.copies, copies_group)
        return total

    def _losses(self, model: nn.Module, samples: Any, measures: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """The task's mean loss, and the loss that backward starts from: the same plus the losses of routers.

        `measures`: set `saved_nbytes`, if it is not known.
        """
        if self._routers is not None:
            self._routers.begin()
        measuring = SavedTensorTracker(plain_model(model)) if measures and self.saved_nbytes is None else nullcontext()
        with measuring as tracker, autocast(model, self._world.device, self._config.precision):
            loss = self._task.loss(model, samples)
        if tracker is not None:
            self.saved_nbytes, self.saved_units = tracker.nbytes, self._micro_units
        of_routers = None if self._routers is None else self._routers.loss()
        return loss, loss if of_routers is None else loss + of_routers

    def _micro_batches(self, step: int) -> Iterator[Any]:
        """This replica's micro-batches of a step, each of micro_batch_size samples, on the device."""
        config, parallel_state = self._config, self._parallel_state
        places = parallel_state.replica, parallel_state.num_replicas
        for micro in range(config.micro_batches):
            indices = global_indices(step, config.batch_size, config.micro_batches, micro, *places)
            self._micro_units = self._task.num_units(indices)
            yield self._task.training_batch(indices).to(self._world.device)

    @torch.no_grad()
    def evaluate(self) -> float | None:
        """Mean loss over the validation samples, the same ones each time, shared by the processes.

        With local steps it is that of the common point.
        """
        if not self._task.num_validation:
            return None
        world, pipeline = self._world, self._pipeline
        model = plain_model(self.model)
        total = torch.zeros(3, dtype=torch.float64, device=world.device)
        classifies = False
        with nullcontext() if self.local is None else self.local.at_common_point():
            model.eval()
            for samples, num_counted in self._validation_batches():
                total[0] += num_counted
                if pipeline is None:
                    with autocast(model, world.device, self._config.precision):
                        loss, correct = self._task.evaluate(model, samples)
                    total[1] += num_counted * loss
                    if correct is not None:
                        classifies = True
                        total[2] += correct if num_counted else 0
                else:
                    counts = torch.arange(len(samples), device=world.device) < num_counted
                    total[1] += pipeline.evaluate(samples, counts)
            model.train()
        count, loss_sum, num_correct = world.sum(total).tolist()
        self.validation_accuracy = num_correct / count if classifies else None
        # All stages of a replica have counted its sequences, and the last one has their loss.
        return float(loss_sum * self._parallel_state.num_stages / count)

    def _validation_batches(self) -> Iterator[tuple[Any, int]]:
        """This replica's validation samples in batches, with how many of them count: the first so many.

        A batch that is not full is short; in a pipeline, whose shapes are fixed, it is filled up with repetitions.
        """
        config, world, parallel_state = self._config, self._world, self._parallel_state
        available = self._task.num_validation
        num_samples = min(config.eval_sequences, available)
        chosen = evenly(num_samples, available)
        own = chosen[parallel_state.replica :: parallel_state.num_replicas]
        fixed = self._pipeline is not None
        size = self.micro_batch_size * (config.micro_batches if fixed else 1)
        # FSDP2 gathers in every forward, so all processes make equally many, if need be with a batch that counts 0.
        num_rounds = math.ceil(math.ceil(num_samples / parallel_state.num_replicas) / size)
        for start in range(0, num_rounds * size, size):
            part = own[start : start + size]
            filled = part + chosen[:1] * (size - len(part) if fixed else not part)
            yield self._task.validation_batch(filled).to(world.device), len(part)


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW over `model`'s trainable parameters; vectors (norms, biases, also those in stacks) are not decayed."""
    # A fused update takes tensors that are spread alike: experts are not, and make groups of their own.
    groups: dict[tuple[bool, DeviceMesh | None], list[nn.Parameter]] = {}
    for decays in (True, False):
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and (parameter.dim() >= 2 and not name.endswith("bias")) == decays:
                mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
                groups.setdefault((decays, mesh), []).append(parameter)
    options: dict[str, Any] = {
        "params": [
            {"params": group, "weight_decay": config.weight_decay if decays else 0.0}
            for (decays, _), group in groups.items()
        ],
        "lr": config.peak_learning_rate,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
    }
    if config.kind == "adamw":
        return torch.optim.AdamW(**options, fused=True)
    made = OPTIMIZER_CLASSES[config.kind](**options)
    if config.update_in_backward:
        made.update_in_backward()
    return made
