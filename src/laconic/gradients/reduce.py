"""Gradient reduction in 8 bits over the network.

Codes cannot be added in a collective: int8 wraps around and each block has a scale of its own. So a reduction is an
all-to-all of codes and scales, a sum in fp32 in rank order, and for an all-reduce one more quantization and an
all-gather of the result (AGoQ, section 4.2; ZeRO++, section 3.3). 4 bytes per element become 1.03, in each direction;
the error does not grow with the number of ranks, and all ranks end with the same bits. docs/gradients.md derives the
bound.

Bytes are sent over the transport of `laconic.collectives`, with its handshake, its chunks and its failure diagnosis.
Ranks quantize, sum and dequantize one chunk while another is being sent. The size of chunks does not change the result.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Literal, TypeVar, overload

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from laconic.collectives.arguments import Op, find_groups, flat_group
from laconic.collectives.codec import Blockwise, Raw
from laconic.collectives.engine.call import CollectiveCall, Exchange
from laconic.collectives.engine.chunks import all_gather_chunk, all_to_all_chunk, overlap
from laconic.collectives.engine.layouts import OneRank, TwoLevel, TwoLevelExchange
from laconic.collectives.engine.transport import Wire
from laconic.collectives.runtime import torch_compat
from laconic.collectives.runtime.background import Work
from laconic.errors import ConfigError, FormatError
from laconic.formats import BlockFormat, QuantizedGradient
from laconic.gradients.message import PART_SIZES, ChunkLayout, Parts, num_blocks
from laconic.ops import DTYPES, dequantize_blockwise, quantize_blockwise, sum_blockwise, sum_requantize_blockwise
from laconic.ops.codebooks import GRADIENT_BLOCK_SIZE

NATIVE_BELOW_NBYTES = 1 << 18
"""Tensors below this size are reduced by the native collective: their messages cost latency, not bytes."""

_CHUNK_NUMEL = 1 << 20
"""Elements per chunk: long enough to make latency negligible, short enough to fill the pipeline quickly.

