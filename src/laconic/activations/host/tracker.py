"""Counts the bytes that autograd saves for backward, by module.

A saved tensor counts once per storage, however many functions save it: that is what memory sees. Parameters and buffers
exist anyway and do not count. The tracker watches and changes nothing: values are handed back as they came.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from laconic.activations.host.audited import AUDITED
from laconic.activations.host.storages import dense_parts, storages_of

_OPEN: list[SavedTensorTracker] = []


@dataclass(frozen=True)
class SavedTensor:
    """One storage that autograd saved: the name of the `module` that ran (the root is ""), shape, dtype and bytes."""

    module: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.module or 'the model itself'} {list(self.shape)} {dtype}, {self.nbytes:,} bytes"


def observe(*tensors: Tensor) -> None:
    """Show open trackers tensors that saved-tensor hooks save: the innermost hooks hide them from all others."""
    for tracker in _OPEN:
        for tensor in tensors:
            tracker.count(tensor)


def own_storages(module: nn.Module) -> Iterator[tuple[int, StorageWeakRef]]:
    """Addresses of the storages of the parameters and buffers that a module itself holds now.

    Each with a weak reference: as long as it is kept, the address is no other storage's, though the module may replace
    its buffers in every forward.
    """
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None:
            for storage in storages_of(tensor):
                yield storage._cdata, StorageWeakRef(storage)


def kind_of(module: nn.Module, name: str, root: nn.Module) -> str:
    """The kind of site that a module's saved tensors are booked under.

    One of "norm", "linear", "mlp", "attention", "embedding", "loss" (the root itself, where logits and loss live) or
    "other".
    """
    label = type(module).__name__.lower()
    path = name.lower()
    if module is root:
        return "loss"
    if "norm" in label:
        return "norm"
    if isinstance(module, nn.Linear) or label == "conv1d":
        return "linear"
    if isinstance(module, nn.Embedding):
        return "embedding"
    if "attention" in label or "attn" in path.rsplit(".", 1)[-1]:
        return "attention"
    if "mlp" in label or "mlp" in path.split("."):
        return "mlp"
    return "other"


def _compiled(root: nn.Module) -> set[nn.Module]:
    """The modules below `root` on which `compile` was called, and all that they hold."""
    compiled = (module for module in root.modules() if module._compiled_call_impl is not None)
    return {inner for module in compiled for inner in module.modules()}


def _unpack(asked: list[bool]) -> Callable[[Tensor | None], Tensor]:
    """What hands a saved tensor back; a function without the tracker, which holds the model that may hold the graph."""

    def unpack(kept: Tensor | None) -> Tensor:
        if kept is None:
            asked.append(True)
            raise RuntimeError("a backward asks for a tensor that a measuring forward has dropped")
        return kept

    return unpack


class SavedTensorTracker:
    """Context manager that counts the bytes autograd saves while it is open.

    After the block: `nbytes`, `by_module` (name -> bytes, the root is ""), `by_kind` (kind -> bytes, see `kind_of`)
    and `tensors`, in the order in which they were saved.
    Tensors that were moved to pinned host memory count in `host_nbytes` instead.

    A tensor is booked on the innermost module that was running when its storage was saved first; tensors that a
    compiled module saves are booked on the module that called it. A checkpointed region saves its input only.

    Args:
        module: the model whose forward runs inside; its submodules give the names.
        drops: let go of what is saved, so that a forward without backward needs no memory for it. A backward in the
            block that asks for a dropped tensor raises, and makes `was_asked` true.
    """

    def __init__(self, module: nn.Module, *, drops: bool = False) -> None:
        self._drops = drops
        self._asked: list[bool] = []
        self._root = module
        self._names = {id(child): name for name, child in module.named_modules()}
        self._kinds = {name: kind_of(child, name, module) for name, child in module.named_modules()}
        self._stack: list[str] = []
        # A storage, or a weak reference to it, is held while counting: so its address cannot be reused and mistaken
        # for one seen before. A weak reference lets go of the memory.
        self._seen: dict[int, torch.UntypedStorage | StorageWeakRef] = {}
        self._parameters: dict[int, StorageWeakRef] = {}
        self._handles: list[Any] = []
        self.by_module: Counter[str] = Counter()
        self.tensors: list[SavedTensor] = []
        self.host_nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes saved for backward, each storage once, parameters and buffers left out."""
        return sum(self.by_module.values())

    @property
    def was_asked(self) -> bool:
        """Whether a backward asked for a tensor that had been dropped."""
        return bool(self._asked)

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes saved for backward by kind of module."""
        kinds: Counter[str] = Counter()
        for name, nbytes in self.by_module.items():
            kinds[self._kinds.get(name, "other")] += nbytes
        return dict(kinds)

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():  # the model was compiled as a whole
            return
        self._stack.append(self._names.get(id(module), ""))
        # FSDP2 swaps sharded parameters for gathered ones just before forward, so they are listed again.
        self._exclude(module)

    def _exit_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self._stack.pop()

    def _exclude(self, module: nn.Module) -> None:
        computed = (p for p in module._parameters.values() if p is not None and not p.is_leaf)  # by a hypernetwork
        made = {storage._cdata for parameter in computed for storage in storages_of(parameter)}
        self._parameters.update((key, storage) for key, storage in own_storages(module) if key not in made)

    def count(self, tensor: Tensor) -> None:
        """Book a tensor that is saved for backward, unless its storage has been booked or is a parameter's.

        What an audit saves before a first call is gone when that call begins, and is not booked.
        """
        if AUDITED.is_running:
            return
        for part in dense_parts(tensor.detach()):
            storage = part.untyped_storage()
            key = storage._cdata
            if (
                key not in self._parameters and key not in self._seen and storage.nbytes()
            ):  # a place in the graph has none
                self._seen[key] = StorageWeakRef(storage) if self._drops else storage
                if part.device.type == "cpu" and part.is_pinned():
                    self.host_nbytes += storage.nbytes()
                    continue
                module = self._stack[-1] if self._stack else ""
                self.by_module[module] += storage.nbytes()
                self.tensors.append(SavedTensor(module, tuple(part.shape), part.dtype, storage.nbytes()))

    def _pack(self, tensor: Tensor) -> Tensor | None:
        self.count(tensor)
        if self._drops and not AUDITED.is_running:  # an audit has backwards of its own
            return None
        # The same bytes, but not the node that made them: a graph that holds itself through a hook is never freed.
        return tensor.detach()

    def __enter__(self) -> SavedTensorTracker:
        compiled = _compiled(self._root)
        for child in self._root.modules():
            self._exclude(child)
            if child in compiled:  # its hooks would be traced, and its graphs guarded by them
                continue
            if isinstance(child, torch.jit.ScriptModule):  # which takes no hooks
                continue
            self._handles.append(child.register_forward_pre_hook(self._enter_module, prepend=True))
            self._handles.append(child.register_forward_hook(self._exit_module, always_call=True))
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack(self._asked))
        self._hooks.__enter__()
        _OPEN.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _OPEN.remove(self)
        self._hooks.__exit__(kind, error, trace)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._seen.clear()
        self._parameters.clear()
