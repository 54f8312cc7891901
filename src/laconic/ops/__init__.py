"""Every op on quantized bytes: the only part of laconic that talks to torch.library.

Each op has a plain-torch reference that runs on every device and is the specification, C++ kernels for CPU and
Triton kernels for CUDA. All return the same bits. docs/formats.md has the layout byte by byte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from laconic.errors import FormatError
from laconic.ops import native, reference, triton
from laconic.ops.codebooks import BITS, BLOCK_SIZES, bits_of
from laconic.ops.dynamic_map import STATE_BLOCK_SIZE
from laconic.ops.gated_activations import CURVES
from laconic.ops.reference import dequantize_dynamic, quantize_dynamic
from laconic.ops.schemas import DTYPES, LIBRARY
from laconic.ops.selection import warn_once
from laconic.ops.self_check import checked

__all__ = [
    "quantize_blockwise",
    "multiply_quantize_blockwise",
    "dequantize_blockwise",
    "gated_product_blockwise",
    "gated_backward_blockwise",
    "sum_blockwise",
    "sum_requantize_blockwise",
    "accumulate_blockwise_",
    "square_sum_blockwise",
    "adamw8bit_",
    "adamw8bit_multi_",
    "lossless_encode",
    "lossless_decode_",
    "lossless_decode_add_",
    "sum_rows",
    "pack_bits",
    "unpack_bits",
    "select_bits",
    "quantize_dynamic",
    "dequantize_dynamic",
    "kernels_in_use",
    "bits_of",
    "BITS",
    "BLOCK_SIZES",
    "DTYPES",
    "GATED_ACTIVATIONS",
    "STATE_BLOCK_SIZE",
]


def _by_reference(op: str) -> Callable[..., Any]:
    """The plain-torch implementation of `op` for CPU tensors; warns at the first call."""

    def call(*args: Any) -> Any:
        warn_once("cpu", native.SELECTION.reason)
        return getattr(reference, op)(*args)

    return call


GATED_ACTIVATIONS = frozenset(CURVES)
"""Activations that the gated ops compute."""

_CPU = torch.device("cpu")
_on_cpu = native.SELECTION.implementation
# Each op by family: plain torch for any device, C++ for CPU, Triton for CUDA.
_FAMILIES = {
    "blockwise": ("quantize_blockwise", "multiply_quantize_blockwise", "dequantize_blockwise"),
    "gated": ("gated_product_blockwise", "gated_backward_blockwise"),
    "reduce": ("sum_blockwise", "sum_requantize_blockwise"),
    "accumulate": ("accumulate_blockwise_", "square_sum_blockwise"),
    "adamw": ("adamw8bit_", "adamw8bit_multi_"),
    "lossless": ("lossless_encode", "lossless_decode_", "lossless_decode_add_"),
    "rows": ("sum_rows",),
    "bits": ("pack_bits", "unpack_bits", "select_bits"),
}
_DIRECT: dict[str, Callable[..., Any]] = {}
for _family, _ops in _FAMILIES.items():
    for _op in _ops:
        LIBRARY.impl(_op, getattr(reference, _op), "CompositeExplicitAutograd")
        # A family without C++ kernels runs the reference.
        _native = getattr(native, _op, None)
        _checked = checked(_op, _native, lambda _: _CPU) if _native else getattr(reference, _op)
        _implementation = _checked if _on_cpu == "c++" else _by_reference(_op)
        LIBRARY.impl(_op, _implementation, "CPU")
        _DIRECT[_op] = _implementation
        triton.implement(_op, _family)

_quantize_blockwise = torch.ops.laconic.quantize_blockwise.default
_multiply_quantize_blockwise = torch.ops.laconic.multiply_quantize_blockwise.default
_dequantize_blockwise = torch.ops.laconic.dequantize_blockwise.default
_gated_product_blockwise = torch.ops.laconic.gated_product_blockwise.default
_gated_product_blockwise_after = torch.ops.laconic.gated_product_blockwise_after.default
_gated_backward_blockwise = torch.ops.laconic.gated_backward_blockwise.default
_sum_blockwise = torch.ops.laconic.sum_blockwise.default
_sum_requantize_blockwise = torch.ops.laconic.sum_requantize_blockwise.default
_accumulate_blockwise_ = torch.ops.laconic.accumulate_blockwise_.default
_square_sum_blockwise = torch.ops.laconic.square_sum_blockwise.default
_adamw8bit_ = torch.ops.laconic.adamw8bit_.default
_adamw8bit_multi_ = torch.ops.laconic.adamw8bit_multi_.default
_lossless_encode = torch.ops.laconic.lossless_encode.default
_lossless_decode_ = torch.ops.laconic.lossless_decode_.default
_lossless_decode_add_ = torch.ops.laconic.lossless_decode_add_.default
_sum_rows = torch.ops.laconic.sum_rows.default
_pack_bits = torch.ops.laconic.pack_bits.default
_unpack_bits = torch.ops.laconic.unpack_bits.default
_select_bits = torch.ops.laconic.select_bits.default
_dequantize_blockwise_after = torch.ops.laconic.dequantize_blockwise_after.default

# Whatever the device, they are the ops without `after`; only a graph that orders its nodes sees a difference.
LIBRARY.impl(
    "dequantize_blockwise_after",
    lambda *args: _dequantize_blockwise(*args[:6], *args[7:]),  # without `after`
    "CompositeExplicitAutograd",
)
LIBRARY.impl(
    "gated_product_blockwise_after", lambda *args: _gated_product_blockwise(*args[:-1]), "CompositeExplicitAutograd"
)


def _is_direct(x: Tensor) -> bool:
    """Whether an op on `x` goes past torch's dispatcher, which takes longer than the kernel of a small tensor.

    So it does in eager mode, for plain tensors on the CPU, as long as no mode, transform or profiler watches ops.
    """
    return (
        type(x) is Tensor
        and x.is_cpu
        and not torch.compiler.is_compiling()
        and not _num_dispatch_modes()
        and not _num_function_modes()
        and _transforms() is None
        and not _profiler_enabled()
        and not x.is_neg()
    )


_num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_num_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
_transforms: Callable[[], object] = torch._C._functorch.peek_interpreter_stack
_profiler_enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled


def quantize_blockwise(
    x: Tensor,
    *,
    code: str = "nf4",
    block_size: int = 64,
    scale_dtype: torch.dtype = torch.bfloat16,
    seed: int | None = None,
    center: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize `x` in blocks along its last dimension, each with one scale.

    The result is not differentiable: neither output requires grad.

    Args:
        x: [..., L], float32, bfloat16 or float16, any strides; a 0-d tensor counts as [1].
        code: "uint2", "nf4", "e2m1", "int4", "int5", "int6" or "int8"; docs/formats.md has the levels and the bytes.
        block_size: 16, 32, 64, 128 or 256. Blocks never cross rows; the last block of a row may be shorter.
        scale_dtype: float32, bfloat16 or float16.
        seed: None rounds to nearest. An integer rounds stochastically, unbiased, with random numbers that depend on the
            seed and the element's linear index in x and on nothing else.
        center: fp32 [L], or None for zeros. What is quantized is fp32(x - center), in the same pass, so that values far
            from zero keep what tells them apart.

    Returns:
        Codes uint8 [..., ceil(L * bits / 8)] and scales [..., ceil(L / block_size)]; of uint2 twice as many, each
        block's step and minimum. A block that holds NaN or infinity, or whose scale overflows scale_dtype, gets scale
        NaN; a block whose scale is below 2**-126 gets scale 0.

    Raises:
        FormatError: an argument is outside of these values.
    """
    if seed is not None and not -(1 << 63) <= seed < 1 << 63:
        raise FormatError(f"seed is {seed}, but it must be None or fit in 64 bits, signed")
    run = _DIRECT["quantize_blockwise"] if _is_direct(x) else _quantize_blockwise
    codes, scales = run(x, code, block_size, scale_dtype, seed, center)
    return codes, scales


