"""Reads a run directory: config.toml, metrics.jsonl, activations.json, summary.json and timeline.json.

A run that died early lacks some of them and is still worth looking at, so a file that is missing or damaged leaves its
part empty and a note in `Run.notes`; only a directory that is no run at all is refused.
"""

from __future__ import annotations

import hashlib
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from laconic.errors import DataError
from laconic.json_text import parse_json
from laconic.train.config.dotted_names import flat_settings
from laconic.train.config.tasks import find_task, task_names
from laconic.train.config.toml_text import parse_toml
from laconic.train.report.metrics import METRICS_FILE, read_metrics
from laconic.train.step_timeline import TIMELINE_FILE

_FILES = ("config.toml", METRICS_FILE, "activations.json", "summary.json")
_LOSSES = ("loss", "validation_loss")
_MEASURES = (
    "tokens_per_second",
    "images_per_second",
    "validation_accuracy",
    "step_seconds",
    "peak_memory_nbytes",
    "memory_nbytes",
    "saved_nbytes",
    "wire_nbytes",
    "wire_raw_nbytes",
    "moe_load_ratio",
    "moe_duplicate_rate",
)
_ACTIVATIONS = {"before_nbytes_per_token", "after_nbytes_per_token"}
LOADS = "moe_loads"
"""Field with the tokens of each expert, by layer."""
LOSS_WINDOW = 20
"""Steps over which the training loss is averaged where one number stands for it."""


