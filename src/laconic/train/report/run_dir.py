"""The directory of a run: config.toml, metrics.jsonl, summary.json, checkpoints/, lock.json, launch.json and others.

Light to import, as the launcher only needs to know where a run is and what its latest checkpoint is called.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laconic.durable import write_whole
from laconic.errors import CheckpointError, ConfigError
from laconic.train.launch_record import LAUNCH_FILE
from laconic.train.run_lock import LOCK_FILE, RunLock

if TYPE_CHECKING:
    from laconic.train.config.schema import TrainConfig
    from laconic.train.data.tokenizer import Tokenizer
    from laconic.train.distributed.world import World

CHECKPOINT_NAME = re.compile(r"step-(\d{8,})(?:-(\d+))?")
"""step-00000200, and step-00000200-2 when that step was saved again."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""What a run keeps of its tokenizer, and an export takes along."""
PREPROCESSOR_FILE = "preprocessor_config.json"
"""How images become the input of the model of a run that learned to classify them; an export takes it along."""


def new_run_dir() -> str:
    """The directory of a run that was given none: runs/<date>-<time>."""
    return f"runs/{datetime.now():%Y%m%d-%H%M%S}"


def check_run_dir(config: TrainConfig, world: World, own: bool = False) -> Path:
    """The run directory, the same on every process; all of them call it together. Nothing is written.

    `own` says that it holds what this launch has begun itself, however far that came.

    Raises:
        ConfigError: on every process, unless it is new or empty, or holds the run to resume.
    """
    chosen = world.gather(config.run_dir or new_run_dir())[0]
    run_dir = Path(chosen)
    with world.agree():
        if world.is_main and not own:
            _check(run_dir, config.resume)
    return run_dir


def claim_run_dir(lock: RunLock, run_dir: Path, resume: bool, world: World, own: bool = False) -> None:
    """Take the lock of `run_dir` on the first process; all processes call it together.

    The directory is made if it is new. `own` as for `check_run_dir`.

    Raises:
        ConfigError: on every process, when another run is at work there, or was since `check_run_dir`.
    """
    with world.agree():
        if world.is_main:
            lock.acquire(run_dir)
            if not own:
                _check(run_dir, resume)
            for torn in run_dir.glob(".*.tmp"):  # what a killed run left
                if not own or not torn.name.startswith(f".{LAUNCH_FILE}."):  # which an own launcher may be writing now
                    torn.unlink()


def _check(run_dir: Path, resume: bool) -> None:
    shown = f"run_dir is {str(run_dir)!r}"
    try:
        if resume:
            if not (run_dir / "config.toml").is_file():
                raise ConfigError(
                    f"{shown}, but it must hold the config.toml of a run for resume; a run that was "
                    "stopped before it wrote one is started again without --resume"
                )
        elif run_dir.is_dir():
            if (run_dir / "config.toml").exists():
                raise ConfigError(f"{shown}, which is not empty; continue that run with --resume or choose another")
            if others := sorted(path.name for path in run_dir.iterdir() if not _is_of_a_beginning(path.name)):
                raise ConfigError(
                    f"{shown}, which is not empty and holds no run to continue: there is {others[0]}, but "
                    "no config.toml; choose another, or remove what is there"
                )
        elif os.path.lexists(run_dir):
            raise ConfigError(f"{shown}, which is not a directory")
    except ConfigError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise ConfigError(f"{shown}, which cannot be used: {getattr(error, 'strerror', None) or error}") from None


def _is_of_a_beginning(name: str) -> bool:
    """Whether a file of this name is what a run has written that was killed before its config.toml was whole."""
    return name in (LOCK_FILE, LAUNCH_FILE) or name.startswith((".config.toml.", f".{LAUNCH_FILE}."))


def latest_name(run_dir: Path) -> str | None:
    """The name in `<run_dir>/checkpoints/latest`, or None when there is no such file."""
    file = run_dir / "checkpoints" / "latest"
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error


def checkpoint_names(run_dir: Path) -> list[str]:
    """The names of the checkpoints in `run_dir`, newest first; of a step that was saved again, the later one first."""
    folder = run_dir / "checkpoints"
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"cannot read {folder}: {error.strerror}") from error
    return sorted((name for name in names if CHECKPOINT_NAME.fullmatch(name)), key=checkpoint_age, reverse=True)


def checkpoint_age(name: str) -> tuple[int, int]:
    """The step of a checkpoint by its name, and which of that step it is, from 1."""
    match = CHECKPOINT_NAME.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2] or 1)


def copy_tokenizer(tokenizer: Tokenizer, run_dir: Path) -> None:
    """Keep the tokenizer with the run, so that it can be exported wherever the run is moved to."""
    from laconic.train.data.tokenizer import JsonTokenizer  # late: the launcher does without numpy

    if not isinstance(tokenizer, JsonTokenizer):
        return
    (run_dir / TOKENIZER_FILES[0]).write_bytes(tokenizer.content)
    for name in TOKENIZER_FILES[1:]:
        if (tokenizer.folder / name).is_file():
            shutil.copyfile(tokenizer.folder / name, run_dir / name)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON; the file appears whole or not at all."""
    write_whole(path, json.dumps(value, indent=1) + "\n")
