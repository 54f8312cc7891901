"""Auxiliary losses: balance the load of experts and keep router logits small."""

from __future__ import annotations

import sys
from types import FrameType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from laconic.collectives.runtime import torch_compat
from laconic.errors import RoutingError


def load_balance_loss(probabilities: Tensor, counts: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return E * sum over experts of (share of the assignments) * (mean probability); 0 without tokens.

    1 if all is even, E if all go to one expert. Switch Transformers (Fedus et al., 2022), equation 4, with shares over
    all top-k assignments. (Hugging Face's `load_balancing_loss_func` is this times top-k.) The gradient goes through
    the mean of probabilities [n, E], whose rows sum to 1; counts are int64 [E].

    With a `group` shares are those of all its ranks' tokens (the global-batch loss of Qiu et al., 2025, section 3): a
    rank's own batch may then be uneven. The probabilities' mean stays this rank's; averaged over ranks, as data
    parallelism averages gradients, it is that of all.
    """
    if group is not None:
        counts = summed_counts(counts, group)
    shares = counts.to(probabilities.dtype) / counts.sum().clamp_min(1)
    mean = probabilities.sum(0) / max(probabilities.shape[0], 1)
    return probabilities.shape[1] * torch.dot(shares, mean)


def sequence_balance_loss(probabilities: Tensor, experts: Tensor, length: int) -> Tensor:
    """Return the mean over sequences of each one's own `load_balance_loss`; DeepSeek-V3 (2024), equations 17 to 20.

    Probabilities are [n, E], `experts`, int64 [n, k], each token's choice. Tokens of a sequence, `length` of them, are
    neighbors; a number of tokens that is no multiple is a RoutingError.
    """
    num_tokens, num_experts = probabilities.shape
    if length < 1 or num_tokens % length:
        raise RoutingError(
            f"sequence_length = {length} must be positive and divide the {num_tokens} tokens that came; set the gate's "
            "sequence_length to that of the batch"
        )
    chosen = experts.view(-1, length * experts.shape[1])
    shares = probabilities.new_zeros(len(chosen), num_experts)
    shares = shares.scatter_add(1, chosen, torch.ones_like(chosen, dtype=shares.dtype)) / chosen.shape[1]
    means = probabilities.view(-1, length, num_experts).mean(1)
    return num_experts * (shares * means).sum() / max(len(chosen), 1)


def z_loss(logits: Tensor) -> Tensor:
    """Return the mean over tokens of logsumexp(logits)^2, a scalar; logits [n, E]. 0 without tokens.

    ST-MoE (Zoph et al., 2022), equation 5.
    """
    return logits.logsumexp(-1).square().sum() / max(logits.shape[0], 1)


def summed_counts(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum int64 counts over the ranks of `group`; every rank calls it."""
    total = counts.clone()
    torch_compat.all_reduce(total, group).wait()
    return total


class FirstRuns:
    """Tells the forwards of a layer in training from those that a checkpoint runs again in backward."""

    def __init__(self) -> None:
        self._without_graph = 0

    def is_first(self) -> bool:
        """Return whether a forward's tokens are to be counted; called once in each forward in training.

        One without gradients in a Function of autograd is that of a reentrant checkpoint, which runs it again with
        gradients in backward: that run counts. Others run in backward for a forward that has counted.
        """
        if torch.compiler.is_compiling():
            return torch.is_grad_enabled()
        if torch._C._current_graph_task_id() == -1:
            self._without_graph += not torch.is_grad_enabled() and _is_in_function()
            return torch.is_grad_enabled()
        counts = self._without_graph > 0
        self._without_graph -= counts
        return counts

    def forget(self) -> None:
        """Forget forwards without gradients that nothing has run again."""
        self._without_graph = 0


def runs_without_graph_first() -> bool:
    """Return whether this is a reentrant checkpoint's forward, which it will run again with gradients in backward."""
    return not torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1 and _is_in_function()


_APPLY = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)
"""What calls the forwards of Functions; no code of Python since torch 2.15."""


def _is_in_function() -> bool:
    """Whether this runs in the forward of a Function of autograd; since torch 2.15, of one that is given a context."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code is _APPLY:
            return True
        # Not the locals of modules: Python before 3.13 holds what it has shown of them until their frame ends.
        may_have_context = code.co_name == "forward" and code.co_argcount > 0 and code.co_varnames[0] != "self"
        if may_have_context and isinstance(frame.f_locals.get(code.co_varnames[0]), FunctionCtx):
            return True
        frame = frame.f_back
    return False


def load_step(load: Tensor, rate: float, dtype: torch.dtype) -> Tensor:
    """Return rate * sign(mean load - load) [E] of int64 [E]: a step of biases towards an even load.

    A dtype of 16 bits, in which biases lose such steps as they grow, is a RoutingError.
    """
    if torch.finfo(dtype).bits < 32:
        raise RoutingError(
            f"the biases of a router are {dtype}, but they must be float32, as steps of {rate} are lost otherwise; give"
            " the module a float32 copy after the model was converted"
        )
    # Integers: sign(total - E * load) is that of mean - load, without a rounded mean.
    return rate * (load.sum() - len(load) * load).sign().to(dtype)