def multiply_quantize_blockwise(
    a: Tensor,
    b: Tensor,
    *,
    code: str = "nf4",
    block_size: int = 64,
    scale_dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor, Tensor]:
    """a * b, and `quantize_blockwise(b)` to nearest, in one pass that reads b once. No result requires grad.

    Args:
        a, b: [..., L], alike in shape, dtype and device; float32, bfloat16 or float16, any strides.
        code, block_size, scale_dtype: as in `quantize_blockwise`.

    Returns:
        The product [..., L] in the dtype of a and b, contiguous, with torch's own bits but for NaN, which is always the
        quiet one without a payload; codes and scales of b.

    Raises:
        FormatError: an argument is outside of these values.
    """
    is_direct = _is_direct(b) and type(a) is Tensor and a.is_cpu and not a.is_neg()
    run = _DIRECT["multiply_quantize_blockwise"] if is_direct else _multiply_quantize_blockwise
    product, codes, scales = run(a, b, code, block_size, scale_dtype)
    return product, codes, scales


def dequantize_blockwise(
    codes: Tensor,
    scales: Tensor,
    *,
    length: int,
    code: str = "nf4",
    block_size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    after: Tensor | None = None,
    center: Tensor | None = None,
) -> Tensor:
    """Turn codes and scales of `quantize_blockwise` back into values.

    Args:
        codes: uint8 [..., ceil(length * bits / 8)].
        scales: [..., ceil(length / block_size)], of uint2 twice as many; float32, bfloat16 or float16.
        length: size of the last dimension that was quantized.
        code, block_size: as given to quantize_blockwise.
        dtype: element type of the result: float32, bfloat16 or float16.
        after: any tensor. A graph traced by torch.compile computes the values after this tensor, never before: given
            the incoming gradient, backward rebuilds them when it gets there, and forward cannot save them instead of
            the codes. Outside of compilation it changes nothing.
        center: fp32 [length], or None for zeros; as given to quantize_blockwise.

    Returns:
        [..., length]: fp32(fp32(level * scale) + center), of uint2 fp32(fp32(minimum + fp32(code * step)) + center),
        rounded to nearest even to `dtype`. A block with scale NaN is all NaN.

    Raises:
        FormatError: an argument is outside of these values.
    """
    if after is not None and torch.compiler.is_compiling():
        return _dequantize_blockwise_after(codes, scales, code, block_size, length, dtype, after, center)
    run = _DIRECT["dequantize_blockwise"] if _is_direct(codes) else _dequantize_blockwise
    values: Tensor = run(codes, scales, code, block_size, length, dtype, center)
    return values


