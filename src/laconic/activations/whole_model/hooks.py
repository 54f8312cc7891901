"""Generic mode: packs whatever autograd saves, in any module, through saved-tensor hooks.

It needs no knowledge of the model. What it knows is functions of torch: which of their saved tensors may be rounded,
and which outputs can be computed again (`laconic.activations.keep.function_rules`).

Where the exact gradient is finite the gradient of packed tensors has to be finite too. So only tensors saved by
functions whose backward tolerates rounding are packed (see `keep.tolerant`); those of all others stay
exact: divisions, logarithms, roots, attention, softmax, cross entropy, user-defined functions. Also exact: parameters
and buffers, tensors that no format packs (integers, booleans, fp64) or that packing would not make smaller, small
tensors, and tensors whose packed values would not be finite, which a test of the scales finds.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from laconic.activations.backward.derivatives import is_transformed
from laconic.activations.forwards.checkpoint import runs_twice
from laconic.activations.forwards.replacement import ModelReplacement, Replacement
from laconic.activations.host.traceable import is_traced_by_make_fx
from laconic.activations.keep.packer import Packer, exactly
from laconic.errors import ModelError
from laconic.formats import BlockFormat


class _Running(threading.local):
    """The forward in hooks mode that runs in this thread."""

    forward: HooksForward | None = None


_RUNNING = _Running()


class HooksForward(ModelReplacement):
    """Replaces the forward of a whole model: the original one, with its saved tensors packed.

    Args:
        module: whose forward is replaced.
        format: how saved tensors are packed.
    """

    def __init__(self, module: nn.Module, format: BlockFormat) -> None:
        super().__init__(module)
        self.format = format

    # Under torch.compile, hooks of this kind would all unpack when backward starts and save nothing.
    @torch.compiler.disable(
        reason="laconic: saved-tensor hooks run eagerly; compile the model with mode='sites' instead"
    )
    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The original forward under the pack and unpack hooks."""
        is_exact = not torch.is_grad_enabled() or runs_twice() or is_transformed() or is_traced_by_make_fx()
        if is_exact or _RUNNING.forward is self:
            return self.original(*args, **kwargs)
        if _RUNNING.forward is not None:
            raise ModelError(
                f"{type(self.module).__name__} is compressed with mode='hooks' inside of "
                f"{type(_RUNNING.forward.module).__name__}, which is so too, but a tensor can be packed only once; "
                f"call laconic.decompress_activations on one of the two"
            )
        packer = Packer(self.format, checked=True)
        with ExitStack() as stack:
            # Looked at module by module: FSDP2 gathers parameters just before the forward that uses them.
            stack.callback(register_module_forward_pre_hook(packer.leave_out).remove)
            stack.enter_context(packer.active(self.module))
            stack.callback(setattr, _RUNNING, "forward", None)
            _RUNNING.forward = self
            return self.original(*args, **kwargs)


class ExactForward(Replacement):
    """The forward of a site that a policy leaves exact, inside of a model whose other saved tensors are packed."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The original forward, during which nothing is packed."""
        if torch.compiler.is_compiling():
            return self.original(*args, **kwargs)
        with exactly():
            return self.original(*args, **kwargs)
