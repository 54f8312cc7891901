"""What torch itself does otherwise for laconic's groups, from the first of them on: DDP's Reducer, `monitored_barrier`.

What C++ of DDP keeps of a group, its Reducer, outlives Python objects, and ends while Python waits for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from functools import cache, wraps
from typing import Any
from weakref import finalize

import torch.distributed as dist
from torch._C import _distributed_c10d

from laconic.collectives.runtime.torch_compat import untraced

_c10d: Any = _distributed_c10d  # whose stubs lack some of it
_Base: Any = dist.ProcessGroup


def prepare_reducers(kind: type[Any]) -> None:
    """Let reducers that DDP makes for groups of class `kind` be destroyed at any time, and their works; idempotent."""
    reducer = _c10d.Reducer
    if not hasattr(reducer.__init__, "__wrapped__"):
        reducer.__init__ = _without_threads(reducer.__init__, kind)
        reducer._set_forward_pass_work_handle = _keeping_works(reducer._set_forward_pass_work_handle)


def _without_threads(make: Callable[..., None], kind: type[Any]) -> Callable[..., None]:
    """The constructor, with a group that owns no threads in place of one of class `kind`.

    A program that destroys its groups before its models leaves the reducer as the last owner of the group. Python holds
    its lock while it frees a reducer, and so while the group would wait for gloo's threads; one that is about to free
    the tensors of its last work waits for that lock: neither would ever end.
    """

    @functools.wraps(make)
    def init(reducer: Any, *arguments: Any, **options: Any) -> None:
        groups = {id(x): _GroupOfReducer(x) for x in (*arguments, *options.values()) if isinstance(x, kind)}
        make(
            reducer,
            *[groups.get(id(x), x) for x in arguments],
            **{name: groups.get(id(x), x) for name, x in options.items()},
        )
        # C++ finds the methods of a group as long as its Python object lives.
        finalize(reducer, groups.clear).atexit = False

    return init


def _keeping_works(setter: Callable[..., None]) -> Callable[..., None]:
    """The setter of the work with which `join` finds out how many ranks are left.

    C++ alone holds it then. Of a work whose Python object has gone it sees torch's base class, which is never done.
    """

    @functools.wraps(setter)
    def keep(reducer: Any, work: dist.Work, use_static_world_size: bool) -> None:
        if type(work) is not dist.Work:
            work = _c10d._create_work_from_future(work.get_future())
        setter(reducer, work, use_static_world_size)

    return keep


@untraced
class _GroupOfReducer(_Base):
    """A group whose calls are those of another one, which only Python owns."""

    def __init__(self, group: Any) -> None:
        super().__init__(group.rank(), group.size())
        self._group = group

    def getBackendName(self) -> str:
        """Name under which the other group was made."""
        name: str = self._group.getBackendName()
        return name

    def allreduce(self, *arguments: Any) -> dist.Work:
        """Sum over ranks: buckets, and which parameters were used."""
        work: dist.Work = self._group.allreduce(*arguments)
        return work

    def broadcast(self, *arguments: Any) -> dist.Work:
        """Replace by the root's: the order in which buckets are made anew."""
        work: dist.Work = self._group.broadcast(*arguments)
        return work

    def allgather(self, *arguments: Any) -> dist.Work:
        """Gather from all ranks."""
        work: dist.Work = self._group.allgather(*arguments)
        return work


@cache  # a second call changes nothing
def take_groups_of(kind: type[Any]) -> None:
    """Let `torch.distributed.monitored_barrier` ask the groups of a class.

    torch's function refuses every group whose backend is not called gloo, before it asks the group. So a function in
    front of it asks these groups and hands all others on; a program that makes no such group keeps torch's own.
    """
    original = dist.monitored_barrier

    @wraps(original)
    def monitored_barrier(
        group: Any = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        found: Any = dist.group.WORLD if group is None else group
        if isinstance(found, kind):
            found.monitored_barrier(timeout, wait_all_ranks)
        else:
            original(group, timeout, wait_all_ranks)

    dist.monitored_barrier = dist.distributed_c10d.monitored_barrier = monitored_barrier