def gated_product_blockwise(
    gate_codes: Tensor,
    gate_scales: Tensor,
    up_codes: Tensor,
    up_scales: Tensor,
    *,
    length: int,
    activation: str,
    code: str = "nf4",
    block_size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    after: Tensor | None = None,
) -> Tensor:
    """activation(gate) * up from what `quantize_blockwise` made of gate and up; neither is written to memory.

    Args:
        gate_codes, up_codes: uint8 [..., ceil(length * bits / 8)].
        gate_scales, up_scales: [..., ceil(length / block_size)], float32, bfloat16 or float16, both alike.
        length: size of the last dimension that was quantized.
        activation: "silu", "quick_gelu" or "gelu_tanh".
        code, block_size: as given to quantize_blockwise.
        dtype: element type of the result: float32, bfloat16 or float16.
        after: as in `dequantize_blockwise`.

    Returns:
        [..., length]: the dequantized gate and up in `dtype` (fp16: within its range), the activation in fp32 rounded
        to `dtype`, and its product with up rounded to `dtype`. A block with scale NaN is all NaN.

    Raises:
        FormatError: an argument is outside of these values.
    """
    if after is not None and torch.compiler.is_compiling():
        return _gated_product_blockwise_after(
            gate_codes, gate_scales, up_codes, up_scales, code, block_size, length, dtype, activation, after
        )
    run = _DIRECT["gated_product_blockwise"] if _is_direct(gate_codes) else _gated_product_blockwise
    product: Tensor = run(gate_codes, gate_scales, up_codes, up_scales, code, block_size, length, dtype, activation)
    return product


