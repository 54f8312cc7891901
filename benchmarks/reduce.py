"""Sums of quantized gradients on one CPU: how exact a reduction over W ranks is, and how fast its arithmetic.

Error: gradients with heavy tails (Student's t, 4 degrees of freedom) whose size differs from region to region and of
which 0.3 is shared by all ranks; their mean as each reduction gives it, against fp64. No network takes part.

Speed: GB/s count what the W shards would take in fp32, so all rows of a table have summed the same numbers. torch adds
fp32 shards one after the other into the first, in place.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.kit.synthetic import heavy_tailed_gradients
from benchmarks.kit.timing import Case, seconds_of
from benchmarks.registry import Options, Table, benchmark, kernels_note
from laconic.ops import (
    dequantize_blockwise,
    native,
    quantize_blockwise,
    sum_blockwise,
    sum_requantize_blockwise,
)

_WORLDS = (2, 4, 8, 16)
_ERROR_ELEMENTS = 1 << 17
_LENGTH = 1 << 20

Parts = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


@benchmark("reduce")
def reduce(options: Options) -> list[Table]:
    """Error of the mean over W ranks; speed of the sums, by instruction set too."""
    tables = [_error_table(min(options.elements, _ERROR_ELEMENTS))] if options.threads == 1 else []
    return [*tables, _speed_table(options), _instruction_sets_table(options)]


def _quantized(x: Tensor, bits: int) -> Parts:
    codes, scales = quantize_blockwise(x, code="int8", block_size=128, scale_dtype=torch.float32)
    if bits == 8:
        return codes, scales, None, None
    rest = x - _int8(codes, scales)
    return codes, scales, *quantize_blockwise(rest, code="int4", block_size=128, scale_dtype=torch.float32)


def _int8(codes: Tensor, scales: Tensor) -> Tensor:
    return dequantize_blockwise(codes, scales, length=codes.shape[-1], code="int8", block_size=128, dtype=torch.float32)


# --- error ---


def _all_reduced(x: Tensor, bits: int) -> Tensor:
    total = sum_blockwise(*_quantized(x, bits), factor=1 / len(x))
    codes, scales, rest_codes, rest_scales = _quantized(total, bits)
    value = _int8(codes, scales)
    if rest_codes is None or rest_scales is None:
        return value
    return value + dequantize_blockwise(
        rest_codes, rest_scales, length=len(total), code="int4", block_size=128, dtype=torch.float32
    )


def _ring(x: Tensor, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    """Partial sums travel from rank to rank and are rounded before each hop."""
    total = rounded(x[0])
    for shard in x[1:]:
        total = rounded(total + shard)
    return total / len(x)


def _error_table(length: int) -> Table:
    def through_int8(x: Tensor) -> Tensor:
        return _int8(*_quantized(x, 8)[:2])

    schemes: dict[str, Callable[[Tensor], Tensor]] = {
        "**reduce_scatter_q8**": lambda x: sum_blockwise(*_quantized(x, 8), factor=1 / len(x)),
        "**all_reduce_q8**": lambda x: _all_reduced(x, 8),
        "**stored gradients, 12 bits**": lambda x: _all_reduced(x, 12),
        "ring, int8 blocks of 128 at every hop": lambda x: _ring(x, through_int8),
        "ring, bf16": lambda x: _ring(x, lambda part: part.bfloat16().float()),
    }
    rows = []
    for name, scheme in schemes.items():
        errors = []
        for world in _WORLDS:
            x = heavy_tailed_gradients(length)(world)
            exact = x.double().mean(0)
            errors.append(f"{((scheme(x).double() - exact).norm() / exact.norm()).item():.1e}")
        rows.append([name, *errors])
    title = f"Relative error (2-norm) of the mean over W ranks, {length:,} elements"
    return Table(title, ["", *(f"W = {world}" for world in _WORLDS)], rows)


# --- speed ---


def _shards(options: Options, world: int) -> Tensor:
    return torch.randn(world, min(_LENGTH, options.elements))


def _speed_table(options: Options) -> Table:
    rows: dict[str, list[str]] = {}
    for world in _WORLDS[:3]:
        x = _shards(options, world)
        eight, twelve = _quantized(x, 8), _quantized(x, 12)

        def add(x: Tensor = x) -> None:
            for shard in x[1:]:
                x[0].add_(shard)

        cases: dict[str, Case] = {
            "torch, fp32 shards added": add,
            "sum, 8 bits": lambda parts=eight: sum_blockwise(*parts),
            "sum and requantize, 8 bits": lambda parts=eight: sum_requantize_blockwise(*parts),
            "sum, 12 bits": lambda parts=twelve: sum_blockwise(*parts),
            "sum and requantize, 12 bits": lambda parts=twelve: sum_requantize_blockwise(*parts),
        }
        seconds = seconds_of(cases, options.rounds, warm_ups=1)
        for name, taken in seconds.items():
            ratio = seconds["torch, fp32 shards added"] / taken
            rows.setdefault(name, []).append(f"{x.nbytes / taken / 1e9:.1f} ({ratio:.2f}x)")
    return Table(
        f"Sums of W shards of {_shards(options, 1).shape[1]:,} elements, GB/s, {options.threads} thread(s)",
        ["", *(f"W = {world}" for world in _WORLDS[:3])],
        [[name, *cells] for name, cells in rows.items()],
        f"In brackets the speed against torch's. {kernels_note()}",
    )


def _instruction_sets_table(options: Options) -> Table:
    x = _shards(options, 4)
    cases: dict[str, Case] = {}
    for isa in native.supported_isas():
        for bits in (8, 12):
            parts = _quantized(x, bits)
            cases[f"{isa} {bits}"] = lambda parts=parts, isa=isa: native.sum_requantize_blockwise(*parts, 1.0, isa=isa)
    seconds = seconds_of(cases, options.rounds, warm_ups=1)
    rows = [
        [isa, *(f"{x.nbytes / seconds[f'{isa} {bits}'] / 1e9:.1f}" for bits in (8, 12))]
        for isa in native.supported_isas()
    ]
    return Table("Sum and requantize of 4 shards by instruction set, GB/s", ["", "8 bits", "12 bits"], rows)
