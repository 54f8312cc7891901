"""Calls of every op with Triton kernels, as training makes them: on whole, aligned tensors of n elements, on the CPU.

`kernel_launches.record` finds out what each call launches. A kernel that no case launches fails
`tests/ops/test_kernel_code.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from laconic.ops import STATE_BLOCK_SIZE
from laconic.ops.declarations import OPS
from laconic.ops.triton import accumulate, adamw, blockwise, gated, lossless, reduce, rows
from laconic.ops.triton import bits as one_bit

_BF16 = torch.bfloat16


@dataclass(frozen=True)
class KernelCase:
    """One call of one op."""

    op: str
    variant: str
    call: Callable[[], object]
    moved_nbytes: float
    """Bytes that have to be read and written, each tensor once; what only a kernel's own scratch takes is not in it."""


def kernel_cases(n: int = 1 << 20) -> Iterator[KernelCase]:
    """Every case, on tensors of n elements; n is a multiple of 4096. An op without one takes its first example."""
    cases = list(_cases(n))
    yield from cases
    for name in OPS.keys() - {case.op for case in cases}:
        op = OPS[name]
        arguments = op.example(*op.examples[0])
        kernel = getattr(import_module(f"laconic.ops.triton.{op.family}"), name)
        moved = sum(x.nbytes for x in tree_leaves(arguments) if isinstance(x, Tensor))
        yield KernelCase(name, "example", lambda k=kernel, a=arguments: k(*a), moved)


def _cases(n: int) -> Iterator[KernelCase]:
    yield from _blockwise(n)
    yield from _gated(n)
    yield from _gradients(n)
    yield from _optimizer(n)
    yield from _lossless(n)
    yield from _rows(n)
    yield from _bits(n)


def _bytes(n: int) -> Tensor:
    return torch.zeros(n, dtype=torch.uint8)


