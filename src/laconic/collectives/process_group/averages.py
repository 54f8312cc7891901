"""Averages of integers: the sum over ranks, divided by their number and cut off, as NCCL makes them.

gloo sums and then raises, with the sum in the caller's tensor. Programs that ask for a backend's name know that of
gloo, and divide themselves there; those that find another name expect what NCCL does.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from laconic.collectives.process_group.work_handles import AfterWork, after

_Method = Callable[..., dist.Work]

_OPTIONS = ("timeout", "asyncOp", "rootRank", "rootTensor")  # and the reduction, which is a sum where none is set


def is_integer(x: Tensor) -> bool:
    """Whether the values of a tensor are integers; booleans are none."""
    return not (x.is_floating_point() or x.is_complex() or x.dtype is torch.bool)


def averages_of_integers(method: _Method) -> _Method:
    """Decorate a reduction that writes its first argument, tensors or lists of them: it sees sums for such averages."""
    position = list(inspect.signature(method).parameters).index("opts")

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> dist.Work:
        opts = args[position] if position < len(args) else kwargs.get("opts")
        if getattr(opts, "reduceOp", None) != dist.ReduceOp.AVG or len(args) < 2:
            return method(*args, **kwargs)
        group, results = args[0], tree_leaves(args[1])
        if not any(is_integer(x) and not (x.is_cuda and group._has_cuda) for x in results):
            return method(*args, **kwargs)
        sums, has_result = _summing(opts), getattr(opts, "rootRank", group.rank()) == group.rank()

        def divide() -> None:
            for x in results if has_result else ():
                x.div_(group.size(), rounding_mode="trunc" if is_integer(x) else None)

        if position < len(args):
            args = (*args[:position], sums, *args[position + 1 :])
        else:
            kwargs["opts"] = sums
        work = after(method(*args, **kwargs), divide, results)
        return work.kept_in(group._unfinished) if isinstance(work, AfterWork) else work

    return call


def _summing(opts: Any) -> Any:
    found = type(opts)()
    for name in _OPTIONS:
        if hasattr(opts, name):
            setattr(found, name, getattr(opts, name))
    return found
