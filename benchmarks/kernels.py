"""Block-wise quantization on the CPU, beside bitsandbytes and memcpy in the same run.

GB/s count the bf16 tensor: what quantize reads and what dequantize writes. memcpy clones that tensor, so its row is the
limit of a kernel that would read and write as much.

The elements come in pieces of 2 MiB, about what a layer saves at a time. Results of that size take memory that was used
before. A result of 32 MiB or more comes from the system as fresh pages, and the first touch of a page costs more than
any of these kernels; the last table shows that.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib.metadata import version

import torch
from torch import Tensor

from benchmarks.kit.peers import BITSANDBYTES_CODES, bitsandbytes_cases, installed
from benchmarks.kit.timing import Case, seconds_of
from benchmarks.registry import Options, Table, benchmark, kernels_note
from laconic.ops import BLOCK_SIZES, dequantize_blockwise, multiply_quantize_blockwise, native, quantize_blockwise
from laconic.ops.codebooks import BITS

_BLOCK_SIZE = 64
_PIECE = 1 << 20
_COLUMNS = tuple(f"{code} {verb}" for code in ("nf4", "int5", "int6", "int8") for verb in ("quantize", "dequantize"))


def _each(function: Callable[..., object], calls: Sequence[tuple[object, ...]]) -> Case:
    """One case that calls the function once per piece."""

    def case() -> None:
        for arguments in calls:
            function(*arguments)

    return case


def _own_case(
    pieces: Sequence[Tensor],
    column: str,
    block_size: int = _BLOCK_SIZE,
    seed: int | None = None,
    isa: str | None = None,
) -> Case:
    """Quantize or dequantize every piece, through the public function or under one instruction set."""
    code, verb = column.split()
    if verb == "quantize":
        if isa is not None:
            quantize = [(x, code, block_size, torch.bfloat16, seed) for x in pieces]
            return _each(lambda *a: native.quantize_blockwise(*a, isa=isa), quantize)
        return _each(
            lambda x: quantize_blockwise(x, code=code, block_size=block_size, seed=seed), [(x,) for x in pieces]
        )
    length = pieces[0].shape[-1]
    packed = [quantize_blockwise(x, code=code, block_size=block_size) for x in pieces]
    if isa is not None:
        dequantize = [(*p, code, block_size, length, torch.bfloat16) for p in packed]
        return _each(lambda *a: native.dequantize_blockwise(*a, isa=isa), dequantize)
    return _each(lambda c, s: dequantize_blockwise(c, s, length=length, code=code, block_size=block_size), packed)


def _peer_cases(pieces: Sequence[Tensor]) -> dict[str, Case]:
    """bitsandbytes' quantize and dequantize for the codes it has; empty where it is not installed."""
    cases: dict[str, Case] = {}
    for code in BITSANDBYTES_CODES if installed("bitsandbytes") else ():
        pairs = [bitsandbytes_cases(x, code, _BLOCK_SIZE) for x in pieces]
        for verb, calls in zip(("quantize", "dequantize"), zip(*pairs, strict=True), strict=True):
            cases[f"{code} {verb}"] = _each(lambda call: call(), [(call,) for call in calls])
    return cases


