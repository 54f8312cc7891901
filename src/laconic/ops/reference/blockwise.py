"""Block-wise quantization: the specification."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from laconic.ops.codebooks import AFFINE, ARITHMETIC, BITS, LEVEL_MAX, MIN_SCALE, codebook, scales_per_block
from laconic.ops.constants import constant_tensor
from laconic.ops.declarations.blockwise import (
    check_dequantize_blockwise,
    check_multiply_quantize_blockwise,
    check_quantize_blockwise,
)

__all__ = ["dequantize_blockwise", "multiply_quantize_blockwise", "quantize_blockwise", "seed_key", "uniform"]

_INFINITY_BITS = 0x7F800000
# Quiet NaN, positive, empty payload: the one NaN that is ever written.
_NAN_BITS = {torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}
_BITS_DTYPE = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


@torch.no_grad()
def quantize_blockwise(
    x: Tensor,
    code: str,
    block_size: int,
    scale_dtype: torch.dtype,
    seed: int | None,
    center: Tensor | None = None,
    *,
    first_index: int = 0,
) -> tuple[Tensor, Tensor]:
    """Quantize blocks of `block_size` along the last dimension of `x`; see `laconic.ops.quantize_blockwise`.

    x [..., L] -> codes uint8 [..., ceil(L * bits / 8)], scales [..., ceil(L / block_size)], of an affine code twice as
    many. `first_index` is added to the linear index that stochastic rounding hashes.
    """
    length, num_codes, num_scales = check_quantize_blockwise(x, code, block_size, scale_dtype, center)
    leading = x.shape[:-1]
    num_rows = math.prod(leading)

    # 1. Blocks [rows, blocks per row, block_size] in fp32; the last block of a row is filled up with its last element,
    # which changes neither its largest magnitude nor its range.
    blocks_per_row = num_scales // scales_per_block(code)
    padding = blocks_per_row * block_size - length
    rows = x.reshape(num_rows, length).float()
    rows = rows if center is None else rows - center
    blocks = torch.cat((rows, rows[:, -1:].expand(num_rows, padding)), -1) if padding else rows
    blocks = blocks.view(num_rows, blocks_per_row, block_size)

    # 2. One scale per block, of an affine code step and minimum. Magnitudes are compared as integers, where NaN >
    # infinity > every finite number.
    magnitude_bits = blocks.abs().view(torch.int32).amax(-1)
    if code in AFFINE:
        minima = _rounded_down(_normal_below(blocks.amin(-1)), scale_dtype)
        exact = blocks.amax(-1) - minima.float()
    else:
        exact = magnitude_bits.view(torch.float32)
    # A tensor divisor, because CUDA turns division by a Python number into multiplication by its reciprocal.
    exact = exact / torch.full_like(exact, LEVEL_MAX[code])
    scales = _rounded_up(exact, scale_dtype) if code in AFFINE else exact.to(scale_dtype)
    broken = (magnitude_bits >= _INFINITY_BITS) | scales.isinf()
    if code in AFFINE:
        broken |= minima.isinf()
        vanished = ~broken & (exact < MIN_SCALE)
        _write_nan(minima, broken)
    else:
        vanished = ~broken & (scales.float() < MIN_SCALE)
    scales = scales.masked_fill(vanished, 0.0)
    _write_nan(scales, broken)

    # 3. Each element becomes the code of a level near n.
    ordinary = ~(broken | vanished)
    inverse = torch.where(ordinary, scales.float(), 1.0).reciprocal()
    if code in AFFINE:
        blocks = blocks - minima.float().unsqueeze(-1)
        scales = torch.stack((scales, minima), -1)
    n = torch.where(ordinary.unsqueeze(-1), blocks * inverse.unsqueeze(-1), 0.0)
    u = None
    if seed is not None:
        index = torch.arange(first_index, first_index + num_rows * length, device=x.device).view(num_rows, length)
        u = uniform(seed, torch.nn.functional.pad(index, (0, padding))).view_as(n)
    codes = _codes_of_integers(n, u, code) if code in ARITHMETIC else _codes_from_table(n, u, code)
    codes = codes.masked_fill(broken.unsqueeze(-1), 0).view(num_rows, blocks_per_row * block_size)[:, :length]

    # 4. The codes of a row as one stream of bits.
    codes = _pack(codes, BITS[code])
    return codes.view(*leading, num_codes), scales.view(*leading, num_scales)


@torch.no_grad()
def multiply_quantize_blockwise(
    a: Tensor, b: Tensor, code: str, block_size: int, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """a * b [..., L], and `quantize_blockwise` of b; see `laconic.ops.multiply_quantize_blockwise`."""
    check_multiply_quantize_blockwise(a, b)
    codes, scales = quantize_blockwise(b, code, block_size, scale_dtype, None)
    product = a.contiguous() * b.contiguous()
    _write_nan(product, product.isnan())
    return product, codes, scales


@torch.no_grad()
def dequantize_blockwise(
    codes: Tensor,
    scales: Tensor,
    code: str,
    block_size: int,
    length: int,
    dtype: torch.dtype,
    center: Tensor | None = None,
) -> Tensor:
    """The inverse of `quantize_blockwise` up to rounding; see `laconic.ops.dequantize_blockwise`.

    codes uint8 [..., ceil(length * bits / 8)], scales [..., ceil(length / block_size)], of an affine code twice as many
    -> [..., length].
    """
    check_dequantize_blockwise(codes, scales, code, block_size, length, dtype, center)
    each = _unpack(codes, BITS[code], length)
    if code in AFFINE:
        levels = each.float()
    elif code in ARITHMETIC:
        sign = 1 << (BITS[code] - 1)
        levels = ((each.int() ^ sign) - sign).float()
    else:
        levels = _table(code, "levels", codes.device)[each.int()]
    # [..., blocks, 1 or 2] -> 1 or 2 numbers for each element.
    each_block = scales_per_block(code)
    numbers = scales.float().unflatten(-1, (scales.shape[-1] // each_block, each_block))
    numbers = numbers.repeat_interleave(block_size, dim=-2)[..., :length, :]
    values = levels * numbers[..., 0]
    if code in AFFINE:
        values = values + numbers[..., 1]
    if center is not None:
        values = values + center
    result = values.to(dtype)
    _write_nan(result, values.isnan())
    return result


def uniform(seed: int, index: Tensor) -> Tensor:
    """Uniform fp32 numbers k * 2**-24, k an integer in [0, 2**24): a pure function of the seed and each int64 index.

    A 32-bit mixer (the multipliers of lowbias32, C. Wellons) over the low half of the index, keyed twice by 64 bits
    that SplitMix64's finalizer makes of the seed and the high half. The second key, between the two multiplications,
    keeps two seeds from giving the same numbers in another order.
    """
    key = _mix64((index >> 32) + seed_key(seed))
    h = (index ^ key) & 0xFFFFFFFF
    h = h ^ (h >> 16)
    h = (h * 0x7FEB352D) & 0xFFFFFFFF
    h = h ^ ((key >> 32) & 0xFFFFFFFF)
    h = h ^ (h >> 15)
    h = (h * 0x846CA68B) & 0xFFFFFFFF
    h = h ^ (h >> 16)
    return (h >> 8).float() * 2.0**-24


def seed_key(seed: int) -> int:
    """The 64-bit key, as a signed integer, that `uniform` derives from a seed before it hashes an index.

    Made by the host, whatever torch's default device is: a device would have to be waited for at every call.
    """
    return int(_mix64(torch.tensor(_signed64(seed + 0x9E3779B97F4A7C15), device="cpu")))


def _write_nan(x: Tensor, where: Tensor) -> None:
    """Write the one NaN, in place, `where` it says so."""
    x.view(_BITS_DTYPE[x.dtype]).masked_fill_(where, _NAN_BITS[x.dtype])


def _normal_below(x: Tensor) -> Tensor:
    """The largest number at or below fp32 `x` that is neither subnormal nor -0."""
    return torch.where(x.abs() < MIN_SCALE, torch.where(x < 0, -MIN_SCALE, 0.0), x)


def _rounded_down(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Fp32 -> the largest number of `dtype` at or below; -infinity where there is none."""
    rounded = x.to(dtype)
    bits = rounded.view(_BITS_DTYPE[dtype])
    # A sign bit and a magnitude: the next number below has the magnitude less one, or more if it is negative.
    return (bits + torch.where(rounded.float() > x, torch.where(bits < 0, 1, -1), 0).to(bits.dtype)).view(dtype)


