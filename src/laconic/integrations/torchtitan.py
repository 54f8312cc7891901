"""laconic in torchtitan: a converter of model configurations, and a container of optimizers with AdamW8bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

from torch.optim import Optimizer
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.protocols.model import BaseModel, ModelConfigConverter
from torchtitan.tools.logging import logger

from laconic.errors import ConfigError
from laconic.integrations.config import LaconicConfig, compress, given
from laconic.optim import OPTIMIZER_CLASSES

__all__ = ["LaconicConfig", "LaconicConverter", "LaconicOptimizersContainer", "adamw8bit"]


class LaconicConverter(ModelConfigConverter):
    """Compresses the activations of a torchtitan model: `model_registry("8B", converters=[LaconicConverter.Config()])`.

    torchtitan builds its models without memory, on the meta device. The model is converted there, before pipeline
    stages are cut from it, layers are compiled and `fully_shard` shards it. Checkpoints have no trace of it.

    Raises:
        ConfigError: at construction, when the configuration asks for gradients, an optimizer or a loss, which are
            torchtitan's; when the trainer starts, if its activation checkpointing runs every layer twice, so that
            nothing would be packed, or its activations are DTensors, which stay exact.
        ModelError: when the model is built: it cannot be converted.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        """What to switch on."""

        laconic: LaconicConfig = field(default_factory=LaconicConfig)

    def __init__(self, config: Config) -> None:
        self.laconic = given(config.laconic)
        for name, own, remedy in (
            ("gradients", 32, "fully_shard holds and reduces them; leave gradients out"),
            ("optimizer", "host", "set optimizer=adamw8bit(lr=...) in the trainer's configuration, leave it out here"),
            ("loss", "exact", "torchtitan's ChunkedLossWrapper never holds all logits either; leave loss out"),
        ):
            if getattr(self.laconic, name) != own:
                raise ConfigError(f"{name} is {getattr(self.laconic, name)!r}, but in torchtitan {remedy}")

    def convert(self, model_config: Any) -> Any:
        """The same configuration, whose `build` also compresses the model.

        Raises:
            ConfigError: it is no configuration of a model.
        """
        if not isinstance(model_config, BaseModel.Config):
            raise ConfigError(
                f"model_config is a {type(model_config).__qualname__}, but a model is converted as a whole; "
                "give the converter to the model's model_registry"
            )
        if not self.laconic.changes_model:
            return model_config
        same = {entry.name: getattr(model_config, entry.name) for entry in fields(model_config)}
        kind: Any = type(model_config)
        return _compressed(kind)(**same, laconic=self.laconic)


@cache
def _compressed(kind: Any) -> Any:
    """A class of configurations like `kind` that build compressed models."""

    def build(self: Any, **kwargs: Any) -> Any:
        model = kind.build(self, **kwargs)
        report = compress(model, self.laconic, agrees=False)  # stages of a pipeline are called one by one
        assert report is not None
        logger.info(f"laconic compresses {len(report.rows)} sites of {type(model).__name__}")
        return model

    def update_from_config(self: Any, *, config: Any, **kwargs: Any) -> None:
        _check(config)
        kind.update_from_config(self, config=config, **kwargs)

    namespace = {
        "__annotations__": {"laconic": LaconicConfig},
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "build": build,
        "update_from_config": update_from_config,
    }
    return dataclass(kw_only=True, slots=True)(type(kind.__name__, (kind,), namespace))


def _check(config: Any) -> None:
    checkpointing = getattr(config, "activation_checkpoint", None)
    if isinstance(checkpointing, FullAC.Config | SelectiveAC.Config):
        name = type(checkpointing).__qualname__.partition(".")[0]
        raise ConfigError(
            f"activation_checkpoint is {name}, which keeps no layer's activations but runs it twice, so nothing would "
            "be compressed; set activation_checkpoint to None, or leave the converter out"
        )
    parallelism = config.parallelism
    for name in ("tensor_parallel_degree", "context_parallel_degree"):
        if parallelism.spmd_backend != "spmd_types" and getattr(parallelism, name) > 1:
            raise ConfigError(
                f"spmd_backend is {parallelism.spmd_backend!r} and {name} is {getattr(parallelism, name)}, where "
                "activations are DTensors, which stay exact; set spmd_backend to 'spmd_types'"
            )


_CLASSES = {cls.__name__: cls for cls in OPTIMIZER_CLASSES.values()}


class LaconicOptimizersContainer(OptimizersContainer):
    """torchtitan's container of optimizers, in which `optimizer_name` may be "AdamW8bit" or "AdamW4bit".

    Its state is sharded, saved and resharded by torchtitan's checkpoints as ever.

    Raises:
        ConfigError: `implementation` asks for moments in bfloat16, or no group is AdamW8bit's.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """As torchtitan's."""

    def __init__(self, config: Any, **kwargs: Any) -> None:
        names = [group.optimizer_name for group in config.param_groups]
        if not _CLASSES.keys() & set(names):
            raise ConfigError(
                f"the groups' optimizers are {names}, but none is {' or '.join(map(repr, _CLASSES))}; take torchtitan's"
                " OptimizersContainer"
            )
        if config.implementation == "fused_opt_states_bf16":
            raise ConfigError(
                "implementation is 'fused_opt_states_bf16', but moments of AdamW8bit are in 8 or 4 bits; set 'fused'"
            )
        super().__init__(config, **kwargs)

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., Optimizer]:
        return _CLASSES[name] if name in _CLASSES else OptimizersContainer._resolve_optimizer_factory(name)


def adamw8bit(lr: float = 8e-4, **kwargs: Any) -> LaconicOptimizersContainer.Config:
    """The configuration of AdamW8bit for all parameters, in place of torchtitan's `default_adamw`.

    Args:
        lr: learning rate.
        kwargs: of `laconic.AdamW8bit`, such as bits=4; betas, eps and weight_decay are torchtitan's by default.
    """
    options = {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, **kwargs}
    group = ParamGroupConfig(pattern=r".*", optimizer_name="AdamW8bit", optimizer_kwargs=options)
    return LaconicOptimizersContainer.Config(param_groups=[group])
