"""One run from its configuration to its summary, as every process of it executes it.

The run directory is made only after data and model have been checked, so a run that could not start leaves nothing
behind.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from torch import Tensor, nn

import laconic
from laconic.activations import Report, saved_nbytes_per_token
from laconic.activations.loss import TILES
from laconic.errors import CheckpointError, ConfigError, DataError, TrainingError
from laconic.output_lines import say
from laconic.train.checkpoint.save_load import (
    Checkpoint,
    find_checkpoint,
    load_checkpoint,
    newest_good_checkpoint,
    save_checkpoint,
)
from laconic.train.config.dotted_names import flat_settings
from laconic.train.config.plan import activation_plan, check_plan, load_plan
from laconic.train.config.schema import ActivationsConfig, TrainConfig
from laconic.train.config.toml import load_config, save_config
from laconic.train.data.corpus import TokenCorpus, TokenDataset, batch, check_vocab, load_tokenizer, prepare
from laconic.train.data.images import ImageCorpus, load_images
from laconic.train.data.tokenizer import bytes_per_token
from laconic.train.distributed import comm_compression
from laconic.train.distributed.consistency import check_agreement
from laconic.train.distributed.data_parallel import autocast, wrap_model
from laconic.train.distributed.parallel_state import ParallelState, make_parallel_state
from laconic.train.distributed.replica_votes import ReplicaVotes
from laconic.train.distributed.world import World
from laconic.train.gradients import make_gradients
from laconic.train.launch_record import Launch, Restart, newer_than, now
from laconic.train.memory.forecast import Forecast
from laconic.train.model import build_model
from laconic.train.model_source import resolve_defaults
from laconic.train.model_split import mean_loss
from laconic.train.moe import migration
from laconic.train.moe.router_balance import Routers, watch_routers
from laconic.train.moe.setup import SpreadExperts, check_experts, spread_experts
from laconic.train.pipeline import Pipeline
from laconic.train.report.metrics import METRICS_FILE, check_tensorboard, read_metrics
from laconic.train.report.run_dir import (
    PREPROCESSOR_FILE,
    check_run_dir,
    checkpoint_names,
    claim_run_dir,
    copy_tokenizer,
    latest_name,
    write_json,
)
from laconic.train.report.run_logger import RunLogger, closing_words
from laconic.train.report.wandb_run import check_wandb
from laconic.train.run_lock import RunLock
from laconic.train.signals import StopRequest
from laconic.train.step_timeline import recorded_step
from laconic.train.tasks.image_classification import (
    ImageClassification,
    build_classifier,
    check_batch_norm,
    preprocessor_config,
)
from laconic.train.tasks.language_modeling import LanguageModeling
from laconic.train.tasks.task import Task
from laconic.train.trainer import StepResult, Trainer, make_optimizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from laconic.cost import Plan

__all__ = ["run"]

_MAX_SKIPPED_STEPS = 5
_SAMPLE_TOKENS = 1 << 18
_MAX_LOAD_ROWS = 100
"""Steps of a run that say how many tokens each expert got; all of them would outgrow the other metrics."""
_FORMERLY = {"optimizer.kind": "adamw"}
"""Values, in the runs that wrote them, of settings that older checkpoints do not name."""


def run(
    config: TrainConfig,
    world: World,
    stop: StopRequest,
    launch: Launch | None = None,
    begin_step: Callable[[int], None] | None = None,
) -> int:
    """Train as `config` says; all processes call it together.

    Args:
        config: of the run.
        world: the processes.
        stop: asks this process to stop.
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
            return _run(config, world, stop, lock, launch, begin_step or (lambda step: None))
    except OSError as error:
        if error.errno is None or isinstance(error, ConnectionError):
            raise
        where = "" if error.filename is None else f" {error.filename}"
        raise TrainingError(
            f"a file{where} cannot be read or written: {error.strerror}; once that is mended, go on with --resume"
        ) from error


