"""Gradients reduced over the network in 8 bits.

Codes cannot be added in a collective: int8 wraps around and each block has a scale of its own. So a reduction is an
all-to-all of codes and scales, a sum in fp32 in rank order, and for an all-reduce one more quantization and an
all-gather of the result (AGoQ, section 4.2; ZeRO++, section 3.3). 4 bytes per element become 1.03, in each direction;
the error does not grow with the number of ranks, and all ranks end with the same bits. docs/gradients.md derives the
bound.

A large tensor goes in pieces that follow each other through the stages quantize, all-to-all, sum, all-gather,
dequantize, so that the network is busy while the processor computes. The cuts do not change the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, TypeVar, overload

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from laconic.collectives.engine.agreement import Settings, start_agreement
from laconic.collectives.engine.overlap import overlap
from laconic.collectives.engine.two_level import TwoLevel
from laconic.collectives.runtime import torch_compat
from laconic.collectives.runtime.background import Groups, Job, Work, run_here, run_in_background
from laconic.errors import ConfigError, FormatError
from laconic.formats import QuantizedGradient
from laconic.gradients.message import PART_SIZES, Parts, num_blocks
from laconic.gradients.pieces import codes_piece, scatter_piece, tensor_piece
from laconic.ops import DTYPES
from laconic.ops.codebooks import GRADIENT_BLOCK_SIZE

__all__ = [
    "NATIVE_BELOW_NBYTES",
    "Op",
    "TwoLevel",
    "all_reduce_q8",
    "all_reduce_quantized",
    "reduce_scatter_q8",
]

NATIVE_BELOW_NBYTES = 1 << 18
"""Tensors below this size are reduced by the native collective: there a message costs its latency, not its bytes."""

_PIECE_NUMEL = 1 << 19
"""Elements per piece: long enough that latency does not count, short enough that filling the pipeline does not."""

Op = Literal["avg", "sum"]

T = TypeVar("T")


# --- public functions ---


@overload
def reduce_scatter_q8(
    input: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    op: Op = "avg",
    async_op: Literal[False] = False,
    min_nbytes: int = NATIVE_BELOW_NBYTES,
) -> Tensor: ...
@overload
def reduce_scatter_q8(
    input: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    op: Op = "avg",
    async_op: Literal[True],
    min_nbytes: int = NATIVE_BELOW_NBYTES,
) -> Work[Tensor]: ...
def reduce_scatter_q8(
    input: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    op: Op = "avg",
    async_op: bool = False,
    min_nbytes: int = NATIVE_BELOW_NBYTES,
) -> Tensor | Work[Tensor]:
    """Reduce `input` over the ranks of `group`, W of them, and keep this rank's chunk.

    Arguments:
        input: [W * n] or [W, n], fp32, bf16 or fp16, contiguous; chunk r goes to rank r. n may be anything, 0 too: each
            chunk is quantized by itself in blocks of 128, the last of which may be shorter.
        group: the default group if None. gloo and NCCL work; only bytes are sent.
        op: "avg" multiplies the fp32 sum by fp32(1 / W).
        async_op: reduce in the background; leave `input` alone until the returned work was waited for.
        min_nbytes: an input of fewer bytes is summed in fp32 by the native reduce-scatter.

    Returns the chunk, fp32 [n], or a `Work` whose wait() returns it. With one rank it is the input, exactly.
    A block in which any rank has NaN or infinity becomes NaN.

    Raises FormatError for an input that does not fit, ConfigError on every rank when ranks disagree about the call.
    """
    group = _group(group)
    world = group.size()
    _check(input, op)
    if input.dim() not in (1, 2) or (input.dim() == 2 and input.shape[0] != world) or input.numel() % world:
        raise FormatError(
            f"input has shape {tuple(input.shape)}, but the {world} ranks need [{world} * n] or [{world}, n];"
            " fill it up with zeros to equal chunks"
        )
    rows = input.detach().reshape(world, -1)
    settings = _settings("reduce_scatter_q8", input, op, min_nbytes)

    def job(groups: Groups) -> Tensor:
        (group,) = groups
        chunk = torch.empty(rows.shape[1], device=input.device)
        if world == 1 or input.numel() == 0:
            return chunk.copy_(rows[0])
        agree = start_agreement(settings, group, input.device)
        if input.nbytes < min_nbytes:
            agree()
            torch_compat.reduce_scatter(chunk, rows.float().contiguous(), group).wait()
            return chunk.mul_(_factor(op, world))
        starts = range(0, rows.shape[1], -(-_PIECE_NUMEL // world // GRADIENT_BLOCK_SIZE) * GRADIENT_BLOCK_SIZE)
        pieces = [slice(start, start + starts.step) for start in starts]
        overlap(
            scatter_piece(rows[:, piece], chunk[piece], group, _factor(op, world), agree if piece.start == 0 else None)
            for piece in pieces
        )
        return chunk

    return _run(job, (group,), input.device, async_op)


@overload
def all_reduce_q8(
    tensor: Tensor,
    group: dist.ProcessGroup | TwoLevel | None = None,
    *,
    op: Op = "avg",
    async_op: Literal[False] = False,
    min_nbytes: int = NATIVE_BELOW_NBYTES,
    error: Tensor | None = None,
) -> Tensor: ...
@overload
def all_reduce_q8(
    tensor: Tensor,
    group: dist.ProcessGroup | TwoLevel | None = None,
    *,
    op: Op = "avg",
    async_op: Literal[True],
    min_nbytes: int = NATIVE_BELOW_NBYTES,
    error: Tensor | None = None,
) -> Work[Tensor]: ...
def all_reduce_q8(
    tensor: Tensor,
    group: dist.ProcessGroup | TwoLevel | None = None,
    *,
    op: Op = "avg",
    async_op: bool = False,
    min_nbytes: int = NATIVE_BELOW_NBYTES,
    error: Tensor | None = None,
) -> Tensor | Work[Tensor]:
    """Reduce `tensor` over the ranks of `group`, W of them, in place; the same bits on every rank.

    Arguments:
        tensor: [...], fp32, bf16 or fp16, any number of elements.
        group: the default group if None; `TwoLevel` reduces inside each node first.
        op: "avg" multiplies the fp32 sum by fp32(1 / W).
        async_op: reduce in the background; leave `tensor` alone until the returned work was waited for.
        min_nbytes: a tensor of fewer bytes is summed by the native all-reduce, in its own type.
        error: fp32 [numel], what this rank's codes have lost so far (error feedback): added before they are made, and
            replaced by what they lose now; 0 where that is not finite. Not with TwoLevel.

    Returns `tensor`, or a `Work` whose wait() returns it. With one rank it is left as it is. A block (128 elements in
    the tensor's order) in which any rank has NaN or infinity becomes NaN on all ranks.

    Raises FormatError for a tensor that does not fit, ConfigError on every rank when ranks disagree about the call.
    """
    _check(tensor, op)
    if error is not None:
        if isinstance(group, TwoLevel):
            raise ConfigError(
                "error is given together with TwoLevel, but feedback needs one level; leave one of them out"
            )
        if error.dtype != torch.float32 or error.shape != (tensor.numel(),) or not error.is_contiguous():
            raise FormatError(
                f"error is {error.dtype} {tuple(error.shape)}, but it must be contiguous float32 ({tensor.numel()},)"
            )
    settings = _settings("all_reduce_q8", tensor, op, min_nbytes) | {"feedback": error is not None}
    values = tensor.detach()

    def job(groups: Groups) -> Tensor:
        flat = values.contiguous().view(-1)
        if len(groups) == 2:
            _all_reduce_two_level(flat, *groups, op, settings, min_nbytes)
        else:
            _all_reduce_flat(flat, groups[0], _factor(op, groups[0].size()), settings, min_nbytes, error)
        if flat.data_ptr() != values.data_ptr():
            values.copy_(flat.view_as(values))
        return tensor

    groups = (group.node, group.cluster) if isinstance(group, TwoLevel) else (_group(group),)
    return _run(job, groups, tensor.device, async_op)


def all_reduce_quantized(
    gradients: Sequence[QuantizedGradient], group: dist.ProcessGroup | None = None, *, average: bool = True
) -> Work[None]:
    """Reduce gradients that are stored in 8 or 12 bits, in place, in the background; the same bits on every rank.

    The stored codes are what is sent: nothing is quantized before the wire. They are summed in fp32 in rank order, and
    the sum is quantized once, into the same gradients. All of them make one message each way, or a few pieces.

    Arguments:
        gradients: of one number of bits, all on one device, in the same order on every rank.
        group: the default group if None.
        average: multiply the sum by fp32(1 / W).

    Returns a `Work`; leave the gradients alone until its wait() has returned. With one rank they stay as they are.

    Raises FormatError for gradients that do not go together; wait() raises ConfigError, on every rank, when ranks
    disagree about the call.
    """
    group = _group(group)
    bits = {gradient.bits for gradient in gradients}
    devices = {gradient.codes.device for gradient in gradients}
    if len(bits) > 1 or len(devices) > 1:
        what, found = ("bits", bits) if len(bits) > 1 else ("devices", devices)
        raise FormatError(
            f"gradients have {what} {', '.join(map(str, sorted(found, key=str)))}, but those of one call must have one;"
            " call once for each"
        )
    settings: Settings = {
        "function": "all_reduce_quantized",
        "bits": next(iter(bits), 8),
        "num_gradients": len(gradients),
        "numel": sum(gradient.codes.numel() for gradient in gradients),
        "average": average,
    }
    device = next(iter(devices), torch.device("cpu"))

    def job(groups: Groups) -> None:
        (group,) = groups
        if group.size() == 1 or settings["numel"] == 0:
            return
        agree = start_agreement(settings, group, device)
        flat = _concatenated(gradients)
        factor = _factor("avg" if average else "sum", group.size())
        overlap(
            codes_piece(piece, group, factor, agree if number == 0 else None)
            for number, piece in enumerate(_pieces_of(flat))
        )
        _split(flat, gradients)

    return run_in_background(job, (group,), device)


# --- the whole of a tensor ---


def _all_reduce_flat(
    flat: Tensor, group: dist.ProcessGroup, factor: float, settings: Settings, min_nbytes: int, error: Tensor | None
) -> None:
    if group.size() == 1 or flat.numel() == 0:
        return
    agree = start_agreement(settings, group, flat.device)
    if flat.nbytes < min_nbytes:
        agree()
        if error is not None:
            flat.add_(error)
            error.zero_()
        torch_compat.all_reduce(flat, group).wait()
        flat.mul_(factor)
        return
    errors = error.split(_PIECE_NUMEL) if error is not None else None
    overlap(
        tensor_piece(piece, group, factor, errors[i] if errors else None, agree if i == 0 else None)
        for i, piece in enumerate(flat.split(_PIECE_NUMEL))
    )


def _all_reduce_two_level(
    flat: Tensor,
    node: dist.ProcessGroup,
    cluster: dist.ProcessGroup,
    op: Op,
    settings: Settings,
    min_nbytes: int,
) -> None:
    """Native reduce-scatter in fp32 inside the node, 8 bits across, native all-gather of the result."""
    if flat.numel() == 0:
        return
    agree = start_agreement(settings, node, flat.device)
    chunk_numel = -(-flat.numel() // node.size())
    rows = F.pad(flat.float(), (0, chunk_numel * node.size() - flat.numel()))
    agree()
    chunk = torch.empty(chunk_numel, device=flat.device)
    torch_compat.reduce_scatter(chunk, rows.view(node.size(), -1), node).wait()
    _all_reduce_flat(chunk, cluster, _factor(op, node.size() * cluster.size()), settings, min_nbytes, None)
    if cluster.size() == 1:
        chunk.mul_(_factor(op, node.size()))
    chunk = chunk.to(flat.dtype)
    gathered = chunk.new_empty(node.size(), chunk_numel)
    torch_compat.all_gather(gathered, chunk, node).wait()
    flat.copy_(gathered.view(-1)[: flat.numel()])


def _parts_of(gradient: QuantizedGradient) -> Parts:
    return Parts(gradient.codes, gradient.scales, gradient.residual_codes, gradient.residual_scales)


def _concatenated(gradients: Sequence[QuantizedGradient]) -> Parts:
    """All gradients as one, each filled up with zeros to whole blocks."""
    padded = [_parts_of(g).map(lambda x, size: F.pad(x, (0, -x.numel() % size)), PART_SIZES) for g in gradients]
    return padded[0].map(lambda _, i: torch.cat([x for parts in padded if (x := parts[i]) is not None]), range(4))


def _split(flat: Parts, gradients: Sequence[QuantizedGradient]) -> None:
    """The inverse of `_concatenated`, into the gradients."""
    start = 0
    for gradient in gradients:
        for part, whole, size in zip(_parts_of(gradient), flat, PART_SIZES, strict=True):
            if part is not None and whole is not None:
                part.copy_(whole[start * size : start * size + part.numel()])
        start += num_blocks(gradient.codes.numel())


def _pieces_of(flat: Parts) -> Iterator[Parts]:
    """Consecutive blocks of flat parts, as views."""
    num = _PIECE_NUMEL // GRADIENT_BLOCK_SIZE
    for number in range(-(-flat.scales.numel() // num)):
        yield flat.map(lambda x, size: x.split(num * size)[number], PART_SIZES)  # noqa: B023 (used at once)


# --- small things ---


def _factor(op: Op, world: int) -> float:
    return 1.0 / world if op == "avg" else 1.0


def _settings(function: str, tensor: Tensor, op: Op, min_nbytes: int) -> Settings:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"function": function, "numel": tensor.numel(), "dtype": dtype, "op": op, "min_nbytes": min_nbytes}


def _check(tensor: Tensor, op: str) -> None:
    if tensor.dtype not in DTYPES:
        raise FormatError(
            f"the tensor is {tensor.dtype}, but it must be float32, bfloat16 or float16; convert it first"
        )
    if tensor.layout != torch.strided:
        raise FormatError(
            f"the tensor's layout is {tensor.layout}, but it must be dense; make gradients with sparse=False"
        )
    if op not in ("avg", "sum"):
        raise FormatError(f"op is {op!r}, but it must be 'avg' or 'sum'")


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if isinstance(group, TwoLevel):
        raise ConfigError("group is a TwoLevel, which only all_reduce_q8 takes; pass a process group")
    if group is None and not dist.is_initialized():
        raise ConfigError("group is None and no process group exists; call torch.distributed.init_process_group first")
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, dist.ProcessGroup):
        raise ConfigError("group does not contain this process; call on members of the group only")
    return found


def _run(job: Job[T], groups: Groups, device: torch.device, async_op: bool) -> T | Work[T]:
    return run_in_background(job, groups, device) if async_op else run_here(job, groups)
