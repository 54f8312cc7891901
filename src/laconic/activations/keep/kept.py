"""What stands in for a tensor between forward and backward.

[Note: kept tensors]
`Kept` is a small set of tensors that autograd saves instead of a large one, plus the rule that rebuilds the large one:

    x  = norm input           Kept(codes, scales)                        x^ = dequantize(codes, scales)
    y  = norm(x)              Kept(codes, scales, weight, bias)          y^ = norm(x^)
    g  = gate projection      Kept(codes, scales)                        g^ = dequantize(codes, scales)
    z  = act(g) * u           Kept(codes_g, scales_g, codes_u, scales_u) z^ = act(g^) * u^
    o  = attention output     Kept(o): the attention already holds it, so a second copy would cost bytes for nothing

A `Kept` travels on the tensor it stands for, as an attribute of the Python object. So the linear after a norm finds out
that its input can be rebuilt, whatever model it sits in, and the note disappears together with the tensor.

What rebuilds a value is told the gradient that it is wanted for (`after`). In eager mode that changes nothing. In a
compiled graph the value then depends on the gradient, so forward cannot compute it and save it in place of the codes.

One value is often wanted several times in backward (by the query, key and value projections, then by the norm), so a
rebuilt value stays until its last reader has had it: that is what `Memo` is for.

A tensor may be written in ways that torch does not count: by NumPy, through `.data`, by a collective or a kernel of
one's own. So a note holds some of its values, and who finds it compares (keep.witnesses): where they
differ, the reader packs what it really got. A batch, or any other tensor without gradient, moreover outlives the step,
and other models read it: a note on it is read within one root forward only, ends with the graph that it was written
for, or with the first value taken from it. Codes with fewer bits than a reader asks for are not read by it, whatever
tensor they are noted on.
"""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import attrgetter

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from laconic.activations.host.audited import AUDITED
from laconic.activations.host.dtensors import Placed, local_of
from laconic.activations.host.storages import place_of
from laconic.activations.host.streams import record_reader, stream_of
from laconic.activations.host.traceable import untraced
from laconic.activations.keep.choice import Offload, Packing, block_format_of
from laconic.activations.keep.exact_codes import MemoryLayout
from laconic.activations.keep.offload import offloader_of
from laconic.activations.keep.rounding import quantized
from laconic.activations.keep.witnesses import (
    RUNNING,
    Glances,
    Witness,
    check_unchanged,
    glance,
    glances,
    root,
    same,
    witness_of,
)
from laconic.formats import BlockFormat, BlockTensor
from laconic.ops import BITS

Tensors = tuple[Tensor, ...]

_ATTRIBUTE = "_laconic_kept"
_LINEAR = "_laconic_linear"

# Backward nodes of torch that save their own output, so that a reference to it costs no bytes: those of attention, and
# others, unless hooks pack what they save. Not that of relu, whose output may be saved as bits.
_ATTENTIONS = frozenset(
    {
        "ScaledDotProductFlashAttentionForCpuBackward0",
        "ScaledDotProductFlashAttentionBackward0",
        "ScaledDotProductEfficientAttentionBackward0",
        "ScaledDotProductCudnnAttentionBackward0",
    }
)
_SAVES_ITS_OUTPUT = _ATTENTIONS | {
    "ExpBackward0",
    "LogSoftmaxBackward0",
    "ReciprocalBackward0",
    "RsqrtBackward0",
    "SigmoidBackward0",
    "SoftmaxBackward0",
    "SqrtBackward0",
    "TanhBackward0",
}


