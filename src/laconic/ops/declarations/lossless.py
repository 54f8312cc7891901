"""Lossless messages: the declarations."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.errors import FormatError
from laconic.ops.declarations.op import Arguments, declare, random_bytes, random_values
from laconic.ops.lossless import CODES, EXPONENT_DTYPES, HEADER_NBYTES, LAYOUTS, MAX_DIMS, dtype_names, max_nbytes


def check_lossless_encode(x: Tensor, code: str, capacity_nbytes: int | None) -> int:
    """Check the arguments of lossless_encode; return how many bytes it returns.

    Raises:
        FormatError: an argument breaks its rule; the message names field, value and rule.
    """
    if x.layout != torch.strided:
        raise FormatError(f"x.layout is {x.layout}, but it must be strided; encode its parts one by one")
    if x.dtype not in LAYOUTS:
        raise FormatError(f"x.dtype is {x.dtype}, but it must be one of {dtype_names()}; view other types as uint8")
    if code not in CODES:
        raise FormatError(f"code is {code!r}, but it must be one of {', '.join(CODES)}")
    num_dims = x.dim() + x.is_complex()
    if num_dims > MAX_DIMS:
        most = f"{MAX_DIMS - 1} of complex numbers" if x.is_complex() else str(MAX_DIMS)
        raise FormatError(f"x has {x.dim()} dimensions, but a message holds at most {most}; flatten x first")
    if capacity_nbytes is None:
        return max_nbytes(x.numel(), x.dtype)
    if capacity_nbytes < HEADER_NBYTES + 8 * num_dims:
        raise FormatError(
            f"capacity_nbytes is {capacity_nbytes}, but the header of a tensor of {x.dim()} dimensions takes"
            f" {HEADER_NBYTES + 8 * num_dims}; laconic.formats.lossless.max_nbytes is always enough"
        )
    return capacity_nbytes


def check_lossless_decode_(out: Tensor, message: Tensor, field: str = "out") -> tuple[()]:
    """Check the arguments of lossless_decode_, not the message's bytes; return the shape of the status.

    Raises:
        FormatError: an argument breaks its rule; the message names field, value and rule.
    """
    if out.dtype not in LAYOUTS:
        raise FormatError(f"{field}.dtype is {out.dtype}, but it must be one of {dtype_names()}")
    if out.layout != torch.strided or not out.is_contiguous():
        raise FormatError(f"{field} must be strided and contiguous, but its strides are not; decode into a new tensor")
    if message.dtype != torch.uint8 or message.dim() != 1 or not message.is_contiguous():
        raise FormatError(
            f"message is {message.dtype} with shape {tuple(message.shape)} and strides {message.stride()}, but it must"
            " be contiguous uint8 [nbytes]"
        )
    if message.device != out.device:
        raise FormatError(f"message is on {message.device} and {field} on {out.device}, but both must be on one device")
    return ()


def check_lossless_decode_add_(total: Tensor, message: Tensor) -> tuple[()]:
    """Check the arguments of lossless_decode_add_, not the message's bytes; return the shape of the status.

    Raises:
        FormatError: an argument breaks its rule; the message names field, value and rule.
    """
    if total.dtype != torch.float32:
        raise FormatError(f"total.dtype is {total.dtype}, but sums are float32; convert total first")
    return check_lossless_decode_(total, message, "total")


def _values_example(dtype: torch.dtype) -> Tensor:
    if dtype == torch.bool:  # other bytes than 0 and 1 change when they are copied
        return random_values(2 * 4096) > 0
    values = random_values(2 * 4096)
    values[4096:] = random_values(16, seed=1).repeat(256)  # a block of few values
    return values.to(dtype) if dtype.is_floating_point else random_bytes(8192 * dtype.itemsize).view(dtype)


def _encode_example(dtype: torch.dtype, code: str, has_capacity: bool) -> Arguments:
    x = _values_example(dtype)
    return x, code, x.nbytes + 128 if has_capacity else None


def _decode_example(dtype: torch.dtype) -> Arguments:
    x = _values_example(dtype)
    return torch.zeros_like(x), _message_example(x)


def _decode_add_example() -> Arguments:
    return random_values(8192, seed=8), _message_example(_values_example(torch.bfloat16))


def _message_example(x: Tensor) -> Tensor:
    from laconic.ops.reference.lossless import lossless_encode as encode  # which imports the checks above

    return encode(x, "tiered", None)


def _message(result: Tensor) -> Tensor:
    """What lies behind the message is undefined; its length is in its header."""
    return result[: int(result[16:24].cpu().view(torch.int64))]


_lossless_encode = declare(
    "lossless_encode(Tensor x, str code, SymInt? capacity_nbytes) -> Tensor",
    fake=lambda x, *a: x.new_empty(check_lossless_encode(x, *a), dtype=torch.uint8),
    example=_encode_example,
    choices_of=lambda x, code, capacity_nbytes: (x.dtype, code, capacity_nbytes is not None),
    examples=[
        *((dtype, "tiered", False) for dtype in EXPONENT_DTYPES),
        (torch.bfloat16, "window", True),
        (torch.bfloat16, "raw", False),
    ],
    significant=_message,
)


def lossless_encode(x: Tensor, *, code: str = "tiered", capacity_nbytes: int | None = None) -> Tensor:
    """The bytes of `x`, losslessly shortened: one message (docs/formats.md, "Lossless float format").

    Args:
        x: any shape of up to 8 dimensions, any strides; one of DTYPE_NUMBERS of ops/lossless.py.
        code: "tiered", "window" or "raw".
        capacity_nbytes: None, or the size of the result, which then depends on nothing else.

    Returns:
        uint8 [capacity_nbytes], or [max_nbytes(numel, dtype)] where that is None. The message is at the front and says
        how long it is: bytes 16 to 23, little-endian. With a capacity zeros follow, and a message that does not fit
        holds a header only, with code 255; without one the bytes behind the message are undefined. The length stays on
        the device: nothing waits for it.

    Raises:
        FormatError: an argument is outside of these values.
    """
    return _lossless_encode(x, code, capacity_nbytes)


_lossless_decode_ = declare(
    "lossless_decode_(Tensor(a!) out, Tensor message) -> Tensor",
    fake=lambda out, message: out.new_empty(check_lossless_decode_(out, message), dtype=torch.int32),
    example=_decode_example,
    choices_of=lambda out, message: (out.dtype,),
    examples=[(dtype,) for dtype in EXPONENT_DTYPES],
)


def lossless_decode_(out: Tensor, message: Tensor) -> Tensor:
    """Write the values of a message to `out`.

    Args:
        out: contiguous; the message's dtype and number of elements. Its shape need not be the message's.
        message: contiguous uint8 [capacity] or longer, on the same device, any bytes.

    Returns:
        The status, a 0-d int32 tensor on the device: 0 if the message was sound, else one of
        `laconic.ops.lossless.Status`; the values of `out` are then undefined. Nothing is read or written outside of the
        two tensors whatever the bytes are.

    Raises:
        FormatError: a tensor is not like this. What the message says never raises.
    """
    return _lossless_decode_(out, message)


_lossless_decode_add_ = declare(
    "lossless_decode_add_(Tensor(a!) total, Tensor message) -> Tensor",
    fake=lambda total, message: total.new_empty(check_lossless_decode_add_(total, message), dtype=torch.int32),
    example=_decode_add_example,
    choices_of=lambda total, message: (),
    examples=[()],
)


def lossless_decode_add_(total: Tensor, message: Tensor) -> Tensor:
    """Add the values of a message to `total`, in fp32: total[i] = fp32(total[i] + fp32(value i)), in one pass.

    Arguments, result and errors are those of `lossless_decode_`, but `total` is contiguous float32 whatever the
    message's dtype.
    """
    return _lossless_decode_add_(total, message)
