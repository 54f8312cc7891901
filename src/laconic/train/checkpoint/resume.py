"""The checkpoint that a run continues from, and the settings it must share with the run that wrote it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from laconic.errors import CheckpointError, ConfigError, DataError
from laconic.train.checkpoint.save_load import Checkpoint, find_checkpoint, newest_good_checkpoint
from laconic.train.config.dotted_names import flat_settings
from laconic.train.config.schema import TrainConfig
from laconic.train.config.toml import load_config
from laconic.train.distributed.world import World
from laconic.train.launch_record import Launch
from laconic.train.lora import BASE_HASH
from laconic.train.report.metrics import METRICS_FILE, read_metrics
from laconic.train.report.run_dir import checkpoint_names, latest_name
from laconic.train.report.run_logger import log_on_stderr
from laconic.train.task import Task

# Fields of config.json that change neither a checkpoint's weights nor the forward of training.
_WITHOUT_EFFECT = {"_name_or_path", "architectures", "initializer_range", "transformers_version", "use_cache"}


def find_start(
    config: TrainConfig,
    world: World,
    run_dir: Path,
    identity: dict[str, Any],
    described: str | None,
    launch: Launch | None,
) -> Checkpoint | None:
    """Find the checkpoint that the run continues from; None for a new run. All processes call it together.

    A `launch` that goes on with its own run takes the newest checkpoint that is good, or none. Neither does a run that
    was stopped before its first save have one.

    Args:
        identity: as of `identity_of`.
        described: config.json of the model that was built; None if it has none.

    Raises:
        ConfigError: the run that wrote it had another `identity`, or its model another config.json.
        CheckpointError: it is missing or damaged.
    """
    if not config.resume:
        return None
    checkpoint: Checkpoint | None
    if launch is not None:
        with log_on_stderr(world):
            checkpoint = newest_good_checkpoint(run_dir, world, launch.in_directory(run_dir).abandoned)
        if checkpoint is None:
            return None
    else:
        name = None if config.checkpoint.load is None else str(config.checkpoint.load)
        if name is None and world.gather(_stopped_before_a_save(run_dir) if world.is_main else None)[0]:
            return None
        checkpoint = find_checkpoint(run_dir, world, name)
    _check_identity(identity, checkpoint.identity, checkpoint.path)
    check_model(described, checkpoint, config)
    return checkpoint


def identity_of(config: TrainConfig, task: Task, base: str | None = None) -> dict[str, Any]:
    """Settings that a resumed run must share with the run that wrote its checkpoint; `base` is frozen weights' hash."""
    lora, outer = config.lora, config.outer
    adapters = {"lora.alpha": lora.alpha, "lora.target_modules": lora.target_modules, BASE_HASH: base}
    apart = {"outer.fragments": outer.fragments, "outer.delay": outer.delay}
    return (
        task.identity()
        | (adapters if lora.r is not None else {})
        | {
            "lora.r": lora.r,
            "model": asdict(replace(config.model, allow_download=False)),
            "data": task.fingerprint,
            "sequence_length": config.sequence_length,
            "batch_size": config.batch_size,
            "seed": config.seed,
            "optimizer.kind": config.optimizer.kind,
            "local_steps": config.local_steps,
        }
        | (apart if config.local_steps else {})
    )


def check_model(described: str | None, checkpoint: Checkpoint, config: TrainConfig) -> None:
    """Compare a model's config.json with that of the run that wrote `checkpoint`, field by field.

    What stands at model.path, and what a family's defaults are, may have changed under the same names. A field that
    only one of them has is one of another transformers.

    Args:
        described: config.json of the model that was built; None if it has none.

    Raises:
        ConfigError: a field differs that changes what the model computes.
    """
    here, there = (json.loads(text or "{}") for text in (described, checkpoint.text("config.json")))
    path = config.model.path
    file, remedy = ("the model's", "use that transformers") if path is None else (f"model.path {path!r}:", "restore it")
    if config.lora.r is None:  # adapters belong to the very model that they were trained on
        remedy += ", or export the model and start a new run from it with model.path"
    for name, value, before in _differences(here, there):
        raise ConfigError(
            f"{file} config.json has {name} = {value!r} (transformers {here.get('transformers_version')}), but the run "
            f"that wrote {checkpoint.path} had {before!r} (transformers {there.get('transformers_version')}); {remedy}"
        )


def _differences(here: Mapping[str, Any], there: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted name, value here, value there) of what both have and differs; what tells most comes first."""
    common = here.keys() & there.keys() - _WITHOUT_EFFECT
    for name in sorted(common, key=lambda name: (name != "model_type", name)):
        value, before = here[name], there[name]
        if value and before and isinstance(value, Mapping) and isinstance(before, Mapping):
            yield from _differences(value, before, f"{prefix}{name}.")
        elif value != before:
            yield prefix + name, value, before


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


def _check_identity(now: dict[str, Any], then: dict[str, Any], path: Path) -> None:
    # Through JSON, like the manifest: tuples become lists.
    here = flat_settings(json.loads(json.dumps(now)))
    there = flat_settings({name: then.get(name) for name in now})
    for name in {**here, **there}:
        value, before = here.get(name), there.get(name)
        if value != before:
            raise ConfigError(
                f"{name} is {value!r}, but the run that wrote {path} had {before!r}; resume it unchanged, or export "
                "the model and start a new run from it with model.path"
            )
