"""AdamW with moments in 8 or 4 bits in Triton; `blockwise.py` explains why bits are equal."""

# The parameters of kernels have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import astuple
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.ops.adamw_scalars import LARGEST_GRADIENT
from laconic.ops.codebooks import GRADIENT_BLOCK_SIZE
from laconic.ops.constants import constant_tensor
from laconic.ops.declarations.adamw import AdamWStep, AdamWTensors, checked_step
from laconic.ops.dynamic_map import dynamic_map_tensor, zero_code
from laconic.ops.reference.adamw import level_numbers
from laconic.ops.triton.blockwise import _bits, _name, _narrow, _on_device, _spread, _widen, _widen_bits
from laconic.ops.triton.kernel_constants import KernelConstant
from laconic.options import MOMENT_BLOCK_SIZES

_BLOCKS = {8: 4, 4: 8}
"""By the bits of a code, blocks per program of a launch for many tensors, one after the other."""

_GRADIENT_BLOCK = KernelConstant(GRADIENT_BLOCK_SIZE)
_INFINITY_BITS = KernelConstant(0x7F800000)
_LARGEST_GRADIENT = KernelConstant(LARGEST_GRADIENT)
_SMALLEST_NORMAL_BITS = KernelConstant(0x00800000)

_LOWEST = KernelConstant(0x34800000)
"""2**-22: all magnitudes up to here, but for zero, take the same level."""
# How many of the low bits of a magnitude do not choose its place in a table, the most for which none has two borders.
_SIGNED_SHIFT = KernelConstant(17)
_UNSIGNED_SHIFT = KernelConstant(16)
_SHIFT_OF_4_BITS = KernelConstant(20)


@triton.jit
def _halves(bytes):
    """int32 [N] of bytes -> their halves of 4 bits, int32 [2 * N]."""
    return tl.reshape(tl.join(bytes & 15, bytes >> 4), [2 * bytes.shape[0]])


@triton.jit
def _dequantize(codes_ptr, scale_ptr, table_ptr, exists, ZERO: tl.constexpr, BITS: tl.constexpr):
    """The codes of a block -> fp32 [BLOCK_SIZE]."""
    bytes = tl.load(codes_ptr, mask=exists, other=ZERO).to(tl.int32)
    codes = _halves(bytes) if BITS == 4 else bytes
    return tl.load(table_ptr + codes).to(tl.float32, bitcast=True) * tl.load(scale_ptr)


