"""Supports first derivatives by backward, and no others.

Backward of packed tensors is written by hand, so it can be neither differentiated again nor transformed by torch.func,
and there is no forward-mode formula. Under such transforms the original code runs, exactly and without saving anything;
a second derivative, which is noticed too late for that, is refused.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch.autograd import forward_ad

from laconic.activations.audited import AUDITED
from laconic.errors import ModelError
from laconic.ops.derivatives import first_derivatives

__all__ = ["first_derivative", "is_transformed"]


def is_transformed() -> bool:
    """Whether torch.func transforms or forward-mode AD differentiate the running code; warns at the first time.

    Also in the exact run of an audit, which runs the original forwards likewise.
    """
    if torch.compiler.is_compiling():
        return False
    if AUDITED.originals:
        return True
    # torch has no public name for either; both are numbers of levels.
    if forward_ad._current_level < 0 and torch._C._functorch.peek_interpreter_stack() is None:
        return False
    _warn_it_is_exact()
    return True


@cache
def _warn_it_is_exact() -> None:
    logging.getLogger("laconic").warning(
        "torch.func transforms and forward-mode AD run the original forwards of compressed models: derivatives are "
        "exact, and nothing is saved"
    )


first_derivative = first_derivatives(
    ModelError,
    "a second derivative (create_graph=True) reaches what laconic keeps packed, but only first derivatives can be had "
    "from that; call laconic.decompress_activations(model) for such steps, compress with mode='hooks', or compute the "
    "loss by torch.nn.functional.cross_entropy",
)
