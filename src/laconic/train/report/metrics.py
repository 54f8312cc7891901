"""Metrics of a run, one JSON object per line, and their display on a terminal.

metrics.jsonl is append-only and flushed per line, so it can be followed while training. A process that dies may leave a
torn last line and rows later than its last checkpoint; opening the file repairs the first, `truncate_after` the second.
JSON has no NaN: non-finite values are written as the strings "NaN", "Infinity" and "-Infinity" and read back as floats.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from laconic.cost.sizes import format_nbytes
from laconic.errors import ConfigError, DataError
from laconic.json_text import json_number, parse_json
from laconic.output_lines import say
from laconic.train.report.wandb_run import WandbRun

METRICS_FILE = "metrics.jsonl"
METRICS_VERSION = 1
"""Version of the rows of metrics.jsonl; summary.json has it as metrics_version."""
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

Value = float | int | str | bool | None


class MetricsWriter:
    """Appends rows to `run_dir`/metrics.jsonl; with `tensorboard` also to event files in `run_dir`/tensorboard.

    With `wandb`, the settings of the run, numbers also go to Weights & Biases (wandb_run.py).

    A training row has step, loss, grad_norm, learning_rate, tokens_per_second, step_seconds, peak_memory_nbytes,
    memory_nbytes (held after the step: by the CUDA allocator, else resident),
    saved_nbytes (kept for backward, per process and micro-batch), wire_nbytes (sent per process and step),
    wire_raw_nbytes (the same without lossless coding) and tokens (in the run so far). A validation row has step and
    validation_loss. With images, `images` stands for tokens in these names, and a validation row has also
    validation_accuracy. At most 100 rows have moe_loads: tokens of each expert, by layer. Fields are only
    ever added; one that changed its meaning would get another name, and METRICS_VERSION would rise. Use it as a context
    manager, or call `close`.

    Raises:
        ConfigError: `tensorboard` or `wandb` is asked for and not installed, or wandb cannot begin a run.
    """

    def __init__(
        self, run_dir: str | os.PathLike[str], tensorboard: bool = False, wandb: Mapping[str, Any] | None = None
    ) -> None:
        self._path = Path(run_dir) / METRICS_FILE
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._events_dir = Path(run_dir) / "tensorboard" if tensorboard else None
        self._events: Any = None
        if self._events_dir is not None:
            self._open_events(first_step=None)
        self._wandb = None if wandb is None else WandbRun(Path(run_dir), wandb)
        _drop_torn_line(self._path)
        self._file: IO[str] = open(self._path, "a", encoding="utf-8")  # noqa: SIM115 - closed in close()

    def write(self, step: int, **fields: Value | list[list[int]]) -> None:
        """Append one row. `fields` are numbers, strings, booleans, None or tables of integers."""
        row = {"step": step, **{name: json_number(value) for name, value in fields.items()}}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()
        numbers = {
            name: value for name, value in fields.items() if type(value) is not bool and isinstance(value, int | float)
        }
        if self._events is not None:
            for name, number in numbers.items():
                self._events.add_scalar(name, number, step)
        if self._wandb is not None:
            self._wandb.write(step, numbers)

    def truncate_after(self, step: int) -> None:
        """Drop rows of steps after `step`, where a resumed run continues, so that no step appears twice."""
        kept = [row for row in _read(self._path) if row["step"] <= step]
        temporary = self._path.with_name(f".{self._path.name}.tmp")
        with open(temporary, "w", encoding="utf-8") as file:
            for row in kept:
                file.write(
                    json.dumps({name: json_number(value) for name, value in row.items()}, allow_nan=False) + "\n"
                )
            file.flush()
            os.fsync(file.fileno())
        self._file.close()
        os.replace(temporary, self._path)
        self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115 - closed in close()
        if self._events is not None:
            self._events.close()
            self._open_events(first_step=step + 1)

    def close(self, failed: bool = False) -> None:
        """Close the files; more than once is fine. `failed` says, to wandb, that an error has ended the run."""
        self._file.close()
        if self._events is not None:
            self._events.close()
            self._events = None
        if self._wandb is not None:
            self._wandb.close(failed)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)

    def _open_events(self, first_step: int | None) -> None:
        """Open event files; TensorBoard hides what older files hold from `first_step` on."""
        check_tensorboard()
        from torch.utils.tensorboard import SummaryWriter

        self._events = SummaryWriter(log_dir=str(self._events_dir), purge_step=first_step)


def check_tensorboard() -> None:
    """Check that TensorBoard is installed."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError("tensorboard is True, but TensorBoard is not installed: pip install 'laconic[tensorboard]'")