@triton.jit
def _quantize(x, codes_ptr, scale_ptr, table_ptr, exists, code_exists, ZERO: tl.constexpr, BITS: tl.constexpr):
    """A block fp32 [BLOCK_SIZE], zeros outside the tensor -> its codes and scale, stored."""
    magnitude_bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)
    is_broken = magnitude_bits >= _INFINITY_BITS
    is_ordinary = (magnitude_bits >= _SMALLEST_NORMAL_BITS) & (magnitude_bits < _INFINITY_BITS)
    scale = magnitude_bits.to(tl.float32, bitcast=True)
    if ZERO and BITS == 4:  # the scale is signed; negations are products
        scale *= tl.where(tl.max(x.to(tl.int32, bitcast=True), axis=0) == magnitude_bits, 1.0, -1.0)
    tl.store(scale_ptr, tl.where(is_ordinary, scale, tl.where(is_broken, float("nan"), 0.0)))

    n = x * tl.where(is_ordinary, tl.div_rn(1.0, tl.where(is_ordinary, scale, 1.0)), 0.0)
    # Magnitudes are in the order of their bits, of which the upper ones find the place in the table.
    if ZERO:
        bits = n.to(tl.int32, bitcast=True)
        magnitude = bits & tl.where(is_ordinary, 0x7FFFFFFF, 0)
    else:
        magnitude = tl.maximum(n, 0.0).to(tl.int32, bitcast=True)
    SHIFT: tl.constexpr = _SHIFT_OF_4_BITS if BITS == 4 else _SIGNED_SHIFT if ZERO else _UNSIGNED_SHIFT
    bounded = tl.maximum(magnitude, _LOWEST)
    number = (bounded + tl.load(table_ptr + (256 - (_LOWEST >> SHIFT)) + (bounded >> SHIFT))) >> SHIFT
    if ZERO:
        codes = ZERO + number * ((bits >> 31) | 1)
        codes -= codes >> 31  # -1, which has no code, takes that of the level beside it
    else:
        codes = tl.minimum(number, magnitude)  # the bits of a number that is not zero are at least 1
    if BITS == 4:
        codes = tl.where(exists, codes, 0)
        even, odd = tl.split(tl.reshape(codes, [codes.shape[0] // 2, 2]))
        codes = even | (odd << 4)
    tl.store(codes_ptr, codes.to(tl.uint8), mask=code_exists)


@triton.jit
def _place(block, length, BLOCK_SIZE: tl.constexpr):
    """Row and first column, int64, of a block, int32: numbers of blocks fit, those of elements may not."""
    blocks_per_row = tl.cast((length - 1) // BLOCK_SIZE + 1, tl.int32)  # a length of 1 is a constant
    return (block // blocks_per_row).to(tl.int64), (block % blocks_per_row).to(tl.int64) * BLOCK_SIZE


@triton.jit
def _update(
    parameter_ptr, exp_avg_codes_ptr, exp_avg_scales_ptr, exp_avg_sq_codes_ptr, exp_avg_sq_scales_ptr, signed_table_ptr,
    unsigned_table_ptr, gradient_ptr, gradient_scales_ptr, residual_codes_ptr, residual_scales_ptr, factor_ptr, row,
    first_column, length, block, beta1, one_minus_beta1, beta2, one_minus_beta2, ratio_max, inverse_correction2, eps,
    decay, step_size,
    TYPE: tl.constexpr, QUANTIZED: tl.constexpr, RESIDUAL: tl.constexpr, FACTOR: tl.constexpr, MAXIMIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SIGNED_ZERO: tl.constexpr, BITS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Update block `block`, which begins at `first_column` of its `row`. WHOLE: 16 divides the length of a row."""
    start = row * length + first_column
    element = tl.arange(0, BLOCK_SIZE)
    if TYPE == "float32":  # a store has four at most, and all else shall be in its layout
        element = tl.max_contiguous(element, 4)
    pair = tl.arange(0, BLOCK_SIZE // 2)
    left = tl.minimum(length - first_column, BLOCK_SIZE).to(tl.int32)
    pairs_left = (left + 1) // 2
    if WHOLE:
        left = tl.multiple_of(left, 16)
        pairs_left = tl.multiple_of(pairs_left, 8)
    exists = element < left
    # Where the codes are: in 4 bits two in a byte, and every row begins at a byte.
    if BITS == 8:
        code_at = start + element
        code_exists = exists
    else:
        code_at = row * ((length - 1) // 2 + 1) + first_column // 2 + pair
        code_exists = pair < pairs_left

    # 1. The gradient in fp32. Negations are products, because 0 - x loses the sign of zero.
    g = tl.load(gradient_ptr + start + element, mask=exists, other=0)
    if QUANTIZED:
        GROUP: tl.constexpr = 16 if WHOLE else 1  # elements that share a scale in any case
        GROUPS: tl.constexpr = BLOCK_SIZE // GROUP
        group = tl.arange(0, GROUPS)
        group_exists = group * GROUP < left
        scale_at = (start + group * GROUP) // _GRADIENT_BLOCK
        scale = _spread(tl.load(gradient_scales_ptr + scale_at, mask=group_exists, other=0.0), GROUPS, GROUP)
        g = g.to(tl.int8, bitcast=True).to(tl.float32) * scale
        if RESIDUAL:
            if WHOLE:
                bytes = tl.load(residual_codes_ptr + start // 2 + pair, mask=pair < pairs_left, other=0)
                nibble = _halves(bytes.to(tl.int32))
            else:
                at = start + element
                pairs = tl.load(residual_codes_ptr + at // 2, mask=exists, other=0).to(tl.int32)
                nibble = (pairs >> (4 * (at % 2)).to(tl.int32)) & 15
            scale = _spread(tl.load(residual_scales_ptr + scale_at, mask=group_exists, other=0.0), GROUPS, GROUP)
            g += ((nibble ^ 8) - 8).to(tl.float32) * scale
    else:
        g = _widen(g)
    if FACTOR:
        g = g * tl.load(factor_ptr)
    if MAXIMIZE:
        g = g * -1.0
    # A finite gradient makes no infinite square; infinity and NaN go on to where they are seen: as infinity * 0.
    g = tl.clamp(g, -_LARGEST_GRADIENT, _LARGEST_GRADIENT, propagate_nan=tl.PropagateNan.ALL) + g * 0.0

    # 2. The moments.
    exp_avg_scale_ptr = exp_avg_scales_ptr + block
    exp_avg_sq_scale_ptr = exp_avg_sq_scales_ptr + block
    m = _dequantize(exp_avg_codes_ptr + code_at, exp_avg_scale_ptr, signed_table_ptr, code_exists, SIGNED_ZERO, BITS)
    v = _dequantize(exp_avg_sq_codes_ptr + code_at, exp_avg_sq_scale_ptr, unsigned_table_ptr, code_exists, 0, BITS)
    m = m * beta1 + g * one_minus_beta1
    v = v * beta2 + (g * g) * one_minus_beta2
    root = tl.sqrt_rn(v)

    # 3. No |m| beyond what Adam's could be; comparisons with NaN leave m alone.
    limit = root * ratio_max
    sign = m.to(tl.int32, bitcast=True) & -0x80000000
    m = tl.where(tl.abs(m) > limit, (limit.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True), m)

    # 4. The weights.
    change = tl.div_rn(m, root * inverse_correction2 + eps)
    p = _widen_bits(tl.load(parameter_ptr + start + element, mask=exists, other=0), TYPE)
    p = p * decay - change * step_size
    tl.store(parameter_ptr + start + element, _narrow(p, TYPE), mask=exists)

    # 5. The moments again in codes. In 8 bits what lies outside the tensor is zero from the start.
    if BITS == 4:
        m = tl.where(exists, m, 0.0)
        v = tl.where(exists, v, 0.0)
    m_ptr, v_ptr = exp_avg_codes_ptr + code_at, exp_avg_sq_codes_ptr + code_at
    _quantize(m, m_ptr, exp_avg_scale_ptr, signed_table_ptr, exists, code_exists, SIGNED_ZERO, BITS)
    _quantize(v, v_ptr, exp_avg_sq_scale_ptr, unsigned_table_ptr, exists, code_exists, 0, BITS)


@triton.jit
def _adamw_kernel(
    parameter_ptr, exp_avg_codes_ptr, exp_avg_scales_ptr, exp_avg_sq_codes_ptr, exp_avg_sq_scales_ptr, signed_table_ptr,
    unsigned_table_ptr, gradient_ptr, gradient_scales_ptr, residual_codes_ptr, residual_scales_ptr, factor_ptr, length,
    beta1, one_minus_beta1, beta2, one_minus_beta2, ratio_max, inverse_correction2, eps, decay, step_size,
    TYPE: tl.constexpr, QUANTIZED: tl.constexpr, RESIDUAL: tl.constexpr, FACTOR: tl.constexpr, MAXIMIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SIGNED_ZERO: tl.constexpr, BITS: tl.constexpr, ONE_ROW: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    if ONE_ROW:
        row = 0
        first_column = block.to(tl.int64) * BLOCK_SIZE
    else:
        row, first_column = _place(block, length, BLOCK_SIZE)
    _update(
        parameter_ptr, exp_avg_codes_ptr, exp_avg_scales_ptr, exp_avg_sq_codes_ptr, exp_avg_sq_scales_ptr,
        signed_table_ptr, unsigned_table_ptr, gradient_ptr, gradient_scales_ptr, residual_codes_ptr,
        residual_scales_ptr, factor_ptr, row, first_column, length, block, beta1, one_minus_beta1, beta2,
        one_minus_beta2, ratio_max, inverse_correction2, eps, decay, step_size,
        TYPE, QUANTIZED, RESIDUAL, FACTOR, MAXIMIZE, BLOCK_SIZE, SIGNED_ZERO, BITS, WHOLE,
    )  # fmt: skip


@triton.jit
def _pointer(table_ptr, column, num_tensors, tensor, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """An address of the table as a pointer to elements of a type."""
    pointer = tl.load(table_ptr + column * num_tensors + tensor).to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit(do_not_specialize=["num_tensors"])
def _adamw_multi_kernel(
    table_ptr, num_tensors, signed_table_ptr, unsigned_table_ptr, factor_ptr, beta1, one_minus_beta1, beta2,
    one_minus_beta2, ratio_max, inverse_correction2, eps, decay, step_size,
    TYPE: tl.constexpr, BITS_TYPE: tl.constexpr, GRADIENT_TYPE: tl.constexpr, QUANTIZED: tl.constexpr,
    RESIDUAL: tl.constexpr, FACTOR: tl.constexpr, MAXIMIZE: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SIGNED_ZERO: tl.constexpr, BITS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """BLOCKS blocks of one tensor; table_ptr is int64 [12, num_tensors] of `_tables`."""
    # The last tensor whose first program is not behind this one.
    program = tl.program_id(0)
    tensor = num_tensors * 0
    end = num_tensors
    while end - tensor > 1:
        middle = (tensor + end) // 2
        is_behind = tl.load(table_ptr + middle) > program
        end = tl.where(is_behind, middle, end)
        tensor = tl.where(is_behind, tensor, middle)

    first_block = (program - tl.load(table_ptr + tensor).to(tl.int32)) * BLOCKS
    length = tl.load(table_ptr + num_tensors + tensor)
    num_blocks = tl.load(table_ptr + 2 * num_tensors + tensor).to(tl.int32)
    if ALIGNED:
        length = tl.multiple_of(length, 16 * 8 // BITS)
    parameter_ptr = _pointer(table_ptr, 3, num_tensors, tensor, BITS_TYPE, ALIGNED)
    exp_avg_codes_ptr = _pointer(table_ptr, 4, num_tensors, tensor, tl.uint8, ALIGNED)
    exp_avg_scales_ptr = _pointer(table_ptr, 5, num_tensors, tensor, tl.float32, ALIGNED)
    exp_avg_sq_codes_ptr = _pointer(table_ptr, 6, num_tensors, tensor, tl.uint8, ALIGNED)
    exp_avg_sq_scales_ptr = _pointer(table_ptr, 7, num_tensors, tensor, tl.float32, ALIGNED)
    gradient_ptr = _pointer(table_ptr, 8, num_tensors, tensor, GRADIENT_TYPE, ALIGNED)
    # Addresses that are not read are 0.
    gradient_scales_ptr = _pointer(table_ptr, 9, num_tensors, tensor, tl.float32, ALIGNED)
    residual_codes_ptr = _pointer(table_ptr, 10, num_tensors, tensor, tl.uint8, ALIGNED)
    residual_scales_ptr = _pointer(table_ptr, 11, num_tensors, tensor, tl.float32, ALIGNED)
    row, first_column = _place(first_block, length, BLOCK_SIZE)
    for block in range(first_block, tl.minimum(first_block + BLOCKS, num_blocks)):
        _update(
            parameter_ptr, exp_avg_codes_ptr, exp_avg_scales_ptr, exp_avg_sq_codes_ptr, exp_avg_sq_scales_ptr,
            signed_table_ptr, unsigned_table_ptr, gradient_ptr, gradient_scales_ptr, residual_codes_ptr,
            residual_scales_ptr, factor_ptr, row, first_column, length, block, beta1, one_minus_beta1, beta2,
            one_minus_beta2, ratio_max, inverse_correction2, eps, decay, step_size,
            TYPE, QUANTIZED, RESIDUAL, FACTOR, MAXIMIZE, BLOCK_SIZE, SIGNED_ZERO, BITS, ALIGNED,
        )  # fmt: skip
        first_column += BLOCK_SIZE
        is_new_row = first_column >= length
        row += is_new_row
        first_column = tl.where(is_new_row, 0, first_column)


def adamw8bit_multi_(*arguments: Any) -> None:
    """`reference.adamw8bit_multi_` in Triton, the same bits."""
    step = checked_step(*arguments)
    if not step.each:
        return
    device = step.each[0].parameter.device
    # A graph outlives this call, and with it the addresses in its launches; nothing would keep a table for it.
    is_capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if is_capturing or len(step.each) == 1:
        for tensors, (rows, length) in zip(step.each, step.shapes, strict=True):
            if tensors.parameter.numel():
                _launch_one(tensors, rows, length, step)
    else:
        _launch_many(step, device)


def _launch_one(tensors: AdamWTensors, rows: int, length: int, step: AdamWStep) -> None:
    parameter, exp_avg_codes, exp_avg_scales, exp_avg_sq_codes, exp_avg_sq_scales = tensors[:5]
    gradient, gradient_scales, residual_codes, residual_scales = tensors[5:]
    one_row = rows == 1 or length % MOMENT_BLOCK_SIZES[step.bits] == 0
    row = parameter.numel() if one_row else length
    # Pointers that are not read still have to be tensors.
    unused = exp_avg_scales
    with _on_device(parameter):
        _adamw_kernel[(exp_avg_scales.numel(),)](
            _bits(parameter.detach()), exp_avg_codes, exp_avg_scales, exp_avg_sq_codes, exp_avg_sq_scales,
            _table_of_codes(True, parameter.device, step.bits), _table_of_codes(False, parameter.device, step.bits),
            _bits(gradient.detach()) if gradient.dtype == torch.bfloat16 else gradient.detach(),
            unused if gradient_scales is None else gradient_scales,
            unused if residual_codes is None else residual_codes,
            unused if residual_scales is None else residual_scales,
            unused if step.gradient_factor is None else step.gradient_factor, row, *astuple(step.scalars),
            TYPE=_name(parameter.dtype), QUANTIZED=gradient_scales is not None, RESIDUAL=residual_codes is not None,
            FACTOR=step.gradient_factor is not None, MAXIMIZE=step.maximize, BLOCK_SIZE=MOMENT_BLOCK_SIZES[step.bits],
            SIGNED_ZERO=zero_code(True, step.bits), BITS=step.bits, ONE_ROW=one_row, WHOLE=row % 16 == 0,
            enable_fp_fusion=False, num_warps=1,
        )  # fmt: skip


def _launch_many(step: AdamWStep, device: torch.device) -> None:
    addresses = tuple([0 if tensor is None else tensor.data_ptr() for tensors in step.each for tensor in tensors])
    first, scalars = step.each[0], astuple(step.scalars)
    # Pointers that are not read still have to be tensors.
    factor = first.exp_avg_scales if step.gradient_factor is None else step.gradient_factor
    with _on_device(first.parameter):
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        for table, num_programs, is_aligned in _tables(tuple(step.shapes), addresses, step.bits, device, stream):
            _adamw_multi_kernel[(num_programs,)](
                table, table.shape[1], _table_of_codes(True, device, step.bits),
                _table_of_codes(False, device, step.bits), factor, *scalars,
                TYPE=_name(first.parameter.dtype),
                BITS_TYPE=tl.int32 if first.parameter.dtype == torch.float32 else tl.int16,
                GRADIENT_TYPE=_GRADIENT_TYPES[first.gradient.dtype], QUANTIZED=first.gradient_scales is not None,
                RESIDUAL=first.residual_codes is not None, FACTOR=step.gradient_factor is not None,
                MAXIMIZE=step.maximize, BLOCKS=_BLOCKS[step.bits], BLOCK_SIZE=MOMENT_BLOCK_SIZES[step.bits],
                SIGNED_ZERO=zero_code(True, step.bits), BITS=step.bits, ALIGNED=is_aligned, enable_fp_fusion=False,
                num_warps=1,
            )  # fmt: skip


_GRADIENT_TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.int16,
    torch.float16: tl.float16,
    torch.uint8: tl.uint8,
}


@lru_cache(maxsize=64)
def _tables(
    shapes: tuple[tuple[int, int], ...], addresses: tuple[int, ...], bits: int, device: torch.device, stream: int
) -> list[tuple[Tensor, int, bool]]:
    """What `_adamw_multi_kernel` reads about its tensors, int64 [12, tensors], number of its programs, and ALIGNED.

    In this order: number of the first program, length of a row, number of blocks, and the nine addresses. Tensors of
    one row and of rows of whole blocks are one row. Empty tensors have no place. Aligned are the tensors whose rows all
    begin at multiples of 16 bytes in all of their parts. A table is copied to the device on its current stream, for
    which the host does not wait. It is found again by all that is in it, so what is found is never out of date.

    Args:
        shapes: (rows, length of a row) of each tensor.
        addresses: nine of each; 0 where there is none.
        bits: of a code of a moment.
        stream: the address of the device's current stream.
    """
    entries: dict[bool, list[tuple[int, ...]]] = {True: [], False: []}
    num_programs = {True: 0, False: 0}
    for number, (rows, length) in enumerate(shapes):
        if rows * length == 0:
            continue
        parts = addresses[9 * number : 9 * number + 9]
        row = rows * length if rows == 1 or length % MOMENT_BLOCK_SIZES[bits] == 0 else length
        num_blocks = rows * -(-length // MOMENT_BLOCK_SIZES[bits])
        is_aligned = row * bits % 128 == 0 and not any(address % 16 for address in parts)
        entries[is_aligned].append((num_programs[is_aligned], row, num_blocks, *parts))
        num_programs[is_aligned] += -(-num_blocks // _BLOCKS[bits])
    found = []
    for is_aligned, of_tensors in entries.items():
        if of_tensors:
            table = torch.tensor(of_tensors, dtype=torch.int64, device="cpu").t().contiguous()
            if device.type == "cuda":
                table = table.pin_memory().to(device, non_blocking=True)
            found.append((table, num_programs[is_aligned], is_aligned))
    return found


@constant_tensor
def _table_of_codes(signed: bool, device: torch.device, bits: int) -> Tensor:
    """The map that a kernel reads, int32: 256 levels by code, as the bits of fp32; then how to number magnitudes.

    A magnitude m, as the bits of fp32, has the place m >> shift in the table from the place of `_LOWEST` on; with what
    is there added and the low bits shifted away, m is the number of its level. For at most one border lies within
    a place, and what is there makes magnitudes behind it carry into the upper bits.
    """
    shift = (_SHIFT_OF_4_BITS if bits == 4 else _SIGNED_SHIFT if signed else _UNSIGNED_SHIFT).value
    first = torch.arange(_LOWEST.value, 0x3F800001, 1 << shift, dtype=torch.int32, device="cpu")
    number = level_numbers(first.view(torch.float32), signed=signed, bits=bits)
    # Bisection: the border, or the end of the place.
    below, above = first, first + (1 << shift)
    for _ in range(shift):
        middle = (below + above) // 2
        is_above = level_numbers(middle.view(torch.float32), signed=signed, bits=bits) > number
        below, above = torch.where(is_above, below, middle), torch.where(is_above, middle, above)
    levels = dynamic_map_tensor(signed, torch.device("cpu"), bits)[:256].view(torch.int32)
    return torch.cat([levels, (number + 1 << shift) - above]).to(device)