def _run(
    config: TrainConfig,
    world: World,
    stop: StopRequest,
    lock: RunLock,
    launch: Launch | None,
    begin_step: Callable[[int], None],
) -> int:
    """Prepare, train and sum up. Everything that can be refused is refused before anything is written."""
    started = time.monotonic()
    config, parallel_state, run_dir, goes_on = _check_settings(config, world, lock, launch)
    data = _load_data(config, world)
    plain = _build_model(config, world, parallel_state, data)
    model = _convert_model(plain, config, world, parallel_state, data)
    identity = _identity(config, data.fingerprint)
    checkpoint = _find_start(config, world, run_dir, identity, launch if goes_on else None)
    training = _make_trainer(plain, model, config, world, parallel_state, data, checkpoint)
    del plain  # frees it: a stage of a pipeline holds only its own part
    first_step = _restore(training, world, checkpoint)
    if first_step >= config.steps:
        if not world.gather(_has_summary(run_dir, first_step))[0]:  # the run was killed after its last checkpoint
            with RunLogger(config, world, run_dir, first_step) as run_logger:
                run_logger.recall(training.trainer)
                summary = run_logger.summary(first_step, training.trainer, model.bf16_nbytes_per_token, 0.0)
            summary["restarts"] = [asdict(restart) for restart in _restarts(launch, run_dir)]
            _write_summary(summary, config, world, run_dir, training, data)
        elif world.is_main:
            say(f"{run_dir} has done {first_step} of {config.steps} steps; raise steps to train it further", sys.stdout)
        return 0
    if not config.resume:
        claim_run_dir(lock, run_dir, False, world)
    restarts = _record_launch(launch, goes_on, world, run_dir, checkpoint)
    _write_settings(config, world, run_dir, model, data)
    saver = _Saver(config, world, lock, run_dir, training, identity, model.texts)
    with RunLogger(config, world, run_dir, first_step) as run_logger, stop.on_signals(run_logger.message):
        stop.armed = True
        training.trainer.rebuild_ddp_buckets()
        _announce(training, model, run_logger, first_step, anew=config.resume and not goes_on)
        if restarts and goes_on:
            run_logger.message(f"restart {len(restarts)} of this run: {restarts[-1].reason}")
        if (audited := training.trainer.audit(first_step)) is not None:
            run_logger.message(str(audited))
        done, stopped = _steps(config, training, run_logger, stop, first_step, saver, begin_step)
    summary = run_logger.summary(done, training.trainer, model.bf16_nbytes_per_token, time.monotonic() - started)
    summary["restarts"] = [asdict(restart) for restart in restarts]
    _write_summary(summary, config, world, run_dir, training, data)
    return stop.exit_code if stopped else 0


@dataclass(frozen=True)
class _Data:
    """Windows of tokens; without `validation` there is no validation loss."""

    corpus: TokenCorpus
    train: TokenDataset
    validation: TokenDataset | None

    @property
    def fingerprint(self) -> str:
        """Identity of the tokens and their split."""
        return self.corpus.fingerprint


@dataclass(frozen=True)
class _ConvertedModel:
    """Decisions and facts about a converted model, collected before it is wrapped."""

    chunked_loss: bool
    plan: Plan | None
    report: Report
    """Report of the activation compression."""
    bf16_nbytes_per_token: float
    """Bytes per token that the unchanged model would keep for backward with parameters in bf16."""
    config: dict[str, Any]
    texts: dict[str, str]
    """The Hugging Face files that describe the unchanged model."""
    routers: Routers | None
    router_message: str | None
    experts: SpreadExperts | None


@dataclass(frozen=True)
class _Training:
    """A trainer, and the components that take part in its steps."""

    trainer: Trainer
    forecast: Forecast
    routers: Routers | None
    experts: SpreadExperts | None
    messages: list[str]
    """Lines for the log: how processes communicate."""
    votes: ReplicaVotes
    """Compares replicas bit by bit."""
    comm_state: str | None
    """State of the comm compression, for checkpoints; None if there is nothing to keep."""


@dataclass(frozen=True)
class _Saver:
    """Writes checkpoints of a run; all processes call it together."""

    config: TrainConfig
    world: World
    lock: RunLock
    run_dir: Path
    training: _Training
    identity: dict[str, Any]
    texts: dict[str, str]

    def save(self, done: int) -> None:
        """Save the state after `done` steps, with experts in logical order."""
        trainer, experts, chosen = self.training.trainer, self.training.experts, self.config.checkpoint
        placement = None if experts is None else experts.state()
        states = {migration.STATE_FILE: placement, comm_compression.STATE_FILE: self.training.comm_state}
        with nullcontext() if experts is None else experts.at_home():
            save_checkpoint(
                self.run_dir,
                self.world,
                trainer.model,
                trainer.optimizer,
                step=done,
                identity=self.identity,
                texts=self.texts | {name: state for name, state in states.items() if state is not None},
                keep=chosen.keep,
                zipped=chosen.zip,
                allowed=self.lock.check,
            )