def gated_backward_blockwise(
    grad: Tensor,
    gate_codes: Tensor,
    gate_scales: Tensor,
    up_codes: Tensor,
    up_scales: Tensor,
    *,
    activation: str,
    code: str = "nf4",
    block_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up, given that of activation(gate) * up: one pass, which rebuilds them in registers.

    Args:
        grad: [..., length], float32, bfloat16 or float16, any strides.
        gate_codes, gate_scales, up_codes, up_scales, activation, code, block_size: as in `gated_product_blockwise`.

    Returns:
        round(round(grad * up) * activation'(gate)) and round(grad * round(activation(gate))), both [..., length] in the
        dtype of grad, to which `round` rounds fp32. Any NaN becomes the quiet NaN without a payload.

    Raises:
        FormatError: an argument is outside of these values.
    """
    run = _DIRECT["gated_backward_blockwise"] if _is_direct(grad) else _gated_backward_blockwise
    grad_gate, grad_up = run(grad, gate_codes, gate_scales, up_codes, up_scales, code, block_size, activation)
    return grad_gate, grad_up


def sum_blockwise(
    codes: Tensor,
    scales: Tensor,
    residual_codes: Tensor | None = None,
    residual_scales: Tensor | None = None,
    *,
    factor: float = 1.0,
) -> Tensor:
    """Dequantize W shards of a gradient and add them up in fp32, first to last, in one pass.

    Args:
        codes: uint8 [W, n], int8 codes in blocks of 128 along n; rows may lie apart.
        scales: fp32 [W, ceil(n / 128)].
        residual_codes, residual_scales: None at 8 bits; at 12 uint8 [W, ceil(n / 2)], int4 codes of what int8 lost, and
            fp32 [W, ceil(n / 128)].
        factor: what the sum is multiplied by, as fp32: 1 / W makes it the mean, exactly so when W is a power of two.

    Returns:
        fp32 [n]: fp32((v0 + v1 + ... ) * factor), every addition rounded to fp32, where v is fp32(code * scale), plus
        fp32(residual code * residual scale) at 12 bits. NaN where the scale of any shard is NaN.

    Raises:
        FormatError: an argument is outside of these values.
    """
    return _sum_blockwise(codes, scales, residual_codes, residual_scales, factor)


def sum_requantize_blockwise(
    codes: Tensor,
    scales: Tensor,
    residual_codes: Tensor | None = None,
    residual_scales: Tensor | None = None,
    *,
    factor: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Sum shards as `sum_blockwise` does and quantize the sum in their format, in one pass over the processor's cache.

    Arguments and errors are those of `sum_blockwise`.

    Returns:
        Codes uint8 [n], scales fp32 [ceil(n / 128)], and with a residual its codes uint8 [ceil(n / 2)] and scales fp32
        [ceil(n / 128)], else None twice.
    """
    *results, rest_codes, rest_scales = _sum_requantize_blockwise(
        codes, scales, residual_codes, residual_scales, factor
    )
    if residual_codes is None:
        return results[0], results[1], None, None
    return results[0], results[1], rest_codes, rest_scales


def accumulate_blockwise_(
    codes: Tensor,
    scales: Tensor,
    gradient: Tensor,
    *,
    residual_codes: Tensor | None = None,
    residual_scales: Tensor | None = None,
    alpha: float = 1.0,
) -> None:
    """Add alpha * gradient to a gradient stored in 8 or 12 bits, in place and in one pass.

    In fp32: value = code * scale + residual code * residual scale + alpha * gradient, each operation rounded, is
    quantized to int8 in blocks of 128; at 12 bits what is left of value is quantized to int4 in blocks of 128. A block
    that met NaN or infinity has scale NaN from then on.

    Args:
        codes: uint8 [n], int8 in two's complement. Zeros are the empty store.
        scales: fp32 [ceil(n / 128)].
        gradient: n elements of any shape and strides, taken in contiguous order; float32, bfloat16 or float16.
        residual_codes: uint8 [ceil(n / 2)], int4; None at 8 bits.
        residual_scales: fp32 [ceil(n / 128)]; None at 8 bits.
        alpha: a finite fp32 number.

    Raises:
        FormatError: an argument is outside of these values.
    """
    _accumulate_blockwise_(codes, scales, residual_codes, residual_scales, gradient, alpha)


def square_sum_blockwise(
    codes: Tensor,
    scales: Tensor,
    *,
    residual_codes: Tensor | None = None,
    residual_scales: Tensor | None = None,
) -> Tensor:
    """The sum of squares of a gradient stored in 8 or 12 bits, without its values in memory.

    Sums within a block are exact integers; blocks are added in fp64 as a binary tree over neighbours, so that the
    result has the same bits for any number of threads and on every device. Arguments are those of
    `accumulate_blockwise_`.

    Returns:
        A 0-d fp64 tensor on the same device; NaN where a scale is NaN.

    Raises:
        FormatError: an argument is outside of these values.
    """
    return _square_sum_blockwise(codes, scales, residual_codes, residual_scales)


def adamw8bit_(
    parameter: Tensor,
    exp_avg_codes: Tensor,
    exp_avg_scales: Tensor,
    exp_avg_sq_codes: Tensor,
    exp_avg_sq_scales: Tensor,
    gradient: Tensor,
    gradient_scales: Tensor | None = None,
    residual_codes: Tensor | None = None,
    residual_scales: Tensor | None = None,
    *,
    gradient_factor: Tensor | None = None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    maximize: bool = False,
) -> None:
    """One step of AdamW with moments in 8 bits, in place, one pass over the data.

    No weight moves by more than lr * C(step) + lr * weight_decay * |weight|, Adam's own worst case (adamw_scalars.py),
    plus its rounding. A block that meets NaN or infinity gets scale NaN.

    Args:
        parameter: [...], float32, bfloat16 or float16. It is cut into rows that blocks of 256 run along: `rows` rows of
            n / rows elements each, in the order of the contiguous tensor.
        exp_avg_codes, exp_avg_sq_codes: uint8 [...], codes of the signed and of the unsigned map of ops/dynamic_map.py.
        exp_avg_scales, exp_avg_sq_scales: fp32 [rows, ceil(n / rows / 256)].
        gradient: [...], float32, bfloat16 or float16; or the int8 codes of a quantized gradient, uint8 [n], with
            gradient_scales fp32 [ceil(n / 128)] and, at 12 bits, residual_codes uint8 [ceil(n / 2)] and
            residual_scales fp32 [ceil(n / 128)].
        gradient_factor: fp32, 0-d; the gradient is multiplied by it. It is not read by the host.
        lr, beta1, beta2, eps, weight_decay, maximize: as in torch.optim.AdamW. eps counts as at least 2**-126.
        step: number of this step, 1 for the first.

    Raises:
        FormatError: an argument is outside of these values.
    """
    _adamw8bit_(
        parameter,
        exp_avg_codes,
        exp_avg_scales,
        exp_avg_sq_codes,
        exp_avg_sq_scales,
        gradient,
        gradient_scales,
        residual_codes,
        residual_scales,
        gradient_factor,
        lr,
        beta1,
        beta2,
        eps,
        weight_decay,
        step,
        maximize,
    )


def adamw8bit_multi_(
    parameters: list[Tensor],
    exp_avg_codes: list[Tensor],
    exp_avg_scales: list[Tensor],
    exp_avg_sq_codes: list[Tensor],
    exp_avg_sq_scales: list[Tensor],
    gradients: list[Tensor],
    gradient_scales: list[Tensor] | None = None,
    residual_codes: list[Tensor] | None = None,
    residual_scales: list[Tensor] | None = None,
    *,
    gradient_factor: Tensor | None = None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    maximize: bool = False,
) -> None:
    """`adamw8bit_` of many parameters with the same bits, on CUDA in one launch however many they are.

    Two launches where some parameters do not begin at multiples of 16 bytes or have rows that are no multiple of 16
    elements; one for each parameter while a CUDA graph is captured. The device reads addresses from a table; a table is
    used again only by a call with the same addresses and sizes, so that it cannot be out of date.

    Args:
        parameters: of one dtype on one device, no two of which share memory; of no parameter nothing happens.
        exp_avg_codes, exp_avg_scales, exp_avg_sq_codes, exp_avg_sq_scales: one for each parameter.
        gradients: one for each parameter, of one dtype, all dense or all codes.
        gradient_scales, residual_codes, residual_scales: one for each parameter; None if the gradients have none.
        gradient_factor, lr, beta1, beta2, eps, weight_decay, step, maximize: as in `adamw8bit_`, the same for all.

    Raises:
        FormatError: an argument is outside of these values; nothing has changed then.
    """
    if parameters:
        _adamw8bit_multi_(
            parameters,
            exp_avg_codes,
            exp_avg_scales,
            exp_avg_sq_codes,
            exp_avg_sq_scales,
            gradients,
            gradient_scales or [],
            residual_codes or [],
            residual_scales or [],
            gradient_factor,
            lr,
            beta1,
            beta2,
            eps,
            weight_decay,
            step,
            maximize,
        )


def sum_rows(rows: Tensor, index: Tensor, offsets: Tensor, weights: Tensor | None = None) -> Tensor:
    """Sums of rows picked from a matrix, each in one pass over memory, without storing weighted rows.

    Args:
        rows: [q, M], float32, bfloat16 or float16.
        index: int64 [e], entry i picks the row index[i].
        offsets: int64 [n + 1], ascending from 0 to e: entries offsets[i] to offsets[i + 1] make sum i.
        weights: fp32 [e], factors of the picked rows; None: 1.

    Returns:
        [n, M] in the rows' dtype: from 0, fp32(total + fp32(weight * row)) entry by entry, rounded once in the end. Any
        NaN becomes the quiet NaN without a payload. A sum without entries is 0.

    Raises:
        FormatError: an argument is outside of these values. On CUDA an entry of `index` that is no row makes its sum
            NaN instead, so that the host does not wait for the device.
    """
    return _sum_rows(rows, index, offsets, weights)


def pack_bits(x: Tensor) -> Tensor:
    """One bit per value: whether it is not zero. NaN is not; minus zero is.

    Args:
        x: [...], bool, float32, bfloat16, float16 or float64, any strides; taken in contiguous order.

    Returns:
        uint8 [ceil(numel / 8)]: bit i % 8 of byte i // 8 belongs to value i; what is left over is zero.

    Raises:
        FormatError: an argument is outside of these values.
    """
    return _pack_bits(x)


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
    return _select_bits(x, codes)


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


def lossless_decode_add_(total: Tensor, message: Tensor) -> Tensor:
    """Add the values of a message to `total`, in fp32: total[i] = fp32(total[i] + fp32(value i)), in one pass.

    Arguments, result and errors are those of `lossless_decode_`, but `total` is contiguous float32 whatever the
    message's dtype.
    """
    return _lossless_decode_add_(total, message)


def kernels_in_use() -> dict[str, dict[str, str]]:
    """For each device type that has kernels: "implementation" ("c++", "triton" or "reference"), "isa", "reason"."""
    return {"cpu": asdict(native.SELECTION), "cuda": asdict(triton.selection())}
