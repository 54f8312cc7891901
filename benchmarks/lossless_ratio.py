"""How short lossless messages get, beside the entropy of their exponents, ZipNN and zstd; speed is lossless.py's.

The bound is what no code of exponents beats that knows each block of 4096 elements' own frequencies: mantissa and sign
as they are, and the empirical entropy of the block's exponents, without the bytes for the frequencies. Zeros that are
left out and byte planes that are all zero do beat it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from benchmarks.kit.captured import capture
from benchmarks.kit.peers import coders
from benchmarks.kit.timing import seconds_of
from benchmarks.registry import Options, Table, benchmark, dtype_name
from laconic.formats import lossless
from laconic.ops import lossless_decode_, lossless_encode, quantize_blockwise
from laconic.ops.lossless import BLOCK_NUMEL, LAYOUTS

_HEADER = (
    "tensors", "elements", "bits", "bound", "window", "tiered", "tiered over bound",
    "ratio bound", "ratio window", "ratio tiered", "ZipNN", "zstd -1", "encode GB/s", "decode GB/s",
)  # fmt: skip


@benchmark("lossless-ratio")
def lossless_ratio(options: Options) -> list[Table]:
    """Known distributions, tensors of a dense and a sparse model in training, and codes of quantizers."""
    numel = min(options.elements, 1 << 21)
    steps, hidden, layers = (2, 64, 2) if options.small else (200, 256, 4)
    tables = [Table("Known distributions", _HEADER, [_row(name, [x], options) for name, x in _distributions(numel)])]
    quantized: list[tuple[str, list[Tensor]]] = []
    for family in ("llama", "mixtral"):
        captured = capture(family, steps, hidden, layers)
        rows = [_row(kind, tensors, options) for kind, tensors in captured.items()]
        tables.append(Table(f"{family}, hidden size {hidden}, {layers} layers, after {steps} steps", _HEADER, rows))
        for kind in ("weights", "gradients"):
            quantized += [(f"{family}, {name}", codes) for name, codes in _codes(kind, captured[f"{kind}, fp32"])]
    rows = [_row(name, codes, options) for name, codes in quantized]
    tables.append(Table("Codes of quantizers", _HEADER, rows, "GB/s of tiered, counted in original bytes."))
    return tables


def _row(name: str, tensors: Sequence[Tensor], options: Options) -> list[str]:
    tensors = [x.contiguous() for x in tensors if x.numel()]
    numel, nbytes = sum(x.numel() for x in tensors), sum(x.nbytes for x in tensors)
    bits = 8 * nbytes / numel
    bound = sum(_bound_bits(x) for x in tensors) / numel
    messages = {code: [lossless.encode(x, code) for x in tensors] for code in ("window", "tiered")}
    for x, *own in zip(tensors, *messages.values(), strict=True):
        for message in own:
            assert lossless.decode(message).view(-1).view(torch.uint8).equal(x.view(-1).view(torch.uint8))
    window, tiered = (8 * sum(m.numel() for m in messages[code]) / numel for code in ("window", "tiered"))
    outs = [torch.empty_like(x) for x in tensors]
    cases = {
        "encode": lambda: [lossless_encode(x) for x in tensors],
        "decode": lambda: [lossless_decode_(*pair) for pair in zip(outs, messages["tiered"], strict=True)],
    }
    seconds = seconds_of(cases, options.rounds)
    return [
        name,
        f"{numel:,}",
        f"{bits:.0f}",
        *(f"{value:.2f}" for value in (bound, window, tiered)),
        f"{100 * (tiered / bound - 1):+.1f} %",
        *(f"{bits / value:.3f}" for value in (bound, window, tiered)),
        *_peer_ratios(tensors, nbytes),
        *(f"{nbytes / seconds[case] / 1e9:.2f}" for case in cases),
    ]


def _bound_bits(x: Tensor) -> float:
    """Bits of a tensor under the bound that the module's docstring describes."""
    layout = LAYOUTS[x.dtype]
    words = x.view(-1).view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[layout.nbytes]).int()
    exponents = ((words >> layout.exponent_shift) & ((1 << layout.exponent_bits) - 1)) ^ layout.exponent_flip
    bits = float(x.numel() * (8 * layout.nbytes - layout.exponent_bits))
    for block in exponents.split(BLOCK_NUMEL):
        counts = torch.bincount(block).double()
        counts = counts[counts > 0]
        bits -= float((counts * (counts / block.numel()).log2()).sum())
    return bits


def _distributions(numel: int) -> Iterable[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape or (numel,), generator=generator)

    for phase in (0.0, 0.25, 0.5, 0.75):
        yield f"Gaussian, standard deviation 2^-{phase}, bf16", (normal() * 2**-phase).bfloat16()
    for freedom in (5, 3):
        squares = sum(normal() ** 2 for _ in range(freedom))
        yield f"Student-t of {freedom} degrees of freedom, bf16", (normal() * (freedom / squares) ** 0.5).bfloat16()
    uniform = torch.rand(numel, generator=generator)
    yield "Laplace, bf16", (-torch.log1p(-uniform) * normal().sign()).bfloat16()
    yield "Gaussian squared, bf16", (normal() ** 2).bfloat16()
    scales = normal(math.isqrt(numel), 1).exp()
    yield "Gaussian rows with log-normal scales, bf16", (normal(len(scales), math.isqrt(numel)) * scales).bfloat16()
    yield "Gaussian, half of it 0, bf16", normal().relu().bfloat16()
    yield "Gaussian, fp32", normal()
    yield "Gaussian, fp16", normal().half()
    x = normal()
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        yield f"Gaussian, largest 448, {dtype_name(dtype)}", (x * (448 / x.abs().max())).to(dtype)
    yield "random bits", torch.randint(0, 256, (numel,), dtype=torch.uint8, generator=generator)


def _codes(kind: str, tensors: Sequence[Tensor]) -> Iterable[tuple[str, list[Tensor]]]:
    """What block-wise quantizers and a scale per tensor make of tensors."""
    for code, block_size in (("int8", 128), ("int8", 64), ("nf4", 64)):
        codes = [quantize_blockwise(x, code=code, block_size=block_size)[0] for x in tensors]
        dtype = torch.int8 if code == "int8" else torch.uint8
        yield f"{kind} in {code}, blocks of {block_size}", [part.view(dtype) for part in codes]
    per_tensor = [(x * (127 / x.abs().max().clamp(min=1e-30))).round().to(torch.int8) for x in tensors]
    yield f"{kind} in int8, one scale per tensor", per_tensor
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        scaled = [(x * (448 / x.abs().max().clamp(min=1e-30))).to(dtype) for x in tensors]
        yield f"{kind} in {dtype_name(dtype)}, one scale per tensor", scaled


def _peer_ratios(tensors: Sequence[Tensor], nbytes: int) -> list[str]:
    """Of ZipNN and of zstd, each empty where it is not installed or does not know the type."""
    data = [bytes(x.view(-1).view(torch.uint8).numpy()) for x in tensors]
    found = {
        name: f"{nbytes / sum(len(compress(part)) for part in data):.3f}"
        for name, compress, _ in coders(tensors[0], threads=1, zipnn_method="AUTO")
    }
    return [found.get(name, "") for name in ("ZipNN", "zstd -1")]