def _check_settings(
    config: TrainConfig, world: World, lock: RunLock, launch: Launch | None
) -> tuple[TrainConfig, ParallelState, Path, bool]:
    """Complete settings from the model directory, and refuse what these processes or this machine cannot do.

    Returns settings, groups, the run's directory, and whether `launch` goes on with a run that it has begun itself.
    """
    with _log_on_stderr(world):
        config = resolve_defaults(config)
    check_agreement(config, world)
    check_experts(config, world)
    parallel_state = make_parallel_state(config, world)
    _check_batch(config, parallel_state)
    if config.tensorboard:
        check_tensorboard()
    _check_wandb(config, world)
    if launch is not None and config.run_dir is None and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        raise ConfigError(
            "run_dir is not set, but torchrun may start the processes again (--max-restarts), which must find the run "
            "then; give it a name with --run-dir"
        )
    goes_on = False
    if launch is not None and config.run_dir is not None:
        goes_on = bool(world.gather(launch.began(Path(config.run_dir)))[0])
    if goes_on:
        config = replace(config, resume=True, checkpoint=replace(config.checkpoint, load=None))
    run_dir = check_run_dir(config, world, own=goes_on)
    if config.resume:  # no other run may write there from now on; a new directory is claimed when it is made
        claim_run_dir(lock, run_dir, True, world, own=goes_on)
    return config, parallel_state, run_dir, goes_on


def _check_wandb(config: TrainConfig, world: World) -> None:
    """Refuse, on every process, what wandb could not do on the first one, which logs."""
    error = None
    if config.wandb and world.is_main:
        try:
            check_wandb()
        except ConfigError as failure:
            error = str(failure)
    error = world.first_error(error)
    if error is not None:
        raise ConfigError(error)


def _load_data(config: TrainConfig, world: World) -> _Data | ImageCorpus:
    """Tokenize the corpus, or open token files of an earlier run; or read all images."""
    if config.task == "image-classification":
        with _log_on_stderr(world):
            return load_images(config.data, config.images)
    with _log_on_stderr(world):
        corpus = prepare(config.data, verify=world.local_rank == 0)
    train = TokenDataset(corpus.train, config.sequence_length)
    wants_validation = config.eval_sequences > 0 and len(corpus.validation) > 0
    return _Data(corpus, train, TokenDataset(corpus.validation, config.sequence_length) if wants_validation else None)


