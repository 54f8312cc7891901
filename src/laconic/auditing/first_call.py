"""The audit of a model that somebody else trains: at its first training call, with the batch of that call.

A forward pre-hook waits for the call, audits and is gone. The loss of a host is not known there: gradients are those of
the loss that the model returns, or of its outputs times fixed random numbers, which reach the same parameters. The
updates of an AdamW8bit are compared at its first step, with the gradients of that.
"""

from __future__ import annotations

import os
import weakref
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from laconic.activations.audited import AUDITED
from laconic.activations.derivatives import is_transformed
from laconic.activations.report import is_measuring
from laconic.auditing.first_step import AuditReport, audit_call
from laconic.auditing.optimizer_update import check_updates
from laconic.errors import ModelError
from laconic.formats import quantized_gradient
from laconic.formats.shards import is_deepspeeds, sharded_like
from laconic.optim import AdamW8bit
from laconic.output_lines import say

__all__ = ["audit_first_call", "audit_now"]


def audit_first_call(model: nn.Module, *, agrees: bool = True) -> None:
    """Audit `model` when it is first called in training mode with gradients enabled; a second request changes nothing.

    Args:
        model: converted already.
        agrees: whether all ranks of the default group train this model, call it first at the same moment, and decide
            together.

    The call raises AuditError where something differs.
    """
    if not any(isinstance(hook, _FirstCall) for hook in model._forward_pre_hooks.values()):
        model.register_forward_pre_hook(_FirstCall(agrees), with_kwargs=True)


def audit_now(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, agrees: bool) -> AuditReport:
    """Audit a model with the arguments of its call, print the line, and wait for its AdamW8bit's first step.

    Raises:
        AuditError: something differs.
    """
    report = _audited(model, args, kwargs, agrees)
    if os.environ.get("RANK", "0") == "0":
        say(f"laconic {report}")
    if report.num_parameters:
        _FirstUpdate(model)
    return report


def _audited(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], agrees: bool) -> AuditReport:
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) or is_deepspeeds(parameter):
            return AuditReport(
                left_out=("all, as the model is sharded; call laconic.audit(model, batch) before a step",)
            )
    try:
        return audit_call(model, args, kwargs, agrees=agrees)
    except ModelError as error:  # without a loss, say: it is the training that has to say so
        return AuditReport(left_out=(f"all, as {error}",))


class _FirstCall:
    """The hook; a copy of the model has one of its own."""

    def __init__(self, agrees: bool) -> None:
        self._agrees = agrees

    @torch.compiler.disable
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not module.training or not torch.is_grad_enabled() or AUDITED.originals or AUDITED.values is not None:
            return
        if is_transformed() or is_measuring() or torch._C._current_graph_task_id() != -1:
            return
        for key in [key for key, hook in module._forward_pre_hooks.items() if isinstance(hook, _FirstCall)]:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
        audit_now(module, args, kwargs, agrees=self._agrees and dist.is_available() and dist.is_initialized())


class _FirstUpdate:
    """Compares the updates of an AdamW8bit at the first step of any optimizer that has parameters of the model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        _watch_steps()
        _WAITING.append(self)

    def before_step(self, optimizer: Optimizer) -> bool:
        """Compare, if the optimizer has parameters of the model; returns whether there is nothing to wait for."""
        model = self._model()
        if model is None:
            return True
        names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p in names]
        if parameters and isinstance(optimizer, AdamW8bit):
            gradients = {}
            for parameter in parameters:
                coded = quantized_gradient(parameter)
                if coded is not None:
                    gradients[parameter] = sharded_like(coded.dequantize(), parameter)
                elif parameter.grad is not None and parameter.grad.layout == torch.strided:
                    gradients[parameter] = parameter.grad
            check_updates(optimizer, gradients, names)
        return bool(parameters)


_WAITING: list[_FirstUpdate] = []


@cache
def _watch_steps() -> None:
    # A hook cannot be removed while it runs, so it stays.
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if _WAITING:
        _WAITING[:] = [one for one in _WAITING if not one.before_step(optimizer)]
