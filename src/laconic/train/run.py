"""One run from its configuration to its summary, as every process of it executes it.

The run directory is made only after data and model have been checked, so a run that could not start leaves nothing
behind.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import nn

import laconic
from laconic.collectives.engine.handshake import difference
from laconic.cost import load_plan
from laconic.errors import ConfigError, TrainingError
from laconic.output_lines import say
from laconic.train.checkpoint.resume import find_start, identity_of
from laconic.train.checkpoint.save_load import save_checkpoint
from laconic.train.config.dotted_names import flat_settings
from laconic.train.config.schema import TrainConfig
from laconic.train.config.settings import settings as settings_of
from laconic.train.config.tasks import find_task
from laconic.train.config.toml import save_config
from laconic.train.conversion import convert_model
from laconic.train.distributed.parallel_state import ParallelState, make_parallel_state
from laconic.train.distributed.world import World
from laconic.train.launch_record import Launch, Restart, record_launch, restarts_of
from laconic.train.lora import add_adapters, freeze_in_bf16
from laconic.train.model_source import resolve_defaults
from laconic.train.moe.setup import check_experts
from laconic.train.report.run_dir import check_run_dir, checkpoint_names, claim_run_dir, write_json
from laconic.train.report.run_logger import RunLogger, check_loggers, closing_words, log_on_stderr
from laconic.train.run_lock import RunLock
from laconic.train.signals import StopRequest
from laconic.train.steps import Steps

_LOCAL = ("nproc", "restarts", "tensorboard", "wandb")
"""What may differ between machines beside paths, or is taken from rank 0."""


def run(
    config: TrainConfig,
    world: World,
    stop: StopRequest,
    launch: Launch | None = None,
    begin_step: Callable[[int], None] | None = None,
) -> int:
    """Train as `config` says; all processes call it together.

    Args:
        launch: what has started the processes. A run in `config.run_dir` that the same launch has begun goes on, from
            the newest good checkpoint or from the beginning.
        begin_step: called with the number of each step, from 1, when it begins.

    Returns:
        The exit code: 0, or the stop request's.

    Raises:
        ConfigError, DataError, ModelError, FormatError, PlanError, CheckpointError: a setting, the data, the model, the
            plan or the checkpoint cannot be used.
        TrainingError: loss or gradients stay non-finite, or a file cannot be read or written.
        CorruptionError: replicas do not hold the same bits.
    """
    try:
        with RunLock(None if launch is None else launch.id) as lock:
            return _Run(config, world, lock, launch).train(stop, begin_step or (lambda step: None))
    except OSError as error:
        if error.errno is None or isinstance(error, ConnectionError):
            raise
        where = "" if error.filename is None else f" {error.filename}"
        raise TrainingError(
            f"a file{where} cannot be read or written: {error.strerror}; once that is mended, go on with --resume"
        ) from error


class _Run:
    """A run that can start: nothing about it is refused any more, and nothing is written yet.

    Attributes:
        goes_on: whether `launch` goes on with a run that it has begun itself.
        first_step: steps done before.
    """

    def __init__(self, config: TrainConfig, world: World, lock: RunLock, launch: Launch | None) -> None:
        self.started = time.monotonic()
        self.world, self.lock, self.launch = world, lock, launch
        parallel_state = self._check_settings(config)
        config = self.config
        for name, value, idle in (("zip", config.zip, "on"), ("gradients.reduce", config.gradients.reduce, "q8")):
            if world.size == 1 and value == idle:
                say(f"laconic: {name} = {value} has no effect: this run is one process, which sends nothing")
        with log_on_stderr(world):
            task = self.task = find_task(config.task)(config, world, parallel_state)
            plain = task.build_model()
            base = add_adapters(plain, config)
        if task.num_validation == 0 and world.is_main:
            usual = TrainConfig()
            if config.eval_every not in (0, usual.eval_every):
                say(f"laconic: eval_every = {config.eval_every} has no effect: this run has nothing to validate on")
            held = config.data.validation_fraction
            if config.eval_sequences and held not in (0.0, usual.data.validation_fraction):
                say(f"laconic: data.validation_fraction = {held} has no effect: the data cannot be divided")
        if parallel_state.num_stages == 1:  # else it is cut on the CPU, and a stage holds only its own part
            nn.Module.to(plain, world.device)
        self.converted = convert_model(plain, task, config, world, parallel_state)
        freeze_in_bf16(plain, config)
        self.identity = identity_of(config, task, base)
        described, own = self.converted.texts.get("config.json"), launch if self.goes_on else None
        self.checkpoint = find_start(config, world, self.run_dir, self.identity, described, own)
        self.steps = Steps(plain, self.converted, task, config, world, parallel_state, self.checkpoint)
        del plain  # its other stages, before a checkpoint is loaded
        self.first_step = self.steps.restore(self.checkpoint)

    def _check_settings(self, config: TrainConfig) -> ParallelState:
        """Complete settings from the model directory, and refuse what these processes or this machine cannot do."""
        world, launch = self.world, self.launch
        with log_on_stderr(world):
            config = resolve_defaults(config)
        _check_agreement(config, world)
        check_experts(config, world)
        parallel_state = make_parallel_state(config, world)
        check_loggers(config, world)
        if launch is not None and config.run_dir is None and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
            raise ConfigError(
                "run_dir is not set, but torchrun may start the processes again (--max-restarts), which must find the "
                "run then; give it a name with --run-dir"
            )
        self.goes_on = False
        if launch is not None and config.run_dir is not None:
            self.goes_on = bool(world.gather(launch.began(Path(config.run_dir)))[0])
        if self.goes_on:
            config = replace(config, resume=True, checkpoint=replace(config.checkpoint, load=None))
        self.run_dir, self.config = check_run_dir(config, world, own=self.goes_on), config
        if config.resume:  # no other run may write there from now on; a new directory is claimed when it is made
            claim_run_dir(self.lock, self.run_dir, True, world, own=self.goes_on)
        return parallel_state

    def train(self, stop: StopRequest, begin_step: Callable[[int], None]) -> int:
        """Do the steps that are left, with all that is written; returns the exit code."""
        config, world, run_dir, steps, first_step = self.config, self.world, self.run_dir, self.steps, self.first_step
        if first_step >= config.steps:
            if not world.gather(_has_summary(run_dir, first_step))[0]:  # the run was killed after its last checkpoint
                with RunLogger(config, world, run_dir, first_step) as run_logger:
                    run_logger.recall(steps.trainer)
                    self._write_summary(run_logger, first_step, 0.0, restarts_of(self.launch, run_dir))
            elif world.is_main:
                say(
                    f"{run_dir} has done {first_step} of {config.steps} steps; raise steps to train it further",
                    sys.stdout,
                )
            return 0
        if not config.resume:
            claim_run_dir(self.lock, run_dir, False, world)
        restarts = self._record_launch()
        self._write_settings()
        with RunLogger(config, world, run_dir, first_step) as run_logger, stop.on_signals(run_logger.message):
            stop.armed = True
            steps.trainer.rebuild_ddp_buckets()
            report, unit = self.converted.report, self.task.unit
            run_logger.message(report.kept(unit))
            advice = report.loss_advice("--activations.loss chunked", unit)
            if advice is not None and report.warning is None:  # which the conversion has logged
                run_logger.message(advice)
            steps.begin(run_logger)
            if first_step:
                run_logger.message(f"resumed after step {first_step}")
            elif config.resume and not self.goes_on:
                run_logger.message("begins anew: the run was stopped before its first checkpoint")
            if restarts and self.goes_on:
                run_logger.message(f"restart {len(restarts)} of this run: {restarts[-1].reason}")
            if (audited := steps.trainer.audit(first_step)) is not None:
                run_logger.message(str(audited))
            done, stopped = steps.run(run_logger, stop, first_step, self._save, begin_step)
        self._write_summary(run_logger, done, time.monotonic() - self.started, restarts)
        return stop.exit_code if stopped else 0

    def _save(self, done: int) -> None:
        """Save the state after `done` steps; all processes call it together."""
        trainer, chosen = self.steps.trainer, self.config.checkpoint
        texts = self.converted.texts | self.steps.texts()
        with self.steps.in_logical_order():
            save_checkpoint(
                self.run_dir,
                self.world,
                trainer.model,
                trainer.optimizer,
                step=done,
                identity=self.identity,
                texts=texts,
                keep=chosen.keep,
                zipped=chosen.zip,
                adapters=self.config.lora.r is not None,
                allowed=self.lock.check,
                local=trainer.local,
            )

    def _write_settings(self) -> None:
        """Write the files that the run can be repeated from."""
        if not self.world.is_main:
            return
        config, run_dir, plan = self.config, self.run_dir, self.converted.plan
        repeatable = replace(config.checkpoint, load=None)
        saved = replace(config, run_dir=str(run_dir), resume=False, checkpoint=repeatable)
        if plan is not None:  # a copy, so that the run can be resumed wherever the original goes
            plan.save(run_dir / "plan.json")
            saved = replace(saved, plan=str(run_dir / "plan.json"))
        save_config(saved, run_dir / "config.toml")
        write_json(run_dir / "activations.json", self.converted.report.to_dict())
        self.task.write_files(run_dir)

    def _record_launch(self) -> tuple[Restart, ...]:
        """Write into the run's directory which launch it belongs to; return the restarts of the run so far."""
        if self.launch is None or not self.world.is_main:
            return restarts_of(self.launch, self.run_dir)
        names = checkpoint_names(self.run_dir)
        chosen = None if self.checkpoint is None else self.checkpoint.path.name
        return record_launch(self.launch, self.run_dir, self.goes_on, names, chosen)

    def _write_summary(self, run_logger: RunLogger, done: int, seconds: float, restarts: Sequence[Restart]) -> None:
        """Write summary.json and print the closing words; all processes call it together."""
        steps = self.steps
        summary = run_logger.summary(done, steps.trainer, self.converted.bf16_nbytes_per_unit, seconds)
        summary["restarts"] = [asdict(restart) for restart in restarts]
        summary["verify"] = steps.votes.summary()
        summary["moe"] = None if steps.experts is None else steps.experts.summary()
        if self.world.is_main:
            # Losses of runs with other tokenizers are compared per byte of text.
            summary["bytes_per_token"] = self.task.bytes_per_token()
            summary["data"] = self.task.fingerprint
            write_json(self.run_dir / "summary.json", summary)
            report, exports = self.converted.report, bool(self.converted.model_config)
            kept = report.before_nbytes_per_token, report.after_nbytes_per_token
            say(closing_words(summary, self.run_dir, self.config, self.task.unit, exports, kept), sys.stdout)


def _has_summary(run_dir: Path, done: int) -> bool:
    try:
        return int(json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))["steps"]) >= done
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _check_agreement(config: TrainConfig, world: World) -> None:
    """Check that all processes have the same settings and versions; all of them call it together.

    Paths may differ; their contents are compared where they are read.
    """
    local = {*_LOCAL, *(one.name for one in settings_of(TrainConfig) if one.is_path)}
    settings = flat_settings(asdict(config))
    settings = {name: value for name, value in settings.items() if name not in local}
    settings |= {"laconic's version": laconic.__version__, "torch's version": str(torch.__version__)}
    if config.plan is not None:
        settings["the plan"] = load_plan(config.plan).to_dict()
    found = difference(dict(enumerate(world.gather(settings))))
    if found is not None:
        raise ConfigError(f"{found}; start all processes of a run with the same settings and versions")
