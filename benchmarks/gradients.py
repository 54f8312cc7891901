"""The gradient store on the CPU: how far it drifts over many micro-batches, and how fast it takes them in.

Error: a synthetic gradient with heavy tails (Student's t, 4 degrees of freedom), a size that differs from region to
region and a part of 0.3 that all micro-batches share. After K of them the stored sum is compared with the exact one.

Speed: GB/s count the gradient that comes in, so all rows of a table moved the same gradients. torch's `add_` into an
fp32 buffer is what the store replaces; memcpy of the gradient is a limit nobody who also writes a sum can reach. The
elements come in pieces of 4M, a large layer's weight: larger than the caches, as gradients are when backward gets to
them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.kit.models import causal_model
from benchmarks.kit.synthetic import heavy_tailed_gradients
from benchmarks.kit.timing import Case, seconds_of
from benchmarks.registry import Options, Table, benchmark, dtype_name, kernels_note
from laconic.formats import QuantizedGradient
from laconic.gradients import compress_gradients
from laconic.ops import dequantize_dynamic, native, quantize_dynamic

_ACCUMULATIONS = (1, 4, 16, 64)
_ERROR_ELEMENTS = 1 << 18
_PIECE = 1 << 22

Accumulate = Callable[[Tensor], None]
Value = Callable[[], Tensor]
Scheme = tuple[Accumulate, Value]


@benchmark("gradients")
def gradients(options: Options) -> list[Table]:
    """Error after K accumulations for every scheme; speed of accumulation and of the norm."""
    tables = [_error_table(min(options.elements, _ERROR_ELEMENTS))] if options.threads == 1 else []
    return [*tables, *_speed_tables(options), _instruction_sets_table(options), _step_table(options)]


# --- error ---


def _blocks(x: Tensor, size: int) -> Tensor:
    return x.view(-1, size)


def _e4m3(x: Tensor) -> Tensor:
    """Through E4M3 codes and fp32 scales, blocks of 128."""
    blocks = _blocks(x, 128)
    scales = (blocks.abs().amax(-1, keepdim=True) / 448).clamp(min=2.0**-126)
    return ((blocks / scales).to(torch.float8_e4m3fn).float() * scales).view(-1)


def _dynamic(x: Tensor) -> Tensor:
    """Through the dynamic 8-bit code, blocks of 256."""
    codes, scales = quantize_dynamic(_blocks(x, 256), signed=True)
    return dequantize_dynamic(codes, scales, signed=True).view(-1)


def _rounded(quantized: Callable[[Tensor], Tensor], length: int, add_dtype: torch.dtype) -> Scheme:
    """A store that is dequantized, added to in `add_dtype` and quantized again."""
    value = torch.zeros(length)

    def accumulate(gradient: Tensor) -> None:
        value.copy_(quantized((value.to(add_dtype) + gradient.to(add_dtype)).float()))

    return accumulate, lambda: value


def _ours(bits: int, length: int) -> Scheme:
    stored = QuantizedGradient.zeros((length,), bits)
    return stored.accumulate_, stored.dequantize


def _schemes(length: int) -> dict[str, tuple[str, Scheme]]:
    """Bytes per element, and the scheme."""
    bf16, fp32 = torch.bfloat16, torch.float32

    def identity(x: Tensor) -> Tensor:
        return x

    return {
        "E4M3, blocks of 128, added in bf16 (AGoQ's words)": ("1.03", _rounded(_e4m3, length, bf16)),
        "E4M3, blocks of 128, added in fp32": ("1.03", _rounded(_e4m3, length, fp32)),
        "dynamic 8-bit, blocks of 256, added in bf16 (AGoQ's release)": ("1.02", _rounded(_dynamic, length, bf16)),
        "dynamic 8-bit, blocks of 256, added in fp32": ("1.02", _rounded(_dynamic, length, fp32)),
        "**int8, blocks of 128** (bits=8)": ("1.03", _ours(8, length)),
        "**int8 + int4 residual** (bits=12)": ("1.56", _ours(12, length)),
        "bf16": ("2", _rounded(identity, length, bf16)),
        "fp32": ("4", _rounded(identity, length, fp32)),
    }


def _error_table(length: int) -> Table:
    length = length // 256 * 256
    schemes = _schemes(length)
    exact = torch.zeros(length, dtype=torch.float64)
    errors: dict[str, list[float]] = {name: [] for name in schemes}
    draw = heavy_tailed_gradients(length)
    for k in range(1, max(_ACCUMULATIONS) + 1):
        gradient = draw().bfloat16()
        exact += gradient.double()
        for name, (_, (accumulate, value)) in schemes.items():
            accumulate(gradient)
            if k in _ACCUMULATIONS:
                errors[name].append(((value().double() - exact).norm() / exact.norm()).item())
    rows = [[name, schemes[name][0], *(f"{error:.2e}" for error in errors[name])] for name in schemes]
    header = ["store", "bytes per element", *(f"K = {k}" for k in _ACCUMULATIONS)]
    return Table(
        f"Relative error (2-norm) after K accumulations, {length:,} elements, bf16 gradients",
        header,
        rows,
        "Nearest rounding everywhere.",
    )


# --- speed ---


def _speed_tables(options: Options) -> list[Table]:
    return [_accumulate_table(options, dtype) for dtype in (torch.float32, torch.bfloat16)] + [_norm_table(options)]


def _pieces(options: Options, dtype: torch.dtype) -> list[Tensor]:
    return list(torch.randn(options.elements).to(dtype).split(min(_PIECE, options.elements)))


def _stores(pieces: list[Tensor], bits: int) -> list[QuantizedGradient]:
    return [QuantizedGradient.zeros(piece.shape, bits) for piece in pieces]


def _accumulate_table(options: Options, dtype: torch.dtype) -> Table:
    pieces = _pieces(options, dtype)
    sums = [torch.zeros_like(piece, dtype=torch.float32) for piece in pieces]
    copies = [torch.empty_like(piece) for piece in pieces]
    low_sums = [torch.zeros_like(piece, dtype=torch.bfloat16) for piece in pieces]
    stores = {bits: _stores(pieces, bits) for bits in (8, 12)}

    def each(function: Callable[[Any, Tensor], object], targets: list[Any]) -> Case:
        def case() -> None:
            for target, piece in zip(targets, pieces, strict=True):
                function(target, piece)

        return case

    cases = {
        "memcpy of the gradient": each(Tensor.copy_, copies),
        "torch add_ to fp32": each(Tensor.add_, sums),
        "torch add_ to bf16": each(Tensor.add_, low_sums),
        "accumulate-q8": each(QuantizedGradient.accumulate_, stores[8]),
        "accumulate-q12": each(QuantizedGradient.accumulate_, stores[12]),
    }
    seconds = seconds_of(cases, options.rounds, warm_ups=1)
    nbytes = sum(piece.nbytes for piece in pieces)
    limit = seconds["torch add_ to fp32"]
    rows = [[name, f"{nbytes / taken / 1e9:.2f}", f"{limit / taken:.2f}"] for name, taken in seconds.items()]
    return Table(
        f"Accumulating {options.elements:,} {dtype_name(dtype)} elements, {options.thread_text}",
        ["", "GB/s", "speed of add_ to fp32"],
        rows,
        kernels_note(),
    )


def _norm_table(options: Options) -> Table:
    pieces = _pieces(options, torch.float32)
    stores = {bits: _stores(pieces, bits) for bits in (8, 12)}
    for each in stores.values():
        for stored, piece in zip(each, pieces, strict=True):
            stored.accumulate_(piece)
    cases: dict[str, Case] = {"torch norm of fp32": lambda: [piece.norm() for piece in pieces]}
    for bits, each in stores.items():
        cases[f"square sum of {bits} bits"] = lambda each=each: [stored.square_sum() for stored in each]
    seconds = seconds_of(cases, options.rounds, warm_ups=1)
    first = seconds["torch norm of fp32"]
    rows = [[name, f"{1e3 * taken:.2f}", f"{first / taken:.2f}"] for name, taken in seconds.items()]
    title = f"Norm of {options.elements:,} elements, {options.thread_text}"
    return Table(title, ["", "ms", "speed of torch norm"], rows)


def _instruction_sets_table(options: Options) -> Table:
    pieces = _pieces(options, torch.bfloat16)
    isas = native.supported_isas()
    stores = {bits: _stores(pieces, bits) for bits in (8, 12)}

    def fold(bits: int, isa: str) -> Callable[[], None]:
        def case() -> None:
            for g, piece in zip(stores[bits], pieces, strict=True):
                native.accumulate_blockwise_(
                    g.codes, g.scales, g.residual_codes, g.residual_scales, piece, 1.0, isa=isa
                )

        return case

    seconds = seconds_of({f"{isa} {bits}": fold(bits, isa) for isa in isas for bits in (8, 12)}, options.rounds)
    nbytes = sum(piece.nbytes for piece in pieces)
    rows = [[isa, *(f"{nbytes / seconds[f'{isa} {bits}'] / 1e9:.2f}" for bits in (8, 12))] for isa in isas]
    title = f"Instruction sets, GB/s of bf16 gradients, {options.thread_text}"
    return Table(title, ["", "accumulate-q8", "accumulate-q12"], rows)


def _step_table(options: Options) -> Table:
    """Eight micro-batches of a small Llama: what keeping gradients in codes adds to the time, and what it holds."""
    small = options.elements < 1 << 16
    width, layers = (64, 1) if small else (384, 6)
    sizes = {"intermediate_size": 3 * width, "num_hidden_layers": layers, "vocab_size": 512, "head_dim": 32}
    tokens = torch.randint(0, 512, (1, 16 if small else 128))
    num_parameters = 0

    def step(bits: int) -> tuple[Callable[[], None], list[int]]:
        nonlocal num_parameters
        model = causal_model("llama", width, **sizes)
        num_parameters = model.num_parameters()
        gradients = compress_gradients(model, bits=bits) if bits < 32 else None
        held: list[int] = []

        def case() -> None:
            for _ in range(8):
                model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
            if gradients is None:
                held.append(sum(parameter.grad.nbytes for parameter in model.parameters()))
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                model.zero_grad()
            else:
                held.append(gradients.nbytes)
                gradients.clip_(1.0)
                gradients.zero_()

        return case, held

    steps = {"grad, fp32": step(32), "8 bits": step(8), "12 bits": step(12)}
    seconds = seconds_of({name: case for name, (case, _) in steps.items()}, options.rounds)
    first = seconds["grad, fp32"]
    rows = [
        [name, f"{1e3 * seconds[name]:.1f}", f"{seconds[name] / first:.3f}", f"{held[-1]:,}"]
        for name, (_, held) in steps.items()
    ]
    title = f"Eight micro-batches of {tokens.numel()} tokens and clipping, {num_parameters:,} parameters"
    return Table(f"{title}, {options.thread_text}", ["gradients in", "ms", "time", "bytes held"], rows)
