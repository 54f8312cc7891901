"""Collectives over a codec: those of torch.distributed, in fewer bytes.

Signatures follow torch's: tensors are contiguous, `group` is the default group if None, `src` and `dst` are global
ranks, and all ranks of a group make the same calls in the same order. Input and output may share memory: the input is
copied first, unless they meet at this rank's own part. Each function returns a `Work`; with
async_op=True the collective goes on in the background and tensors must be left alone until `wait()`, else it is over
already. wait() returns the output and raises the call's error.

`codec="auto"` asks the cost model, as `Auto(capacity_bits=...)` does; `Raw()`, `Lossless()` or `Blockwise(format)`
decides for it. Lossless codecs never change a bit of a result: float32, bfloat16 and float16 are summed in fp32 in the
order of ranks and rounded once to the tensor's type, whatever the codec. docs/collectives.md has the orders, the
messages and the errors after a rank has failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import methodcaller

import torch.distributed as dist
from torch import Tensor

from laconic.collectives.arguments import (
    Group,
    Op,
    check_end,
    check_numel,
    check_tensors,
    copy_if_overwritten,
    find_factor,
    find_group_rank,
    find_groups,
    find_splits,
    flat_group,
    flatten,
    numels_of,
)
from laconic.collectives.codec import Codec
from laconic.collectives.engine import uncoded
from laconic.collectives.engine.call import CollectiveCall
from laconic.collectives.policy.raw_calls import known_route
from laconic.collectives.policy.selector import leaves_raw
from laconic.collectives.runtime.background import Work
from laconic.errors import ConfigError, FormatError


def all_gather(
    output: Tensor, input: Tensor, group: Group = None, *, codec: Codec | str = "auto", async_op: bool = False
) -> Work[Tensor]:
    """Gather the tensors of all ranks on every rank.

    Args:
        output: W times the elements of `input`, same dtype; rank r's values are its r-th part.
        input: any shape and dtype.
        group: a process group of W ranks, or TwoLevel, whose rank r has local rank r % L on node r // L.
        codec, async_op: as in the module's docstring.

    Raises:
        FormatError: the tensors do not fit.
        ConfigError: ranks disagree about the call; raised on every rank.
    """
    route = known_route(group, ("all_gather",), input, output, async_op) if codec == "auto" else None
    if route is not None:
        carrier = route.group()
        return route.run(uncoded.all_gather, output, copy_if_overwritten(input, output, carrier), carrier, async_op)
    check_tensors(codec, output=output, input=input)
    world, groups = find_groups(group)
    check_numel("output", output, world * input.numel(), f"{world} times that of input")
    input = copy_if_overwritten(input, output, groups[0])
    if codec == "auto" and leaves_raw(group, ("all_gather",), input.numel(), input, output, groups, async_op):
        return uncoded.all_gather(output, input, groups[0], async_op)
    mine, rows = flatten(input), flatten(output).view(world, -1)
    return CollectiveCall("all_gather", groups, codec, input.dtype, input.device).run(
        methodcaller("all_gather", rows, mine), output, async_op
    )


def reduce_scatter(
    output: Tensor,
    input: Tensor,
    group: Group = None,
    *,
    op: Op = "sum",
    codec: Codec | str = "auto",
    async_op: bool = False,
) -> Work[Tensor]:
    """Sum over ranks and give each rank its part of the sum.

    Args:
        output: any shape; becomes the sum of the parts that the ranks have for this one.
        input: W times the elements of `output`, same dtype; its r-th part goes to rank r.
        group: a process group of W ranks, or TwoLevel: each node sums in fp32 and rounds, then nodes' sums are summed.
        op: "sum", or "avg": the fp32 sum times fp32(1 / W).
        codec, async_op: as in the module's docstring.

    Raises:
        FormatError: the tensors do not fit.
        ConfigError: ranks disagree about the call; raised on every rank.
    """
    route = known_route(group, ("reduce_scatter", op), input, output, async_op) if codec == "auto" else None
    if route is not None:
        carrier = route.group()
        input = copy_if_overwritten(input, output, carrier)
        return route.run(uncoded.reduce_scatter, output, input, carrier, op, async_op)
    check_tensors(codec, output=output, input=input)
    world, groups = find_groups(group)
    check_numel("input", input, world * output.numel(), f"{world} times that of output")
    factor = find_factor(op, input, world)
    input = copy_if_overwritten(input, output, groups[0])
    if codec == "auto" and leaves_raw(group, ("reduce_scatter", op), input.numel(), input, output, groups, async_op):
        return uncoded.reduce_scatter(output, input, groups[0], op, async_op)
    mine, rows = flatten(output), flatten(input).view(world, -1)
    return CollectiveCall("reduce_scatter", groups, codec, input.dtype, input.device).run(
        methodcaller("reduce_scatter", mine, rows, factor), output, async_op
    )


def all_reduce(
    tensor: Tensor, group: Group = None, *, op: Op = "sum", codec: Codec | str = "auto", async_op: bool = False
) -> Work[Tensor]:
    """Replace `tensor` by its sum over the ranks of `group`, on each of them: the same bits everywhere.

    With a codec that is not lossless, each rank's message is rounded by it, and once more the sum; a rank's own values
    count exactly.

    Args:
        tensor: any shape.
        group, op: as in `reduce_scatter`.
        codec, async_op: as in the module's docstring.

    Raises:
        FormatError: the tensor does not fit.
        ConfigError: ranks disagree about the call; raised on every rank.
    """
    route = known_route(group, ("all_reduce", op), tensor, None, async_op) if codec == "auto" else None
    if route is not None:
        return route.run(uncoded.all_reduce, tensor, route.group(), op, async_op)
    check_tensors(codec, tensor=tensor)
    world, groups = find_groups(group)
    factor = find_factor(op, tensor, world)
    if codec == "auto" and leaves_raw(group, ("all_reduce", op), tensor.numel(), tensor, None, groups, async_op):
        return uncoded.all_reduce(tensor, groups[0], op, async_op)
    return CollectiveCall("all_reduce", groups, codec, tensor.dtype, tensor.device).run(
        methodcaller("all_reduce", flatten(tensor), factor), tensor, async_op
    )


def all_to_all(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    *,
    codec: Codec | str = "auto",
    async_op: bool = False,
    table: Sequence[Sequence[int]] | None = None,
) -> Work[Tensor]:
    """Send a part of `input` to each rank and receive a part of `output` from each.

    Args:
        output, input: [n, ...], same dtype, in the order of ranks.
        output_split_sizes, input_split_sizes: rows from and to each rank; equal parts if both are None, for which the
            rows of each tensor must be divisible by the number of ranks.
        group: a process group of W ranks, or TwoLevel (equal parts only).
        codec, async_op: as in the module's docstring.
        table: rows from each rank to each, [from][to], if all ranks know them: the call does not wait for the others'
            sizes then, and over Raw() only rows are sent. It must agree with the split sizes.

    Raises:
        FormatError: the tensors do not fit.
        ConfigError: ranks disagree about the call; raised on every rank.
    """
    even = output_split_sizes is None and input_split_sizes is None
    route = known_route(group, ("all_to_all",), input, output, async_op) if even and codec == "auto" else None
    # A known route is looked up by numel; rows may still not divide.
    if route is not None and not any([x.dim() > 1 and x.shape[0] % route.group().size() for x in (output, input)]):
        return route.run(uncoded.all_to_all, output, copy_if_overwritten(input, output), route.group(), async_op)
    check_tensors(codec, output=output, input=input)
    world, groups = find_groups(group)
    if even:
        check_numel("output", output, input.numel(), "that of input")
        for name, x in (("output", output), ("input", input)):
            num_rows = x.shape[0] if x.dim() else 1
            if num_rows % world:
                raise FormatError(
                    f"{name} has {num_rows} rows, which {world} ranks cannot share evenly; pass split sizes"
                )
    elif len(groups) == 2:
        raise ConfigError("split sizes are given, but TwoLevel takes equal parts only; pass a process group")
    input = copy_if_overwritten(input, output)
    if codec == "auto" and even and leaves_raw(group, ("all_to_all",), input.numel(), input, output, groups, async_op):
        return uncoded.all_to_all(output, input, groups[0], async_op)
    out, into = flatten(output), flatten(input)
    call = CollectiveCall("all_to_all", groups, codec, input.dtype, input.device)
    if even:
        rows, own = out.view(world, -1), into.view(world, -1)
        return call.run(methodcaller("all_to_all", rows, own), output, async_op)
    expected = find_splits("output_split_sizes", output_split_sizes, output, world)
    offered = find_splits("input_split_sizes", input_split_sizes, input, world)
    numels = numels_of(expected, output), numels_of(offered, input)
    received, sent = (list(x.split(each)) for x, each in zip((out, into), numels, strict=True))
    if table is not None:
        me = groups[0].rank()
        if list(table[me]) != list(offered) or [row[me] for row in table] != list(expected):
            raise FormatError(
                f"table says that rank {me} of the group sends {list(table[me])} rows and gets"
                f" {[row[me] for row in table]}, but split sizes say {list(offered)} and {list(expected)}; they"
                " must be the same"
            )
        table = [numels_of(row, input) for row in table]
    return call.run(methodcaller("all_to_all_uneven", received, sent, *numels, table), output, async_op)


def broadcast(
    tensor: Tensor,
    src: int,
    group: dist.ProcessGroup | None = None,
    *,
    codec: Codec | str = "auto",
    async_op: bool = False,
) -> Work[Tensor]:
    """Replace `tensor`, of any shape and dtype, on the ranks of `group` by that of the global rank `src`."""
    route = known_route(group, ("broadcast", src), tensor, None, async_op) if codec == "auto" else None
    if route is not None:
        return route.run(uncoded.broadcast, tensor, route.group(), route.root, async_op)
    check_tensors(codec, tensor=tensor)
    _, groups = find_groups(flat_group("broadcast", group))
    root = find_group_rank(groups[0], src, "src")
    known, is_end = ("broadcast", src), root == groups[0].rank()
    if codec == "auto" and leaves_raw(group, known, tensor.numel(), tensor, None, groups, async_op, root, is_end):
        return uncoded.broadcast(tensor, groups[0], root, async_op)
    return CollectiveCall("broadcast", groups, codec, tensor.dtype, tensor.device).run(
        methodcaller("broadcast", flatten(tensor), root), tensor, async_op
    )


def gather(
    output: Tensor | None,
    input: Tensor,
    dst: int,
    group: dist.ProcessGroup | None = None,
    *,
    codec: Codec | str = "auto",
    async_op: bool = False,
) -> Work[Tensor | None]:
    """Gather the tensors of all ranks on the global rank `dst`: `output` as in `all_gather` there, None elsewhere."""
    route = known_route(group, ("gather", dst, output is None), input, output, async_op) if codec == "auto" else None
    if route is not None:
        carrier = route.group()
        input = input if output is None else copy_if_overwritten(input, output, carrier)
        return route.run(uncoded.gather, output, input, carrier, route.root, async_op)
    check_tensors(codec, input=input, **({} if output is None else {"output": output}))
    world, groups = find_groups(flat_group("gather", group))
    root = find_group_rank(groups[0], dst, "dst")
    check_end("output", output, root == groups[0].rank(), "dst")
    if output is not None:
        check_numel("output", output, world * input.numel(), f"{world} times that of input")
        input = copy_if_overwritten(input, output, groups[0])
    known, is_end = ("gather", dst, output is None), output is not None
    if codec == "auto" and leaves_raw(group, known, input.numel(), input, output, groups, async_op, root, is_end):
        return uncoded.gather(output, input, groups[0], root, async_op)
    mine = flatten(input)
    rows = None if output is None else flatten(output).view(world, -1)
    return CollectiveCall("gather", groups, codec, input.dtype, input.device).run(
        methodcaller("gather", rows, mine, root), output, async_op
    )


def scatter(
    output: Tensor,
    input: Tensor | None,
    src: int,
    group: dist.ProcessGroup | None = None,
    *,
    codec: Codec | str = "auto",
    async_op: bool = False,
) -> Work[Tensor]:
    """Give each rank its part of `input` of the global rank `src`: [W * n] there, None on the others."""
    route = known_route(group, ("scatter", src, input is None), output, input, async_op) if codec == "auto" else None
    if route is not None:
        carrier = route.group()
        input = None if input is None else copy_if_overwritten(input, output, carrier)
        return route.run(uncoded.scatter, output, input, carrier, route.root, async_op)
    check_tensors(codec, output=output, **({} if input is None else {"input": input}))
    world, groups = find_groups(flat_group("scatter", group))
    root = find_group_rank(groups[0], src, "src")
    check_end("input", input, root == groups[0].rank(), "src")
    if input is not None:
        check_numel("input", input, world * output.numel(), f"{world} times that of output")
        input = copy_if_overwritten(input, output, groups[0])
    known, is_end = ("scatter", src, input is None), input is not None
    if codec == "auto" and leaves_raw(
        group, known, world * output.numel(), output, input, groups, async_op, root, is_end
    ):
        return uncoded.scatter(output, input, groups[0], root, async_op)
    mine = flatten(output)
    rows = None if input is None else flatten(input).view(world, -1)
    return CollectiveCall("scatter", groups, codec, output.dtype, output.device).run(
        methodcaller("scatter", mine, rows, root), output, async_op
    )
