"""Tables about runs: their measures with differences to the first run, and how their configurations differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import methodcaller
from typing import Any

from laconic.cost.sizes import format_nbytes
from laconic.json_text import json_number
from laconic.text_columns import columns
from laconic.train.config.dotted_names import flat_settings
from laconic.train.config.schema import FINE_TUNING_RATE, PRETRAINING_RATE, TrainConfig
from laconic.train.report.run_reader import LOSS_WINDOW, Run, default_format, last_common_step, number

_MISSING = "-"
"""Stands where a run does not tell."""
# Fields that differ between any two runs anyway.
_NOT_COMPARED = ("run_dir", "resume")


_DEFAULTS = flat_settings(asdict(TrainConfig()))
_FOLLOWS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "optimizer.learning_rate": lambda config: FINE_TUNING_RATE if config.get("model.path") else PRETRAINING_RATE,
    "model.num_key_value_heads": lambda config: config.get("model.num_attention_heads"),
    "activations.format": lambda config: default_format(config.get("activations.bits", 4)),
    "activations.attention": lambda config: "exact" if config.get("activations.bits") == 16 else "int8",
}
"""What a setting is that is left out and has no default of its own."""


@dataclass(frozen=True)
class Cell:
    """One value of one run as text, and its difference to the first run ("" for that run and where there is none)."""

    text: str
    difference: str = ""
    better: bool | None = None
    """Whether the difference is an improvement; None where neither direction is."""
    value: float | str | None = None
    """What the text stands for, in tokens, seconds or bytes, fit for JSON; None where a run does not tell."""


@dataclass(frozen=True)
class Row:
    """One measure, a cell per run."""

    label: str
    cells: tuple[Cell, ...]


def summary_rows(runs: Sequence[Run]) -> list[Row]:
    """The measures of `runs`, each with its difference to the first run."""

    def row(label: str, value: Callable[[Run], float | None], form: _Form, compared: bool = True) -> Row:
        first = value(runs[0]) if compared else None
        return Row(label, tuple(form.cell(value(run), None if run is runs[0] else first) for run in runs))

    def at_common_step(field: str, label: str, value: Callable[[Run], float | None]) -> list[Row]:
        """Losses after other numbers of steps do not compare: of such runs, those of the last common step."""
        step = None if equally_long else last_common_step(runs, field)
        return [] if step is None else [row(f"{label} {step}{unit}", lambda run: value(run.until(step)), loss)]

    equally_long = len({run.steps for run in runs} - {None}) < 2
    loss = _Form("{:.4f}".format, relative=False, lower_is_better=True)
    nbytes = _Form(format_nbytes, relative=True, lower_is_better=True)
    # Losses of different tokenizers are comparable per byte of text only.
    unit = "" if all(run.loss_scale == 1.0 for run in runs) else ", bits per byte"
    per = " or ".join(sorted({run.unit for run in runs}, reverse=True))
    settings = tuple(Cell(run.activation_setting or _MISSING, value=run.activation_setting) for run in runs)
    return [
        Row("activations kept as", settings),
        row("steps", lambda run: run.steps, _Form("{:,.0f}".format, relative=False, lower_is_better=None)),
        row(f"validation loss{unit}", lambda run: run.validation_loss, loss, equally_long),
        *at_common_step("validation_loss", "validation loss at step", lambda run: run.validation_loss),
        row(f"validation loss, best{unit}", lambda run: run.best_validation_loss, loss, equally_long),
        row(f"train loss, last {LOSS_WINDOW} steps{unit}", lambda run: run.loss, loss, equally_long),
        *at_common_step("loss", f"train loss, {LOSS_WINDOW} steps to step", lambda run: run.loss),
        row(f"train loss, best {LOSS_WINDOW} steps{unit}", _best_loss, loss, equally_long),
        *(
            [row("validation accuracy", lambda run: run.validation_accuracy, _Form("{:.4f}".format, False, False))]
            if any(run.validation_accuracy is not None for run in runs)
            else []
        ),
        row(f"{per}s/s, median", lambda run: run.tokens_per_second, _Form("{:,.0f}".format, True, False)),
        row("peak memory of a process", lambda run: run.peak_memory_nbytes, nbytes),
        row(f"kept for backward per {per}", lambda run: run.kept_nbytes_per_token, nbytes),
        row("unmodified model keeps", lambda run: number(run.activations, "before_nbytes_per_token"), nbytes),
        row("unmodified model in bf16 keeps", lambda run: number(run.summary, f"bf16_nbytes_per_{run.unit}"), nbytes),
        row("sent by a process per step", methodcaller("median", "wire_nbytes"), nbytes),
        row("before lossless coding", methodcaller("median", "wire_raw_nbytes"), nbytes),
        row("lossless coding's ratio", _wire_ratio, _Form("{:.3f}".format, False, False)),
        *(
            row(label, methodcaller("median", field), _Form("{:.3f}".format, False, lower_is_better))
            for label, field, lower_is_better in (
                ("busiest expert over mean", "moe_load_ratio", True),
                ("duplicate rate", "moe_duplicate_rate", None),
            )
            if any(run.series(field) for run in runs)
        ),
    ]


def _best_loss(run: Run) -> float | None:
    return min(filter(math.isfinite, run.mean_losses()), default=None)


def _wire_ratio(run: Run) -> float | None:
    raw, sent = run.median("wire_raw_nbytes"), run.median("wire_nbytes")
    return raw / sent if raw and sent else None


def config_differences(runs: Sequence[Run]) -> list[Row]:
    """Fields of the configuration, and data, that are not the same in all `runs` that have them."""
    names = sorted({name for run in runs for name in run.config if name not in _NOT_COMPARED})
    compared = [(name, [_config_text(run, name) for run in runs]) for name in names]
    # Files of one name may have changed between two runs.
    compared.append(("hash of the data", [str(run.summary.get("data", _MISSING))[:8] for run in runs]))
    rows = []
    for name, texts in compared:
        if len(set(texts) - {_MISSING}) > 1:
            rows.append(Row(name, tuple(map(Cell, texts))))
    return rows


def as_data(runs: Sequence[Run], rows: Sequence[Row], differences: Sequence[Row]) -> dict[str, Any]:
    """The same as data for JSON: "runs", "measures" and "configuration" (label -> a value per run), "notes"."""
    return {
        "runs": [run.name for run in runs],
        "measures": {row.label: [cell.value for cell in row.cells] for row in rows},
        "configuration": {row.label: [cell.text for cell in row.cells] for row in differences},
        "notes": [note for run in runs for note in run.notes],
    }


def text_table(runs: Sequence[Run], rows: Sequence[Row], differences: Sequence[Row]) -> str:
    """Both tables as aligned text, a column per run, followed by the notes of the runs."""
    lines = [
        [row.label, *(f"{c.text} ({c.difference})" if c.difference else c.text for c in row.cells)] for row in rows
    ]
    if differences:
        lines.append([""] * (len(runs) + 1))
        lines += [[row.label, *(cell.text for cell in row.cells)] for row in differences]
    text = [columns(["", *(run.name for run in runs)], lines, rule=False)]
    for run in runs:
        if run.collectives_table is not None:
            text += ["", f"collectives of {run.name}, all processes", *run.collectives_table.splitlines()]
    notes = [f"note: {note}" for run in runs for note in run.notes]
    return "\n".join([*text, *([""] if notes else []), *notes])


@dataclass(frozen=True)
class _Form:
    write: Callable[[float], str]
    relative: bool
    """The difference is a share of the first run's value rather than a number of the same unit."""
    lower_is_better: bool | None

    def cell(self, value: float | None, first: float | None) -> Cell:
        if value is None:
            return Cell(_MISSING)
        text = self.write(value) if math.isfinite(value) else str(value)
        if first is None or not math.isfinite(first) or not math.isfinite(value):
            return Cell(text, value=json_number(value))
        if value == first:
            return Cell(text, "=", value=value)
        if self.relative and not first:
            return Cell(text, value=json_number(value))
        change = value - first
        if self.relative:
            difference = f"{change / first * 100:+.1f} %"
        else:
            difference = ("-" if change < 0 else "+") + self.write(abs(change))
        # A difference that rounds to nothing is neither good nor bad.
        visible = any(digit in difference for digit in "123456789")
        better = None if self.lower_is_better is None or not visible else (change < 0) == self.lower_is_better
        return Cell(text, difference if visible else "=", better, value)


def _config_text(run: Run, name: str) -> str:
    """The setting in effect: what a configuration leaves out has its default, or follows from other settings."""
    if not run.config:
        return _MISSING
    value = run.config.get(name, _DEFAULTS.get(name))
    if value is None and name in _FOLLOWS:
        value = _FOLLOWS[name](run.config)
    return "none" if value is None else str(value)
