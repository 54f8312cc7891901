"""Collectives over a codec: what torch.distributed has, in fewer bytes.

Signatures follow torch's: tensors are contiguous, `group` is the default group if None, `src` and `dst` are global
ranks, and all ranks of a group make the same calls in the same order. Each function returns a `Work`; with
async_op=True the collective goes on in the background and tensors must be left alone until `wait()`, else it is over
already. wait() returns the output and raises what went wrong.

`codec="auto"` asks the cost model; `Raw()`, `Lossless()` or `Blockwise(format)` decides for it. Lossless codecs never
change a bit of a result: float32, bfloat16 and float16 are summed in fp32 in the order of ranks and rounded once to the
tensor's type, whatever travels. docs/collectives.md has the orders, the messages and what happens when a rank fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collectives.codec import Codec, Raw
from laconic.collectives.exchange import REDUCIBLE, Exchange
from laconic.collectives.lane import Groups, Job, Work, done, run_here, run_in_background
from laconic.collectives.levels import (
    TwoLevel,
    all_gather_on_two_levels,
    all_reduce_on_two_levels,
    all_to_all_on_two_levels,
    reduce_scatter_on_two_levels,
)
from laconic.errors import ConfigError, FormatError

__all__ = ["Op", "all_gather", "all_reduce", "all_to_all", "broadcast", "gather", "reduce_scatter", "scatter"]

T = TypeVar("T")

Op = Literal["sum", "avg"]

Group = dist.ProcessGroup | TwoLevel | None

_INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)


def all_gather(
    output: Tensor, input: Tensor, group: Group = None, *, codec: Codec | str = "auto", async_op: bool = False
) -> Work[Tensor]:
    """Every rank gets what all ranks have.

    Arguments:
        output: W times the elements of `input`, same dtype; rank r's values are its r-th part.
        input: any shape and dtype; it may be this rank's part of `output`.
        group: a process group of W ranks, or TwoLevel, whose rank r is place r % L of node r // L.

    Raises FormatError for tensors that do not fit, ConfigError on every rank when ranks disagree about the call.
    """
    _check_tensors(output=output, input=input)
    world, groups = _groups(group)
    _check_numel("output", output, world * input.numel(), f"{world} times that of input")
    mine, rows = _flat(input), _flat(output).view(world, -1)
    call = _Call("all_gather", groups, codec, input)

    def job(groups: Groups) -> Tensor:
        if len(groups) == 2:
            all_gather_on_two_levels(*call.on_two_levels(groups), rows, mine)
        else:
            call.on(groups[0]).all_gather(list(rows), mine)
        return output

    return call.run(job, lambda: rows[0].copy_(mine), output, async_op)


def reduce_scatter(
    output: Tensor,
    input: Tensor,
    group: Group = None,
    *,
    op: Op = "sum",
    codec: Codec | str = "auto",
    async_op: bool = False,
) -> Work[Tensor]:
    """Each rank gets its part of the sum over ranks.

    Arguments:
        output: any shape; becomes the sum of the parts that the ranks have for this one.
        input: W times the elements of `output`, same dtype; its r-th part goes to rank r.
        group: a process group of W ranks, or TwoLevel: each node sums in fp32 and rounds, then nodes' sums are summed.
        op: "sum", or "avg": the fp32 sum times fp32(1 / W).

    Raises FormatError for tensors that do not fit, ConfigError on every rank when ranks disagree about the call.
    """
    _check_tensors(output=output, input=input)
    world, groups = _groups(group)
    _check_numel("input", input, world * output.numel(), f"{world} times that of output")
    factor = _factor(op, input, world)
    mine, rows = _flat(output), _flat(input).view(world, -1)
    call = _Call("reduce_scatter", groups, codec, input)

    def job(groups: Groups) -> Tensor:
        if len(groups) == 2:
            reduce_scatter_on_two_levels(*call.on_two_levels(groups), mine, rows, factor)
        else:
            call.on(groups[0]).reduce_scatter(mine, rows, factor)
        return output

    return call.run(job, lambda: mine.copy_(rows[0]), output, async_op)


def all_reduce(
    tensor: Tensor, group: Group = None, *, op: Op = "sum", codec: Codec | str = "auto", async_op: bool = False
) -> Work[Tensor]:
    """`tensor`, of any shape, becomes the sum over the ranks of `group` on each of them: the same bits everywhere.

    `op` and TwoLevel as in `reduce_scatter`. With a codec that is not lossless, what ranks send is rounded by it, and
    once more the sum; what a rank has itself counts exactly.

    Raises FormatError for a tensor that does not fit, ConfigError on every rank when ranks disagree about the call.
    """
    _check_tensors(tensor=tensor)
    world, groups = _groups(group)
    factor = _factor(op, tensor, world)
    x = _flat(tensor)
    call = _Call("all_reduce", groups, codec, tensor)

    def job(groups: Groups) -> Tensor:
        if len(groups) == 2:
            all_reduce_on_two_levels(*call.on_two_levels(groups), x, factor)
        else:
            call.on(groups[0]).all_reduce(x, factor)
        return tensor

    return call.run(job, lambda: None, tensor, async_op)


def all_to_all(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    *,
    codec: Codec | str = "auto",
    async_op: bool = False,
) -> Work[Tensor]:
    """Each rank sends a part of `input` to each rank and gets a part of `output` from each.

    Arguments:
        output, input: [n, ...], same dtype, in the order of ranks.
        output_split_sizes, input_split_sizes: rows from and to each rank; equal parts if both are None.
        group: a process group of W ranks, or TwoLevel (equal parts only).

    Raises FormatError for tensors that do not fit, ConfigError on every rank when ranks disagree about the call.
    """
    _check_tensors(output=output, input=input)
    world, groups = _groups(group)
    even = output_split_sizes is None and input_split_sizes is None
    if even:
        _check_numel("output", output, input.numel(), "that of input")
        if input.numel() % world:
            raise FormatError(
                f"input has {input.numel()} elements, which {world} ranks cannot share evenly; pass split sizes"
            )
    elif len(groups) == 2:
        raise ConfigError("split sizes are given, but TwoLevel takes equal parts only; pass a process group")
    out, into = _flat(output), _flat(input)
    call = _Call("all_to_all", groups, codec, input)
    if even:
        received, sent = list(out.view(world, -1)), list(into.view(world, -1))
    else:
        expected = _splits("output_split_sizes", output_split_sizes, output, world)
        offered = _splits("input_split_sizes", input_split_sizes, input, world)
        received, sent = list(out.split(_numels(expected, output))), list(into.split(_numels(offered, input)))

    def job(groups: Groups) -> Tensor:
        if len(groups) == 2:
            all_to_all_on_two_levels(*call.on_two_levels(groups), out.view(world, -1), into.view(world, -1))
        elif even:
            call.on(groups[0]).all_to_all(received, sent)
        else:
            call.on(groups[0]).all_to_all_uneven(received, sent, _numels(expected, output), _numels(offered, input))
        return output

    return call.run(job, lambda: received[0].copy_(sent[0]), output, async_op)


def broadcast(
    tensor: Tensor,
    src: int,
    group: dist.ProcessGroup | None = None,
    *,
    codec: Codec | str = "auto",
    async_op: bool = False,
) -> Work[Tensor]:
    """`tensor`, of any shape and dtype, of the global rank `src` replaces that of the other ranks of `group`."""
    _check_tensors(tensor=tensor)
    _, groups = _groups(_flat_group("broadcast", group))
    place, x = _place(groups[0], src, "src"), _flat(tensor)
    call = _Call("broadcast", groups, codec, tensor)

    def job(groups: Groups) -> Tensor:
        call.on(groups[0]).broadcast(x, place)
        return tensor

    return call.run(job, lambda: None, tensor, async_op)


def gather(
    output: Tensor | None,
    input: Tensor,
    dst: int,
    group: dist.ProcessGroup | None = None,
    *,
    codec: Codec | str = "auto",
    async_op: bool = False,
) -> Work[Tensor | None]:
    """The global rank `dst` gets what all ranks have: `output` as in `all_gather` there, None on the others."""
    _check_tensors(input=input, **({} if output is None else {"output": output}))
    world, groups = _groups(_flat_group("gather", group))
    place = _place(groups[0], dst, "dst")
    _check_end("output", output, place == groups[0].rank(), "dst")
    mine, rows = _flat(input), None
    if output is not None:
        _check_numel("output", output, world * input.numel(), f"{world} times that of input")
        rows = list(_flat(output).view(world, -1))
    call = _Call("gather", groups, codec, input)

    def job(groups: Groups) -> Tensor | None:
        call.on(groups[0]).gather(rows, mine, place)
        return output

    return call.run(job, lambda: rows and rows[0].copy_(mine), output, async_op)


def scatter(
    output: Tensor,
    input: Tensor | None,
    src: int,
    group: dist.ProcessGroup | None = None,
    *,
    codec: Codec | str = "auto",
    async_op: bool = False,
) -> Work[Tensor]:
    """Each rank gets its part of `input` of the global rank `src`: [W * n] there, None on the others."""
    _check_tensors(output=output, **({} if input is None else {"input": input}))
    world, groups = _groups(_flat_group("scatter", group))
    place = _place(groups[0], src, "src")
    _check_end("input", input, place == groups[0].rank(), "src")
    mine, rows = _flat(output), None
    if input is not None:
        _check_numel("input", input, world * output.numel(), f"{world} times that of output")
        rows = list(_flat(input).view(world, -1))
    call = _Call("scatter", groups, codec, output)

    def job(groups: Groups) -> Tensor:
        call.on(groups[0]).scatter(mine, rows, place)
        return output

    return call.run(job, lambda: rows and mine.copy_(rows[0]), output, async_op)


# --- arguments ---


@dataclass(frozen=True)
class _Call:
    """What the exchanges of one call have in common."""

    function: str
    groups: Groups
    """Those of the caller, of which a lane may use copies."""
    codec: Codec | str
    tensor: Tensor

    def __post_init__(self) -> None:
        if isinstance(self.codec, str) and self.codec != "auto":
            raise ConfigError(f"codec is {self.codec!r}, but it must be 'auto' or a codec such as Lossless() or Raw()")

    def on(self, group: dist.ProcessGroup, level: int = 0, codec: Codec | str | None = None) -> Exchange:
        """The exchange on `group`, which is the caller's group number `level` or its copy."""
        ranks = tuple(dist.get_process_group_ranks(self.groups[level]))
        return Exchange(group, ranks, self.function, codec or self.codec, self.tensor.dtype, self.tensor.device)

    def on_two_levels(self, groups: Groups) -> tuple[Exchange, Exchange]:
        """Those inside the node and between nodes."""
        node, cluster = groups
        return self.on(node, 0, Raw()), self.on(cluster, 1)

    def run(self, job: Job[T], alone: Callable[[], object], result: T, async_op: bool) -> Work[T]:
        """Run a job, or what a rank does that has no others."""
        if all(group.size() == 1 for group in self.groups):
            with torch.no_grad():
                alone()
            return done(result)
        if async_op:
            return run_in_background(job, self.groups, self.tensor.device)
        return done(run_here(job, self.groups))


