"""Lossless messages on CUDA: `reference/lossless.py` in Triton, the same bytes and the same status.

Types without an exponent code take the reference itself, in plain torch.
"""

from __future__ import annotations

from torch import Tensor

from laconic.ops import reference
from laconic.ops.declarations.lossless import check_lossless_decode_, check_lossless_decode_add_, check_lossless_encode
from laconic.ops.lossless import LAYOUTS
from laconic.ops.triton.lossless_decoder import decode
from laconic.ops.triton.lossless_encoder import encode


def lossless_encode(x: Tensor, code: str, capacity_nbytes: int | None) -> Tensor:
    """`reference.lossless_encode` in Triton, the same message."""
    size = check_lossless_encode(x, code, capacity_nbytes)
    if not LAYOUTS[x.dtype].has_exponent:
        return reference.lossless_encode(x, code, capacity_nbytes)
    return encode(x, code, capacity_nbytes, size)


def lossless_decode_(out: Tensor, message: Tensor) -> Tensor:
    """`reference.lossless_decode_` in Triton, the same status."""
    check_lossless_decode_(out, message)
    if not LAYOUTS[out.dtype].has_exponent:
        return reference.lossless_decode_(out, message)
    return decode(out, message, adds=False)


def lossless_decode_add_(total: Tensor, message: Tensor) -> Tensor:
    """`reference.lossless_decode_add_` in Triton, the same bits and status.

    Values are added block by block, before the checksum over all of them is known. So after a status of PAYLOAD or
    later some of them are in the total.
    """
    check_lossless_decode_add_(total, message)
    return decode(total, message, adds=True)
