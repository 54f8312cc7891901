"""laconic in DeepSpeed: compressed activations and AdamW8bit under ZeRO; docs/integrations.md has what composes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from copy import deepcopy
from os import PathLike
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn

from laconic.activations.whole_model.report import Report
from laconic.errors import ConfigError
from laconic.formats.shards import is_deepspeeds
from laconic.gradients.turns import owner_of
from laconic.integrations.config import LaconicConfig, compress, given
from laconic.optim import OPTIMIZER_CLASSES, AdamW8bit

__all__ = ["LaconicConfig", "attach", "initialize"]

_ADAMW = ("adam", "adamw")
_HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay")


def initialize(
    model: nn.Module,
    config: Mapping[str, Any] | str | PathLike[str],
    laconic: LaconicConfig | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    **kwargs: Any,
) -> tuple[Any, Any, Any, Any]:
    """Convert a model and call `deepspeed.initialize` with it.

    With `optimizer="adamw8bit"` or "adamw4bit" the configuration's "optimizer" section, of type Adam or AdamW, says the
    hyperparameters, and its "scheduler" works on it. ZeRO cuts parameters into one flat vector for each group and
    process; AdamW8bit keeps those of less than 2**20 elements in fp32.

    Args:
        model: the model, also one made under `deepspeed.zero.Init`; see `attach`.
        config: DeepSpeed's configuration, or the JSON file that has it; it stays as it is.
        laconic: what to switch on; None is 4-bit activations.
        optimizer: yours; None is that of the configuration.
        kwargs: of `deepspeed.initialize`.

    Returns:
        Engine, optimizer, data loader and scheduler, as from `deepspeed.initialize`.

    Raises:
        ConfigError: as `attach`; or the configuration has an optimizer that AdamW8bit cannot stand for.
        ModelError: the model cannot be converted.
    """
    laconic, settings = given(laconic), _settings(config)
    if laconic.optimizer != "host":
        if optimizer is not None:
            raise ConfigError(
                f"optimizer is {laconic.optimizer!r}, but initialize was given an optimizer; leave one of them out"
            )
        hyperparameters = _hyperparameters(settings, laconic.optimizer)
    attach(model, settings, laconic)
    if laconic.optimizer != "host":
        trainable = kwargs.pop("model_parameters", None) or [p for p in model.parameters() if p.requires_grad]
        optimizer = OPTIMIZER_CLASSES[laconic.optimizer](trainable, **hyperparameters)
    if isinstance(optimizer, AdamW8bit):
        settings["zero_allow_untested_optimizer"] = True  # tests/integrations/test_deepspeed.py has tested it
    made: tuple[Any, Any, Any, Any] = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, **kwargs)
    return made


def attach(
    model: nn.Module, config: Mapping[str, Any] | str | PathLike[str], laconic: LaconicConfig | None = None
) -> Report | None:
    """Convert a model before `deepspeed.initialize`, which `initialize` does for you.

    Under ZeRO 3 the model's layers (those that Hugging Face's `_no_split_modules` names) become leaf modules, whose
    parameters are gathered together: hooks at every linear layer, as ZeRO 3 has them otherwise, hide from a
    projection that its input is already kept. A model made under `deepspeed.zero.Init` is gathered for the conversion,
    whole on each process, and partitioned again.

    Args:
        model: no engine yet.
        config: DeepSpeed's configuration, or the JSON file that has it.
        laconic: what to switch on; `optimizer` is for `initialize`.

    Returns:
        The report of the compressed activations; None where they are left exact.

    Raises:
        ConfigError: `gradients` is not 32, the model's gradients are in codes already, or an engine has the model.
        ModelError: the model cannot be converted.
    """
    laconic, settings = given(laconic), _settings(config)
    if laconic.gradients != 32 or any(owner_of(parameter) is not None for parameter in model.parameters()):
        found = f"gradients is {laconic.gradients}" if laconic.gradients != 32 else "the model's gradients are in codes"
        raise ConfigError(
            f"{found}, but DeepSpeed holds and reduces gradients itself; leave them as they are, and "
            "init_process_group('laconic') shortens what it sends"
        )
    partitioned = [parameter for parameter in model.parameters() if hasattr(parameter, "ds_id")]
    if (
        isinstance(model, deepspeed.DeepSpeedEngine)
        or any(is_deepspeeds(parameter) for parameter in model.parameters() if parameter not in set(partitioned))
        or hasattr(model, "ds_id")
    ):
        raise ConfigError("DeepSpeed has an engine of the model already; convert it before deepspeed.initialize")
    if not laconic.changes_model:
        return None
    gathered = deepspeed.zero.GatheredParameters(partitioned) if partitioned else nullcontext()
    with gathered:
        report = compress(model, laconic)
    if settings.get("zero_optimization", {}).get("stage", 0) == 3:
        _gather_by_layer(model)
    return report


def _gather_by_layer(model: nn.Module) -> None:
    """Make leaf modules of ZeRO 3 of the model's layers, unless the caller has chosen some."""
    if any(deepspeed.utils.z3_leaf_module(module) for module in model.modules()):
        return
    names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    layers = {type(module) for module in model.modules() if type(module).__name__ in names}
    if layers:
        deepspeed.utils.set_z3_leaf_modules(model, sorted(layers, key=lambda kind: kind.__name__))


def _settings(config: Mapping[str, Any] | str | PathLike[str]) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return deepcopy(dict(config))
    if not isinstance(config, str | PathLike):
        raise ConfigError(
            f"config is a {type(config).__name__}, but it must be DeepSpeed's configuration or a JSON file of it"
        )
    try:
        found = json.loads(Path(config).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"config is {str(config)!r}, but it must be a JSON file: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"config is {str(config)!r}, but that JSON file must have an object")
    return found


def _hyperparameters(settings: dict[str, Any], wanted: str) -> dict[str, Any]:
    section = settings.pop("optimizer", None)
    if section is None:
        raise ConfigError(
            f"optimizer is {wanted!r}, but DeepSpeed's configuration has no optimizer section that says its lr; add "
            '"optimizer": {"type": "AdamW", "params": {"lr": ...}}'
        )
    kind, params = str(section.get("type")), dict(section.get("params", {}))
    adam_w_mode = params.pop("adam_w_mode", True)
    params.pop("torch_adam", None)
    unknown = sorted(set(params) - {*_HYPERPARAMETERS})
    if kind.lower() not in _ADAMW or not adam_w_mode or unknown:
        found = f"has {', '.join(unknown)}" if unknown else f"is {kind}"
        mode = "" if adam_w_mode else " with adam_w_mode false"
        raise ConfigError(
            f"optimizer is {wanted!r}, but the optimizer of DeepSpeed's configuration {found}{mode}; it must be AdamW "
            f"with {', '.join(_HYPERPARAMETERS)}"
        )
    # DeepSpeed's default of the weight decay, not AdamW8bit's: what the configuration means stays.
    return {"weight_decay": 0.0, **params}
