"""A run's model as a Hugging Face directory that `from_pretrained` of its auto class loads."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from laconic.errors import CheckpointError, ConfigError
from laconic.formats.archive import zip_path
from laconic.train.checkpoint.save_load import find_checkpoint, load_weights
from laconic.train.distributed.world import World
from laconic.train.model import check_config, no_progress_bars
from laconic.train.report.run_dir import PREPROCESSOR_FILE, TOKENIZER_FILES

__all__ = ["export"]


def export(
    run_dir: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    checkpoint: str | None = None,
    zipped: bool = False,
) -> Path:
    """Write config.json, model.safetensors and generation_config.json of a checkpoint of `run_dir` to `out_dir`.

    One process exports, whatever number of processes trained. Weights are fp32, equal to the checkpoint's bit for bit,
    tied weights stored once. The tokenizer files of a run that did not use bytes are copied. `out_dir` appears whole or
    not at all.

    Args:
        run_dir: of the run.
        out_dir: new, or an empty directory.
        checkpoint: a name (step-00000200) or a step; None means the latest.
        zipped: whether `laconic zip` is applied to the result.

    Raises:
        ConfigError: `run_dir` is no run or `out_dir` is not empty.
        CheckpointError: the checkpoint is missing, damaged or does not fit its model, or `out_dir` cannot be written.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification, GenerationConfig

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

    temporary = out.with_name(f".{out.name}.tmp-{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with no_progress_bars():
            model.save_pretrained(temporary)
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
