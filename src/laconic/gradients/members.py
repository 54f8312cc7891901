"""Parameters whose gradients a store keeps: all that require a gradient, also after the model has changed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Set
from typing import NoReturn

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from laconic.collectives.runtime.group_facts import ranks_of
from laconic.errors import ModelError
from laconic.formats.shards import has_inner_tensors, is_deepspeeds, local_part
from laconic.gradients.turns import Owner, own, owner_of, release
from laconic.ops import DTYPES

_HELD = "_laconic_gradients"


class Members:
    """A model's parameters by name, each with a hook that is called with it when autograd has made its gradient.

    Parameters that are added, replaced (by fully_shard, adapters, a new head) or unfrozen join at the next `follow`;
    those that are gone from the model leave. One that was trainable once stays when it is frozen: it may have a
    gradient. `owner` stores the gradients, and reduces them over `group` if there is one.
    """

    def __init__(
        self,
        model: nn.Module,
        owner: Owner,
        hook: Callable[[nn.Parameter], None],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.parameters: dict[str, nn.Parameter] = {}
        self._model = model
        self._owner = owner
        self._hook = hook
        self._group = group
        self._handles: dict[int, RemovableHandle] = {}
        self._places: dict[int, tuple[int, str]] = {}
        self._removed = False

    def follow(self) -> bool:
        """Take in the model's current parameters, all if they can be compressed; return whether they are others."""
        if self._removed:
            return False
        found = {
            name: parameter
            for name, parameter in self._model.named_parameters()
            if id(parameter) in self._handles or (parameter.requires_grad and owner_of(parameter) is None)
        }
        for parameter in self.parameters.values():
            handle = self._handles[id(parameter)]
            if handle.id not in (parameter._post_accumulate_grad_hooks or ()):  # swapped for a tensor of another type
                self._hook_on(parameter)
        if len(found) == len(self.parameters) and all(
            name == other and one is two
            for (name, one), (other, two) in zip(found.items(), self.parameters.items(), strict=True)
        ):
            return False
        check_modules(self._model, dist_group=self._owner.has_group)
        for name, parameter in found.items():
            if id(parameter) not in self._handles:
                check_dtype(name, parameter)
                check_replicas(name, parameter, self._group)
        for parameter in self.parameters.values():
            if all(parameter is not other for other in found.values()):
                self._handles.pop(id(parameter)).remove()
                _let_go(parameter)
        for parameter in found.values():
            if id(parameter) not in self._handles:
                own(parameter, self._owner)
                self._hook_on(parameter)
        self.parameters.clear()
        self.parameters.update(found)
        self._places = {id(parameter): place for place, parameter in zip(enumerate(found), found.values(), strict=True)}
        return True

    def _hook_on(self, parameter: nn.Parameter) -> None:
        # The garbage collector does not look into hooks: one that held the store would keep the model for ever. So the
        # parameter holds it where the collector sees it, and the hook finds it there.
        found = weakref.WeakMethod(self._hook)

        def arrived(parameter: nn.Parameter) -> None:
            hook = found()
            if hook is not None:
                hook(parameter)

        parameter.__dict__[_HELD] = _Held(self._owner)
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(arrived)
        self._handles[id(parameter)] = handle

    def check_engine(self, parameter: nn.Parameter) -> None:
        """Check, when a gradient arrives, that no DeepSpeed engine was made of the model since: both would reduce."""
        if is_deepspeeds(parameter) or _has_engine(self._model):
            _refuse_deepspeed(self._places[id(parameter)][1])

    def place_of(self, parameter: Tensor) -> tuple[int, str]:
        """The parameter's number and name."""
        return self._places[id(parameter)]

    def remove(self) -> None:
        """Remove all hooks, for good."""
        self._removed = True
        for handle in self._handles.values():
            handle.remove()
        for parameter in self.parameters.values():
            _let_go(parameter)
        self._handles.clear()


class _Held:
    """Keeps a store alive for as long as a parameter is; a copy of the parameter, also in a file, keeps nothing."""

    def __init__(self, owner: Owner | None = None) -> None:
        self.owner = owner

    def __reduce__(self) -> tuple[type[_Held], tuple[()]]:
        return _Held, ()


def _let_go(parameter: nn.Parameter) -> None:
    release(parameter)
    parameter.__dict__.pop(_HELD, None)


