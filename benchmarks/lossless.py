"""Lossless messages on the CPU, beside ZipNN, zstd and memcpy in the same run.

GB/s count the tensor: what encode reads and what decode writes, checksums and the choice of codes included. memcpy
copies that tensor, so its row is the limit of a code that would read and write as much.

Tensors come in pieces of 2 MiB of bf16, messages of the size that collectives send. Results of that size take memory
that was used before. `lossless_encode` returns the memory of the longest possible message; what it does not write of
that costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

import laconic
from benchmarks.kit.peers import coders
from benchmarks.kit.timing import Case, seconds_of
from benchmarks.registry import Options, Table, benchmark, dtype_name, kernels_note
from laconic.ops import lossless_decode_, lossless_decode_add_, lossless_encode, native

_PIECE = 1 << 20
_CODES = ("window", "tiered")
_PEER_PIECES = 4  # peers are ten times slower; their speed does not depend on how many pieces there are


def _data(numel: int) -> dict[str, Tensor]:
    """Weights and activations are near Gaussian, gradients have heavier tails."""
    generator = torch.Generator().manual_seed(0)

    def normal() -> Tensor:
        return torch.randn(numel, generator=generator)

    # Student's t with 3 degrees of freedom.
    squares = torch.stack([normal() ** 2 for _ in range(3)]).sum(0)
    heavy = 1e-4 * normal() * (3 / squares).sqrt()
    some_zeros = heavy * (torch.rand(numel, generator=generator) < 0.7)
    return {
        "Gaussian bf16": (0.02 * normal()).bfloat16(),
        "Student-t bf16": heavy.bfloat16(),
        "Student-t bf16, 30 % zeros": some_zeros.bfloat16() + 0,  # + 0 turns -0 into 0
        "Gaussian fp32": normal(),
        "Gaussian fp16": normal().half(),
        "Gaussian int8": (30 * normal()).clamp(-127, 127).to(torch.int8),
        "random bits": torch.randint(-(1 << 15), 1 << 15, (numel,), generator=generator).short().view(torch.bfloat16),
    }


def _length(message: Tensor) -> int:
    return int(message[16:24].view(torch.int64))


def _own_cases(pieces: Sequence[Tensor], isa: str | None = None) -> tuple[dict[str, Case], dict[str, float]]:
    """What to time, and the ratio of each code."""
    cases: dict[str, Case] = {}
    ratios: dict[str, float] = {}
    how = {} if isa is None else {"isa": isa}
    encode = lossless_encode if isa is None else native.lossless_encode
    decode = lossless_decode_ if isa is None else native.lossless_decode_
    decode_add = lossless_decode_add_ if isa is None else native.lossless_decode_add_
    out, total = torch.empty_like(pieces[0]), torch.zeros(pieces[0].numel())
    for code in _CODES:
        messages = []
        for x in pieces:
            buffer = lossless_encode(x, code=code)
            messages.append(buffer[: _length(buffer)].clone())
        ratios[code] = sum(x.nbytes for x in pieces) / sum(message.numel() for message in messages)

        def encode_all(code: str = code) -> None:
            for x in pieces:
                if isa is None:
                    encode(x, code=code)
                else:
                    encode(x, code, None, isa=isa)

        def decode_all(messages: Sequence[Tensor] = messages) -> None:
            for x, message in zip(pieces, messages, strict=True):
                decode(out[: x.numel()], message, **how)

        def add_all(messages: Sequence[Tensor] = messages) -> None:
            for x, message in zip(pieces, messages, strict=True):
                decode_add(total[: x.numel()], message, **how)

        cases |= {f"{code} encode": encode_all, f"{code} decode": decode_all, f"{code} decode_add": add_all}
    return cases, ratios


def _peer_cases(pieces: Sequence[Tensor], threads: int) -> tuple[dict[str, Case], dict[str, float]]:
    """ZipNN and zstd on the same bytes; those that are installed."""
    cases: dict[str, Case] = {}
    ratios: dict[str, float] = {}
    data = [bytes(x.view(torch.uint8).numpy()) for x in pieces[:_PEER_PIECES]]
    for name, compress, decompress in coders(pieces[0], threads):
        packed = [compress(part) for part in data]
        ratios[name] = sum(map(len, data)) / sum(map(len, packed))
        cases[f"{name} encode"] = lambda compress=compress: [compress(part) for part in data]
        cases[f"{name} decode"] = lambda decompress=decompress, packed=packed: [decompress(part) for part in packed]
    return cases, ratios


@benchmark("lossless")
def lossless(options: Options) -> list[Table]:
    """Speed and ratio of both codes on several kinds of data, beside peers and memcpy; instruction sets."""
    data = {name: list(x.split(_PIECE)) for name, x in _data(options.elements).items()}
    tables = [_data_table(name, pieces, options) for name, pieces in data.items()]
    return [
        *tables,
        _public_table(options),
        _instruction_sets_table(data["Gaussian bf16"], options),
        _sizes_table(options),
    ]


def _memcpy(pieces: Sequence[Tensor]) -> Case:
    out = torch.empty_like(pieces[0])

    def case() -> None:
        for x in pieces:
            out[: x.numel()].copy_(x)

    return case


def _data_table(name: str, pieces: Sequence[Tensor], options: Options) -> Table:
    own, own_ratios = _own_cases(pieces)
    peers, peer_ratios = _peer_cases(pieces, options.threads)
    nbytes = sum(x.nbytes for x in pieces)
    peer_nbytes = sum(x.nbytes for x in pieces[:_PEER_PIECES])
    seconds = seconds_of({"memcpy": _memcpy(pieces), **own, **peers}, options.rounds, warm_ups=1)
    speed = {case: (peer_nbytes if case in peers else nbytes) / taken / 1e9 for case, taken in seconds.items()}
    limit = speed["memcpy"]
    rows = [["memcpy", "1.000", f"{limit:.2f}", f"{limit:.2f}", "", "1.00", "1.00"]]
    for code, ratio in (own_ratios | peer_ratios).items():
        encode, decode = speed[f"{code} encode"], speed[f"{code} decode"]
        added = f"{speed[f'{code} decode_add']:.2f}" if code in own_ratios else ""
        cells = [f"{ratio:.3f}", f"{encode:.2f}", f"{decode:.2f}", added]
        rows.append([code, *cells, f"{encode / limit:.2f}", f"{decode / limit:.2f}"])
    return Table(
        f"{name}, {options.elements:,} elements, {options.thread_text}",
        ["", "ratio", "encode GB/s", "decode GB/s", "decode_add GB/s", "encode of memcpy", "decode of memcpy"],
        rows,
        kernels_note(),
    )


def _public_table(options: Options) -> Table:
    """What a user calls, on one large tensor: results are memory that was not touched before, as those of clone."""
    rows = []
    values = torch.randn(options.elements, generator=torch.Generator().manual_seed(0)).mul_(0.02)
    for x in (values, torch.cat([values, values.flip(0)]).bfloat16()):
        message = laconic.encode(x)
        cases: dict[str, Case] = {
            "clone": x.clone,
            "encode": lambda x=x: laconic.encode(x),
            "decode": lambda message=message: laconic.decode(message),
        }
        seconds = seconds_of(cases, options.rounds)
        rows.append(
            [
                dtype_name(x.dtype),
                *(f"{x.nbytes / seconds[case] / 1e9:.2f}" for case in cases),
                *(f"{1 / seconds[case].over(seconds['clone']):.2f}" for case in ("encode", "decode")),
            ]
        )
    return Table(
        f"laconic.encode and decode of one tensor of {values.nbytes >> 20} MiB, GB/s, {options.thread_text}",
        ["", "x.clone()", "encode", "decode", "encode of clone", "decode of clone"],
        rows,
        "Every call makes a new tensor. Ours ask the system for huge pages, clone does not.",
    )


def _instruction_sets_table(pieces: Sequence[Tensor], options: Options) -> Table:
    cases: dict[str, Case] = {"memcpy": _memcpy(pieces)}
    for isa in native.supported_isas():
        cases |= {f"{isa}, {name}": case for name, case in _own_cases(pieces, isa)[0].items()}
    nbytes = sum(x.nbytes for x in pieces)
    seconds = seconds_of(cases, max(options.rounds // 2, 1))
    return Table(
        f"Instruction sets, Gaussian bf16, {options.thread_text}",
        ["", "GB/s"],
        [[case, f"{nbytes / taken / 1e9:.2f}"] for case, taken in seconds.items()],
    )


def _sizes_table(options: Options) -> Table:
    """Small messages fit the cache; the smallest show what a call costs."""
    rows = []
    x = torch.randn(min(_PIECE, options.elements), generator=torch.Generator().manual_seed(1)).bfloat16()
    for kib in (8, 64, 512, 2048):
        numel = min(kib << 9, x.numel())
        pieces = [x[:numel]] * math.ceil(x.numel() / numel)
        cases, ratios = _own_cases(pieces)
        seconds = seconds_of({"memcpy": _memcpy(pieces), **cases}, options.rounds, warm_ups=1)
        nbytes = numel * 2 * len(pieces)
        names = ("memcpy", "window encode", "window decode", "tiered encode", "tiered decode")
        rows.append(
            [f"{numel * 2 >> 10} KiB", f"{ratios['tiered']:.3f}", *(f"{nbytes / seconds[n] / 1e9:.2f}" for n in names)]
        )
    header = [
        "message",
        "ratio, tiered",
        "memcpy",
        *(f"{code} {verb}" for code in _CODES for verb in ("encode", "decode")),
    ]
    return Table(f"Sizes of one message, Gaussian bf16, GB/s, {options.thread_text}", header, rows)
