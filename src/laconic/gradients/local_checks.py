"""What local steps refuse: arguments, models that reduce or shard by themselves, other parameters than at the start."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from laconic.errors import ConfigError, ModelError
from laconic.formats.shards import has_inner_tensors
from laconic.gradients.turns import owner_of
from laconic.ops import DTYPES
from laconic.options import DIFFERENCE_BITS, refused, takes


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require a gradient, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def kind_of(parameter: Tensor) -> str:
    """Dtype, shape and device, as errors name them."""
    dtype = str(parameter.dtype).removeprefix("torch.")
    return f"{dtype} {list(parameter.shape)} on {parameter.device}"


def change_of(then: Mapping[str, str], now: Mapping[str, nn.Parameter]) -> str | None:
    """What differs between the parameters of the start and those of now, as the beginning of a sentence; None: nothing.

    A sharded or wrapped model is another one, too.
    """
    for name in (*then, *now):
        if name not in now:
            return f"parameter {name} is gone or frozen"
        if name not in then:
            return f"parameter {name} is new or trainable"
        if isinstance(now[name], DTensor):
            return f"parameter {name} has been sharded"
        if (kind := kind_of(now[name])) != then[name]:
            return f"parameter {name} was {then[name]} and is {kind}"
    return None


def averaged_elsewhere(parameters: Mapping[str, nn.Parameter]) -> str | None:
    """Which gradient `compress_gradients` averages over ranks, as the beginning of a sentence; None: it does none."""
    for name, parameter in parameters.items():
        owner = owner_of(parameter)
        if owner is not None and owner.has_group:
            return f"the gradient of {name} is averaged over ranks in every step by compress_gradients"
    return None


class WatchedLoads:
    """Sees weights that the model's `load_state_dict` changes, also in a part of it: no common point knows of them."""

    def __init__(self, model: nn.Module) -> None:
        self._loaded: str | None = None
        for name, module in model.named_modules():
            module.register_load_state_dict_pre_hook(_LoadHook(self, name))

    def changed(self) -> str | None:
        """The parameter that a load has changed, as the beginning of a sentence; None: there was no such load."""
        return None if self._loaded is None else f"other values of parameter {self._loaded} were loaded"

    def forget(self) -> None:
        """Forget the loads so far: the common point is that of the loaded weights."""
        self._loaded = None

    def note(self, name: str) -> None:
        """Note that a parameter gets other values."""
        self._loaded = self._loaded or name


class _LoadHook:
    """Hook of one module; a copy of the module, also in a file, has one that sees nothing."""

    def __init__(self, loads: WatchedLoads | None = None, name: str = "") -> None:
        self._loads = None if loads is None else weakref.ref(loads)
        self._name = name

    def __call__(self, module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
        loads = None if self._loads is None else self._loads()
        if loads is None:
            return
        for name, parameter in module.named_parameters(recurse=False):
            value = state.get(prefix + name)
            if isinstance(value, Tensor) and parameter.requires_grad and value.shape == parameter.shape:
                value = value.detach().to(parameter)
                if not bool((value == parameter).logical_or(value.isnan() & parameter.isnan()).all()):
                    loads.note(f"{self._name}.{name}" if self._name else name)

    def __reduce__(self) -> tuple[type[_LoadHook], tuple[()]]:
        return _LoadHook, ()


def check_names(part: str, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Check that a part of a state has the tensors of a model, in their shapes."""
    for name in (*wanted, *found):
        shapes = [list(tensors[name].shape) if name in tensors else "missing" for tensors in (found, wanted)]
        if shapes[0] != shapes[1]:
            raise ConfigError(
                f"{name} of {part!r} is {shapes[0]} in the state and {shapes[1]} in the model; load the state of the "
                "same model"
            )


def check_arguments(
    every: int, bits: int, outer_lr: float, outer_momentum: float, num_fragments: int, delay: int
) -> None:
    """Check that the arguments of `LocalSteps` are in their ranges."""
    if not takes(DIFFERENCE_BITS, bits):
        raise ConfigError(refused("bits", bits, DIFFERENCE_BITS))
    rules = [
        ("every", every, 1, None, "at least 1: steps between two synchronizations"),
        ("num_fragments", num_fragments, 1, every, f"from 1 to every ({every}): one begins in a step"),
        ("delay", delay, 0, None, "at least 0"),
    ]
    for name, value, low, high, rule in rules:
        if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
            raise ConfigError(f"{name} is {value!r}, but it must be an integer {rule}")
    if delay >= every:
        raise ConfigError(
            f"delay is {delay}, but it must be below every ({every}): a fragment is merged before it is sent again"
        )
    if not 0 < outer_lr < float("inf"):
        raise ConfigError(f"outer_lr is {outer_lr!r}, but it must be positive and finite")
    if not 0 <= outer_momentum < 1:
        raise ConfigError(f"outer_momentum is {outer_momentum!r}, but it must lie in [0, 1)")


def check_alone(model: nn.Module) -> None:
    """Check that ranks can train a model apart: nothing in it reduces or cuts, and all dtypes can be averaged."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"model is {type(model).__name__}, but it must be a torch.nn.Module")
    for name, module in model.named_modules():
        where = f"module {name!r}" if name else "the model"
        if isinstance(module, DistributedDataParallel):
            raise ModelError(
                f"{where} is a DistributedDataParallel, which averages gradients in every step; pass the inner module "
                "(.module), and train that"
            )
        if isinstance(module, FSDPModule | FullyShardedDataParallel):
            raise ModelError(
                f"{where} is sharded by {'FSDP2' if isinstance(module, FSDPModule) else 'FSDP1'}, but each rank must "
                "hold the whole model to train it alone; leave it whole"
            )
        # By its name: this room knows nothing of laconic.moe.
        dispatcher = type(getattr(module, "dispatcher", None))
        if dispatcher.__module__.startswith("laconic.moe.") and dispatcher.__name__ != "LocalDispatcher":
            raise ModelError(
                f"{where} spreads its experts over ranks (expert parallelism), but each rank must hold the whole model "
                "to train it alone; leave it whole"
            )
    parameters = trainable(model)
    if not parameters:
        raise ModelError("the model has no parameter that requires a gradient, so there is nothing to train")
    devices = {parameter.device for parameter in parameters.values()}
    if len(devices) > 1:
        raise ModelError(
            f"parameters lie on {', '.join(map(str, sorted(devices, key=str)))}, but must lie on one device"
        )
    for name, parameter in parameters.items():
        if isinstance(parameter, DTensor):
            raise ModelError(
                f"parameter {name} is a DTensor, cut over ranks, but each rank must hold the whole model to train it "
                "alone; leave it whole"
            )
        if has_inner_tensors(parameter):
            raise ModelError(
                f"parameter {name} is a {type(parameter).__name__}, which consists of several tensors, but only the"
                " differences of plain tensors can be averaged; freeze it"
            )
        if parameter.dtype not in DTYPES:
            raise ModelError(
                f"parameter {name} is {str(parameter.dtype).removeprefix('torch.')}, but it must be float32, bfloat16 "
                "or float16; convert the model or freeze it"
            )
    if (averaged := averaged_elsewhere(parameters)) is not None:
        raise ModelError(f"{averaged}; pass group=None there")
