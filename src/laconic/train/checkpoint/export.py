"""A run's model as a Hugging Face directory that `from_pretrained` of its auto class loads."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from laconic.errors import CheckpointError, ConfigError
from laconic.formats.archive import zip_path
from laconic.train.checkpoint.resume import check_model
from laconic.train.checkpoint.save_load import Checkpoint, find_checkpoint, load_weights
from laconic.train.config.schema import TrainConfig
from laconic.train.config.toml import load_config
from laconic.train.distributed.world import World
from laconic.train.lora import BASE_HASH, with_adapters
from laconic.train.model import check_config, load_model, no_progress_bars, path_config
from laconic.train.model_source import check_path
from laconic.train.report.run_dir import PREPROCESSOR_FILE, TOKENIZER_FILES


def export(
    run_dir: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    checkpoint: str | None = None,
    zipped: bool = False,
    merge: bool = False,
) -> Path:
    """Write config.json, model.safetensors and generation_config.json of a checkpoint of `run_dir` to `out_dir`.

    Of a run with adapters write these, as PeftModel.from_pretrained loads them beside the run's model.path; with
    `merge` the whole model, in which the adapters have been added to the weights of model.path.

    One process exports, whatever number of processes trained. Weights are fp32, equal to the checkpoint's bit for bit,
    tied weights stored once. The tokenizer files of a run that did not use bytes are copied. `out_dir` appears whole or
    not at all.

    Args:
        out_dir: new, or an empty directory.
        checkpoint: a name (step-00000200) or a step; None means the latest.
        zipped: whether `laconic zip` is applied to the result.

    Raises:
        ConfigError: `run_dir` is no run, or none with adapters to merge, or `out_dir` is not empty; or config.json of
            the model that the adapters belong to has changed.
        ModelError: the model that the adapters belong to cannot be loaded from model.path.
        CheckpointError: the checkpoint is missing, damaged or does not fit its model, or `out_dir` cannot be written.
    """
    run, out = Path(run_dir), Path(out_dir)
    if not (run / "checkpoints").is_dir():
        raise ConfigError(f"{run} is not a run directory with checkpoints")
    if out.is_dir() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty; export into a new directory")
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is not a directory; export into a new one")

    alone = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
    found = find_checkpoint(run, alone, checkpoint)
    if not (found.path / "config.json").is_file():
        raise CheckpointError(
            f"{found.path} holds no config.json, so its model is none of transformers', and only the task that it was "
            "trained with can build it; nothing is exported"
        )
    config = _config_with_adapters(run)
    if merge and config is None:
        raise ConfigError(f"--merge is given, but {run} has trained all weights, without adapters; leave it out")
    model = _whole_model(found, run) if config is None else _adapted_model(found, config, merge)

    temporary = out.with_name(f".{out.name}.tmp-{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with no_progress_bars():
            # Else peft may ask the hub whether the base's vocabulary has grown.
            model.save_pretrained(temporary, **({} if config is None or merge else {"save_embedding_layers": False}))
        for name in (*TOKENIZER_FILES, PREPROCESSOR_FILE):
            if (run / name).is_file():
                shutil.copyfile(run / name, temporary / name)
        if zipped:
            zip_path(temporary, out)
            shutil.rmtree(temporary)
        else:
            if out.exists():
                out.rmdir()
            os.rename(temporary, out)
    except Exception as error:  # safetensors has an exception of its own for a full disk
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"cannot write {out}: {error}") from error
    return out


def _config_with_adapters(run: Path) -> TrainConfig | None:
    if not (run / "config.toml").is_file():
        return None
    config = load_config(run / "config.toml")
    return None if config.lora.r is None else config


def _adapted_model(found: Checkpoint, config: TrainConfig, merge: bool) -> Any:
    from transformers import AutoModelForCausalLM

    path = str(config.model.path)
    if not config.model.allow_download and not Path(path).is_dir():
        raise ConfigError(
            f"model.path is {path!r}, the model that the run's adapters belong to, but it is no directory here; bring "
            "it back, or write into the run's config.toml where it is now"
        )
    check_path(config.model)
    plain = load_model(AutoModelForCausalLM, config.model, path_config(config.model), config.seed)
    check_model(plain.config.to_json_string(use_diff=False), found, config)
    model = with_adapters(plain, config, found.identity.get(BASE_HASH))
    load_weights(found, model.get_base_model(), adapters=True)
    return model.merge_and_unload() if merge else model


def _whole_model(found: Checkpoint, run: Path) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification, GenerationConfig

    of_images = (run / PREPROCESSOR_FILE).is_file()
    if of_images:
        import laconic.vision.resnet  # noqa: F401 - makes afi_resnet known
    try:
        config = AutoConfig.from_pretrained(found.path, local_files_only=True, trust_remote_code=False)
        check_config(config, str(found.path))
        if of_images:
            model = AutoModelForImageClassification.from_config(config, dtype=torch.float32, trust_remote_code=False)
        else:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
        if (found.path / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(found.path, local_files_only=True)
    except Exception as error:
        raise CheckpointError(f"{found.path} holds a config.json that transformers cannot build: {error}") from error
    load_weights(found, model)
    return model
