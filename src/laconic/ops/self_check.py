"""Kernels beside the plain-torch reference on small inputs, at the first use of an op and in `laconic doctor`.

`checked` wraps an implementation. Before its first call with a combination of dtypes, formats and options it runs the
implementation on a small input of that combination; other bits than the reference's raise `KernelError`, and the
implementation is not used. LACONIC_CHECK_KERNELS=0 switches this off.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from laconic.errors import ConfigError, FormatError, KernelError
from laconic.ops import reference
from laconic.ops.codebooks import BITS, GRADIENT_BLOCK_SIZE
from laconic.ops.dynamic_map import STATE_BLOCK_SIZE
from laconic.ops.lossless import EXPONENT_DTYPES
from laconic.ops.schemas import MASK_DTYPES

__all__ = ["OPS", "arguments_of", "checked", "difference", "examples"]

Implementation = Callable[..., Any]
Choices = tuple[Any, ...]
"""What selects a kernel's code: dtypes, formats, which optional tensors there are."""


def _random(*shape: int, seed: int = 0) -> Tensor:
    """Fp32 with magnitudes over some decades and zeros."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")
    values *= torch.exp2(torch.randint(-6, 6, shape, generator=generator, device="cpu"))
    return torch.where(torch.rand(*shape, generator=generator, device="cpu") < 0.1, 0.0, values)


def _bytes(n: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8, device="cpu")


# --- the arguments of an op, on the CPU, for each choice that is compiled into its kernels ---


def _quantize(
    dtype: torch.dtype, code: str, block_size: int, scale_dtype: torch.dtype, has_seed: bool, is_centered: bool = False
) -> Choices:
    center = (_random(1024, seed=9),) if is_centered else ()
    return _random(4, 1024).to(dtype), code, block_size, scale_dtype, 7 if has_seed else None, *center


def _multiply_quantize(dtype: torch.dtype, code: str, block_size: int, scale_dtype: torch.dtype) -> Choices:
    return _random(4, 1024, seed=8).to(dtype), _random(4, 1024).to(dtype), code, block_size, scale_dtype


def _dequantize(
    scale_dtype: torch.dtype, code: str, block_size: int, dtype: torch.dtype, is_centered: bool = False
) -> Choices:
    codes, scales = reference.quantize_blockwise(_random(4, 1024), code, block_size, scale_dtype, None)
    return codes, scales, code, block_size, 1024, dtype, *((_random(1024, seed=9),) if is_centered else ())


def _pair(scale_dtype: torch.dtype, code: str) -> Choices:
    parts = (reference.quantize_blockwise(_random(4, 1024, seed=seed), code, 64, scale_dtype, None) for seed in (1, 2))
    return tuple(tensor for part in parts for tensor in part)


def _gated_product(scale_dtype: torch.dtype, code: str, dtype: torch.dtype, activation: str) -> Choices:
    return *_pair(scale_dtype, code), code, 64, 1024, dtype, activation


def _gated_backward(dtype: torch.dtype, scale_dtype: torch.dtype, code: str, activation: str) -> Choices:
    return _random(4, 1024, seed=3).to(dtype), *_pair(scale_dtype, code), code, 64, activation


def _store(n: int, has_residual: bool) -> Choices:
    num_blocks = -(-n // GRADIENT_BLOCK_SIZE)
    codes, scales = _bytes(n), _random(num_blocks, seed=1).abs()
    if not has_residual:
        return codes, scales, None, None
    return codes, scales, _bytes(n // 2, 2), _random(num_blocks, seed=3).abs() * 0.01


def _sum(has_residual: bool) -> Choices:
    shards = [None if part is None else torch.stack([part, part.flip(0)]) for part in _store(4096, has_residual)]
    return *shards, 0.5


def _accumulate(has_residual: bool, dtype: torch.dtype) -> Choices:
    return *_store(4096, has_residual), _random(4096, seed=4).to(dtype), 0.5


def _square_sum(has_residual: bool) -> Choices:
    return _store(4096, has_residual)


def _adamw(
    dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    is_quantized: bool,
    has_residual: bool,
    has_factor: bool,
    maximizes: bool,
    *,
    shape: tuple[int, int] = (4, 2 * STATE_BLOCK_SIZE),
) -> Choices:
    rows, n = shape[0], shape[0] * shape[1]
    moments = (
        part
        for seed in (1, 2)
        for part in (_bytes(n, seed).view(shape), _random(rows, -(-shape[1] // STATE_BLOCK_SIZE), seed=seed).abs())
    )
    if is_quantized:
        gradient: Choices = _store(n, has_residual)
    else:
        dense = _random(*shape, seed=5).to(gradient_dtype)
        dense[0, 0] = min(2e19, torch.finfo(gradient_dtype).max)  # whose square is not finite
        gradient = (dense, None, None, None)
    factor = torch.tensor(0.75, dtype=torch.float32, device="cpu") if has_factor else None
    scalars = (1e-3, 0.9, 0.999, 1e-8, 0.1, 3, maximizes)
    return _random(*shape, seed=6).to(dtype), *moments, *gradient, factor, *scalars


def _adamw_multi(*choices: Any) -> Choices:
    # Whole blocks; ragged rows, whose accesses are narrow; a tensor of several programs.
    shapes = ((4, 2 * STATE_BLOCK_SIZE), (3, 300), (9, 3 * STATE_BLOCK_SIZE))
    each = [_adamw(*choices, shape=shape) for shape in shapes]
    lists = [[] if tensors[0] is None else list(tensors) for tensors in list(zip(*each, strict=True))[:9]]
    return *lists, *each[0][9:]


def _lossless_values(dtype: torch.dtype) -> Tensor:
    if dtype == torch.bool:  # other bytes than 0 and 1 change when they are copied
        return _random(2 * 4096) > 0
    values = _random(2 * 4096)
    values[4096:] = _random(16, seed=1).repeat(256)  # a block of few values
    return values.to(dtype) if dtype.is_floating_point else _bytes(8192 * dtype.itemsize).view(dtype)


def _encode(dtype: torch.dtype, code: str, has_capacity: bool) -> Choices:
    x = _lossless_values(dtype)
    return x, code, x.nbytes + 128 if has_capacity else None


def _decode(dtype: torch.dtype) -> Choices:
    x = _lossless_values(dtype)
    return torch.zeros_like(x), reference.lossless_encode(x, "tiered", None)


def _decode_add() -> Choices:
    message = reference.lossless_encode(_lossless_values(torch.bfloat16), "tiered", None)
    return _random(8192, seed=8), message


def _sum_rows(dtype: torch.dtype, is_weighted: bool) -> Choices:
    index = torch.tensor([0, 3, 3, 5, 1, 2], device="cpu")
    weights = _random(6, seed=1) if is_weighted else None
    return _random(6, 1024).to(dtype), index, torch.tensor([0, 2, 2, 6], device="cpu"), weights


def _pack_bits(dtype: torch.dtype) -> Choices:
    return (_random(1000).to(dtype),)


def _unpack_bits(dtype: torch.dtype) -> Choices:
    return _bytes(125), 1000, dtype, -1.0, 0.5


def _select_bits(dtype: torch.dtype) -> Choices:
    return _random(1000).to(dtype), _bytes(125)


# --- which choices a call makes ---


def _dtype_of(tensors: list[Tensor]) -> torch.dtype:
    """The dtype of the first; of an empty list, which the implementation refuses, any."""
    return tensors[0].dtype if tensors else torch.float32


def _is_given(arguments: Choices, position: int) -> bool:
    """Whether an argument that may be left out is there."""
    return len(arguments) > position and arguments[position] is not None


_Op = tuple[Callable[..., Choices], Callable[[Choices], Choices]]
_OPS: dict[str, _Op] = {
    "quantize_blockwise": (_quantize, lambda a: (a[0].dtype, a[1], a[2], a[3], a[4] is not None, _is_given(a, 5))),
    "multiply_quantize_blockwise": (_multiply_quantize, lambda a: (a[0].dtype, *a[2:])),
    "dequantize_blockwise": (_dequantize, lambda a: (a[1].dtype, a[2], a[3], a[5], _is_given(a, 6))),
    "gated_product_blockwise": (_gated_product, lambda a: (a[1].dtype, a[4], a[7], a[8])),
    "gated_backward_blockwise": (_gated_backward, lambda a: (a[0].dtype, a[2].dtype, a[5], a[7])),
    "sum_blockwise": (_sum, lambda a: (a[2] is not None,)),
    "sum_requantize_blockwise": (_sum, lambda a: (a[2] is not None,)),
    "accumulate_blockwise_": (_accumulate, lambda a: (a[2] is not None, a[4].dtype)),
    "square_sum_blockwise": (_square_sum, lambda a: (a[2] is not None,)),
    "adamw8bit_": (
        _adamw,
        lambda a: (a[0].dtype, a[5].dtype, a[6] is not None, a[7] is not None, a[9] is not None, bool(a[16])),
    ),
    "adamw8bit_multi_": (
        _adamw_multi,
        lambda a: (_dtype_of(a[0]), _dtype_of(a[5]), bool(a[6]), bool(a[7]), a[9] is not None, bool(a[16])),
    ),
    "lossless_encode": (_encode, lambda a: (a[0].dtype, a[1], a[2] is not None)),
    "lossless_decode_": (_decode, lambda a: (a[0].dtype,)),
    "lossless_decode_add_": (_decode_add, lambda a: ()),
    "sum_rows": (_sum_rows, lambda a: (a[0].dtype, a[3] is not None)),
    "pack_bits": (_pack_bits, lambda a: (a[0].dtype,)),
    "unpack_bits": (_unpack_bits, lambda a: (a[2],)),
    "select_bits": (_select_bits, lambda a: (a[0].dtype,)),
}

OPS = tuple(_OPS)
"""Every op that can be checked."""


def examples(op: str) -> Iterator[tuple[Choices, Choices]]:
    """Choices that cover the code of an op's kernels, and arguments on the CPU for each.

    Args:
        op: one of `OPS`.
    """
    bf16, fp32, fp16 = torch.bfloat16, torch.float32, torch.float16
    adamw: list[Choices] = [
        (fp32, fp32, False, False, False, False),
        (bf16, bf16, False, False, True, True),
        (bf16, torch.uint8, True, False, False, False),
        (fp16, torch.uint8, True, True, True, False),
    ]
    choices: dict[str, list[Choices]] = {
        "quantize_blockwise": [
            *((bf16, code, 64, bf16, False) for code in BITS),
            (fp32, "nf4", 128, fp32, True),
            (fp32, "uint2", 256, bf16, True),
            (fp16, "int8", 16, fp16, True),
            (fp32, "nf4", 64, bf16, False, True),
        ],
        "multiply_quantize_blockwise": [
            *((bf16, code, 64, bf16) for code in BITS),
            (fp32, "nf4", 128, fp32),
            (fp16, "int8", 16, fp16),
        ],
        "dequantize_blockwise": [
            *((bf16, code, 64, bf16) for code in BITS),
            (fp32, "int8", 128, fp32),
            (bf16, "nf4", 64, fp32, True),
        ],
        "gated_product_blockwise": [(bf16, "nf4", bf16, "silu"), (fp32, "int8", fp32, "gelu_tanh")],
        "gated_backward_blockwise": [(bf16, bf16, "nf4", "silu"), (fp16, fp32, "int6", "quick_gelu")],
        "accumulate_blockwise_": [(False, bf16), (True, fp32)],
        "adamw8bit_": adamw,
        "adamw8bit_multi_": adamw,
        "lossless_encode": [
            *((dtype, "tiered", False) for dtype in EXPONENT_DTYPES),
            (bf16, "window", True),
            (bf16, "raw", False),
        ],
        "lossless_decode_": [(dtype,) for dtype in EXPONENT_DTYPES],
        "lossless_decode_add_": [()],
        "sum_rows": [(bf16, False), (fp32, True), (fp16, True)],
        "pack_bits": [(dtype,) for dtype in MASK_DTYPES],
        "unpack_bits": [(dtype,) for dtype in MASK_DTYPES],
        "select_bits": [(dtype,) for dtype in MASK_DTYPES],
    }
    for chosen in choices.get(op, [(False,), (True,)]):
        yield chosen, arguments_of(op, *chosen)


def arguments_of(op: str, *choices: Any) -> Choices:
    """Small arguments on the CPU of one combination of choices.

    Args:
        op: one of `OPS`.
        choices: what selects the kernel's code, as `examples` yields it.
    """
    return _OPS[op][0](*choices)


# --- the comparison ---


def difference(op: str, implementation: Implementation, arguments: Choices, device: torch.device | str) -> str:
    """Run an op and its reference on the same arguments.

    Args:
        op: one of `OPS`.
        implementation: takes the op's arguments, positional.
        arguments: tensors on the CPU; they are copied.
        device: where the implementation runs.

    Returns:
        "" if all results and all tensors written to have the same bits; else which of them differ.
    """
    there, here = ([_copied(argument, where) for argument in arguments] for where in (device, "cpu"))
    with torch.no_grad(), torch.device("cpu"):  # whatever the caller's default device is
        found = _tensors(op, implementation(*there), there)
        expected = _tensors(op, getattr(reference, op)(*here), here)
    wrong = [name for name, truth in expected.items() if not _same_bits(found[name].cpu(), truth)]
    return ", ".join(wrong)


def _tensors(op: str, results: Any, arguments: list[Any]) -> dict[str, Tensor]:
    """Results and arguments by name; an op may write to the arguments."""
    listed = results if isinstance(results, (tuple, list)) else () if results is None else (results,)
    named = {f"result {number}": x for number, x in enumerate(listed)}
    if op == "lossless_encode":  # what lies behind the message is undefined
        message = named["result 0"]
        named["result 0"] = message[: int(message[16:24].cpu().view(torch.int64))]
    for number, argument in enumerate(arguments):
        if isinstance(argument, list):
            named |= {f"argument {number}[{index}]": x for index, x in enumerate(argument)}
        elif isinstance(argument, Tensor):
            named[f"argument {number}"] = argument
    return named


def _copied(argument: Any, device: torch.device | str) -> Any:
    """An argument with copies of its tensors on a device; lists are lists of tensors."""
    if isinstance(argument, list):
        return [x.to(device, copy=True) for x in argument]
    return argument.to(device, copy=True) if isinstance(argument, Tensor) else argument


def _same_bits(found: Tensor, truth: Tensor) -> bool:
    if found.shape != truth.shape or found.dtype != truth.dtype:
        return False
    found, truth = (x.contiguous().view(-1).view(torch.uint8) for x in (found, truth))
    return torch.equal(found, truth)


# --- the first use ---


def _is_switched_on() -> bool:
    value = os.environ.get("LACONIC_CHECK_KERNELS", "1")
    if value not in ("0", "1"):
        raise ConfigError(f"LACONIC_CHECK_KERNELS is {value!r}, but it must be 1 (the default), or 0 to trust kernels")
    return value == "1"


_IS_ON = _is_switched_on()


def checked(op: str, implementation: Implementation, device_of: Callable[[Choices], torch.device]) -> Implementation:
    """`implementation`, refused if it does not give the reference's bits on a small input.

    Args:
        op: one of `OPS`.
        implementation: takes the op's arguments, positional.
        device_of: the device of the op's arguments.

    Returns:
        A function like `implementation`. Its first call with each combination of device, dtypes, formats and options
        checks it; while a CUDA graph is captured nothing is checked, and the next call outside of a capture does it.
        `KernelError` names op, device and combination, at every call with it.
    """
    if not _IS_ON:
        return implementation
    build, choices_of = _OPS[op]
    verdicts: dict[Choices, str] = {}

    # No lock: two threads may both check, but a process forked in the middle of a check cannot wait for ever.
    def check(key: Choices) -> str:
        device, *choices = key
        # The implementation itself words its refusal of a format that is not known.
        try:
            with torch.no_grad(), torch.device("cpu"):
                arguments = build(*choices)
        except FormatError:
            return ""
        verdicts[key] = difference(op, implementation, arguments, device)
        return verdicts[key]

    def call(*arguments: Any) -> Any:
        key = (device_of(arguments), *choices_of(arguments))
        wrong = verdicts.get(key)
        if wrong is None and not (key[0].type == "cuda" and torch.cuda.is_current_stream_capturing()):
            wrong = check(key)
        if wrong:
            raise KernelError(
                f"the kernel of {op} on {key[0]} gives other bits than the reference for"
                f" ({', '.join(map(str, key[1:]))}): {wrong}; its result was not used. Set LACONIC_KERNELS=reference to"
                " run plain torch, and report what `laconic doctor` says"
            )
        return implementation(*arguments)

    return call
