"""LoRA of PEFT on fused experts (`target_parameters`), of which each process computes its own experts' part.

[Note: adapters are replicas]
PEFT's ParamWrapper adds scaling * B A to a parameter [E, ...]. Every process keeps the factors of all experts, as it
keeps the dense parameters, and adds the products of its own experts; with esp, its part of each. Gradients of the
others are zero. An expert's rows are at one process of each EP group, so the mean over dp, which DDP, FSDP2 and
`reduce_gradients` make of dense gradients, is that of the mean of all processes' losses. Clipping, optimizers, saving,
loading and resuming treat factors like any replicated parameter.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from laconic.errors import ConfigError
from laconic.formats.shards import Runs, local_part, local_runs, taken
from laconic.moe.huggingface.experts import FusedExperts
from laconic.moe.huggingface.sharding import Slots


def adapt_above(model: nn.Module, experts: str) -> None:
    """Let all of PEFT's wrappers around the module `experts` add their products to this process's part."""
    found = model.get_submodule(experts)
    while adapt(found, model.get_submodule(experts := experts.rpartition(".")[0])):
        pass


def adapt(wrapped: Any, module: Any) -> bool:
    """Do so for a module around `wrapped`; return whether it is PEFT's around a parameter of fused experts."""
    layers = sys.modules.get("peft.tuners.lora.layer")
    kind = getattr(layers, "ParamWrapper", None)
    experts = wrapped.get_base_layer() if kind is not None and isinstance(wrapped, kind) else wrapped
    if kind is None or not isinstance(module, kind) or not isinstance(experts, FusedExperts):
        return False
    layer: Any = experts.__dict__.get("layer")
    if layer is not None:  # else it is on its way, and `parallelize` has checked
        if isinstance(experts.placement, Slots):
            raise ConfigError(
                f"LoRA is on {module.parameter_name} of experts that lie beside identities, as LongCat's do, and are"
                " cut in blocks over processes; train them without adapters, or call parallelize without a mesh"
            )
        check_adaptable(module.parameter_name, layer.num_mp, experts.placement is not None)
    if not isinstance(module, own := _wrapper(kind)):
        module.__class__ = own
        experts.adapters.append(module)
    return True


def check_adaptable(names: str, num_mp: int, movable: bool) -> None:
    """Refuse LoRA on parameters of experts where its gradients, or its products, would be wrong."""
    if num_mp > 1:
        raise ConfigError(
            f"LoRA's target_parameters has {names}, but mp is {num_mp}, so that a process would get only a part of the"
            " factors' gradients; make the Grid without mp, or leave experts out of target_parameters"
        )
    if movable:
        raise ConfigError(
            f"LoRA's target_parameters has {names}, but movable experts would leave their factors behind; call"
            " parallelize without movable"
        )


@cache
def _wrapper(kind: Any) -> Any:
    """Return the subclass of PEFT's ParamWrapper for experts of which a process may have a part."""

    class PartialParamWrapper(kind):
        """ParamWrapper; see laconic.moe.huggingface.adapters [Note: adapters are replicas]."""

        @contextmanager
        def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
            yield  # the experts ask for products when they run, which may be again in backward

        def added_to(self, name: str, held: Tensor, parameter: Tensor) -> Tensor:
            """Return `held`, this process's part of the experts' parameter `name`, with active products added."""
            if name != self.parameter_name or self.disable_adapters or self.merged:
                return held
            for adapter in self.active_adapters:
                if adapter in self.lora_A:
                    held = self._with_product(adapter, held, parameter)
            return held

        def unload_and_optionally_merge_module(self, *args: Any, **kwargs: Any) -> Any:
            experts = super().unload_and_optionally_merge_module(*args, **kwargs)
            experts.adapters.clear()
            return experts

        def _with_product(self, adapter: str, held: Tensor, parameter: Tensor) -> Tensor:
            if self.num_experts == 1:  # of biases [E, ...], which PEFT takes for one matrix
                return held + _part(self.get_delta_weight(adapter).view(parameter.shape), parameter)
            first, second, scaling = self.get_delta_factors(adapter)
            with torch.autocast(held.device.type, enabled=False):
                return torch.baddbmm(held, _part(first, parameter, 2), _part(second, parameter, 1), alpha=scaling)

        def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
            from peft.tuners.tuners_utils import check_adapters_to_merge

            for adapter in check_adapters_to_merge(self, adapter_names):
                if adapter in self.lora_A:
                    self._add(adapter, 1.0, safe_merge)
                    self.merged_adapters.append(adapter)

        def unmerge(self) -> None:
            while self.merged_adapters:
                self._add(self.merged_adapters.pop(), -1.0, False)

        @torch.no_grad()
        def _add(self, adapter: str, sign: float, checks: bool) -> None:
            parameter = self.get_param()
            zeros = torch.zeros_like(local_part(parameter))
            product = self._with_product(adapter, zeros, parameter).mul_(sign)
            if checks and not _all_finite(product, parameter):
                raise ValueError(f"adapter {adapter} would make {self.parameter_name} NaN or infinite")
            local_part(parameter).add_(product)

    PartialParamWrapper.__name__ = kind.__name__  # by which PEFT knows its own
    PartialParamWrapper.__qualname__ = "PartialParamWrapper"  # by which pickle finds it
    return PartialParamWrapper


def __getattr__(name: str) -> Any:
    """`PartialParamWrapper`, for pickles of adapted models."""
    if name != "PartialParamWrapper":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from peft.tuners.lora.layer import ParamWrapper

    return _wrapper(ParamWrapper)


def _part(whole: Tensor, like: Tensor, uncut: int = -1) -> Tensor:
    """Return the part of a tensor that is this process's of `like`, whose dimension `uncut` it has in another size."""
    if not isinstance(like, DTensor):
        return whole
    return taken(whole, _runs(whole.shape, like.device_mesh, like.placements, uncut))


@lru_cache(maxsize=256)
def _runs(shape: torch.Size, mesh: Any, placements: tuple[Any, ...], uncut: int) -> Runs:
    kept = [Replicate() if getattr(place, "dim", None) == uncut else place for place in placements]
    return local_runs(shape, mesh, kept)


def _all_finite(held: Tensor, like: Tensor) -> bool:
    """Return whether the parts of all processes are finite."""
    finite = held.isfinite().all().to(torch.int64)
    if isinstance(like, DTensor):
        for dim in range(like.device_mesh.ndim):
            dist.all_reduce(finite, dist.ReduceOp.MIN, group=like.device_mesh.get_group(dim))
    return bool(finite)
