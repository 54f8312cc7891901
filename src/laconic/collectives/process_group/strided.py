"""Dense copies of strided tensors in calls of a process group: transposed, sliced, expanded, conjugated, negated ones.

Backends read and write memory: gloo silently treats it as dense, NCCL and the codecs refuse such tensors. So calls of a
process group are given dense copies of them, and results are copied back.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collectives.policy.raw_calls import is_plain
from laconic.collectives.process_group.work_handles import after
from laconic.errors import FormatError

_Method = Callable[..., dist.Work]


def on_dense(
    *, reads: tuple[str, ...] = (), writes: tuple[str, ...] = (), updates: tuple[str, ...] = ()
) -> Callable[[_Method], _Method]:
    """Decorate a method whose arguments of these names are tensors or nested lists of them: it sees plain ones.

    A tensor to be written whose elements share memory is a FormatError.
    """

    def decorate(method: _Method) -> _Method:
        names = list(inspect.signature(method).parameters)
        roles = [
            (names.index(name), name, name not in writes, name not in reads) for name in (*reads, *writes, *updates)
        ]

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> dist.Work:
            for position, name, _, _ in roles:
                if not _all_plain(args[position] if position < len(args) else kwargs.get(name)):
                    break
            else:
                return method(*args, **kwargs)
            given, copies = list(args), _Copies()
            for position, name, is_read, is_written in roles:
                if position < len(args):
                    given[position] = copies.of(name, args[position], is_read, is_written)
                elif name in kwargs:
                    kwargs[name] = copies.of(name, kwargs[name], is_read, is_written)
            return copies.written_after(method(*given, **kwargs))

        return call

    return decorate


def _all_plain(x: Any) -> bool:
    if isinstance(x, Tensor):
        return is_plain(x)
    return all(map(_all_plain, x)) if isinstance(x, list | tuple) else True


class _Copies:
    """Plain copies of tensors, and the tensors to copy back to."""

    def __init__(self) -> None:
        self._back: list[tuple[Tensor, Tensor]] = []
        self._written: list[Tensor] = []

    def of(self, name: str, x: Any, is_read: bool, is_written: bool) -> Any:
        """`x`, with copies in place of tensors that are not plain; FormatError where what is written shares memory."""
        if isinstance(x, list | tuple):
            return [self.of(name, each, is_read, is_written) for each in x]
        if not isinstance(x, Tensor):
            return x
        x = x.detach()
        if is_written:
            self._written.append(x)
        if is_plain(x):
            return x
        if is_written and _overlaps(x):
            raise FormatError(
                f"{name} has shape {tuple(x.shape)} and strides {x.stride()}, so some of its elements share memory, but"
                " a result must have a place for each; pass a contiguous tensor"
            )
        found = x.new_empty(x.shape)
        if is_read:
            found.copy_(x)
        if is_written:
            self._back.append((x, found))
        return found

    def written_after(self, work: dist.Work) -> dist.Work:
        """A work that is done when the results of `work` have been copied back."""
        back = self._back

        def write() -> None:
            for x, found in back:
                x.copy_(found)

        return after(work, write, self._written)


def _overlaps(x: Tensor) -> bool:
    """Whether two elements share memory."""
    if x.numel() < 2:
        return False
    reach = 0
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1):
        if stride <= reach:
            break
        reach += stride * (size - 1)
    else:
        return False
    offsets = torch.zeros((), dtype=torch.int64, device="cpu")
    for stride, size in zip(x.stride(), x.shape, strict=True):
        offsets = offsets.unsqueeze(-1) + stride * torch.arange(size, device="cpu")
    return len(set(offsets.flatten().tolist())) < x.numel()