def read_metrics(run_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Rows of `run_dir`/metrics.jsonl in order; a torn last line is left out.

    Raises:
        DataError: there is no such file or a line before the last is damaged.
    """
    return _read(Path(run_dir) / METRICS_FILE)


def peak_memory_nbytes() -> int:
    """Most memory this process has held: of the CUDA allocator if CUDA is in use, else resident (peak RSS)."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kibibytes everywhere but on macOS


def memory_nbytes() -> int:
    """Memory this process holds now: of the CUDA allocator if CUDA is in use, else resident (RSS)."""
    import psutil
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.memory_allocated()
    return int(psutil.Process().memory_info().rss)


class Progress:
    """Shows a run's progress on stderr: a live bar on a terminal, a line every `log_every` steps elsewhere.

    Only rank 0 shows anything. When the terminal is closed or the reader has left, the run goes on: metrics.jsonl has
    every step. Use it as a context manager, or call `close`.
    """

    def __init__(self, steps: int, first_step: int = 0, *, rank: int = 0, log_every: int = 10) -> None:
        """`steps` is the last step of the run, `first_step` the number of steps done before this process started."""
        self._steps = steps
        self._log_every = log_every
        self._shows = rank == 0
        self._started = time.monotonic()
        self._first_step = first_step
        self._bar: Any = None
        if self._shows and sys.stderr.isatty():
            with contextlib.suppress(ImportError):  # tqdm is an extra; lines do without it
                from tqdm import tqdm

                with self._while_it_can_be_seen():
                    self._bar = tqdm(total=steps, initial=first_step, unit="step", dynamic_ncols=True, file=sys.stderr)

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show that `step` steps are done, with loss, tokens_per_second and saved_nbytes from `metrics` if present."""
        if not self._shows:
            return
        parts = _summary(metrics)
        if self._bar is not None:
            with self._while_it_can_be_seen():
                self._bar.set_postfix_str(", ".join(parts), refresh=False)
                self._bar.update(step - self._bar.n)
        elif step % self._log_every == 0 or step == self._steps:
            done = max(1, step - self._first_step)
            left = (time.monotonic() - self._started) / done * (self._steps - step)
            self.message(f"step {step}/{self._steps}  {'  '.join(parts)}  {_clock(left)} left")

    def message(self, text: str) -> None:
        """Show a line of its own, above the bar if there is one."""
        if not self._shows:
            return
        if self._bar is not None:
            with self._while_it_can_be_seen():
                self._bar.write(text, file=sys.stderr)
        else:
            say(text)

    def close(self) -> None:
        """Leave the bar as it stands; more than once is fine."""
        if self._bar is not None:
            with self._while_it_can_be_seen():
                self._bar.close()

    @contextlib.contextmanager
    def _while_it_can_be_seen(self) -> Iterator[None]:
        try:
            yield
        except OSError:  # tqdm's; its bar would try again at exit
            self._shows, self._bar = False, None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _summary(metrics: Mapping[str, Any]) -> list[str]:
    parts = []
    if (loss := metrics.get("loss")) is not None:
        parts.append(f"loss {loss:.4f}")
    if (validation := metrics.get("validation_loss")) is not None:
        parts.append(f"validation {validation:.4f}")
    if (speed := metrics.get("tokens_per_second")) is not None:
        parts.append(f"{speed:,.0f} tokens/s")
    if (speed := metrics.get("images_per_second")) is not None:
        parts.append(f"{speed:,.0f} images/s")
    if (saved := metrics.get("saved_nbytes")) is not None:
        parts.append(f"kept {format_nbytes(saved)}")
    return parts


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _from_json(value: Any) -> Any:
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; is {path.parent} a run directory?") from None
    rows = []
    for number, line in enumerate(content.split(b"\n")[:-1], 1):
        try:
            row = parse_json(line)
            if not isinstance(row, dict) or type(row.get("step")) is not int:
                raise ValueError("no object with a step")
        except ValueError as error:
            raise DataError(f"{path}:{number} is damaged ({error}); remove the line to go on") from None
        rows.append({name: _from_json(value) for name, value in row.items()})
    return rows


def _drop_torn_line(path: Path) -> None:
    if not path.exists():
        return
    with open(path, "r+b") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            file.truncate(whole)
