"""What a host says of compressed activations: bytes of the model as it trains.

At conversion there is no batch yet, and what the host is going to do is not known: autocast, its batches, the heads'
labels. So the first figure, on tokens that are made up, is replaced at the first training call by one of that call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from laconic.activations.forwards.checkpoint import runs_twice
from laconic.activations.host.audited import AUDITED
from laconic.activations.host.cuda_graph import is_captured
from laconic.activations.recognize.largest_parts import largest_parts
from laconic.activations.whole_model.report import Measurement, Report, TrainingCall
from laconic.activations.whole_model.suspended import fitting, measure_both
from laconic.errors import ModelError


def measure_first_call(model: nn.Module, then: Callable[[Measurement, Measurement], object]) -> None:
    """Measure the first training call of a converted model, exact and compressed; a slice of it where memory is short.

    Where a host calls a part of the model that has most of its parameters instead (a language model's decoder), it is a
    call of that. What cannot be called once more stays unmeasured: models that are sharded or compiled.
    """
    _FirstCall(model, then)


class _FirstCall:
    """A forward pre-hook of a model and its largest parts, until the first training call."""

    _is_measuring = False

    def __init__(self, model: nn.Module, then: Callable[[Measurement, Measurement], object]) -> None:
        self._model, self._then = model, then
        self._handles = [part.register_forward_pre_hook(self, with_kwargs=True) for part in largest_parts(model)]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
            return
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return  # frozen for a while, as one network of a GAN
        if runs_twice() or is_captured(next((p.device for p in module.parameters()), torch.device("cpu"))):
            return
        if _FirstCall._is_measuring or AUDITED.is_running:  # this is a call that another one makes
            return
        for handle in self._handles:
            handle.remove()
        _FirstCall._is_measuring = True
        try:
            call = fitting(self._model, TrainingCall(module, args, kwargs, is_hosts=True))
            before, after, _ = measure_both(self._model, call)
        except ModelError:  # which the host's own call is about to raise
            return
        finally:
            _FirstCall._is_measuring = False
        if before is not None and after is not None:
            self._then(before, after)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (_nothing,)  # in a copy of the model, which is not what trains


def _nothing(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    pass


def logged(report: Report | None) -> dict[str, float]:
    """What a host logs of a conversion: how much less a forward keeps for backward, and bytes per token.

    Models of images and sounds have no tokens.
    """
    if report is None or report.before is None or report.after is None:
        return {}
    found = {"laconic/activation_factor": report.before.nbytes / max(1, report.after.nbytes)}
    if report.after.is_of_tokens:
        found["laconic/activation_nbytes_per_token"] = report.after.nbytes / report.after.tokens
    return found