def _build_model(
    config: TrainConfig, world: World, parallel_state: ParallelState, data: _Data | ImageCorpus
) -> PreTrainedModel:
    """Build the unchanged model, on its device unless it is going to be cut into stages."""
    if isinstance(data, ImageCorpus):
        with _log_on_stderr(world):
            classifier = build_classifier(config.model, data, config.seed)
        check_batch_norm(classifier, config.batch_size // (parallel_state.num_replicas * config.micro_batches))
        nn.Module.to(classifier, world.device)
        return classifier
    corpus = data.corpus
    with _log_on_stderr(world):
        shape = corpus.vocab_size, config.sequence_length
        model = build_model(config.model, *shape, config.seed, corpus.end_of_document)
    check_vocab(corpus, next(model.get_input_embeddings().parameters()).shape[0])
    if parallel_state.num_stages == 1:
        nn.Module.to(model, world.device)
    return model


def _convert_model(
    plain: PreTrainedModel, config: TrainConfig, world: World, parallel_state: ParallelState, data: _Data | ImageCorpus
) -> _ConvertedModel:
    """Hook the routers of `plain`, spread its experts and compress its activations, all in place."""
    if isinstance(data, ImageCorpus):
        return _convert_classifier(plain, config, world, data)
    bf16_nbytes_per_token = saved_nbytes_per_token(plain, sequence_length=config.sequence_length)
    chunked_loss = _chunks_loss(config, world, parallel_state, plain)
    plan = None
    if config.plan is not None:
        plan = load_plan(config.plan)
        check_plan(plan, config, parallel_state, plain.config, chunked_loss)
    texts, model_config = _model_texts(plain), plain.config.to_dict()
    routers, router_message = watch_routers(plain, config, world)
    experts = spread_experts(plain, config, world)
    report = _compress(plain, config, plan, chunked_loss)
    if experts is not None:
        experts.tune(partial(_first_loss, plain, config, world, parallel_state, data.train, chunked_loss))
    return _ConvertedModel(
        chunked_loss, plan, report, bf16_nbytes_per_token, model_config, texts, routers, router_message, experts
    )


def _convert_classifier(
    plain: PreTrainedModel, config: TrainConfig, world: World, corpus: ImageCorpus
) -> _ConvertedModel:
    """Compress the activations of an image classifier; bytes are measured with two images and counted per image."""
    images = ImageClassification(corpus, config).training_batch(range(2)).to(world.device)
    # The first integer tensor says of how many: labels, one per image.
    inputs = {"labels": images.labels, "pixel_values": images.pixels}
    halved = inputs | {"pixel_values": images.pixels.bfloat16()}
    in_bf16 = copy.deepcopy(plain).bfloat16()  # with its buffers: batch normalization takes no mixture
    bf16_nbytes = saved_nbytes_per_token(in_bf16, dtype=None, example_inputs=halved)
    texts, model_config = _model_texts(plain), plain.config.to_dict()
    chosen = config.activations
    report = laconic.compress_activations(
        plain,
        chosen.bits,
        **_kept_as(chosen),
        example_inputs=inputs,
    )
    return _ConvertedModel(False, None, report, bf16_nbytes, model_config, texts, None, None, None)


def _make_task(config: TrainConfig, data: _Data | ImageCorpus, chunked_loss: bool) -> Task:
    """Make the task of the run."""
    if isinstance(data, ImageCorpus):
        return ImageClassification(data, config)
    return LanguageModeling(data.train, data.validation, config.seed, chunked_loss)


def _find_start(
    config: TrainConfig, world: World, run_dir: Path, identity: dict[str, Any], launch: Launch | None
) -> Checkpoint | None:
    """Find the checkpoint that the run continues from; None for a new run.

    A `launch` that goes on with its own run takes the newest checkpoint that is good, or none. Neither does a run that
    was stopped before its first save have one.
    """
    if not config.resume:
        return None
    checkpoint: Checkpoint | None
    if launch is not None:
        with _log_on_stderr(world):
            checkpoint = newest_good_checkpoint(run_dir, world, launch.in_directory(run_dir).abandoned)
        if checkpoint is None:
            return None
    else:
        name = None if config.checkpoint.load is None else str(config.checkpoint.load)
        if name is None and world.gather(_stopped_before_a_save(run_dir) if world.is_main else None)[0]:
            return None
        checkpoint = find_checkpoint(run_dir, world, name)
    _check_identity(identity, checkpoint.identity, checkpoint.path)
    return checkpoint


def _stopped_before_a_save(run_dir: Path) -> bool:
    """Whether the run in `run_dir` was stopped, or killed, before its first checkpoint was whole.

    A run of which more is known than such a run can have done has lost its checkpoints instead.
    """
    try:
        if checkpoint_names(run_dir) or latest_name(run_dir) is not None or (run_dir / "summary.json").exists():
            return False
        every = load_config(run_dir / "config.toml").checkpoint.every
        rows = read_metrics(run_dir) if (run_dir / METRICS_FILE).exists() else []
    except (CheckpointError, ConfigError, DataError):  # whoever looks for a checkpoint meets it, too
        return False
    return every == 0 or max((row["step"] for row in rows), default=0) <= every


def _make_trainer(
    plain: PreTrainedModel,
    model: _ConvertedModel,
    config: TrainConfig,
    world: World,
    parallel_state: ParallelState,
    data: _Data | ImageCorpus,
    checkpoint: Checkpoint | None,
) -> _Training:
    """Wrap `plain` or cut it into stages, choose the codecs of its messages, and make its optimizer."""
    spread = None if model.experts is None else model.experts.model
    pipeline = (
        None if parallel_state.num_stages == 1 else Pipeline(config, world, parallel_state, plain, model.chunked_loss)
    )
    wrapped = wrap_model(plain, config, world, parallel_state, spread) if pipeline is None else pipeline.parts
    messages: list[str] = []
    comm_state = None
    bare = config.moe.overlap_grad_reduce and config.parallel == "ddp"  # its gradients choose their codec themselves
    if not bare:
        saved = None if checkpoint is None else checkpoint.text(comm_compression.STATE_FILE)
        modules = [wrapped] if pipeline is None else pipeline.wrapped
        messages, comm_state = comm_compression.zip_model(modules, config, world, parallel_state, saved)
    gradients = make_gradients(config, parallel_state, wrapped, spread)
    optimizer = make_optimizer(wrapped, config.optimizer)
    trainer = Trainer(
        config,
        world,
        parallel_state,
        wrapped,
        gradients,
        optimizer,
        _make_task(config, data, model.chunked_loss),
        pipeline,
        model.routers,
    )
    split = () if pipeline is None else pipeline.split
    forecast = Forecast(config, parallel_state, model.config, trainer, model.plan, split, model.chunked_loss)
    sends = [] if pipeline is None else [pipeline.sends]
    votes = ReplicaVotes(config, world, parallel_state, wrapped, optimizer, spread)
    return _Training(trainer, forecast, model.routers, model.experts, [*messages, *sends], votes, comm_state)


def _restore(training: _Training, world: World, checkpoint: Checkpoint | None) -> int:
    """Load `checkpoint`, if any, and set up expert migration; return the number of steps done before."""
    trainer, experts = training.trainer, training.experts
    if checkpoint is not None:
        load_checkpoint(checkpoint, world, trainer.model, trainer.optimizer)
    if experts is not None:
        experts.prepare(trainer.optimizer, None if checkpoint is None else checkpoint.text(migration.STATE_FILE))
    return 0 if checkpoint is None else checkpoint.step


def _write_settings(
    config: TrainConfig,
    world: World,
    run_dir: Path,
    model: _ConvertedModel,
    data: _Data | ImageCorpus,
) -> None:
    """Write the files that the run can be repeated from."""
    if not world.is_main:
        return
    repeatable = replace(config.checkpoint, load=None)
    saved = replace(config, run_dir=str(run_dir), resume=False, checkpoint=repeatable)
    if model.plan is not None:  # a copy, so that the run can be resumed wherever the original goes
        model.plan.save(run_dir / "plan.json")
        saved = replace(saved, plan=str(run_dir / "plan.json"))
    save_config(saved, run_dir / "config.toml")
    write_json(run_dir / "activations.json", model.report.to_dict())
    if isinstance(data, ImageCorpus):
        write_json(run_dir / PREPROCESSOR_FILE, preprocessor_config(data))
    else:
        copy_tokenizer(load_tokenizer(config.data.tokenizer or "bytes", config.data.end_of_document), run_dir)


def _has_summary(run_dir: Path, done: int) -> bool:
    """Whether summary.json is there and about a run of `done` steps or more."""
    try:
        return int(json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))["steps"]) >= done
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _restarts(launch: Launch | None, run_dir: Path) -> tuple[Restart, ...]:
    """The restarts of the run so far."""
    return (launch or Launch("")).in_directory(run_dir).restarts


