"""Checkpointing that a model does by a function of its own, its regions' inputs packed.

Models of diffusers, and older ones of transformers, hand their blocks to `self._gradient_checkpointing_func`, which the
host sets when checkpointing is switched on: it runs `torch.utils.checkpoint`, whose regions keep their arguments
exactly. The function is called in the model's forward, so what packs the arguments stands around the function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from laconic.activations.backward.derivatives import is_transformed
from laconic.activations.forwards.checkpoint import is_checkpointed_layer, packed_inputs, runs_twice
from laconic.activations.forwards.replacement import Replacement
from laconic.formats import BlockFormat

_FUNCTION = "_gradient_checkpointing_func"


def checkpoints_others(module: nn.Module) -> bool:
    """Whether a module may run parts of itself under a checkpointing function that its host gives it."""
    if isinstance(module, torch.jit.ScriptModule):
        return False
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and _FUNCTION in code.co_names and not is_checkpointed_layer(module)


class _Packing:
    """A host's checkpointing function, with tensors among the arguments kept in `format`."""

    def __init__(self, function: Callable[..., Any], format: BlockFormat) -> None:
        self.function = function
        self.format = format

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if runs_twice() or is_transformed():
            return self.function(*args, **kwargs)
        with packed_inputs((args, kwargs), self.format):
            return self.function(*args, **kwargs)


class CheckpointingForward(Replacement):
    """The forward of a module that checkpoints parts of itself; their inputs are kept packed.

    Args:
        module: whose forward is replaced.
        format: how inputs are packed that require a gradient.
    """

    def __init__(self, module: nn.Module, format: BlockFormat) -> None:
        super().__init__(module)
        self.format = format

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward; the function that its host has set packs what it keeps."""
        function = self.module.__dict__.get(_FUNCTION)  # set anew whenever checkpointing is switched on
        if callable(function) and not isinstance(function, _Packing) and not torch.compiler.is_compiling():
            self.module.__dict__[_FUNCTION] = _Packing(function, self.format)
        return self.original(*args, **kwargs)

    def remove(self) -> None:
        """Restore the module's forward and the host's function."""
        super().remove()
        function = self.module.__dict__.get(_FUNCTION)
        if isinstance(function, _Packing):
            self.module.__dict__[_FUNCTION] = function.function
