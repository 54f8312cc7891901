"""Low-rank adapters (LoRA, arXiv 2106.09685) on a model that is trained already; peft makes and merges them.

The adapters are put into the model itself, so whatever looks at modules and trained parameters (activation
compression, wrappers, optimizers, checkpoints) needs to know nothing of them. Frozen weights stay those of model.path:
checkpoints hold a hash of them instead, and an export reads them there again.
"""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from laconic.errors import CheckpointError, ConfigError, first_line
from laconic.formats.digest import digest
from laconic.train.config.dotted_names import nearest
from laconic.train.config.schema import TrainConfig
from laconic.train.model_source import find_weights

logger = logging.getLogger(__name__)

BASE_HASH = "weights of model.path"
"""Name, in a checkpoint's identity, of the hash that `add_adapters` returns."""


def add_adapters(model: nn.Module, config: TrainConfig) -> str | None:
    """Freeze `model`, of transformers, and put adapters into it, as `[lora]` says; nothing without lora.r.

    Returns:
        A hash of the frozen weights; None without lora.r.
    """
    lora, path = config.lora, str(config.model.path)
    if lora.r is None:
        return None
    made = _peft_config(config)
    if Path(path).is_dir() and find_weights(Path(path)) is None:
        raise ConfigError(
            f"lora.r is {lora.r}, but model.path {path!r} holds no weights, and adapters of random ones are of no use; "
            "leave lora out, or give the directory of a trained model"
        )
    _check_targets(model, lora.target_modules)
    base = _hash(model)
    from peft import inject_adapter_in_model

    with torch.random.fork_rng(devices=[]), _without_warnings():
        torch.manual_seed(config.seed)
        try:
            inject_adapter_in_model(made, model)
        except ValueError as error:
            raise ConfigError(
                f"lora.target_modules is {list(lora.target_modules)} and lora.dropout {lora.dropout}, which peft "
                f"refuses for this model: {first_line(error)}"
            ) from error
    model.train()
    trained = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    layers = {name.partition(".lora_")[0].replace(".base_layer", "") for name in trained}
    logger.info(
        "adapters: r %d on %d layers (%s); %s of %s parameters are trained",
        *(lora.r, len(layers), ", ".join(sorted({name.rpartition(".")[2] for name in layers}))),
        *(f"{sum(trained.values()):,}", f"{sum(p.numel() for p in model.parameters()):,}"),
    )
    return base


def freeze_in_bf16(model: nn.Module, config: TrainConfig) -> None:
    """Keep the frozen weights of linear layers in bf16 where bf16 autocast would round them so in each forward anyway.

    Under autocast a frozen fp32 weight is held twice for backward. FSDP2, which wants one dtype, rounds by itself.
    """
    if config.lora.r is None or config.precision != "bf16" or config.parallel != "ddp":
        return
    shared = _shared(model)
    for module in model.modules():
        if type(module) is nn.Linear:
            for parameter in module.parameters():
                if not parameter.requires_grad and id(parameter) not in shared:
                    parameter.data = parameter.data.bfloat16()


def with_adapters(model: Any, config: TrainConfig, base: str | None) -> Any:
    """`model` as a PeftModel with new adapters, to load a checkpoint into its `get_base_model()`."""
    made = _peft_config(config)
    if _hash(model) != base:
        raise CheckpointError(
            f"model.path {config.model.path!r} holds other weights than those that the run's adapters were trained on; "
            "bring these back"
        )
    from peft import get_peft_model

    with _without_warnings():
        return get_peft_model(model, made)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Ignore what peft says of settings that it sets itself, and of what it still asks transformers for."""
    with warnings.catch_warnings():
        for message in ("fan_in_fan_out is set to", "The following (rank|alpha)_pattern keys did not match"):
            warnings.filterwarnings("ignore", message=message)
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        yield


def _peft_config(config: TrainConfig) -> Any:
    lora = config.lora
    assert lora.r is not None
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ConfigError(
            f"lora.r is {lora.r}, but adapters need peft ({error}): pip install 'laconic[lora]'"
        ) from error
    return LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(config.model.path),
        r=lora.r,
        lora_alpha=2 * lora.r if lora.alpha is None else lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.target_modules) or "all-linear",
    )


def _check_targets(model: nn.Module, targets: tuple[str, ...]) -> None:
    """Refuse names of no module, which peft would pass over, and of one whose weight another module shares."""
    modules, shared = dict(model.named_modules()), _shared(model)
    for target in targets:
        found = [name for name in modules if name == target or name.endswith(f".{target}")]
        if not found:
            linear = {name.rpartition(".")[2] for name, module in modules.items() if type(module) is nn.Linear}
            raise ConfigError(
                f"lora.target_modules is {list(targets)}, but the model has no module {target!r}"
                f"{nearest(target, linear)}; its linear layers are {', '.join(sorted(linear))}"
            )
        if any(id(parameter) in shared for name in found for parameter in modules[name].parameters(recurse=False)):
            raise ConfigError(
                f"lora.target_modules is {list(targets)}, but {target!r} shares its weight with another module (tied "
                "embeddings), so an adapter could not be merged; leave it out"
            )


def _shared(model: nn.Module) -> set[int]:
    times = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    return {one for one, count in times.items() if count > 1}


def _hash(model: nn.Module) -> str:
    sha = hashlib.sha256()
    for name, parameter in model.named_parameters():
        sha.update(f"{name} {tuple(parameter.shape)} {int(digest(parameter))}\n".encode())
    return sha.hexdigest()[:16]