def _record_launch(
    launch: Launch | None, goes_on: bool, world: World, run_dir: Path, checkpoint: Checkpoint | None
) -> tuple[Restart, ...]:
    """Write into the run's directory which launch it belongs to; return the restarts of the run so far."""
    if launch is None or not world.is_main:
        return _restarts(launch, run_dir)
    recorded = launch.in_directory(run_dir)
    if not goes_on:
        names = checkpoint_names(run_dir)
        recorded = replace(recorded, abandoned=newer_than(names, None if checkpoint is None else checkpoint.path.name))
    elif not launch.restarts:  # torchrun tells its processes no reason
        recorded = replace(
            recorded, restarts=(*recorded.restarts, Restart(launch.id, now(), "torchrun started it again"))
        )
    recorded.save(run_dir)
    return recorded.restarts


def _announce(training: _Training, model: _ConvertedModel, run_logger: RunLogger, first_step: int, anew: bool) -> None:
    """Log what the steps run with: activations, experts, routers, communication, the step resumed from, if any."""
    unit = training.trainer.unit
    run_logger.message(str(model.report).splitlines()[-1].replace("per token", f"per {unit}"))
    lines: list[str] = []
    if training.experts is not None:
        training.experts.begin()
        lines += [*training.experts.messages(), str(training.experts)]
    if model.router_message is not None:
        lines.append(model.router_message)
    for line in [*lines, *training.messages]:
        run_logger.message(line)
    if first_step:
        run_logger.message(f"resumed after step {first_step}")
    elif anew:
        run_logger.message("begins anew: the run was stopped before its first checkpoint")


