"""Checks and resolution of the arguments of collectives: groups, ranks, tensors, split sizes, reduction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collectives.codec import Blockwise, Codec, check_codec
from laconic.collectives.engine.call import REDUCIBLE
from laconic.collectives.engine.layouts import TwoLevel
from laconic.collectives.runtime.background import Groups
from laconic.collectives.runtime.group_facts import check_member, registered_ranks
from laconic.errors import ConfigError, FormatError

Op = Literal["sum", "avg"]

Group = dist.ProcessGroup | TwoLevel | None

_INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)


def find_groups(group: Group) -> tuple[int, Groups]:
    """Resolve `group` to the number of ranks and the process groups; ConfigError if this process is in none."""
    check_member(group)
    if isinstance(group, TwoLevel):
        return group.node.size() * group.cluster.size(), (_carrier(group.node), _carrier(group.cluster))
    if group is None and not dist.is_initialized():
        raise ConfigError("group is None and no process group exists; call torch.distributed.init_process_group first")
    found = dist.group.WORLD if group is None else group
    assert found is not None
    return found.size(), (_carrier(found),)


def _carrier(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group that carries bytes: the backend group of a laconic one, whose rates and executor it shares then."""
    found = getattr(group, "_backend_group", None)
    if not isinstance(found, dist.ProcessGroup):
        return group
    p2p: Any = getattr(group, "_p2p", None)
    p2p.start()  # what was put off
    return found


def flat_group(function: str, group: Group) -> dist.ProcessGroup | None:
    """Return `group`, unless it is a TwoLevel, which `function` does not take."""
    if isinstance(group, TwoLevel):
        raise ConfigError(f"group is a TwoLevel, which {function} does not take; pass a process group")
    return group


def find_group_rank(group: dist.ProcessGroup, rank: int, name: str) -> int:
    """Translate the global rank, argument `name` of the call, to that within the group; ConfigError if it has none."""
    ranks = registered_ranks(group)
    if rank not in ranks:
        raise ConfigError(f"{name} is {rank}, but the group has the global ranks {[*ranks]}; pass one of them")
    return ranks.index(rank)


def check_group_rank(name: str, rank: int, size: int) -> None:
    """Check that `rank` is a rank within a group of `size`; torch checks it in other groups than the default one."""
    if not 0 <= rank < size:
        raise ConfigError(f"{name} is {rank}, but the group has {size} ranks, 0 to {size - 1}; pass one of them")


def check_tensors(codec: Codec | str, /, **tensors: Tensor) -> None:
    """Check that tensors, given by argument name, are contiguous and dense and share one dtype and one device.

    And that the codec is one that takes them: a rank that only receives would wait for one that refuses to encode.
    """
    check_codec(codec)
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise FormatError(
                f"{name} is a {type(x).__name__}, but it must be one tensor; cut it into the parts of the ranks where a"
                " call of torch.distributed has a list"
            )
        if x.layout != torch.strided or not x.is_contiguous():
            remedy = "contiguous()" if x.layout == torch.strided else "to_dense(), or make embeddings with sparse=False"
            raise FormatError(f"{name} is not contiguous and dense, but it must be; pass {name}.{remedy}")
        if x.is_conj() or x.is_neg():
            raise FormatError(
                f"{name} is a conjugated or negated view, whose memory holds other numbers, but it must hold its own;"
                f" pass {name}.resolve_conj().resolve_neg()"
            )
    first, *others = tensors.values()
    if any(x.dtype != first.dtype or x.device != first.device for x in others):
        found = ", ".join(f"{name} {x.dtype} on {x.device}" for name, x in tensors.items())
        raise FormatError(f"the tensors are {found}, but they must have one dtype and one device; convert one of them")
    if isinstance(codec, Blockwise):
        codec.check_dtype(first.dtype)


def check_numel(name: str, x: Tensor, numel: int, rule: str) -> None:
    """Check the number of elements of the argument `name`; `rule` explains the expected number in the error."""
    if x.numel() != numel:
        raise FormatError(f"{name} has {x.numel()} elements, but it must have {numel}, {rule}")


def check_end(name: str, x: Tensor | None, is_end: bool, end: str) -> None:
    """Check that argument `name` is a tensor on the root rank (`is_end`), the call's `end`, and None on all others."""
    if (x is not None) != is_end:
        raise FormatError(
            f"{name} is {'None' if x is None else 'a tensor'}, but it must be a tensor on the rank {end} and None on"
            " the others"
        )


def find_splits(name: str, splits: Sequence[int] | None, x: Tensor, world: int) -> list[int]:
    """Rows of `x` for each of `world` ranks: the given split sizes, or equal parts; FormatError if they do not fit."""
    num_rows = x.shape[0] if x.dim() else 1
    if splits is None:
        if num_rows % world:
            raise FormatError(f"{name} is None, but {num_rows} rows are no multiple of {world} ranks; pass the sizes")
        return [num_rows // world] * world
    if len(splits) != world or sum(splits) != num_rows or min(splits) < 0:
        raise FormatError(
            f"{name} is {list(splits)}, but it must be {world} numbers of rows that add up to {num_rows}; count again"
        )
    return list(splits)


def numels_of(splits: Sequence[int], x: Tensor) -> list[int]:
    """Convert split sizes from rows of `x` to elements."""
    row_numel = x.shape[1:].numel() if x.dim() else 0
    return [rows * row_numel for rows in splits]


def find_factor(op: str, x: Tensor, world: int) -> float:
    """Factor of the fp32 sum over `world` ranks: 1 for "sum", 1 / world for "avg"; others are a FormatError."""
    if op not in ("sum", "avg"):
        raise FormatError(
            f"op is {op!r}, but it must be 'sum' or 'avg': other results need no sum that could be shortened; use"
            " torch.distributed for them"
        )
    if x.dtype not in (*REDUCIBLE, torch.float64, *_INTEGERS):
        raise FormatError(
            f"the tensor is {x.dtype}, but sums are of float32, bfloat16, float16, float64, uint8, int8, int32 or"
            " int64; convert it first"
        )
    if op == "avg" and x.dtype in _INTEGERS:
        raise FormatError(f"op is 'avg' of {x.dtype}, but an average of integers is no integer; use 'sum'")
    return 1.0 / world if op == "avg" else 1.0


def copy_if_overwritten(read: Tensor, written: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """What a call reads, or a copy of it if results are written over it before it was sent; both are contiguous.

    In a `group` this rank reads the part of `written`, or writes that of `read`, that is its own and no other rank's;
    nothing is copied if the two lie so.
    """
    distance = read.data_ptr() - written.data_ptr()
    if abs(distance) >= (written if distance >= 0 else read).nbytes:  # one of the two: short calls wait for this
        return read
    if group is not None and abs(distance) == group.rank() * min(read.nbytes, written.nbytes):
        return read
    return read.detach().clone()


def flatten(x: Tensor) -> Tensor:
    """View a contiguous tensor as [numel], detached from autograd."""
    return x.detach().view(-1)
