"""Run logger: metrics, progress, summary.json and the closing words of a run. Only rank 0 writes and prints."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import shlex
import statistics
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from laconic.collectives import audit
from laconic.cost.sizes import format_nbytes
from laconic.errors import CheckpointError
from laconic.installation import command
from laconic.schedule.moe_pipeline import COMPUTE
from laconic.schedule.streams import Timeline
from laconic.train.config.dotted_names import flat_settings
from laconic.train.config.schema import TrainConfig
from laconic.train.distributed.world import World
from laconic.train.memory.check import MemoryCheck
from laconic.train.report.metrics import (
    METRICS_VERSION,
    MetricsWriter,
    Progress,
    check_tensorboard,
    memory_nbytes,
    peak_memory_nbytes,
    read_metrics,
)
from laconic.train.report.run_dir import write_json
from laconic.train.report.wandb_run import check_wandb
from laconic.train.step_timeline import TIMELINE_FILE, machine, timeline_of_layer, timeline_of_pipeline
from laconic.train.trainer import StepResult, Trainer


class RunLogger:
    """Logs each step and each validation loss, on all processes alike; a context manager around the steps.

    `first_step` is the number of steps done before; rows of later ones in metrics.jsonl are dropped.
    """

    def __init__(self, config: TrainConfig, world: World, run_dir: Path, first_step: int) -> None:
        self._config = config
        self._world = world
        self._run_dir = run_dir
        self._metrics: MetricsWriter | None = None
        if world.is_main:
            settings = flat_settings(asdict(config)) if config.wandb else None
            self._metrics = MetricsWriter(run_dir, config.tensorboard, settings)
            self._metrics.truncate_after(first_step)
        self._first_step = first_step
        self._progress = Progress(config.steps, first_step, rank=world.rank, log_every=config.log_every)
        # Of each step, for what is usual in `summary`: eight bytes a number, in runs of millions of steps.
        self._speeds, self._sent, self._raw = array("d"), array("q"), array("q")
        self._num_units: int | None = None
        self._last: dict[str, Any] = {}
        self._num_skipped = 0
        self._memory: MemoryCheck | None = None
        self._audit_before = audit.snapshot()

    def message(self, text: str) -> None:
        """Show a line to the user."""
        self._progress.message(text)

    def step(
        self,
        done: int,
        result: StepResult,
        seconds: float,
        trainer: Trainer,
        of_experts: Mapping[str, float | int | str] | None = None,
        loads: list[list[int]] | None = None,
    ) -> None:
        """Log the step after which `done` steps are done; it took `seconds`.

        `of_experts` are more fields, `loads` the tokens of each expert by layer, if they were counted.
        """
        step_units = trainer.num_units(done - 1, done)
        if self._num_units is None:
            self._num_units = trainer.num_units(0, done - 1)
        self._num_units += step_units
        self._speeds.append(step_units / seconds)
        held = memory_nbytes()
        self._num_skipped += result.skipped
        self._sent.append(trainer.wire_nbytes or 0)
        self._raw.append(trainer.wire_raw_nbytes or 0)
        self._last |= {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "learning_rate": result.learning_rate,
            f"{trainer.unit}s_per_second": self._speeds[-1],
            "step_seconds": seconds,
            "peak_memory_nbytes": max(peak_memory_nbytes(), held),  # Linux counts the peak late
            "memory_nbytes": held,
            "saved_nbytes": trainer.saved_nbytes,
            "wire_nbytes": trainer.wire_nbytes,
            "wire_raw_nbytes": trainer.wire_raw_nbytes,
            f"{trainer.unit}s": self._num_units,
            "skipped_steps": self._num_skipped,
            **(of_experts or {}),
        }
        if trainer.overlapped_nbytes is not None:
            self._last["moe_window_nbytes"] = trainer.overlapped_nbytes
        if self._metrics is not None:
            apart = ("validation_loss", "validation_accuracy")
            counted = {} if loads is None else {"moe_loads": loads}
            row = {name: self._last[name] for name in self._last if name not in apart}
            self._metrics.write(done, **row, **counted)
        self._progress.update(done, self._last)

    def timeline(self, done: int, trainer: Trainer, executed: Mapping[str, Timeline]) -> None:
        """Write when the tasks of a step ran, if it followed a schedule; all processes call it together.

        `executed` are timelines of this process's layers in chunks, by direction.
        """
        config = self._config
        found = None
        if config.pipeline.stages > 1:
            ranks = self._world.gather((machine(), trainer.synced_at, trainer.passes or []))
            # The first replica stands for all: they run the same passes.
            replicas = self._world.size // config.pipeline.stages
            lanes = [(f"rank {rank}", *ranks[rank]) for rank in range(0, self._world.size, replicas)]
            words = f"{config.pipeline.schedule}, {config.pipeline.stages} stages, {config.micro_batches} micro-batches"
            found = timeline_of_pipeline(done, words, lanes)
        elif executed:
            named = {f"{direction} of a layer of experts on rank 0": run for direction, run in executed.items()}
            words = ", ".join(f"{_chunks(run)} chunks {direction}" for direction, run in executed.items())
            found = timeline_of_layer(done, words, named)
        if found is not None and self._world.is_main:
            write_json(self._run_dir / TIMELINE_FILE, found)

    def recall(self, trainer: Trainer) -> None:
        """Take the steps of metrics.jsonl for those of this process, where a run has none left to do."""
        steps = [row for row in read_metrics(self._run_dir) if "loss" in row]
        if not steps:
            raise CheckpointError(f"{self._run_dir} has no metrics.jsonl with the steps of its last checkpoint")
        self._speeds = array("d", [row[f"{trainer.unit}s_per_second"] for row in steps])
        self._sent = array("q", [row["wire_nbytes"] or 0 for row in steps])
        self._raw = array("q", [row["wire_raw_nbytes"] or 0 for row in steps])
        self._num_skipped = steps[-1]["skipped_steps"]
        for row in read_metrics(self._run_dir):
            self._last |= row
        trainer.saved_nbytes = steps[-1]["saved_nbytes"]

    def memory(self, check: MemoryCheck) -> None:
        """Log what this process holds, and what its plan has predicted."""
        self._memory = check
        self.message(str(check))

    def validation(self, done: int, loss: float | None, accuracy: float | None = None) -> None:
        """Log validation loss and accuracy (a share) after `done` steps; None: there is no validation data."""
        if loss is None:
            return
        self._last["validation_loss"] = loss
        of_classes = {} if accuracy is None else {"validation_accuracy": accuracy}
        self._last |= of_classes
        if self._metrics is not None:
            self._metrics.write(done, validation_loss=loss, **of_classes)
        words = "" if accuracy is None else f", accuracy {accuracy:.2%}"
        self.message(f"step {done}: validation loss {loss:.4f}{words}")

    def summary(self, done: int, trainer: Trainer, bf16_nbytes_per_unit: float, seconds: float) -> dict[str, Any]:
        """The contents of summary.json; all processes call it together.

        Seconds, speed, memory and bytes are those of the steps after `first_step`. The speed is that of the median
        step, so that neither the measuring first step nor a pause counts. Memory is that of the process that took most;
        `earlier_peak_memory_nbytes` is that of the starts before, as their summaries or (of rank 0) their rows tell.
        """
        config, unit = self._config, trainer.unit
        # A copy of the model is as many processes as there are stages.
        saved_nbytes = sum(self._world.gather(trainer.saved_nbytes)) / self._world.size * config.pipeline.stages
        saved_units = sum(self._world.gather(trainer.saved_units)) / self._world.size
        peak_nbytes = max(self._world.gather(peak_memory_nbytes()))
        # Most local steps send nothing at all.
        usual = statistics.mean if config.local_steps else statistics.median
        sent, raw = usual(self._sent), usual(self._raw)
        audits = self._world.gather((audit.snapshot() - self._audit_before).to_dict())
        coded = sum(map(audit.Snapshot.from_dict, audits), audit.Snapshot(()))
        best: float | None = None
        earlier: int | None = None
        if self._metrics is not None:
            rows = read_metrics(self._run_dir)
            losses = [row["validation_loss"] for row in rows if "validation_loss" in row]
            best = min((loss for loss in losses if math.isfinite(loss)), default=None)
            earlier = self._earlier_peak_nbytes(rows)
        return {
            "metrics_version": METRICS_VERSION,
            "steps": done,
            "first_step": self._first_step,
            "loss": self._last["loss"],
            "validation_loss": self._last.get("validation_loss"),
            "best_validation_loss": best,
            **({"validation_accuracy": self._last.get("validation_accuracy")} if trainer.classifies else {}),
            f"{unit}s_per_second": statistics.median(self._speeds),
            "peak_memory_nbytes": peak_nbytes,
            "earlier_peak_memory_nbytes": earlier,
            f"saved_nbytes_per_{unit}": saved_nbytes / saved_units,
            f"bf16_nbytes_per_{unit}": bf16_nbytes_per_unit,
            "wire_nbytes_per_step": sent,
            "wire_raw_nbytes_per_step": raw,
            "collectives": coded.to_dict() if coded.entries else None,
            "skipped_steps": self._num_skipped,
            "world_size": self._world.size,
            "parallel": config.parallel,
            "stages": config.pipeline.stages,
            "precision": config.precision,
            "seconds": seconds,
            "memory": None if self._memory is None else self._memory.to_dict(),
        }

    def _earlier_peak_nbytes(self, rows: Sequence[Mapping[str, Any]]) -> int | None:
        """Most memory that a process held in earlier starts of the run; None in its first."""
        if not self._first_step:
            return None
        with contextlib.suppress(OSError, ValueError, TypeError):  # a summary that is missing or damaged
            rows = [*rows, {"step": 0, **json.loads((self._run_dir / "summary.json").read_text(encoding="utf-8"))}]
        found = [
            row.get(name)
            for row in rows
            for name in ("peak_memory_nbytes", "earlier_peak_memory_nbytes")
            if row["step"] <= self._first_step
        ]
        return max((nbytes for nbytes in found if isinstance(nbytes, int)), default=None)

    def __enter__(self) -> RunLogger:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._progress.close()
        if self._metrics is not None:
            self._metrics.close(failed=kind is not None)


def closing_words(
    summary: dict[str, Any],
    run_dir: Path,
    config: TrainConfig,
    unit: str,
    exports: bool,
    kept: tuple[float | None, float | None],
) -> str:
    """The closing text of a run: results, cost, and what to do next.

    Args:
        unit: what speed and bytes are counted per.
        exports: whether the model is one of transformers', which an export needs.
        kept: what the report of the compression measured in fp32, before and after, bytes per unit, or None.
    """
    done, steps = summary["steps"], config.steps
    validation, best = summary["validation_loss"], summary["best_validation_loss"]
    stages = f", {summary['stages']} stages" if summary["stages"] > 1 else ""
    resumed = f", {done - first} of them since the run was resumed," if (first := summary["first_step"]) else ""
    processes = f"{summary['world_size']} processes, {config.parallel}{stages}"
    processes = "1 process" if summary["world_size"] == 1 else processes
    lines = [
        f"{'done' if done == steps else 'stopped'}: {done} of {steps} steps{resumed} in {summary['seconds']:.0f} s",
        f"  loss               {summary['loss']:.4f}",
    ]
    if validation is not None:
        lines.append(f"  validation loss    {validation:.4f} (best {best:.4f})")
    if (accuracy := summary.get("validation_accuracy")) is not None:
        lines.append(f"  accuracy           {accuracy:.2%} of the validation {unit}s")
    lines += [
        f"  speed              {summary[f'{unit}s_per_second']:,.0f} {unit}s/s ({processes}, {config.precision})",
        f"  kept for backward  {_kept_words(summary, config, unit, kept)}",
        f"  peak memory        {_peak_words(summary)}",
        *_wire_words(summary),
        *(f"  restart            {restart['reason']}" for restart in summary.get("restarts", ())),
        f"  run directory      {run_dir}",
        "next:",
    ]
    further = "" if done < steps else f" --steps {2 * steps}"
    laconic, folder = command(), shlex.quote(str(run_dir))
    lines += [
        f"  {laconic} train --resume --run-dir {folder}{further}",
        f"  {laconic} compare {folder} OTHER_RUN",
        *([f"  {laconic} export {folder} DIRECTORY"] if exports else []),
    ]
    return "\n".join(lines)


def _peak_words(summary: Mapping[str, Any]) -> str:
    earlier = summary["earlier_peak_memory_nbytes"]
    before = "" if earlier is None else f" in this start, {format_nbytes(earlier)} in earlier ones"
    return f"{format_nbytes(summary['peak_memory_nbytes'])} per process{before}"


def _kept_words(
    summary: Mapping[str, Any], config: TrainConfig, unit: str, kept: tuple[float | None, float | None]
) -> str:
    """What backward keeps beside exact training in the same precision: the figures of the run's first lines in fp32."""
    before, after = kept
    name, included = "exact training", ""
    if config.precision != "fp32" or before is None or after is None:
        before, after = summary[f"bf16_nbytes_per_{unit}"], summary[f"saved_nbytes_per_{unit}"]
        name = "the unmodified model in bf16"
        if config.precision == "bf16" and config.parallel == "ddp":  # FSDP2 gathers what the other has as parameters
            included = ", autocast's bf16 weights included"
    times = f" ({before / after:.2f}x)" if after else ""
    return f"{after:,.0f} bytes per {unit}{included}; {name} keeps {before:,.0f}{times}"


def check_loggers(config: TrainConfig, world: World) -> None:
    """Refuse, on every process, what the first one, which logs, could not do; all processes call it together.

    Raises:
        ConfigError: TensorBoard or wandb is asked for, but cannot be used.
    """
    if config.tensorboard:
        check_tensorboard()
    with world.agree():
        if config.wandb and world.is_main:
            check_wandb()


@contextmanager
def log_on_stderr(world: World) -> Iterator[None]:
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


def _chunks(run: Timeline) -> int:
    return sum(task.stream == COMPUTE for task in run.plan.tasks)


def _wire_words(summary: dict[str, Any]) -> list[str]:
    sent, raw = summary["wire_nbytes_per_step"], summary["wire_raw_nbytes_per_step"]
    if not sent:
        return []
    shortened = f"; {format_nbytes(raw)} before lossless coding ({raw / sent:.2f}x)" if raw != sent else ""
    return [f"  sent               {format_nbytes(sent)} per process and step{shortened}"]