def _steps(
    config: TrainConfig,
    training: _Training,
    run_logger: RunLogger,
    stop: StopRequest,
    first_step: int,
    saver: _Saver,
    begin_step: Callable[[int], None],
) -> tuple[int, bool]:
    """Run the steps after `first_step`, with evaluations and checkpoints.

    Returns:
        The number of steps done, and whether a stop was requested.

    Raises:
        TrainingError: loss or gradient was not finite in several steps in a row.
        AuditError: replicas differ after the first step.
        CorruptionError: replicas differ.
    """
    skipped_in_a_row = 0
    recorded = recorded_step(first_step, config.steps)
    load_stride = math.ceil(config.steps / _MAX_LOAD_ROWS)
    for done in range(first_step + 1, config.steps + 1):
        begin_step(done)
        counts = done % load_stride == 0
        result = _step(done, training, run_logger, stop, record=done == recorded, count_loads=counts)
        if done == first_step + 1 and config.audit and (number := training.votes.audit(done)):
            run_logger.message(f"audit: after step {done}, {number} replicated tensors have the same bits")
        skipped_in_a_row = skipped_in_a_row + 1 if result.skipped else 0
        if skipped_in_a_row == _MAX_SKIPPED_STEPS:
            raise TrainingError(
                f"loss or gradient was not finite in {_MAX_SKIPPED_STEPS} steps in a row, "
                f"{done - skipped_in_a_row + 1} to {done}; lower optimizer.learning_rate or look at the data of these "
                "steps, then continue from the last checkpoint with --resume"
            )
        last = done == config.steps
        stopped = result.stop and not last
        saves = last or stopped or (config.checkpoint.every > 0 and done % config.checkpoint.every == 0)
        if training.votes.due(done, saves) and (line := training.votes.vote(done)):
            run_logger.message(line)
        if last or (config.eval_every and done % config.eval_every == 0):
            run_logger.validation(done, training.trainer.evaluate(), training.trainer.validation_accuracy)
        if saves:
            saver.save(done)
        if stopped:
            return done, True
    return config.steps, False


def _step(
    done: int,
    training: _Training,
    run_logger: RunLogger,
    stop: StopRequest,
    *,
    record: bool = False,
    count_loads: bool = False,
) -> StepResult:
    """Run the step after which `done` are done, and log its metrics and messages.

    `record`: also its timeline. `count_loads`: also the tokens of each expert.
    """
    trainer, forecast, routers, experts = training.trainer, training.forecast, training.routers, training.experts
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


def _write_summary(
    summary: dict[str, Any],
    config: TrainConfig,
    world: World,
    run_dir: Path,
    training: _Training,
    data: _Data | ImageCorpus,
) -> None:
    """Complete `summary`, write summary.json and print the closing words."""
    summary["verify"] = training.votes.summary()
    summary["moe"] = None if training.experts is None else training.experts.summary()
    if world.is_main:
        # Losses of runs with other tokenizers are compared per byte of text.
        summary["bytes_per_token"] = None if isinstance(data, ImageCorpus) else _bytes_per_token(config, data.corpus)
        write_json(run_dir / "summary.json", summary)
        say(closing_words(summary, run_dir, config), sys.stdout)


def _check_batch(config: TrainConfig, parallel_state: ParallelState) -> None:
    """Check that the token ids of a step alone, where there are any, fit into this machine's memory.

    Raises:
        ConfigError: they do not.
    """
    if config.task == "image-classification":
        return
    sequences = config.batch_size // parallel_state.num_replicas
    nbytes, memory = 8 * sequences * (config.sequence_length + 1), psutil.virtual_memory().total
    if nbytes > memory:
        raise ConfigError(
            f"batch_size is {config.batch_size}, but the tokens of {sequences} sequences of {config.sequence_length} "
            f"take {nbytes:,} bytes on a process, and this machine has {memory:,}; lower batch_size"
        )


