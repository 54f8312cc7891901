"""One bit per value: the declarations."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.errors import FormatError
from laconic.ops.declarations.op import DIRECT, declare, is_direct, names, random_bytes, random_values

MASK_DTYPES = (torch.bool, torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Element types that pack_bits reads and unpack_bits writes."""

_EXAMPLES = [(dtype,) for dtype in MASK_DTYPES]


def check_pack_bits(x: Tensor) -> int:
    """Check the argument of pack_bits; return the number of bytes.

    Raises:
        FormatError: it breaks its rule; the message names field, value and rule.
    """
    if x.layout != torch.strided:
        raise FormatError(f"x.layout is {x.layout}, but it must be strided; make x dense first")
    if x.dtype not in MASK_DTYPES:
        raise FormatError(f"x.dtype is {x.dtype}, but it must be one of {names(MASK_DTYPES)}; pass x != 0 instead")
    return (x.numel() + 7) // 8


def check_unpack_bits(codes: Tensor, length: int, dtype: torch.dtype) -> int:
    """Check the arguments of unpack_bits; return the number of values.

    Raises:
        FormatError: an argument breaks its rule; the message names field, value and rule.
    """
    if dtype not in MASK_DTYPES:
        raise FormatError(f"dtype is {dtype}, but it must be one of {names(MASK_DTYPES)}")
    if codes.dtype != torch.uint8:
        raise FormatError(f"codes.dtype is {codes.dtype}, but it must be uint8, as pack_bits returns it")
    if length < 0:
        raise FormatError(f"length is {length}, but it must be at least 0")
    if codes.dim() != 1 or codes.shape[0] != (length + 7) // 8:
        raise FormatError(f"codes have shape {tuple(codes.shape)}, but length {length} takes ({(length + 7) // 8},)")
    return length


def check_select_bits(x: Tensor, codes: Tensor) -> torch.Size:
    """Check the arguments of select_bits; return the shape of the result.

    Raises:
        FormatError: an argument breaks its rule; the message names field, value and rule.
    """
    check_pack_bits(x)
    check_unpack_bits(codes, x.numel(), x.dtype)
    if codes.device != x.device:
        raise FormatError(f"x is on {x.device} and codes on {codes.device}, but both must be on one device")
    return x.shape


_pack_bits = declare(
    "pack_bits(Tensor x) -> Tensor",
    fake=lambda x: x.new_empty(check_pack_bits(x), dtype=torch.uint8),
    example=lambda dtype: (random_values(1000).to(dtype),),
    choices_of=lambda x: (x.dtype,),
    examples=_EXAMPLES,
)


def pack_bits(x: Tensor) -> Tensor:
    """One bit per value: whether it is not zero. NaN is not; minus zero is.

    Args:
        x: [...], bool, float32, bfloat16, float16 or float64, any strides; taken in contiguous order.

    Returns:
        uint8 [ceil(numel / 8)]: bit i % 8 of byte i // 8 belongs to value i; what is left over is zero.

    Raises:
        FormatError: an argument is outside of these values.
    """
    codes: Tensor = (DIRECT["pack_bits"] if is_direct(x) else _pack_bits)(x)
    return codes


_unpack_bits = declare(
    "unpack_bits(Tensor codes, SymInt length, ScalarType dtype, float zero, float one) -> Tensor",
    fake=lambda codes, length, dtype, *_: codes.new_empty(check_unpack_bits(codes, length, dtype), dtype=dtype),
    example=lambda dtype: (random_bytes(125), 1000, dtype, -1.0, 0.5),
    choices_of=lambda codes, length, dtype, zero, one: (dtype,),
    examples=_EXAMPLES,
)


def unpack_bits(
    codes: Tensor, *, length: int, dtype: torch.dtype = torch.bool, zero: float = 0.0, one: float = 1.0
) -> Tensor:
    """Turn the bits of `pack_bits` into values.

    Args:
        codes: uint8 [ceil(length / 8)].
        length: number of values that were packed.
        dtype: of the result: bool, float32, bfloat16, float16 or float64.
        zero: the value where the bit is not set, rounded to `dtype`.
        one: the value where it is set.

    Returns:
        [length].

    Raises:
        FormatError: an argument is outside of these values.
    """
    return _unpack_bits(codes, length, dtype, zero, one)


_select_bits = declare(
    "select_bits(Tensor x, Tensor codes) -> Tensor",
    fake=lambda x, codes: x.new_empty(check_select_bits(x, codes)),
    example=lambda dtype: (random_values(1000).to(dtype), random_bytes(125)),
    choices_of=lambda x, codes: (x.dtype,),
    examples=_EXAMPLES,
)


def select_bits(x: Tensor, codes: Tensor) -> Tensor:
    """What a mask of `pack_bits` lets pass, as the gradient of a relu is: the rest becomes zero, NaN and infinity, too.

    Args:
        x: [...], of the dtypes of pack_bits, any strides; taken in contiguous order.
        codes: uint8 [ceil(numel / 8)].

    Returns:
        [...], contiguous.

    Raises:
        FormatError: an argument is outside of these values.
    """
    values: Tensor = DIRECT["select_bits"](x, codes) if is_direct(x, codes) else _select_bits(x.detach(), codes)
    return values
