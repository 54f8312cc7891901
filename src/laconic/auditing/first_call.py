"""The audit of a model that somebody else trains: at its first training call, with the batch of that call.

Forward pre-hooks of the model and its largest parts wait for the call; the first that is called is audited, and all of
them are gone. The loss of a host is not known there: gradients are those of the loss that is returned, or of outputs
times fixed random numbers, which reach the same parameters. At the first step of an optimizer that has parameters of
the model, the updates of an AdamW8bit are compared, with the gradients of that step, and afterwards the weights of the
ranks that train replicas. A model that was not called by then was not audited, and a line says so.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from laconic.activations.backward.derivatives import is_transformed
from laconic.activations.host.audited import AUDITED
from laconic.activations.recognize.largest_parts import largest_parts
from laconic.activations.whole_model.report import is_measuring
from laconic.auditing.first_step import AuditReport, audit_call
from laconic.auditing.optimizer_update import check_updates
from laconic.auditing.replicated import compare_replicas, is_sharded_by_fsdp, spread_experts
from laconic.errors import AuditError, LaconicError, ModelError
from laconic.formats import quantized_gradient
from laconic.formats.shards import is_deepspeeds, sharded_like
from laconic.gradients import CompressedGradients
from laconic.gradients.turns import owner_of
from laconic.optim import AdamW8bit
from laconic.optim.in_backward import UsedGradient
from laconic.output_lines import say


def audit_first_call(model: nn.Module, *, agrees: bool = True) -> None:
    """Audit `model`, or a part with most of its parameters: whichever is first called in training, with gradients.

    A second request changes nothing.

    Args:
        model: converted already.
        agrees: whether all ranks of the default group train this model, call it first at the same moment, and decide
            together.

    The call raises AuditError where something differs, and so does the first step of its optimizer.
    """
    if any(isinstance(hook, _FirstCall) for hook in model._forward_pre_hooks.values()):
        return
    hook = _FirstCall([*largest_parts(model)], agrees)
    for part in hook.parts:
        part.register_forward_pre_hook(hook, with_kwargs=True)
    _first_step_of(model)


def audit_now(
    called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, agrees: bool, model: nn.Module | None = None
) -> AuditReport:
    """Audit a module with the arguments of its call, print the line, and wait for its optimizer's first step.

    Args:
        agrees: as in `audit_first_call`.
        model: that `called` is a part of; None if it is one itself.

    Raises:
        AuditError: something differs.
    """
    model = called if model is None else model
    first_step = _first_step_of(model)
    first_step.replicas = _replicas(model) if agrees else None
    first_step.was_called = True
    report = _audited(called, args, kwargs, agrees)
    has_more = len({*model.parameters()}) > len({*called.parameters()})
    if has_more and report.num_parameters:
        name = next(name for name, module in model.named_modules() if module is called)
        report = replace(report, left_out=(*report.left_out, f"what is not in {name}, which is called by itself"))
    _say(report)
    return report


def say_left_out(reason: str) -> None:
    """Print the line of an audit that compares nothing."""
    _say(AuditReport(left_out=(reason,)))


def _say(report: AuditReport) -> None:
    if os.environ.get("RANK", "0") == "0":
        say(f"laconic {report}")


def _replicas(model: nn.Module) -> dist.ProcessGroup | None:
    """The group whose ranks have the same weights after each step, but for experts that are spread; None: not known."""
    spread = spread_experts(model)
    for store in map(owner_of, model.parameters()):
        if isinstance(store, CompressedGradients):
            return None if spread else store.group
    around = DistributedDataParallel._get_active_ddp_module()
    if around is None or not any(m is model for m in around.module.modules()):
        return None
    spread_names = {name for name, parameter in around.module.named_parameters() if parameter in spread}
    if {*around.parameters_to_ignore} != spread_names or None in spread.values():
        return None
    hooks = [hook for hook, _ in getattr(around, "_comm_hooks", ())]  # one of another may leave ranks apart for a while
    known = all(getattr(hook, "__module__", "").startswith("laconic") for hook in hooks)
    return around.process_group if known else None


def _audited(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], agrees: bool) -> AuditReport:
    # Ranks with other experts meet in each run, so they have to decide together.
    experts = {} if not agrees or is_sharded_by_fsdp(model) else spread_experts(model)
    for parameter in model.parameters():
        if (isinstance(parameter, DTensor) and parameter not in experts) or is_deepspeeds(parameter):
            return AuditReport(
                left_out=("all, as the model is sharded; call laconic.audit(model, batch) before a step",)
            )
    try:
        return audit_call(model, args, kwargs, agrees=agrees)
    except ModelError as error:  # without a loss, say: it is the training that has to say so
        return AuditReport(left_out=(f"all, as {error}",))


class _FirstCall:
    """The hook of a model and its parts; a copy of the model has one of its own."""

    def __init__(self, parts: list[nn.Module], agrees: bool) -> None:
        self.parts, self._agrees = parts, agrees

    @torch.compiler.disable
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not module.training or not torch.is_grad_enabled() or AUDITED.is_running:
            return
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return  # frozen for a while, as one network of a GAN
        if is_transformed() or is_measuring() or torch._C._current_graph_task_id() != -1:
            return
        for part in self.parts:
            for key in [key for key, hook in part._forward_pre_hooks.items() if hook is self]:
                del part._forward_pre_hooks[key]
                part._forward_pre_hooks_with_kwargs.pop(key, None)
        agrees = self._agrees and dist.is_available() and dist.is_initialized()
        audit_now(module, args, kwargs, agrees=agrees, model=self.parts[0])


class _FirstStep:
    """What is due at the first step of any optimizer that has parameters of a model.

    Attributes:
        model: weakly held.
        was_called: whether the model, or a part of it, was called; else it was not audited.
        replicas: the group whose ranks have to have the same weights afterwards; None if nobody has.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = weakref.ref(model)
        self.was_called = False
        self.replicas: dist.ProcessGroup | None = None

    def before(self, optimizer: Optimizer) -> bool:
        """Compare updates, if the optimizer has parameters of the model; returns whether this is the step."""
        model = self.model()
        if model is None:
            return True
        names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p in names]
        if not parameters:
            return False
        if not self.was_called:
            unseen = "all, as no training call of the model was seen before its optimizer's first step"
            say_left_out(f"{unseen}; call laconic.audit(model, batch) before it")
        elif isinstance(optimizer, AdamW8bit):
            used = [parameter for parameter in parameters if isinstance(parameter.grad, UsedGradient)]
            if used:
                say_left_out(
                    f"updates of {len(used)} parameters, as update_in_backward() made them before step(); call "
                    "laconic.audit(model, batch, optimizer=optimizer) before the first backward"
                )
            parameters = [parameter for parameter in parameters if parameter not in set(used)]
            gradients = {}
            for parameter in parameters:
                coded = quantized_gradient(parameter)
                if coded is not None:
                    gradients[parameter] = sharded_like(coded.dequantize(), parameter)
                elif parameter.grad is not None and parameter.grad.layout == torch.strided:
                    gradients[parameter] = parameter.grad
            check_updates(optimizer, gradients, names)
        return True

    def after(self) -> None:
        """Compare the weights of all ranks."""
        model = self.model()
        if model is None or self.replicas is None or self.replicas.size() == 1:
            return
        try:
            compare_replicas(model, self.replicas)
        except LaconicError as error:
            raise AuditError(
                f"after the first step {error}; likely causes: a bucket that was not reduced, gradients clipped or "
                "scaled on one rank before they were, hyperparameters of the optimizer that ranks do not share"
            ) from error


_WAITING: list[_FirstStep] = []
_STEPPING: list[_FirstStep] = []


def _first_step_of(model: nn.Module) -> _FirstStep:
    """The one that waits for a model's first step, made if there is none."""
    for one in _WAITING:
        if one.model() is model:
            return one
    _watch_steps()
    _WAITING.append(_FirstStep(model))
    return _WAITING[-1]


@cache
def _watch_steps() -> None:
    # A hook cannot be removed while it runs, so they stay.
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if _WAITING:
        _STEPPING[:] = [one for one in _WAITING if one.before(optimizer)]
        _WAITING[:] = [one for one in _WAITING if one not in _STEPPING]


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    while _STEPPING:
        _STEPPING.pop().after()