@contextmanager
def _log_on_stderr(world: World) -> Iterator[None]:
    """Print laconic's log messages to stderr while the block runs, unless the user has set up logging.

    The main process prints all of them, the others only those about the corpus, which any process may tokenize.
    """
    logger = logging.getLogger("laconic" if world.is_main else "laconic.train.data.corpus")
    if logger.hasHandlers():
        yield
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("laconic: %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _chunks_loss(config: TrainConfig, world: World, parallel_state: ParallelState, model: PreTrainedModel) -> bool:
    """Decide whether the loss is computed in chunks; with "auto", if there are more logits than one tile holds."""
    if config.activations.loss != "auto":
        return config.activations.loss == "chunked"
    tokens = config.batch_size // (parallel_state.num_replicas * config.micro_batches) * config.sequence_length
    num_entries = next(model.get_input_embeddings().parameters()).shape[0]
    _, tile_numel = TILES[world.device.type]
    return config.activations.mode == "sites" and tokens * num_entries > tile_numel


def _first_loss(
    model: nn.Module,
    config: TrainConfig,
    world: World,
    parallel_state: ParallelState,
    train: TokenDataset,
    chunked: bool,
) -> Tensor:
    """Run a forward of this process's first micro-batch and return its loss, 0-dim."""
    places = config.micro_batches, 0, parallel_state.replica, parallel_state.num_replicas
    tokens = batch(train, config.seed, 0, config.batch_size, *places).to(world.device)
    with autocast(model, world.device, config.precision):
        return mean_loss(model, tokens[:, 1:], chunked, input_ids=tokens[:, :-1])


def _kept_as(chosen: ActivationsConfig) -> dict[str, Any]:
    """How `compress_activations` is told what `[activations]` says, but for the bits and the loss."""
    return {
        "format": chosen.format,
        "block_size": chosen.block_size,
        "mode": chosen.mode,
        "attention": chosen.attention,
    }


def _compress(model: PreTrainedModel, config: TrainConfig, plan: Plan | None, chunked_loss: bool) -> Report:
    """Make `model` keep for backward what the plan says, or else `[activations]`."""
    chosen = config.activations
    options: dict[str, Any] = {"sequence_length": config.sequence_length}
    options["loss"] = "chunked" if chunked_loss else "exact"
    if plan is not None:
        return laconic.compress_activations(model, plan=activation_plan(plan), **options)
    return laconic.compress_activations(
        model,
        chosen.bits,
        **_kept_as(chosen),
        **options,
    )


def _bytes_per_token(config: TrainConfig, corpus: TokenCorpus) -> float | None:
    """UTF-8 bytes of text per token, over the tokens that validation reads first; None if they have no text."""
    stream = corpus.validation if len(corpus.validation) else corpus.train
    tokenizer = load_tokenizer(config.data.tokenizer or "bytes", config.data.end_of_document)
    return bytes_per_token(tokenizer, stream.read(0, min(len(stream), _SAMPLE_TOKENS)))


def _identity(config: TrainConfig, fingerprint: str) -> dict[str, Any]:
    """Settings that a resumed run must share with the run that wrote its checkpoint."""
    of_images: dict[str, Any] = {} if config.task == "language-modeling" else {"images": asdict(config.images)}
    return of_images | {
        "model": asdict(replace(config.model, allow_download=False)),
        "data": fingerprint,
        "sequence_length": config.sequence_length,
        "batch_size": config.batch_size,
        "seed": config.seed,
        "optimizer.kind": config.optimizer.kind,
    }


def _check_identity(now: dict[str, Any], then: dict[str, Any], path: Path) -> None:
    """Check that the settings `now` are those `then`, of the checkpoint at `path`.

    Raises:
        ConfigError: one of them has changed.
    """
    # Through JSON, like the manifest: tuples become lists.
    here = flat_settings(json.loads(json.dumps(now)))
    there = flat_settings({name: then.get(name, _FORMERLY.get(name)) for name in now})
    for name in {**here, **there}:
        value, before = here.get(name), there.get(name)
        if value != before:
            raise ConfigError(
                f"{name} is {value!r}, but the run that wrote {path} had {before!r}; resume it unchanged, or export "
                "the model and start a new run from it with model.path"
            )


def _model_texts(model: PreTrainedModel) -> dict[str, str]:
    """Texts of the Hugging Face files that describe `model`, by name, to be saved beside its weights."""
    texts = {"config.json": model.config.to_json_string(use_diff=False)}
    if model.can_generate():
        texts["generation_config.json"] = model.generation_config.to_json_string(use_diff=False)
    return texts