def check_model(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Check that a model's gradients can be compressed."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"model is {type(model).__name__}, but it must be a torch.nn.Module")
    check_modules(model, dist_group=group is not None)
    _check_experts(model, group)
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trainable:
        raise ModelError("the model has no parameter that requires a gradient, so there is nothing to compress")
    for name, parameter in trainable:
        check_dtype(name, parameter)
        check_replicas(name, parameter, group)
        if is_deepspeeds(parameter):
            _refuse_deepspeed(name)
        if owner_of(parameter) is not None:
            raise ModelError(f"the gradient of {name} is compressed already; call remove() on the first result before")


def check_replicas(name: str, parameter: Tensor, group: dist.ProcessGroup | None) -> None:
    """Check that no rank of a group holds another part of a parameter, which cannot be added to this one."""
    if group is None or not isinstance(parameter, DTensor):
        return
    mesh, here = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    if here is None:
        return
    cut = [not place.is_replicate() for place in parameter.placements]
    same = tuple(at if is_cut else slice(None) for at, is_cut in zip(here, cut, strict=True))
    others = {*mesh.mesh.flatten().tolist()} - {*mesh.mesh[same].flatten().tolist()}
    _check_apart(f"parameter {name} is cut over ranks", others, group)


def _check_experts(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Check that a group is apart from the ranks that a layer of experts sends its rows to, which hold others."""
    for name, module in model.named_modules():
        dispatcher = getattr(module, "dispatcher", None)
        # By its name: this room knows nothing of laconic.moe.
        if group is None or not type(dispatcher).__module__.startswith("laconic.moe."):
            continue
        peers = {rank for one in getattr(dispatcher, "groups", ()) for rank in ranks_of(one)} - {dist.get_rank()}
        if any(parameter.requires_grad for parameter in module.get_submodule("experts").parameters()):
            _check_apart(f"module {name!r} spreads its experts over ranks", peers, group)


def _check_apart(what: str, others: Set[int], group: dist.ProcessGroup) -> None:
    found = sorted(others & {*ranks_of(group)})
    if found:
        raise ModelError(
            f"{what}, and the group's ranks {found} hold other parts, whose gradients would be added to its own; leave"
            " gradients uncompressed and call laconic.moe.reduce_gradients, or train by laconic train"
        )


def check_modules(model: nn.Module, dist_group: bool) -> None:
    """Check that a model has no wrapper or layer that excludes gradients in codes, reduced here if `dist_group`."""
    for name, module in model.named_modules():
        where = f"module {name!r}" if name else "the model"
        if _has_engine(module):
            _refuse_deepspeed(next((inner for inner, _ in module.named_parameters(prefix=name)), where))
        if isinstance(module, DistributedDataParallel):
            raise ModelError(
                f"{where} is a DistributedDataParallel, whose buckets keep every gradient in full precision; pass the"
                " inner module with group=..., gradients are then reduced here, in few bytes"
            )
        if isinstance(module, FullyShardedDataParallel):
            raise ModelError(f"{where} is a FullyShardedDataParallel of FSDP1; use fully_shard (FSDP2) instead")
        if dist_group and isinstance(module, FSDPModule):
            raise ModelError(f"{where} is sharded by FSDP2, which reduces gradients itself; pass group=None")
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise ModelError(f"{where} makes sparse gradients, but only dense ones can be compressed; use sparse=False")


def _has_engine(module: nn.Module) -> bool:
    """Whether a DeepSpeed engine, of any stage of ZeRO, trains the module: it hooks itself on the module's forward."""
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return any(str(getattr(hook, "__module__", "")).startswith("deepspeed.") for hook in hooks)


def _refuse_deepspeed(name: str) -> NoReturn:
    raise ModelError(
        f"{name} is a parameter of a DeepSpeed engine, which holds and reduces gradients itself; leave them as they are"
        " (remove() undoes compress_gradients), and init_process_group('laconic') shortens what it sends"
    )


def check_dtype(name: str, parameter: Tensor) -> None:
    """Check that the gradient of a parameter of this dtype and class can be compressed."""
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise ModelError(
            f"parameter {name} gets its shape in the first forward, but codes have that of a parameter; run the model"
            " once before"
        )
    if has_inner_tensors(parameter):
        raise ModelError(
            f"parameter {name} is a {type(local_part(parameter)).__name__}, which consists of several tensors, but only"
            " the gradient of one tensor can be compressed; freeze it, or leave gradients as they are"
        )
    if parameter.dtype not in DTYPES:
        raise ModelError(
            f"parameter {name} is {str(parameter.dtype).removeprefix('torch.')}, but its gradient can be compressed"
            " only from float32, bfloat16 or float16; convert or freeze it"
        )


class Subset(nn.Module):
    """Some of a model's parameters, as a module with their names; buffers are left out."""

    def __init__(self, model: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        known = {id(parameter) for parameter in parameters}
        self._held = {name: p for name, p in model.named_parameters() if id(p) in known}

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters under their names in the model."""
        return ((prefix + name, parameter) for name, parameter in self._held.items())