def _rounded_up(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Fp32, at least 0 -> the smallest number of `dtype` at or above; infinity where there is none."""
    rounded = x.to(dtype)
    bits = rounded.view(_BITS_DTYPE[dtype])
    return (bits + (rounded.float() < x).to(bits.dtype)).view(dtype)


def _codes_of_integers(n: Tensor, u: Tensor | None, code: str) -> Tensor:
    if u is None:
        rounded = n.round()
    else:
        lower = n.floor()
        rounded = lower + (u < n - lower)
    least = 0.0 if code in AFFINE else -LEVEL_MAX[code]
    integers = rounded.clamp(least, LEVEL_MAX[code]).to(torch.int8).view(torch.uint8)
    return integers & ((1 << BITS[code]) - 1)


def _codes_from_table(n: Tensor, u: Tensor | None, code: str) -> Tensor:
    # bucketize with right=False counts the boundaries strictly below n.
    if u is None:
        index = torch.bucketize(n, _table(code, "thresholds", n.device), out_int32=True)
    else:
        index = torch.bucketize(n, _table(code, "floor_thresholds", n.device), out_int32=True)
        lower = _table(code, "sorted_levels", n.device)[index]
        index = index + (u < (n - lower) * _table(code, "reciprocal_gaps", n.device)[index])
    return _table(code, "codes", n.device)[index].to(torch.uint8)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes [rows, L] -> uint8 [rows, ceil(L * bits / 8)]: code i takes bits [i * bits, (i + 1) * bits) of a row.

    Eight codes fill `bits` whole bytes, so they are put together as one integer. What is left over at the end is zero.
    """
    num_rows, length = codes.shape
    if bits == 8:
        return codes.clone(memory_format=torch.contiguous_format)
    eights = torch.nn.functional.pad(codes, (0, -length % 8)).view(num_rows, -(-length // 8), 8).long()
    streams = (eights << (bits * torch.arange(8, device=codes.device))).sum(-1, keepdim=True)
    packed = ((streams >> (8 * torch.arange(bits, device=codes.device))) & 0xFF).to(torch.uint8).flatten(1)
    return packed[:, : (length * bits + 7) // 8].clone(memory_format=torch.contiguous_format)


def _unpack(codes: Tensor, bits: int, length: int) -> Tensor:
    """The inverse of `_pack` on the last dimension: uint8 [..., ceil(length * bits / 8)] -> [..., length]."""
    if bits == 8:
        return codes
    num_eights = -(-length // 8)
    padded = torch.nn.functional.pad(codes, (0, num_eights * bits - codes.shape[-1]))
    eights = padded.view(*codes.shape[:-1], num_eights, bits).long()
    streams = (eights << (8 * torch.arange(bits, device=codes.device))).sum(-1, keepdim=True)
    each = (streams >> (bits * torch.arange(8, device=codes.device))) & ((1 << bits) - 1)
    return each.to(torch.uint8).flatten(-2)[..., :length]


@constant_tensor
def _table(code: str, field: str, device: torch.device) -> Tensor:
    return torch.tensor(getattr(codebook(code), field), dtype=torch.float32, device=device)


def _signed64(value: int) -> int:
    value &= 0xFFFFFFFFFFFFFFFF
    return value - (1 << 64) if value >> 63 else value


def _mix64(z: Tensor) -> Tensor:
    """SplitMix64's finalizer (Steele, Lea, Flood 2014). torch shifts int64 with its sign; the masks undo that."""
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * _signed64(0xBF58476D1CE4E5B9)
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * _signed64(0x94D049BB133111EB)
    return z ^ ((z >> 31) & 0x1FFFFFFFF)