def _blockwise(n: int) -> Iterator[KernelCase]:
    x = torch.zeros(n // 1024, 1024, dtype=_BF16)
    for code, bits in (("nf4", 4), ("int5", 5), ("int6", 6), ("int8", 8)):
        codes = _bytes(n * bits // 8).view(n // 1024, -1)
        scales = torch.zeros(n // 1024, 16, dtype=_BF16)
        moved = 2 * n + n * bits / 8 + n / 32

        def quantize(code: str = code, seed: int | None = None) -> object:
            return blockwise.quantize_blockwise(x, code, 64, _BF16, seed)

        def dequantize(code: str = code, codes: Tensor = codes, scales: Tensor = scales) -> object:
            return blockwise.dequantize_blockwise(codes, scales, code, 64, 1024, _BF16)

        yield KernelCase("quantize_blockwise", code, quantize, moved)
        yield KernelCase("dequantize_blockwise", code, dequantize, moved)
    yield KernelCase(
        "quantize_blockwise",
        "nf4, stochastic",
        lambda: blockwise.quantize_blockwise(x, "nf4", 64, _BF16, 1),
        2 * n + n / 2 + n / 32,
    )
    for code, bits in (("nf4", 4), ("int8", 8)):
        yield KernelCase(
            "multiply_quantize_blockwise",
            code,
            lambda code=code: blockwise.multiply_quantize_blockwise(x, x, code, 64, _BF16),
            6 * n + n * bits / 8 + n / 32,
        )
    center, codes, scales = torch.zeros(1024), _bytes(n // 2).view(-1, 512), torch.zeros(n // 1024, 16, dtype=_BF16)
    yield KernelCase(
        "quantize_blockwise",
        "nf4, around a center",
        lambda: blockwise.quantize_blockwise(x, "nf4", 64, _BF16, None, center),
        2 * n + n / 2 + n / 32,
    )
    yield KernelCase(
        "dequantize_blockwise",
        "nf4, around a center",
        lambda: blockwise.dequantize_blockwise(codes, scales, "nf4", 64, 1024, _BF16, center),
        2 * n + n / 2 + n / 32,
    )
    wide = torch.zeros(n // 1024, 1024)
    yield KernelCase(
        "quantize_blockwise",
        "int8 of fp32, blocks of 128",
        lambda: blockwise.quantize_blockwise(wide, "int8", 128, torch.float32, None),
        5 * n + n / 32,
    )


def _gated(n: int) -> Iterator[KernelCase]:
    """The product of a feed-forward block of 1024 columns, and the gradients of gate and up."""
    grad = torch.zeros(n // 1024, 1024, dtype=_BF16)
    for code, bits, activation in (("nf4", 4, "silu"), ("int8", 8, "silu"), ("nf4", 4, "gelu_tanh")):
        codes, scales = _bytes(n * bits // 8).view(n // 1024, -1), torch.zeros(n // 1024, 16, dtype=_BF16)
        packed = codes, scales, codes, scales
        packed_nbytes = 2 * (n * bits / 8 + n / 32)
        yield KernelCase(
            "gated_product_blockwise",
            f"{code}, {activation}",
            lambda p=packed, c=code, a=activation: gated.gated_product_blockwise(*p, c, 64, 1024, _BF16, a),
            packed_nbytes + 2 * n,
        )
        yield KernelCase(
            "gated_backward_blockwise",
            f"{code}, {activation}",
            lambda p=packed, c=code, a=activation: gated.gated_backward_blockwise(grad, *p, c, 64, a),
            packed_nbytes + 6 * n,
        )


def _store(n: int, bits: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    codes, scales = _bytes(n), torch.zeros(n // 128)
    return (codes, scales, None, None) if bits == 8 else (codes, scales, _bytes(n // 2), torch.zeros(n // 128))


def _gradients(n: int) -> Iterator[KernelCase]:
    gradient = torch.zeros(n, dtype=_BF16)
    num_shards = 4
    for bits in (8, 12):
        store = _store(n, bits)
        stored = n * bits / 8 + n / 32 * (bits / 4 - 1)
        shards = [part if part is None else part.view(1, -1).expand(num_shards, -1).contiguous() for part in store]
        yield KernelCase(
            "accumulate_blockwise_",
            f"{bits} bits, bf16 gradient",
            lambda s=store: accumulate.accumulate_blockwise_(*s, gradient, 0.5),
            2 * stored + 2 * n,
        )
        yield KernelCase(
            "square_sum_blockwise", f"{bits} bits", lambda s=store: accumulate.square_sum_blockwise(*s), stored
        )
        yield KernelCase(
            "sum_blockwise",
            f"{num_shards} shards in {bits} bits",
            lambda s=shards: reduce.sum_blockwise(*s, 0.25),
            num_shards * stored + 4 * n,
        )
        yield KernelCase(
            "sum_requantize_blockwise",
            f"{num_shards} shards in {bits} bits",
            lambda s=shards: reduce.sum_requantize_blockwise(*s, 0.25),
            (num_shards + 1) * stored,
        )


def _optimizer(n: int) -> Iterator[KernelCase]:
    scalars = (1e-3, 0.9, 0.999, 1e-8, 0.1, 10, False)
    shape = (n // STATE_BLOCK_SIZE, STATE_BLOCK_SIZE)
    moments = _moments(shape)
    read_and_written = 4 * n + 4 * n / 64
    for name, dtype in (("bf16", _BF16), ("fp32", torch.float32)):
        weight, gradient = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
        yield KernelCase(
            "adamw8bit_multi_",
            f"one of {name} weights, {name} gradient",
            lambda w=weight, g=gradient: _adamw_of_one(w, *moments, g, None, None, None, None, *scalars),
            read_and_written + 3 * n * dtype.itemsize,
        )
    weight, gradient, pairs = torch.randn(n // 128, 128), torch.randn(n // 128, 128), _moments((n // 128, 64))
    yield KernelCase(
        "adamw8bit_multi_",
        "one of fp32 weights, fp32 gradient, moments in 4 bits",
        lambda w=weight, g=gradient: _adamw_of_one(w, *pairs, g, None, None, None, None, *scalars, 4),
        14 * n + n / 8,
    )
    for bits in (8, 12):
        weight, store, factor = torch.randn(shape, dtype=_BF16), _random_store(n, bits), torch.ones(())
        yield KernelCase(
            "adamw8bit_multi_",
            f"one of bf16 weights, gradient in {bits} bits, clipped",
            lambda w=weight, s=store, f=factor: _adamw_of_one(w, *moments, *s, f, *scalars),
            read_and_written + 4 * n + n * bits / 8 + n / 32 * (bits / 4 - 1),
        )
    yield from _optimizer_of_many(n, scalars)


def _moments(shape: tuple[int, int]) -> list[Tensor]:
    """Of gradients about 1. A device takes longer for the square root of zero, and for zero over anything."""
    codes = [torch.randint(256, shape, dtype=torch.uint8) for _ in range(2)]
    return [codes[0], torch.rand(shape[0], 1), codes[1], torch.rand(shape[0], 1)]


def _random_store(n: int, bits: int) -> tuple[Tensor | None, ...]:
    store = _store(n, bits)
    for part in store:
        if part is not None:
            part.fill_(1 / 127) if part.is_floating_point() else part.random_()
    return store


def _adamw_of_one(*arguments: Any) -> None:
    lists = [[] if tensor is None else [tensor] for tensor in arguments[:9]]
    adamw.adamw8bit_multi_(*lists, *arguments[9:])


def _optimizer_of_many(n: int, scalars: tuple[object, ...]) -> Iterator[KernelCase]:
    """n elements in 16 matrices of different heights, with rows of whole blocks."""
    rows = n // STATE_BLOCK_SIZE
    heights = [rows // 32] * 8 + [rows // 16] * 4 + [rows // 8] * 4
    heights[-1] += rows - sum(heights)
    shapes = [(height, STATE_BLOCK_SIZE) for height in heights]
    sizes = [height * STATE_BLOCK_SIZE for height in heights]
    moments = [list(parts) for parts in zip(*map(_moments, shapes), strict=True)]
    read_and_written = 4 * n + 4 * n / 64
    weights, dense = ([torch.randn(shape, dtype=_BF16) for shape in shapes] for _ in range(2))
    yield KernelCase(
        "adamw8bit_multi_",
        f"{len(shapes)} bf16 weights, bf16 gradients",
        lambda: adamw.adamw8bit_multi_(weights, *moments, dense, [], [], [], None, *scalars),
        read_and_written + 6 * n,
    )
    factor = torch.ones(())
    for bits in (8, 12):
        parts = zip(*(_random_store(size, bits) for size in sizes), strict=True)
        gradients = [[tensor for tensor in tensors if tensor is not None] for tensors in parts]
        yield KernelCase(
            "adamw8bit_multi_",
            f"{len(shapes)} bf16 weights, gradients in {bits} bits, clipped",
            lambda g=gradients: adamw.adamw8bit_multi_(weights, *moments, *g, factor, *scalars),
            read_and_written + 4 * n + n * bits / 8 + n / 32 * (bits / 4 - 1),
        )


def _lossless(n: int) -> Iterator[KernelCase]:
    for name, dtype in (("bf16", _BF16), ("fp32", torch.float32)):
        x = torch.zeros(n, dtype=dtype)
        # The length of a Gaussian's message (benchmarks/results/lossless_ratio_xeon_202611.md): 1.5 bf16, 1.2 fp32.
        coded = x.nbytes / (1.5 if dtype == _BF16 else 1.2)
        message, total = _bytes(2 * x.nbytes), torch.zeros(n)
        yield KernelCase(
            "lossless_encode",
            f"{name}, tiered",
            lambda x=x: lossless.lossless_encode(x, "tiered", None),
            x.nbytes + coded,
        )
        yield KernelCase(
            "lossless_decode_", name, lambda x=x, m=message: lossless.lossless_decode_(x, m), x.nbytes + coded
        )
        yield KernelCase(
            "lossless_decode_add_", name, lambda t=total, m=message: lossless.lossless_decode_add_(t, m), 8 * n + coded
        )


def _rows(n: int) -> Iterator[KernelCase]:
    source = torch.zeros(n // 1024, 1024, dtype=_BF16)
    num_sums = len(source) // 2
    index, offsets = torch.arange(2 * num_sums), torch.arange(num_sums + 1) * 2
    for name, weights in (("two of", None), ("two of, weighted", torch.ones(2 * num_sums))):
        yield KernelCase(
            "sum_rows",
            f"bf16, {name} 1024 columns",
            lambda w=weights: rows.sum_rows(source, index, offsets, w),
            3 * n + 24 * num_sums + (8 * num_sums if weights is not None else 0),
        )


def _bits(n: int) -> Iterator[KernelCase]:
    codes = _bytes(n // 8)
    for name, dtype in (("bf16", _BF16), ("fp32", torch.float32), ("bool", torch.bool)):
        x = torch.zeros(n, dtype=dtype)
        moved = n * dtype.itemsize + n / 8
        yield KernelCase("pack_bits", name, lambda x=x: one_bit.pack_bits(x), moved)
        yield KernelCase("select_bits", name, lambda x=x: one_bit.select_bits(x, codes), moved + n * dtype.itemsize)
        yield KernelCase("unpack_bits", name, lambda d=dtype: one_bit.unpack_bits(codes, n, d, 0.0, 1.0), moved)