@dataclass(frozen=True)
class Run:
    """Results of one run. A number is None where the run's files do not have it."""

    name: str
    path: Path
    config: Mapping[str, Any]
    """config.toml, flattened to dotted names."""
    rows: Sequence[Mapping[str, Any]]
    """metrics.jsonl."""
    activations: Mapping[str, Any]
    """activations.json."""
    summary: Mapping[str, Any]
    """summary.json."""
    timeline: Mapping[str, Any]
    """timeline.json, which only runs with a schedule have."""
    notes: tuple[str, ...]
    """What is missing, damaged or cannot be compared, in words."""
    loss_scale: float | None = 1.0
    """Times this, losses are in the unit of all compared runs; None: they cannot be."""

    def series(self, field: str) -> list[tuple[int, float]]:
        """(step, value) of each row that has a number under `field`; losses in the unit of all compared runs."""
        scale = self.loss_scale if field in _LOSSES else 1.0
        if scale is None:
            return []
        return [(row["step"], float(row[field]) * scale) for row in self.rows if _is_number(row.get(field))]

    @property
    def bytes_per_token(self) -> float | None:
        """UTF-8 bytes of text per token of the data, or None."""
        recorded = number(self.summary, "bytes_per_token")
        if recorded is not None and math.isfinite(recorded) and recorded > 0:
            return float(recorded)
        return 1.0 if self.tokenizer == "bytes" else None

    @property
    def tokenizer(self) -> str | None:
        """Identity of the tokenizer, or None."""
        if self.unit != "token":
            return f"none: {self.unit}s"
        copied = self.path / "tokenizer.json"
        if copied.is_file():
            return hashlib.sha256(copied.read_bytes()).hexdigest()
        return str(self.config.get("data.tokenizer") or "bytes") if self.config else None

    @property
    def unit(self) -> str:
        """What speed and bytes of the run are counted per: "token", "image" or another unit of its task."""
        name = self.config.get("task")
        return find_task(name).unit if name in task_names() else "token"

    @property
    def validation_accuracy(self) -> float | None:
        """Last share of the validation samples classified correctly; None where the task has no classes."""
        shares = self.series("validation_accuracy")
        return shares[-1][1] if shares else number(self.summary, "validation_accuracy")

    def median(self, field: str) -> float | None:
        """Median of `field` over the steps, without the first one, which pays for warming up."""
        values = [value for _, value in self.series(field)]
        return statistics.median(values[1:] or values) if values else None

    @property
    def steps(self) -> int | None:
        """Steps that were trained."""
        losses = [row["step"] for row in self.rows if _is_number(row.get("loss"))]
        return losses[-1] if losses else number(self.summary, "steps", int)

    def until(self, step: int) -> Run:
        """The run as it was after `step` steps, as far as its metrics tell."""
        summary = {name: value for name, value in self.summary.items() if "loss" not in name}
        return replace(self, rows=[row for row in self.rows if row["step"] <= step], summary=summary)

    def _summary_loss(self, key: str) -> float | None:
        value = number(self.summary, key)
        return None if value is None or self.loss_scale is None else float(value) * self.loss_scale

    @property
    def loss(self) -> float | None:
        """Training loss, mean of the last LOSS_WINDOW steps."""
        means = self.mean_losses()
        return means[-1] if means else self._summary_loss("loss")

    @property
    def validation_loss(self) -> float | None:
        """Last validation loss."""
        losses = self.series("validation_loss")
        return losses[-1][1] if losses else self._summary_loss("validation_loss")

    @property
    def best_validation_loss(self) -> float | None:
        """Lowest validation loss."""
        losses = [value for _, value in self.series("validation_loss") if math.isfinite(value)]
        return min(losses) if losses else self._summary_loss("best_validation_loss")

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens, or images, per second, median over steps."""
        name = f"{self.unit}s_per_second"
        return self.median(name) or number(self.summary, name)

    @property
    def peak_memory_nbytes(self) -> float | None:
        """Most memory a process held in any start; of one that was killed (no summary), rank 0 after a step."""
        names = ("peak_memory_nbytes", "earlier_peak_memory_nbytes")
        of_all = [nbytes for name in names if (nbytes := number(self.summary, name)) is not None]
        return max([*of_all, *(value for _, value in self.series("peak_memory_nbytes"))], default=None)

    @property
    def collectives_table(self) -> str | None:
        """What the collectives of all processes sent, by operation and type, and what was left raw and why."""
        counted = self.summary.get("collectives")
        if not counted:
            return None
        from laconic.collectives.audit import Snapshot  # late: a run that has none needs no torch to be looked at

        try:
            return Snapshot.from_dict(counted).table()
        except (KeyError, TypeError):
            return None

    @property
    def kept_nbytes_per_token(self) -> float | None:
        """Bytes kept for backward per token or image."""
        kept = number(self.activations, "after_nbytes_per_token")
        return kept if kept is not None else number(self.summary, f"saved_nbytes_per_{self.unit}")

    @property
    def activation_setting(self) -> str | None:
        """How activations were kept, in a few words; None if the configuration does not say."""
        bits = self.config.get("activations.bits")
        if bits is None:
            return None
        if bits == 16:
            return "exact"
        name = self.config.get("activations.format") or default_format(bits)
        mode = self.config.get("activations.mode", "sites")
        block = self.config.get("activations.block_size")
        return f"{name} b{block}" + ("" if mode == "sites" else f" {mode}")

    def mean_losses(self) -> list[float]:
        """Means of LOSS_WINDOW consecutive training losses."""
        losses = [value for _, value in self.series("loss")]
        window = min(LOSS_WINDOW, len(losses))
        if not window:
            return []
        return [math.fsum(losses[end - window : end]) / window for end in range(window, len(losses) + 1)]


def default_format(bits: int) -> str:
    """The block format of so many bits that no format is given for."""
    return {2: "uint2", 4: "nf4", 16: "exact"}.get(bits, f"int{bits}")


def last_common_step(runs: Sequence[Run], field: str) -> int | None:
    """The last step in which all `runs` have a number under `field`; None if there is none."""
    return max(set.intersection(*({step for step, _ in run.series(field)} for run in runs)), default=None)


def load_runs(run_dirs: Sequence[str | os.PathLike[str]]) -> list[Run]:
    """`_load_run` of each directory, named by its last path component where that tells them apart."""
    paths = [Path(run_dir) for run_dir in run_dirs]
    if not paths:
        raise DataError("compare needs at least one run directory")
    names = [Path(os.path.abspath(path)).name for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    return _in_one_unit([_load_run(path, name) for path, name in zip(paths, names, strict=True)])


def _in_one_unit(runs: list[Run]) -> list[Run]:
    """The runs with losses that can be compared: nats per token of one tokenizer, else bits per byte of text."""
    if len({run.tokenizer for run in runs}) == 1:
        return runs
    found = []
    for run in runs:
        nbytes = run.bytes_per_token
        notes = run.notes
        if nbytes is None:
            notes += (
                f"losses of {run.name} are not compared: the tokenizers of the runs differ or are not known, and this "
                f"run does not say how many bytes its tokens have (bytes_per_token in summary.json)",
            )
        found.append(replace(run, notes=notes, loss_scale=None if nbytes is None else 1 / (math.log(2) * nbytes)))
    return found


def _load_run(path: Path, name: str) -> Run:
    """Read the run directory `path`."""
    if not path.is_dir():
        raise DataError(f"{path} is not a directory; give run directories, e.g. runs/20260102-030405")
    if not any((path / file).exists() for file in _FILES):
        raise DataError(f"{path} is no run directory: it holds none of {', '.join(_FILES)}")
    notes: list[str] = []
    run = Run(
        name=name,
        path=path,
        config=flat_settings(_read(path / "config.toml", lambda content: parse_toml(content.decode()), notes)),
        rows=_read_rows(path, notes),
        activations=_read(path / "activations.json", parse_json, notes),
        summary=_read(path / "summary.json", parse_json, notes),
        timeline=_read(path / TIMELINE_FILE, parse_json, notes) if (path / TIMELINE_FILE).exists() else {},
        notes=(),
    )
    if run.config and not {"steps", "batch_size", "sequence_length"} & set(run.config):
        notes.append(f"{path / 'config.toml'} is no configuration of laconic train")
        run = replace(run, config={})
    # Files of these names are written by other programs, too.
    if not (run.config or run.rows or run.activations.keys() & _ACTIVATIONS or "steps" in run.summary):
        raise DataError(f"{path} is no run directory: {'; '.join(notes) or 'its files hold nothing of a run'}")
    return replace(run, notes=tuple(notes))


def _read_rows(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl without what cannot be a measurement, of which each kind is noted once."""
    try:
        rows = read_metrics(path)
    except DataError as error:
        notes.append(str(error))
        return []
    wrong: dict[str, tuple[int, str]] = {}
    kept: list[dict[str, Any]] = []
    for number, row in enumerate(rows, 1):
        last = kept[-1]["step"] if kept else 0
        if row["step"] < last:
            back = f"step is {row['step']} after {last}, but steps never go back"
            wrong.setdefault("step", (number, back))
            continue
        good = {}
        for field, value in row.items():
            rule = _rule_broken_by(field, value)
            if rule is None:
                good[field] = value
            else:
                wrong.setdefault(field, (number, f"{field} is {value!r}, but it must be {rule}"))
        kept.append(good)
    notes += [f"{path / METRICS_FILE}, row {number}: {problem}; left out" for number, problem in wrong.values()]
    if kept and not any(_is_number(row.get(field)) for row in kept for field in _LOSSES):
        notes.append(f"{path / METRICS_FILE} holds no loss")
    return kept


def _rule_broken_by(field: str, value: Any) -> str | None:
    if value is None or field not in (*_LOSSES, *_MEASURES, LOADS):
        return None
    if field == LOADS:
        return None if _is_table_of_counts(value) else "a list of at least one number of tokens for each layer"
    if not _is_number(value):
        return "a number"
    if field in _MEASURES and not math.isfinite(value):
        return "finite"  # a loss may be: the run diverged
    return "at least 0" if value < 0 else None


def _read(path: Path, parse: Callable[[bytes], Any], notes: list[str]) -> dict[str, Any]:
    try:
        content = parse(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError("it holds no table")
        return content
    except OSError as error:
        notes.append(f"{path} cannot be read: {error.strerror}")
    except ValueError as error:
        notes.append(f"{path} is damaged: {error}")
    return {}


def _is_table_of_counts(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(row, list) and row and all(type(n) is int and n >= 0 for n in row) for row in value)
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def number(table: Mapping[str, Any], key: str, kind: type[int] | type[float] = float) -> Any:
    """The number under a key of a table, None if there is none."""
    value: Any = table.get(key)
    return kind(value) if _is_number(value) else None