Between two processes of one machine, half of it takes a third longer for 16 MB and more.
"""

_CODEC = Blockwise(BlockFormat("int8", GRADIENT_BLOCK_SIZE, torch.float32))
"""The codec that ranks compare in the handshake, which replaces a header in their messages."""

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

    Args:
        input: [W * n] or [W, n], fp32, bf16 or fp16, contiguous; chunk r goes to rank r. n may be anything, 0 too: each
            chunk is quantized by itself in blocks of 128, the last of which may be shorter.
        group: the default group if None. gloo and NCCL work; only bytes are sent.
        op: "avg" multiplies the fp32 sum by fp32(1 / W); "sum" does not.
        async_op: reduce in the background; leave `input` alone until the returned work was waited for.
        min_nbytes: an input of fewer bytes is summed in fp32 by the native reduce-scatter.

    Returns:
        The chunk, fp32 [n], or a `Work` whose wait() returns it. With one rank it is the input, exactly. A block in
        which any rank has NaN or infinity becomes NaN.

    Raises:
        FormatError: the input does not fit.
        ConfigError: ranks disagree about the call; raised on every rank.
    """
    world, groups = find_groups(flat_group("reduce_scatter_q8", group))
    _check(input, op)
    if input.dim() not in (1, 2) or (input.dim() == 2 and input.shape[0] != world) or input.numel() % world:
        raise FormatError(
            f"input has shape {tuple(input.shape)}, but the {world} ranks need [{world} * n] or [{world}, n];"
            " fill it up with zeros to equal chunks"
        )
    rows = input.detach().reshape(world, -1)
    chunk = torch.empty(rows.shape[1], device=input.device, dtype=torch.float32)
    call = CollectiveCall("reduce_scatter_q8", groups, _CODEC, torch.uint8, input.device)

    def reduce(exchange: Exchange | OneRank) -> None:
        if isinstance(exchange, OneRank):
            chunk.copy_(rows[0])
            return
        if input.numel() == 0:
            return
        wire = exchange.wire(**_settings(input, op, min_nbytes))
        if input.nbytes < min_nbytes:
            wire.agree()
            torch_compat.reduce_scatter(chunk, rows.float().contiguous(), exchange.group).wait()
            chunk.mul_(_factor(op, world))
            return
        step = -(-_CHUNK_NUMEL // world // GRADIENT_BLOCK_SIZE) * GRADIENT_BLOCK_SIZE
        columns = [slice(start, start + step) for start in range(0, rows.shape[1], step)]
        overlap(_reduce_scatter_chunk(wire, rows[:, part], chunk[part], _factor(op, world)) for part in columns)

    return _result(call.run(reduce, chunk, async_op), async_op)


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

    Args:
        tensor: [...], fp32, bf16 or fp16, any number of elements.
        group: the default group if None; `TwoLevel` reduces inside each node first.
        op: "avg" multiplies the fp32 sum by fp32(1 / W); "sum" does not.
        async_op: reduce in the background; leave `tensor` alone until the returned work was waited for.
        min_nbytes: a tensor of fewer bytes is summed by the native all-reduce, in its own type.
        error: fp32 [numel], what this rank's codes have lost so far (error feedback): added before they are made, and
            replaced by what they lose now; 0 where that is not finite. Not with TwoLevel.

    Returns:
        `tensor`, or a `Work` whose wait() returns it. With one rank it is left as it is. A block (128 elements in the
        tensor's order) in which any rank has NaN or infinity becomes NaN on all ranks.

    Raises:
        FormatError: a tensor does not fit.
        ConfigError: ranks disagree about the call (raised on every rank), or `error` is given with TwoLevel.
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
    _, groups = find_groups(group)
    call = CollectiveCall("all_reduce_q8", groups, _CODEC, torch.uint8, tensor.device)
    settings = _settings(tensor, op, min_nbytes) | {"feedback": error is not None}
    values = tensor.detach()

    def reduce(exchange: Exchange | TwoLevelExchange | OneRank) -> None:
        if isinstance(exchange, OneRank):
            return
        flat = values.contiguous().resolve_neg().view(-1)  # the backend reads memory
        if isinstance(exchange, TwoLevelExchange):
            _all_reduce_two_level(flat, exchange.node, exchange.cluster, op, settings, min_nbytes)
        else:
            _all_reduce_flat(flat, exchange, _factor(op, exchange.world), settings, min_nbytes, error)
        if flat.data_ptr() != values.data_ptr():
            values.copy_(flat.view_as(values))

    return _result(call.run(reduce, tensor, async_op), async_op)


def all_reduce_quantized(
    gradients: Sequence[QuantizedGradient], group: dist.ProcessGroup | None = None, *, average: bool = True
) -> Work[None]:
    """Reduce gradients that are stored in 8 or 12 bits, in place, in the background; the same bits on every rank.

    The stored codes are what is sent: nothing is quantized before. They are summed in fp32 in rank order, and the sum
    is quantized once, into the same gradients. All of them make one message each way, or a few chunks.

    Args:
        gradients: of one number of bits, all on one device, in the same order on every rank.
        group: the default group if None.
        average: multiply the sum by fp32(1 / W).

    Returns:
        A `Work`; leave the gradients alone until its wait() has returned. wait() raises ConfigError, on every rank,
        when ranks disagree about the call. With one rank the gradients stay as they are.

    Raises:
        FormatError: the gradients do not go together.
    """
    _, groups = find_groups(flat_group("all_reduce_quantized", group))
    bits = {gradient.bits for gradient in gradients}
    devices = {gradient.codes.device for gradient in gradients}
    if len(bits) > 1 or len(devices) > 1:
        what, found = ("bits", bits) if len(bits) > 1 else ("devices", devices)
        raise FormatError(
            f"gradients have {what} {', '.join(map(str, sorted(found, key=str)))}, but those of one call must have one;"
            " call once for each"
        )
    numel = sum(gradient.codes.numel() for gradient in gradients)
    call = CollectiveCall("all_reduce_quantized", groups, _CODEC, torch.uint8, next(iter(devices), torch.device("cpu")))

    def reduce(exchange: Exchange | OneRank) -> None:
        if numel == 0 or isinstance(exchange, OneRank):
            return
        wire = exchange.wire(bits=next(iter(bits)), num_gradients=len(gradients), numel=numel, average=average)
        flat = _concatenated(gradients)
        factor = _factor("avg" if average else "sum", exchange.world)
        overlap(_codes_chunk(wire, chunk, factor) for chunk in _chunks_of(flat))
        _split(flat, gradients)

    return call.run(reduce, None, async_op=True)


# --- whole tensors ---


def _all_reduce_flat(
    flat: Tensor, exchange: Exchange, factor: float, settings: _Settings, min_nbytes: int, error: Tensor | None
) -> None:
    if exchange.world == 1 or flat.numel() == 0:
        return
    wire = exchange.wire(**settings)
    if flat.nbytes < min_nbytes:
        wire.agree()
        if error is not None:
            flat.add_(error)
            error.zero_()
        torch_compat.all_reduce(flat, exchange.group).wait()
        flat.mul_(factor)
        return
    chunks = flat.split(_CHUNK_NUMEL)
    errors = [None] * len(chunks) if error is None else error.split(_CHUNK_NUMEL)
    overlap(_values_chunk(wire, x, factor, lost) for x, lost in zip(chunks, errors, strict=True))


def _all_reduce_two_level(
    flat: Tensor, node: Exchange, cluster: Exchange, op: Op, settings: _Settings, min_nbytes: int
) -> None:
    """Native reduce-scatter in fp32 inside the node, 8 bits across, native all-gather of the result."""
    if flat.numel() == 0:
        return
    node.wire(**settings).agree()
    chunk_numel = -(-flat.numel() // node.world)
    rows = F.pad(flat.float(), (0, chunk_numel * node.world - flat.numel()))
    chunk = torch.empty(chunk_numel, device=flat.device, dtype=torch.float32)
    torch_compat.reduce_scatter(chunk, rows.view(node.world, -1), node.group).wait()
    _all_reduce_flat(chunk, cluster, _factor(op, node.world * cluster.world), settings, min_nbytes, None)
    if cluster.world == 1:
        chunk.mul_(_factor(op, node.world))
    chunk = chunk.to(flat.dtype)
    gathered = chunk.new_empty(node.world, chunk_numel)
    torch_compat.all_gather(gathered, chunk, node.group).wait()
    flat.copy_(gathered.view(-1)[: flat.numel()])


def _parts_of(gradient: QuantizedGradient) -> Parts:
    return Parts(gradient.codes, gradient.scales, gradient.residual_codes, gradient.residual_scales)


def _concatenated(gradients: Sequence[QuantizedGradient]) -> Parts:
    """All gradients as one, each padded with zeros to whole blocks."""
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


def _chunks_of(flat: Parts) -> Iterator[Parts]:
    """Views of consecutive blocks of flat parts, one per chunk."""
    num = _CHUNK_NUMEL // GRADIENT_BLOCK_SIZE
    for number in range(-(-flat.scales.numel() // num)):
        yield flat.map(lambda x, size: x.split(num * size)[number], PART_SIZES)  # noqa: B023 (used at once)


# --- one chunk ---


def _reduce_scatter_chunk(wire: Wire, rows: Tensor, out: Tensor, factor: float) -> Iterator[None]:
    """Reduce columns of every rank's rows [W, m] into `out` fp32 [m]."""
    message = ChunkLayout(rows.shape[1], bits=8)
    sent = message.zeros(len(rows), rows.device)
    codes, scales = _quantize(rows)
    views = message.parts(sent)
    views.codes.copy_(codes)
    views.scales.copy_(scales)
    received = torch.empty_like(sent)
    yield from all_to_all_chunk(wire, Raw(), received, sent)
    out.copy_(sum_blockwise(*message.parts(received), factor=factor))


def _values_chunk(wire: Wire, x: Tensor, factor: float, error: Tensor | None) -> Iterator[None]:
    """Replace flat values x [m] by their reduction."""
    exact = x if error is None else x.float() + error
    parts = Parts(*_quantize(exact))
    if error is not None:
        error.copy_((exact - _dequantize(parts, torch.float32)).nan_to_num_(0.0, 0.0, 0.0))
    reduced = yield from _sum_everywhere(wire, parts, factor)
    x.copy_(_dequantize(reduced, x.dtype))


def _codes_chunk(wire: Wire, parts: Parts, factor: float) -> Iterator[None]:
    """Replace flat codes and scales by those of their reduction."""
    reduced = yield from _sum_everywhere(wire, parts, factor)
    for old, new in zip(parts, reduced, strict=True):
        if old is not None and new is not None:
            old.copy_(new)


def _sum_everywhere(wire: Wire, parts: Parts, factor: float) -> Generator[None, None, Parts]:
    """Sum flat parts of m elements over ranks, times `factor`, and return the sum's parts on every rank."""
    world, length, device = wire.group.size(), parts.codes.numel(), parts.codes.device
    # Equal chunks of whole blocks; those of the last ranks may hold nothing.
    message = ChunkLayout(
        -(-num_blocks(length) // world) * GRADIENT_BLOCK_SIZE, 8 if parts.residual_codes is None else 12
    )
    sent = message.zeros(world, device)
    message.write(parts, sent)
    received = torch.empty_like(sent)
    yield from all_to_all_chunk(wire, Raw(), received, sent)
    mine = message.zeros(1, device)
    message.write(Parts(*sum_requantize_blockwise(*message.parts(received), factor=factor)), mine)
    yield from all_gather_chunk(wire, Raw(), mine[0], received)
    return message.read(received, length)


def _quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    return quantize_blockwise(x, code="int8", block_size=GRADIENT_BLOCK_SIZE, scale_dtype=torch.float32)


def _dequantize(parts: Parts, dtype: torch.dtype) -> Tensor:
    length = parts.codes.numel()
    return dequantize_blockwise(
        parts.codes, parts.scales, length=length, code="int8", block_size=GRADIENT_BLOCK_SIZE, dtype=dtype
    )


# --- helpers ---


def _factor(op: Op, world: int) -> float:
    return 1.0 / world if op == "avg" else 1.0


_Settings = dict[str, str | int]


def _settings(tensor: Tensor, op: Op, min_nbytes: int) -> _Settings:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"dtype": dtype, "numel": tensor.numel(), "op": op, "min_nbytes": min_nbytes}


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


def _result(work: Work[T], async_op: bool) -> T | Work[T]:
    return work if async_op else work.wait()