class Memo:
    """Rebuilds a value once for all its readers in a backward pass.

    Readers `announce` themselves in forward and `take` once in backward, or `leave`; the last one frees the value. In
    further passes over a retained graph every `take` rebuilds.

    Args:
        rebuild: from the saved tensors, and the incoming gradient, to the value.
        inner: memos that `rebuild` takes from.
        makes_new: every value of `rebuild` is a tensor that nothing else refers to.
    """

    # Slots, and objects in the place of closures: what a graph holds counts for Python's garbage collector, which looks
    # at all of the process whenever enough has been made.
    __slots__ = ("__weakref__", "_inner", "_readers", "_rebuild", "_value", "makes_new", "was_taken")

    def __init__(
        self,
        rebuild: Callable[[Tensors, Tensor | None], Tensor],
        inner: tuple[Memo, ...] = (),
        *,
        makes_new: bool = False,
    ) -> None:
        self._rebuild = rebuild
        self.makes_new = makes_new
        self._inner = inner
        self._readers = 0
        self._value: Tensor | None = None
        self.was_taken = False

    def announce(self) -> None:
        """Register one more reader, in forward."""
        if not self._readers:
            for memo in self._inner:
                memo.announce()
        self._readers += 1

    def leave(self) -> None:
        """Do without the value, in backward, as a reader that announced itself."""
        self._readers -= 1
        if self._readers == 0 and self._value is None:
            for memo in self._inner:
                memo.leave()
        if self._readers <= 0:
            self._value = None

    def take(self, tensors: Tensors, after: Tensor | None = None) -> Tensor:
        """The value, rebuilt from the saved `tensors` unless an earlier reader had it rebuilt.

        Args:
            tensors: saved for it.
            after: the incoming gradient of the reader's backward.
        """
        value = self._value
        if value is None:
            value = self._rebuild(tensors, after)
            if value.dtype is torch.float16:
                value = in_range(value)
        self.was_taken = True
        self._readers -= 1
        self._value = value if self._readers > 0 else None
        return value

    def then(self, function: Callable[[Tensor], Tensor]) -> Memo:
        """Rebuilds `function` of a value of its own, which it may change where this one `makes_new`."""
        return Memo(partial(_applied, function, self._rebuild), self._inner)


def _applied(
    function: Callable[[Tensor], Tensor],
    rebuild: Callable[[Tensors, Tensor | None], Tensor],
    tensors: Tensors,
    after: Tensor | None,
) -> Tensor:
    return function(rebuild(tensors, after))


def in_range(value: Tensor) -> Tensor:
    """Clamp a rebuilt fp16 value whose rounding left the range of its dtype; other dtypes have room enough."""
    if value.dtype is not torch.float16:
        return value
    largest = torch.finfo(torch.float16).max
    return value.clamp(-largest, largest)


class Kept:
    """The saved `tensors` from which the `memo` rebuilds a value, and its `origin`, a kind of site.

    Packed codes of the value itself say in how many `bits`; None for what is exact or computed from other values. Codes
    and scales that lie on the value's device say their `format`, and the output of an activation its `gate`. What was
    packed has a `witness`.
    """

    __slots__ = ("bits", "format", "gate", "memo", "origin", "tensors", "witness")

    def __init__(
        self,
        tensors: Tensors,
        memo: Memo,
        origin: str,
        bits: int | None = None,
        format: BlockFormat | None = None,
        gate: GateInput | None = None,
        witness: Witness | None = None,
    ) -> None:
        self.tensors, self.memo, self.origin = tensors, memo, origin
        self.bits, self.format, self.gate, self.witness = bits, format, gate, witness

    def with_memo(self, memo: Memo) -> Kept:
        """The same, rebuilt by another memo."""
        return Kept(self.tensors, memo, self.origin, self.bits, self.format, self.gate, self.witness)


@dataclass(frozen=True)
class GateInput:
    """What an activation read, for a product that computes the gradient of this itself.

    Attributes:
        kept: packs the activation's input.
        activation: its name.
        forward: computes it.
        edge: shape and dtype of the input and no memory; its gradient is that of the input.
    """

    kept: Kept
    activation: str
    forward: Callable[[Tensor], Tensor]
    edge: Tensor


