"""Defaults that a model directory decides: the tokenizer, the learning rate, and which weights there are.

A directory that somebody saved holds a model together with the tokenizer it was trained with. Bytes instead of its
tokens, the learning rate of a model without any training, or random weights where there are some that cannot be loaded
would all train, and all give a useless model without a word. What is not certain is refused here.
"""

from __future__ import annotations

import logging
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from laconic.errors import ConfigError, ModelError, first_line
from laconic.json_text import parse_json
from laconic.train.config.schema import FINE_TUNING_RATE, LORA_RATE, ModelConfig, TrainConfig
from laconic.train.config.tasks import find_task

logger = logging.getLogger(__name__)

_LOADABLE = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""What transformers' from_pretrained looks for, in its order."""
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".distcp", ".laconic")
_NO_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state", "scaler", "random_states", "tokenizer")
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "tekken.json", "spiece.model", "sentencepiece.bpe.model", "vocab.json"),
    *("vocab.txt", "merges.txt", "tokenizer_config.json"),
)
_NUM_BYTE_TOKENS = 257


def resolve_defaults(config: TrainConfig) -> TrainConfig:
    """`config` with what its task resolves and optimizer.learning_rate filled in where left out, logging both.

    Raises:
        ConfigError, ModelError: model.path is no model, or leaves open which tokenizer or weights are meant.
    """
    config = find_task(config.task).resolve(config)
    path = config.model.path
    if config.optimizer.learning_rate is None:
        rate = config.optimizer.peak_learning_rate
        if path is not None and (not Path(path).is_dir() or find_weights(Path(path)) is not None):
            tuned, what = FINE_TUNING_RATE, "weights that are trained already"
            if config.lora.r is not None:
                tuned, what = LORA_RATE, "adapters"
            logger.info(
                "learning rate: %g, the default for %s (%g for random weights); optimizer.learning_rate sets another",
                *(tuned, what, rate),
            )
            rate = tuned
        config = replace(config, optimizer=replace(config.optimizer, learning_rate=rate))
    return config


def check_path(config: ModelConfig) -> None:
    """Refuse a model.path that is no directory of a model, where no hub may be asked, or one of adapters."""
    if config.path is not None and (Path(config.path) / "adapter_config.json").is_file():
        raise ModelError(
            f"model.path {config.path!r} holds an adapter_config.json, so its weights belong to a model elsewhere; "
            "merge them with `laconic export RUN DIR --merge`, or PEFT's merge_and_unload, and give that directory"
        )
    if config.path is None or config.allow_download:
        return
    if not Path(config.path).is_dir():
        raise ConfigError(
            f"model.path is {config.path!r}, but it must be a directory; "
            "for a name on the Hugging Face hub also set model.allow_download"
        )
    if not (Path(config.path) / "config.json").is_file():
        remedy = how_to_get_a_model(Path(config.path))
        raise ConfigError(f"model.path is {config.path!r}, but that directory has no config.json; {remedy}")


def how_to_get_a_model(directory: Path) -> str:
    """The command that makes a model of what a directory without a config.json holds, for error messages."""
    if (directory / "adapter_config.json").is_file():
        return "it holds adapters: `laconic export RUN DIR --merge`, or PEFT's merge_and_unload, writes the whole model"
    if (directory / "checkpoints").is_dir() and (directory / "config.toml").is_file():
        return f"it is a run: `laconic export {shlex.quote(str(directory))} DIR` writes its model"
    return "give a directory that save_pretrained or `laconic export` wrote"


def find_weights(directory: Path) -> str | None:
    """The file that from_pretrained will load weights (or their index) from; None when `directory` holds no weights."""
    for name in _LOADABLE:
        if (directory / name).is_file():
            return name
    try:
        names = sorted(file.name for file in directory.iterdir())
    except OSError as error:
        raise ConfigError(f"model.path is {str(directory)!r}, which cannot be read: {error.strerror}") from None
    others = [name for name in names if name.endswith(_SUFFIXES) and not name.startswith(_NO_WEIGHTS)]
    if not others:
        return None
    remedy = "save the model with save_pretrained, or remove the file to start from random weights"
    if any(name.endswith(".distcp") for name in others) or (directory / "manifest.json").is_file():
        remedy = "write the model of a run with `laconic export RUN DIRECTORY` and give that directory"
    elif any(name.endswith(".laconic") for name in others):
        remedy = "restore the directory with `laconic unzip`"
    elif others[0].startswith("adapter_model"):
        remedy = "merge the adapter into its base model (PEFT's merge_and_unload) and save that"
    raise ModelError(
        f"model.path {str(directory)!r} holds {others[0]}, which transformers does not load as the weights of a model; "
        + remedy
    )


def own_tokenizer(path: str, allow_download: bool = False) -> str:
    """The value of data.tokenizer for the model at `path`: its own files, or "bytes" for a model of bytes.

    `path` may be the name of a model on the hub with `allow_download`.
    """
    directory = Path(path)
    if not directory.is_dir():
        return _from_hub(path) if allow_download else "bytes"  # what is no directory is refused with the model
    if (directory / "tokenizer.json").is_file():
        return str(directory / "tokenizer.json")
    if tokenizer_files(directory):
        return path
    num_entries = _num_entries(directory)
    if num_entries != _NUM_BYTE_TOKENS and find_weights(directory) is not None:
        raise ConfigError(
            f"model.path {path!r} has weights but no tokenizer, and its vocabulary of {num_entries} entries is not "
            f"that of bytes ({_NUM_BYTE_TOKENS}); give the tokenizer.json it was trained with as data.tokenizer, or "
            "say data.tokenizer = bytes"
        )
    return "bytes"


def tokenizer_files(directory: Path) -> list[str]:
    """The files of a tokenizer in `directory`, by name."""
    return [name for name in _TOKENIZER_FILES if (directory / name).is_file()]


def _num_entries(directory: Path) -> Any:
    try:
        config = parse_json((directory / "config.json").read_bytes())
        return config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return None  # refused, with its reason, when the model is built


def _from_hub(name: str) -> str:
    from transformers.utils.hub import cached_file

    try:
        cached_file(name, "tokenizer_config.json", _raise_exceptions_for_missing_entries=False)
        return str(cached_file(name, "tokenizer.json"))
    except Exception as error:
        raise ConfigError(
            f"model.path is {name!r}, whose tokenizer.json cannot be had from the hub ({first_line(error)}); give the "
            "path of one as data.tokenizer"
        ) from error