def _groups(group: Group) -> tuple[int, Groups]:
    """Number of ranks, and the process groups."""
    if isinstance(group, TwoLevel):
        return group.node.size() * group.cluster.size(), (group.node, group.cluster)
    if group is None and not dist.is_initialized():
        raise ConfigError("group is None and no process group exists; call torch.distributed.init_process_group first")
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, dist.ProcessGroup):
        raise ConfigError("group does not contain this process; call on members of the group only")
    return found.size(), (found,)


def _flat_group(function: str, group: Group) -> dist.ProcessGroup | None:
    if isinstance(group, TwoLevel):
        raise ConfigError(f"group is a TwoLevel, which {function} does not take; pass a process group")
    return group


def _place(group: dist.ProcessGroup, rank: int, name: str) -> int:
    ranks = dist.get_process_group_ranks(group)
    if rank not in ranks:
        raise ConfigError(f"{name} is {rank}, but the group has the global ranks {ranks}; pass one of them")
    return ranks.index(rank)


def _check_tensors(**tensors: Tensor) -> None:
    for name, x in tensors.items():
        if x.layout != torch.strided or not x.is_contiguous():
            raise FormatError(f"{name} is not contiguous and dense, but it must be; pass {name}.contiguous()")
    dtypes, devices = {x.dtype for x in tensors.values()}, {x.device for x in tensors.values()}
    if len(dtypes) > 1 or len(devices) > 1:
        found = ", ".join(f"{name} {x.dtype} on {x.device}" for name, x in tensors.items())
        raise FormatError(f"the tensors are {found}, but they must have one dtype and one device; convert one of them")


def _check_numel(name: str, x: Tensor, numel: int, rule: str) -> None:
    if x.numel() != numel:
        raise FormatError(f"{name} has {x.numel()} elements, but it must have {numel}, {rule}")


def _check_end(name: str, x: Tensor | None, is_end: bool, end: str) -> None:
    if (x is not None) != is_end:
        raise FormatError(
            f"{name} is {'None' if x is None else 'a tensor'}, but it must be a tensor on the rank {end} and None on"
            " the others"
        )


def _splits(name: str, splits: Sequence[int] | None, x: Tensor, world: int) -> list[int]:
    """Rows for each rank."""
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


def _numels(splits: Sequence[int], x: Tensor) -> list[int]:
    row_numel = x.numel() // x.shape[0] if x.dim() and x.shape[0] else 0
    return [rows * row_numel for rows in splits]


def _factor(op: str, x: Tensor, world: int) -> float:
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


def _flat(x: Tensor) -> Tensor:
    return x.detach().view(-1)