class _OfThisTensor:
    """Base of attributes that are about a tensor in this process.

    Copies and files of the tensor go without them, and files stay loadable with weights_only=True.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return OrderedDict, ()


_MARK = _OfThisTensor()


class _Note(_OfThisTensor):
    """The attribute on a tensor: `kept` rebuilds it as long as it holds what it held.

    Args:
        x: the tensor.
        kept: rebuilds it.
        lasts: as long as the tensor; otherwise until the root forward ends in which it was written, or the graph is
            gone that `kept` was made for, or is read.
        values: `glance(x)`.
    """

    __slots__ = ("__weakref__", "_address", "_kept", "_memo", "_numel", "_root", "_values", "_version")

    def __init__(self, x: Tensor, kept: Kept, values: bytes | Tensor | None, *, lasts: bool) -> None:
        self._version = x._version
        self._values = values
        if values is not None:
            self._address, self._numel = x.data_ptr(), x.numel()
        self._root = None if lasts or values is None else root()
        self._kept: Kept | None = kept
        self._memo: weakref.ref[Memo] | None = None
        if not lasts:
            # The graph holds the memo of what it saved. The note must not, nor the codes when the memo is gone.
            self._kept = kept.with_memo(_GONE)
            self._memo = weakref.ref(kept.memo, self._end)

    def about(self, x: Tensor) -> Kept | None:
        """What rebuilds `x`, the tensor or a full view of it; None if it holds other values, or the note has ended."""
        if self._version != x._version:
            return None
        values = self._values
        if values is not None:  # there are none in a graph that is traced, which sees all writes
            if self._root is not None and self._root is not root():
                return None
            if self._address != x.data_ptr() or self._numel != x.numel():
                return None
            now = glance(x)
            if (type(now) is not bytes or now != values) and not same(values, x):
                return None
        return self._kept if self._memo is None else self.unended()

    def unended(self) -> Kept | None:
        if self._kept is None or self._memo is None:
            return self._kept
        memo = self._memo()
        if memo is None or memo.was_taken:
            self._kept = None
            return None
        return self._kept.with_memo(memo)

    def _end(self, _: object) -> None:
        self._kept = None


def _no_value(tensors: Tensors, after: Tensor | None) -> Tensor:
    raise AssertionError("a note that has ended was read")


_GONE = Memo(_no_value)


Quantize = Callable[[Tensor, BlockFormat], BlockTensor | None]
"""(x, format) -> what `quantized` makes of x; None where that has to make it itself."""


@untraced
def keep(
    x: Tensor,
    format: Packing,
    origin: str,
    quantize: Quantize | None = None,
    pack_as: Callable[[Tensor, Packing, str], Kept] | None = None,
) -> Kept:
    """The `Kept` of `x`: what is saved for it already, the tensor its producer holds anyway, or packed codes.

    Args:
        x: floating-point tensor of any shape; of a DTensor what this rank holds is packed.
        format: how to pack it if it has to be packed.
        origin: kind of the site that asks.
        quantize: makes the codes in the place of `quantized`.
        pack_as: packs in the place of `pack`, and reads no codes but its own.
    """
    kept = known(x)
    is_other = pack_as is not None and kept is not None and kept.origin != origin
    if kept is None or (kept.bits is not None and (is_other or kept.bits < _bits(format))):
        local = x if type(x) is Tensor else local_of(x)
        kept = pack(local, format, origin, quantize=quantize) if pack_as is None else pack_as(local, format, origin)
        if kept.bits is not None and not ((x.is_leaf or local is not x) and _is_reused(x)):
            if local is x:
                _write(x, kept, lasts=x.requires_grad)
            else:
                _share(local, kept, lasts=x.requires_grad)
        if local is not x:
            kept = _placed(kept, x)
    return kept


@untraced
def keep_rows(x: Tensor, format: Packing, *, has_mean: bool) -> Kept:
    """The `Kept` of the input of a norm over the last dimension.

    The norm divides each row by its own deviation, and so the error of its rounding: a block shared with a larger row,
    or an offset of many deviations, would leave nothing but error. So each row has blocks of its own, around its mean.

    Args:
        x: [..., features].
        format: how to pack it if it has to be packed.
        has_mean: whether the norm subtracts the mean of a row.
    """
    return keep(x, format, "norm", pack_as=partial(_pack_rows, has_mean))


def _pack_rows(has_mean: bool, x: Tensor, format: Packing, origin: str) -> Kept:
    if not has_mean:
        return pack(x, format, origin, may_share=False)
    values = x.detach()
    if type(x) is Tensor and _known_size(x.shape, block_format_of(format), False)[1] >= x.nbytes:
        return held(values, origin)
    if x.is_cuda:
        record_reader(x)
    mean = values.mean(-1, keepdim=True)
    # A difference may leave the range of float16.
    flat = pack((values.float() if x.dtype is torch.float16 else values) - mean, format, origin, may_share=False)
    return as_packed(derive(partial(_around, x.dtype), (flat,), (mean,), origin), flat)


def _around(dtype: torch.dtype, x: Tensor, mean: Tensor) -> Tensor:
    return (x + mean).to(dtype)


def _share(x: Tensor, kept: Kept, *, lasts: bool) -> None:
    """Note that `kept` rebuilds what this rank holds of a DTensor, and the tensor that one was made from.

    Each layer makes a DTensor of its own, whose local part is a view of the same tensor.
    """
    _write(x, kept, lasts=lasts)
    whole = whole_of(x)
    if whole is x:
        return
    if whole.shape == x.shape:
        _write(whole, kept, lasts=lasts)
    elif lasts:  # or nobody would hold what the note refers to
        _write(whole, derive(_Reshaped(whole.shape), (kept,), (), kept.origin), lasts=True)


def _placed(kept: Kept, x: Tensor) -> Kept:
    """The `Kept` of `x` from that of what this rank holds of it."""
    if not isinstance(x, DTensor):
        return kept
    return as_packed(derive(Placed.of(x), (kept,), (), kept.origin), kept)


def as_packed(derived: Kept, kept: Kept) -> Kept:
    """What rebuilds the same values as `kept`, in as many bits."""
    derived.bits = kept.bits
    return derived


def _bits(format: Packing) -> int:
    return BITS[block_format_of(format).code]


def known(x: Tensor, *, by_hooks: bool = False) -> Kept | None:
    """What is saved for `x` already, or the tensor its producer holds anyway; None if there is neither.

    Args:
        x: floating-point tensor of any shape.
        by_hooks: whether hooks ask, which may pack what the producer of x saves, but for attention.
    """
    kept = None if (x.is_leaf or type(x) is not Tensor) and _is_reused(x) else found(x)
    if kept is not None:
        return kept
    local = x if type(x) is Tensor else local_of(x)
    if _producer_holds(local, _ATTENTIONS if by_hooks else _SAVES_ITS_OUTPUT):
        return _placed(held(local, "attention"), x)
    return None


def _is_reused(x: Tensor) -> bool:
    # A leaf may be filled again without torch counting it as a change: pipelines receive the hidden states of each step
    # into one tensor. What was kept of it last time must not be found again.
    if type(x) is not Tensor and isinstance(x, DTensor):
        # Its local part says nothing about itself, but may be a view of such a leaf.
        local = local_of(x)
        whole = whole_of(local)
        return (x if whole is local else whole).is_leaf and x.requires_grad
    return x.is_leaf and x.requires_grad


def whole_of(x: Tensor) -> Tensor:
    """The tensor that `x` is a full view of, as logits of all tokens are a slice; else `x`."""
    base = x._base
    is_full = base is not None and x.numel() == base.numel() and x.is_contiguous() and base.is_contiguous()
    return base if is_full and base is not None else x


def mark_as_linear(y: Tensor) -> None:
    """Note on the output of a linear layer, and on the tensor it is a view of, that it is one."""
    setattr(y, _LINEAR, _MARK)
    if y._base is not None:
        setattr(y._base, _LINEAR, _MARK)


def is_linear(x: Tensor) -> bool:
    """Whether `x` is what a site has made, a linear layer above all, or a part of it."""
    source = x if x._base is None else x._base  # gate and up may be parts of what one layer made
    return hasattr(source, _LINEAR) or getattr(source.grad_fn, "origin", None) is not None


def found_or_held(x: Tensor) -> Kept:
    """The `Kept` of `x`, or else one that holds `x` itself, for a value that another function holds anyway."""
    return found(x) or held(x, "linear")


def held(x: Tensor, origin: str) -> Kept:
    """The `Kept` that holds `x` itself."""
    return Kept((x,), Memo(_itself), origin)


@untraced
def pack(
    x: Tensor,
    format: Packing,
    origin: str,
    layout: MemoryLayout | None = None,
    quantize: Quantize | None = None,
    *,
    may_share: bool = True,
) -> Kept:
    """Packed codes and scales of `x`, whatever else is kept for it; in host memory if `format` says so.

    Rows much shorter than a block share blocks with their neighbours. What would not become smaller is kept as it is.

    Args:
        x: [..., L].
        format: how to pack it.
        origin: kind of the site that asks.
        layout: of the tensor to rebuild, whose values in memory order x holds; None for x itself.
        quantize: makes the codes in the place of `quantized`; not asked where x stays as it is or has a stand-in.
        may_share: whether short rows may share blocks.
    """
    block_format = block_format_of(format)
    is_plain = type(x) is Tensor
    is_traced = not is_plain and torch.compiler.is_compiling()
    # Only plain tensors have shapes that are numbers for certain.
    find_size = _known_size if is_plain else _packed_size
    shares, packed_nbytes = find_size(x.shape, block_format, may_share)
    if not is_traced and packed_nbytes >= x.numel() * x.element_size():
        return Kept((x,), Memo(_itself if layout is None else partial(_laid_out, layout)), origin)
    if x.is_cuda:
        record_reader(x)
    laid_out: Callable[[Tensor], Tensor] | None = None
    if layout is not None:
        laid_out = layout.unflatten
    elif shares:
        laid_out = _Reshaped(x.shape)
    if shares:
        x = x.reshape(-1)
    if AUDITED.values is not None:
        return _stood_in(AUDITED.values(x.detach(), block_format), laid_out, origin, block_format.bits)
    packed = quantize(x.detach(), block_format) if quantize is not None else None
    if packed is None and block_format.is_stochastic:
        packed = quantized(x.detach(), block_format)
    elif packed is None:
        packed = block_format.quantize(x.detach())
    witness = witness_of(x, packed.scales, block_format, origin) if RUNNING.watches else None
    saved: Tensors = (packed.codes, packed.scales)
    fetch: Callable[[Tensors], Tensors] | None = None
    # torch.compile traces on tensors of other classes; its graphs keep them on the device.
    if isinstance(format, Offload) and type(packed.codes) is Tensor:
        offloader = offloader_of(x.device)
        saved, handle = offloader.send(saved)
        fetch = partial(offloader.fetch, handle=handle)
    # Gated products are made from codes of such tensors only.
    is_whole = fetch is None and not shares and not block_format.is_stochastic
    gated_format = block_format if is_whole else None
    dequantize = _Dequantized(block_format, x.shape, x.dtype, witness, fetch, laid_out)
    return Kept(saved, Memo(dequantize), origin, BITS[block_format.code], gated_format, None, witness)


class _Dequantized:
    """Rebuilds a value from its codes and scales."""

    __slots__ = ("_dtype", "_fetch", "_format", "_laid_out", "_shape", "_witness")

    def __init__(
        self,
        format: BlockFormat,
        shape: torch.Size,
        dtype: torch.dtype,
        witness: Witness | None,
        fetch: Callable[[Tensors], Tensors] | None,
        laid_out: Callable[[Tensor], Tensor] | None,
    ) -> None:
        self._format, self._shape, self._dtype = format, shape, dtype
        self._witness, self._fetch, self._laid_out = witness, fetch, laid_out

    def __call__(self, tensors: Tensors, after: Tensor | None) -> Tensor:
        codes, scales = tensors if self._fetch is None else self._fetch(tensors)
        values = BlockTensor(codes, scales, self._format, self._shape, self._dtype).dequantize(after=after)
        if self._witness is not None:
            self._witness.saw(values, scales)
        return values if self._laid_out is None else self._laid_out(values)


def _stood_in(value: Tensor, laid_out: Callable[[Tensor], Tensor] | None, origin: str, bits: int) -> Kept:
    """What `pack` returns in an audit that keeps a value in the place of codes, and of scales a zero."""

    def rebuild(tensors: Tensors, after: Tensor | None) -> Tensor:
        value = tensors[0].clone()  # readers may change what they take
        return value if laid_out is None else laid_out(value)

    storage = value.untyped_storage()
    AUDITED.stand_ins[storage._cdata] = StorageWeakRef(storage)
    return Kept((value, value.new_zeros(1)), Memo(rebuild), origin, bits)


def _packed_size(shape: torch.Size, format: BlockFormat, may_share: bool) -> tuple[bool, int]:
    """Whether rows share blocks, and the bytes of codes and scales."""
    shares = may_share and _has_short_rows(shape, format)
    return shares, format.nbytes((shape.numel(),) if shares else shape)


_known_size = lru_cache(maxsize=1024)(_packed_size)


def _has_short_rows(shape: torch.Size, format: BlockFormat) -> bool:
    """Whether blocks of their own would cost rows an eighth more than shared ones, as rows of one value do."""
    if len(shape) < 2:
        return False
    length = shape[-1]
    row = math.ceil(length / format.block_size) * format.block_size
    return length < row and 8 * format.nbytes((length,)) * row > 9 * length * format.nbytes((row,))


def _itself(tensors: Tensors, after: Tensor | None) -> Tensor:
    return tensors[0]


def _laid_out(layout: MemoryLayout, tensors: Tensors, after: Tensor | None) -> Tensor:
    return layout.unflatten(tensors[0])


def derive(
    function: Callable[..., Tensor],
    inner: tuple[Kept, ...],
    parameters: Tensors,
    origin: str,
    *,
    makes_new: bool = False,
) -> Kept:
    """The `Kept` of a value that `function` makes of other kept values, followed by `parameters`.

    With `makes_new` every value of `function` is a tensor that nothing else refers to.
    """
    memos, tensors = tuple(map(_MEMO, inner)), tuple(map(_TENSORS, inner))
    rebuild = _Derived(function, memos, tuple(map(len, tensors)), glances(parameters))
    return Kept(sum((*tensors, parameters), ()), Memo(rebuild, memos, makes_new=makes_new), origin)


_MEMO, _TENSORS = attrgetter("memo"), attrgetter("tensors")


class _Derived:
    """Computes a value from other kept values, and parameters that have not changed."""

    __slots__ = ("_counts", "_function", "_glances", "_memos")

    def __init__(
        self, function: Callable[..., Tensor], memos: tuple[Memo, ...], counts: tuple[int, ...], seen: Glances
    ) -> None:
        self._function, self._memos, self._counts, self._glances = function, memos, counts, seen

    def __call__(self, tensors: Tensors, after: Tensor | None) -> Tensor:
        parameters = tensors[sum(self._counts) :]
        if parameters:
            check_unchanged(self._glances, parameters)
        return self._function(*take_all(self._memos, self._counts, tensors, after), *parameters)


class _Reshaped:
    """A function that gives a value another shape."""

    __slots__ = ("_shape",)

    def __init__(self, shape: torch.Size) -> None:
        self._shape = shape

    def __call__(self, value: Tensor) -> Tensor:
        return value.reshape(self._shape)


def take_all(
    memos: tuple[Memo, ...], counts: tuple[int, ...], tensors: Tensors, after: Tensor | None = None
) -> list[Tensor]:
    """The values of several memos whose saved tensors are concatenated, `counts` of them for each."""
    values = []
    start = 0
    for memo, count in zip(memos, counts, strict=True):
        values.append(memo.take(tensors[start : start + count], after))
        start += count
    return values


@untraced
def attach(x: Tensor, kept: Kept) -> None:
    """Note on `x` that `kept` rebuilds it: functions that would save `x` for backward save `kept.tensors` instead.

    On a DTensor the note is on what this rank holds of it.
    """
    local = x if type(x) is Tensor else local_of(x)
    _write(local, kept if local is x else derive(local_of, (kept,), (), kept.origin), lasts=x.requires_grad)


def _attribute(x: Tensor) -> str:
    """Name of the attribute that has the note of the current stream on a plain tensor."""
    stream = stream_of(x) if x.is_cuda else None
    return _ATTRIBUTE if stream is None else f"{_ATTRIBUTE}_{stream.cuda_stream}"


def _write(x: Tensor, kept: Kept, *, lasts: bool) -> None:
    """The note of `attach` on a plain tensor; none on one without gradient that is read outside of a root forward."""
    values = glance(x)
    if values is None or lasts or root() is not None:
        setattr(x, _attribute(x) if x.is_cuda else _ATTRIBUTE, _Note(x, kept, values, lasts=lasts))


@untraced
def found(x: Tensor) -> Kept | None:
    """The `Kept` of `x`, or of a tensor that `x` is a full view of (logits of all tokens are a slice), or None."""
    if type(x) is not Tensor and (local := local_of(x)) is not x:
        kept = found(local)
        return None if kept is None else _placed(kept, x)
    attribute = _attribute(x) if x.is_cuda else _ATTRIBUTE
    note = getattr(x, attribute, None)
    if note is not None:
        return note.about(x) if isinstance(note, _Note) else None
    note = None if x._base is None else getattr(whole_of(x), attribute, None)
    kept = note.about(x) if isinstance(note, _Note) else None
    return None if kept is None else as_packed(derive(_Reshaped(x.shape), (kept,), (), kept.origin), kept)


def _producer_holds(x: Tensor, nodes: frozenset[str]) -> bool:
    """Whether the function that made `x` saves the very same storage for its own backward."""
    output = x._base if x._base is not None else x
    node = output.grad_fn
    name = type(node).__name__  # in a tenth of the time of `node.name()`
    if node is None or (name not in nodes and name != "CompiledFunctionBackward"):
        return False
    place = place_of(x)
    if not place or place_of(output) != place:
        return False
    if name in nodes:
        return True
    # A compiled graph shows what it saved, not what it ran. Under saved-tensor hooks reading would unpack, which
    # in a checkpointed region means to run it again.
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return False
    saved: tuple[Tensor | None, ...] = getattr(node, "saved_tensors", ())
    return any(tensor is not None and place_of(tensor) == place for tensor in saved)
