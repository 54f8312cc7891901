"""Which derivatives a compressed model has.

Derivatives of any order by backward: where a graph of the gradients is asked for (`create_graph=True`), backward
rebuilds its inputs as always and differentiates torch's own formula at them. Of DTensors there are first derivatives
only, and a second one is refused. Backward of packed tensors cannot be transformed by torch.func, and there is no
forward-mode formula: under such transforms the original code runs, exactly and without saving anything. So it does
under a function mode of others, which may compute something else in the place of torch's functions, and where hooks on
saved tensors are forbidden, without which no value is computed that keeps nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.autograd import forward_ad

from laconic.activations.host.audited import AUDITED
from laconic.activations.host.patched import mode_of_others
from laconic.activations.keep.kept import Memo, Tensors
from laconic.errors import ModelError
from laconic.ops.derivatives import connected, differentiable, refusal


def is_transformed(*, needs_hooks: bool = True) -> bool:
    """Whether torch.func, forward-mode AD or a function mode of others changes the running code; warns once of each.

    Also where hooks on saved tensors are forbidden, in the exact run of an audit and under torch.jit.trace: these run
    the original forwards likewise.

    Args:
        needs_hooks: whether the code that asks has no use where hooks on saved tensors are forbidden.
    """
    if torch.compiler.is_compiling():
        return False
    if AUDITED.originals or torch._C._is_tracing():
        return True
    # torch has no public name for either; both are numbers of levels.
    if forward_ad._current_level >= 0 or innermost_transform() is not None:
        _warn_it_is_exact("torch.func transforms and forward-mode AD")
        return True
    if needs_hooks and not may_hook():
        _warn_it_is_exact("blocks of torch.autograd.graph.disable_saved_tensors_hooks")
        return True
    mode = mode_of_others()
    if mode is not None:
        _warn_it_is_exact(f"function modes of others, here {type(mode).__name__},")
    return mode is not None


innermost_transform: Callable[[], object] = torch._C._functorch.peek_interpreter_stack
may_hook: Callable[[], bool] = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]


@cache
def _warn_it_is_exact(what: str) -> None:
    logging.getLogger("laconic").warning(
        "%s run the original forwards of compressed models: derivatives are exact, and nothing is saved", what
    )


def take(memo: Memo, tensors: Tensors, edge: Tensor | None, after: Tensor | None = None) -> Tensor:
    """What `memo.take` gives; where a graph of the gradients is asked for, in the place of the tensor it stands for.

    Args:
        memo, tensors, after: see `Memo.take`.
        edge: `edge_of` the tensor.
    """
    if not torch.is_grad_enabled():
        return memo.take(tensors, after)
    with torch.no_grad():
        value = memo.take(tensors)
    return connected(value, edge)


_REASON = (
    "a second derivative (create_graph=True) reaches a {} that laconic keeps packed, of which there is only the first; "
    "call laconic.decompress_activations(model) for such steps, compress with mode='hooks', or {}"
)

derivative = differentiable(ModelError, _REASON.format("DTensor", "take it before the model is parallelized"))
"""Decorates each backward of this package: see `laconic.ops.derivatives.differentiable`."""

refuse_more = refusal(ModelError, _REASON.format("vocabulary-parallel loss", "compute the loss from the logits"))