@benchmark("kernels")
def kernels(options: Options) -> list[Table]:
    """Speed of every code, against bitsandbytes and memcpy; instruction sets; block sizes; large results."""
    x = torch.randn(options.elements, generator=torch.Generator().manual_seed(0)).bfloat16()
    x = x.view(-1, min(1024, options.elements))
    pieces = x.split(max(_PIECE // x.shape[1], 1))
    isas = {isa: {column: _own_case(pieces, column, isa=isa) for column in _COLUMNS} for isa in native.supported_isas()}
    sizes = {f"{n}": {column: _own_case(pieces, column, block_size=n) for column in _COLUMNS} for n in BLOCK_SIZES}
    return [
        _codes_table(pieces, options),
        _grid_table(f"Instruction sets, GB/s, {options.thread_text}", "", isas, pieces, options),
        _grid_table(f"Block sizes, GB/s, {options.thread_text}", "block", sizes, pieces, options),
        _one_call_table(x, options),
        _product_table(pieces, options),
    ]


def _speeds(pieces: Sequence[Tensor], cases: dict[str, Case], options: Options) -> dict[str, float]:
    nbytes = sum(x.nbytes for x in pieces)
    seconds = seconds_of(cases, options.rounds, warm_ups=1)
    return {name: nbytes / taken / 1e9 for name, taken in seconds.items()}


def _codes_table(pieces: Sequence[Tensor], options: Options) -> Table:
    peers = _peer_cases(pieces)
    cases: dict[str, Case] = {"memcpy": _each(Tensor.clone, [(x,) for x in pieces])}
    for code in BITS:
        for column in (f"{code} quantize", f"{code} dequantize"):
            cases[column] = _own_case(pieces, column)
            if column in peers:
                cases[f"peer {column}"] = peers[column]
        cases[f"{code} quantize, stochastic"] = _own_case(pieces, f"{code} quantize", seed=1)
    speed = _speeds(pieces, cases, options)

    def peer(name: str) -> float:
        return speed.get(f"peer {name}", 0.0)

    release = version("bitsandbytes") if installed("bitsandbytes") else "(not installed)"
    return Table.of(
        f"{options.elements:,} bf16 elements, blocks of {_BLOCK_SIZE}, bf16 scales, {options.thread_text}",
        [name for name in cases if not name.startswith("peer ")],
        [
            ("", str),
            ("laconic GB/s", lambda name: f"{speed[name]:.2f}"),
            (f"bitsandbytes {release} GB/s", lambda name: f"{peer(name):.2f}" if peer(name) else ""),
            ("ratio", lambda name: f"{speed[name] / peer(name):.1f}x" if peer(name) else ""),
            ("of memcpy", lambda name: f"{speed[name] / speed['memcpy']:.2f}"),
        ],
        f"{kernels_note()} bitsandbytes' fp4 stands beside e2m1 (4-bit floats both), its 8-bit dynamic code beside "
        "int8; its scales are fp32.",
    )


def _grid_table(
    title: str, heading: str, grid: dict[str, dict[str, Case]], pieces: Sequence[Tensor], options: Options
) -> Table:
    """A row for each instruction set or block size, a column for each code and verb."""
    cases = {f"{row} {column}": case for row, of_row in grid.items() for column, case in of_row.items()}
    speed = _speeds(pieces, cases, options)
    columns = [(column, lambda row, column=column: f"{speed[f'{row} {column}']:.2f}") for column in _COLUMNS]
    return Table.of(title, grid, [(heading, str), *columns])


def _one_call_table(x: Tensor, options: Options) -> Table:
    cases: dict[str, Case] = {"memcpy": x.clone}
    cases |= {column: _own_case([x], column) for column in _COLUMNS}
    speed = _speeds([x], cases, options)
    return Table.of(
        f"The same elements in one call, GB/s, {options.thread_text}",
        cases,
        [("", str), ("GB/s", lambda name: f"{speed[name]:.2f}")],
        "Large results are fresh pages of the system. torch asks for huge pages, which cost less, when the environment "
        f"has THP_MEM_ALLOC_ENABLE=1; here it is {os.environ.get('THP_MEM_ALLOC_ENABLE', 'not set')}.",
    )


def _product_table(pieces: Sequence[Tensor], options: Options) -> Table:
    cases: dict[str, Case] = {}
    for code in ("nf4", "int8"):

        def apart(a: Tensor, b: Tensor, code: str = code) -> object:
            return a * b, quantize_blockwise(b, code=code)

        def at_once(a: Tensor, b: Tensor, code: str = code) -> object:
            return multiply_quantize_blockwise(a, b, code=code)

        pairs = [(a, a.flip(0)) for a in pieces]
        cases[f"{code}, torch's product and quantize"] = _each(apart, pairs)
        cases[f"{code}, multiply_quantize_blockwise"] = _each(at_once, pairs)
    speed = _speeds(pieces, cases, options)
    return Table.of(
        f"A product and the codes of a factor, GB/s, {options.thread_text}",
        cases,
        [("", str), ("GB/s", lambda name: f"{speed[name]:.2f}")],
    )
