"""Loss and gradients of one batch, computed in one of the ways that an audit compares."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from laconic.activations.host.audited import in_an_audit, keeping_values, running_originals
from laconic.auditing.replicated import is_sharded_by_fsdp, spread_experts
from laconic.auditing.rounding_bound import Rounding, unrounded
from laconic.auditing.state import ModelState
from laconic.errors import AuditError
from laconic.formats.digest import digest
from laconic.formats.shards import local_part

RunKind = Literal["exact", "unrounded", "rounded", "compressed", "nudged"]
"""Ways to compute that comparison.py tells apart; `nudged` is exact, but for noise of some roundings in backward."""

_NUDGE = 4
"""Size of that noise, in eps of the dtype."""


@dataclass(frozen=True)
class Outcome:
    """What one run computed: the loss, by name the gradients (None: the parameter got none), and hashes of buffers."""

    loss: Tensor
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, int]


class Runs:
    """Runs a loss and its backward, each time from the same state, and leaves that state as it was.

    Args:
        model: whose parameters' gradients are wanted; a wrapper of DDP is looked through.
    """

    def __init__(self, model: nn.Module, loss: Callable[[], Tensor]) -> None:
        self._model = model
        self._loss = loss
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        # FSDP2 computes with parameters of its own and reduces their gradients into those of the model.
        # Experts that lie on several ranks are leaves themselves.
        leaves = {} if is_sharded_by_fsdp(model) else spread_experts(model)
        self._through_leaves = any(isinstance(p, DTensor) and p not in leaves for p in self._parameters.values())

    def run(self, kind: RunKind) -> Outcome:
        """Loss and gradients in one of the ways; the model's state and gradients stay as they were.

        Raises:
            AuditError: a tensor that is rounded is further off than its format allows.
            ModelError: code that runs again in backward decides something else than in forward.
        """
        rounding = Rounding()
        switch: AbstractContextManager[None] = nullcontext()
        if kind in ("exact", "nudged"):
            switch = running_originals()
        elif kind != "compressed":
            switch = keeping_values(unrounded if kind == "unrounded" else rounding)
        state = ModelState(self._model)
        try:
            with torch.enable_grad(), _interpreted(), in_an_audit(), switch, self._nudging(kind):
                loss = self._loss()
                gradients = self._backward(loss)
            buffers = {name: int(digest(local_part(x))) for name, x in self._model.named_buffers() if not x.is_meta}
        finally:
            state.restore()
        if rounding.fault is not None:
            raise AuditError(rounding.fault)
        found = {name: None if grad is None else _dense(grad) for name, grad in gradients.items()}
        return Outcome(loss.detach().clone(), found, buffers)

    @contextmanager
    def _nudging(self, kind: RunKind) -> Iterator[None]:
        """Multiply the gradient of each layer's output by numbers near one, in the run that is nudged."""
        noise = torch.Generator().manual_seed(2611)

        def nudge(grad: Tensor) -> Tensor:
            signs = (
                torch.rand(grad.shape, generator=noise, dtype=torch.float32, device="cpu").to(grad.device, grad.dtype)
                * 2
                - 1
            )
            return grad + grad * signs * (_NUDGE * torch.finfo(grad.dtype).eps)

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if type(output) is Tensor and output.requires_grad:
                output.register_hook(nudge)

        with ExitStack() as stack:
            for module in self._model.modules() if kind == "nudged" else ():
                if next(module.children(), None) is None:
                    stack.callback(module.register_forward_hook(hook).remove)
            yield

    def _backward(self, loss: Tensor) -> dict[str, Tensor | None]:
        if not self._through_leaves:
            try:
                found = torch.autograd.grad(loss, list(self._parameters.values()), allow_unused=True)
                parts = [None if gradient is None else local_part(gradient) for gradient in found]
                return dict(zip(self._parameters, parts, strict=True))
            except RuntimeError as error:
                # A reentrant checkpoint, or one hook on the gradients of several parameters.
                if not any(name in str(error) for name in ("use_reentrant", "_will_engine_execute_node")):
                    raise
                self._through_leaves = True
                return self._backward(self._loss())  # the graph of the first is gone
        with self._gradients_aside():
            loss.backward()
            return {name: None if p.grad is None else local_part(p.grad) for name, p in self._parameters.items()}

    @contextmanager
    def _gradients_aside(self) -> Iterator[None]:
        """Let parameters have no gradient and no hook that takes it away, while the block runs."""
        with ExitStack() as stack:
            for parameter in self._parameters.values():
                hooks: Any = getattr(parameter, "_post_accumulate_grad_hooks", None)
                stack.callback(setattr, parameter, "grad", parameter.grad)
                if hooks:
                    stack.callback(hooks.update, dict(hooks))
                    hooks.clear()
                parameter.grad = None
            yield


@contextmanager
def _interpreted() -> Iterator[None]:
    """Run what torch.compile has compiled, or would, as it is written: graphs have bits of their own."""
    if torch.compiler.is_compiling():
        yield
        return
    dynamo = sys.modules.get("torch._dynamo")
    with nullcontext() if dynamo is None else torch.compiler.set_stance("force_eager"):
        yield


def _dense(gradient: Tensor) -> Tensor:
    """The gradient with all its zeros, which those of an embedding may leave out."""
    return gradient if gradient.layout == torch.strided else gradient.to_dense()
