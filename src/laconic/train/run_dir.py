"""The directory of a run: config.toml, metrics.jsonl, activations.json, summary.json, checkpoints/.

Light to import, as the launcher only needs to know where a run is and what its latest checkpoint is called.
"""

from __future__ import annotations

import json
import os
import shutil
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laconic.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from laconic.train.config import TrainConfig
    from laconic.train.world import World

__all__ = ["check_run_dir", "copy_tokenizer", "latest_name", "new_run_dir", "write_json"]


def new_run_dir() -> str:
    """The directory of a run that was given none: runs/<date>-<time>."""
    return f"runs/{datetime.now():%Y%m%d-%H%M%S}"


def check_run_dir(config: TrainConfig, world: World) -> Path:
    """The run directory, the same on every process; all of them call it together. Nothing is written.

    Raises ConfigError on every process unless it is new or empty, or holds the run to resume.
    """
    chosen = world.gather(config.run_dir or new_run_dir())[0]
    run_dir = Path(chosen)
    error = None
    if world.is_main:
        if config.resume and not (run_dir / "config.toml").is_file():
            error = f"run_dir is {chosen!r}, but it must hold the config.toml of a run for resume"
        elif not config.resume and run_dir.is_dir() and any(run_dir.iterdir()):
            error = f"run_dir is {chosen!r}, which is not empty; continue that run with --resume or choose another"
        elif not config.resume and run_dir.exists() and not run_dir.is_dir():
            error = f"run_dir is {chosen!r}, which is not a directory"
    error = world.first_error(error)
    if error is not None:
        raise ConfigError(error)
    return run_dir


def latest_name(run_dir: Path) -> str | None:
    """The name in `<run_dir>/checkpoints/latest`, or None when nothing was saved yet; raises CheckpointError."""
    file = run_dir / "checkpoints" / "latest"
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error


def copy_tokenizer(tokenizer: str, run_dir: Path) -> None:
    """Keep the tokenizer `data.tokenizer` with the run, so that it can be exported wherever the run is moved to."""
    if tokenizer == "bytes":
        return
    source = Path(tokenizer)
    shutil.copyfile(source, run_dir / "tokenizer.json")
    settings = source.with_name("tokenizer_config.json")
    if settings.is_file():
        shutil.copyfile(settings, run_dir / settings.name)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON; the file appears whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)
