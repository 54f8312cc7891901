"""Block-wise quantization on the CPU, beside bitsandbytes and memcpy in the same run.

GB/s count the bf16 tensor: what quantize reads and what dequantize writes. memcpy clones that tensor, so its row is the
limit of a kernel that would read and write as much.

The elements come in pieces of 2 MiB, about what a layer saves at a time. Results of that size take memory that was used
before. A result of 32 MiB or more comes from the system as fresh pages, and the first touch of a page costs more than
any of these kernels; the last table shows that.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.registry import Options, Table, benchmark, seconds_of
from laconic.ops import BLOCK_SIZES, dequantize_blockwise, kernels_in_use, native, quantize_blockwise
from laconic.ops.codebooks import BITS

_BLOCK_SIZE = 64
_PIECE = 1 << 20
_COLUMNS = tuple(f"{code} {verb}" for code in ("nf4", "int5", "int6", "int8") for verb in ("quantize", "dequantize"))

Case = Callable[[], object]


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
    if importlib.util.find_spec("bitsandbytes") is None:
        return {}
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import bitsandbytes.functional as peer

    inputs = [(x,) for x in pieces]
    cases: dict[str, Case] = {}
    for code, kind in (("nf4", "nf4"), ("e2m1", "fp4")):

        def quantize(x: Tensor, kind: str = kind) -> tuple[object, ...]:
            return peer.quantize_4bit(x, blocksize=_BLOCK_SIZE, quant_type=kind)

        cases[f"{code} quantize"] = _each(quantize, inputs)
        cases[f"{code} dequantize"] = _each(peer.dequantize_4bit, [quantize(x) for x in pieces])
    cases["int8 quantize"] = _each(lambda x: peer.quantize_blockwise(x, blocksize=_BLOCK_SIZE), inputs)
    packed = [peer.quantize_blockwise(x, blocksize=_BLOCK_SIZE) for x in pieces]
    cases["int8 dequantize"] = _each(peer.dequantize_blockwise, packed)
    return cases


@benchmark("kernels")
def kernels(options: Options) -> list[Table]:
    """Speed of every code, against bitsandbytes and memcpy; instruction sets; block sizes; large results."""
    x = torch.randn(options.elements, generator=torch.Generator().manual_seed(0)).bfloat16()
    x = x.view(-1, min(1024, options.elements))
    pieces = x.split(max(_PIECE // x.shape[1], 1))
    threads = f"{options.threads} thread{'s' * (options.threads > 1)}"
    return [
        _codes_table(pieces, options, threads),
        _instruction_sets_table(pieces, options, threads),
        _block_sizes_table(pieces, options, threads),
        _one_call_table(x, options, threads),
    ]


def _speeds(pieces: Sequence[Tensor], cases: dict[str, Case], options: Options) -> dict[str, float]:
    nbytes = sum(x.nbytes for x in pieces)
    seconds = seconds_of(cases, options.rounds, warm_ups=1)
    return {name: nbytes / taken / 1e9 for name, taken in seconds.items()}


def _codes_table(pieces: Sequence[Tensor], options: Options, threads: str) -> Table:
    peers = _peer_cases(pieces)
    cases: dict[str, Case] = {"memcpy": _each(Tensor.clone, [(x,) for x in pieces])}
    for code in BITS:
        for column in (f"{code} quantize", f"{code} dequantize"):
            cases[column] = _own_case(pieces, column)
            if column in peers:
                cases[f"peer {column}"] = peers[column]
        cases[f"{code} quantize, stochastic"] = _own_case(pieces, f"{code} quantize", seed=1)
    speed = _speeds(pieces, cases, options)
    rows = [["memcpy", f"{speed['memcpy']:.2f}", "", "", "1.00"]]
    for name in cases:
        if name == "memcpy" or name.startswith("peer "):
            continue
        peer = speed.get(f"peer {name}")
        beside = [f"{peer:.2f}", f"{speed[name] / peer:.1f}x"] if peer else ["", ""]
        rows.append([name, f"{speed[name]:.2f}", *beside, f"{speed[name] / speed['memcpy']:.2f}"])
    return Table(
        f"{options.elements:,} bf16 elements, blocks of {_BLOCK_SIZE}, bf16 scales, {threads}",
        ["", "laconic GB/s", f"{_peer_version()} GB/s", "ratio", "of memcpy"],
        rows,
        f"C++ kernels: {kernels_in_use()['cpu']['isa'] or 'none, plain torch'}. bitsandbytes' fp4 stands beside e2m1 "
        "(4-bit floats both), its 8-bit dynamic code beside int8; its scales are fp32.",
    )


def _instruction_sets_table(pieces: Sequence[Tensor], options: Options, threads: str) -> Table:
    isas = native.supported_isas()
    cases = {f"{isa} {column}": _own_case(pieces, column, isa=isa) for isa in isas for column in _COLUMNS}
    speed = _speeds(pieces, cases, options)
    rows = [[isa, *(f"{speed[f'{isa} {column}']:.2f}" for column in _COLUMNS)] for isa in isas]
    return Table(f"Instruction sets, GB/s, {threads}", ["", *_COLUMNS], rows)


def _block_sizes_table(pieces: Sequence[Tensor], options: Options, threads: str) -> Table:
    cases = {
        f"{size} {column}": _own_case(pieces, column, block_size=size) for size in BLOCK_SIZES for column in _COLUMNS
    }
    speed = _speeds(pieces, cases, options)
    rows = [[str(size), *(f"{speed[f'{size} {column}']:.2f}" for column in _COLUMNS)] for size in BLOCK_SIZES]
    return Table(f"Block sizes, GB/s, {threads}", ["block", *_COLUMNS], rows)


def _one_call_table(x: Tensor, options: Options, threads: str) -> Table:
    cases: dict[str, Case] = {"memcpy": x.clone}
    cases |= {column: _own_case([x], column) for column in _COLUMNS}
    speed = _speeds([x], cases, options)
    return Table(
        f"The same elements in one call, GB/s, {threads}",
        ["", "GB/s"],
        [[name, f"{value:.2f}"] for name, value in speed.items()],
        "Large results are fresh pages of the system. torch asks for huge pages, which cost less, when the environment "
        f"has THP_MEM_ALLOC_ENABLE=1; here it is {os.environ.get('THP_MEM_ALLOC_ENABLE', 'not set')}.",
    )


def _peer_version() -> str:
    if importlib.util.find_spec("bitsandbytes") is None:
        return "bitsandbytes (not installed)"
    from importlib.metadata import version

    return f"bitsandbytes {version('bitsandbytes')}"
