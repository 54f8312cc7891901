"""Block-wise quantization on the CPU, beside bitsandbytes and memcpy in the same run.

GB/s count the bf16 tensor: what quantize reads and what dequantize writes. memcpy copies that tensor, so its row is the
limit of a kernel that would read and write as much.

Large results come from the system as fresh pages, and the first touch of a page costs more than any of these kernels.
Training touches the same memory every step, so this benchmark lets the C library keep freed memory, for everybody
alike; the last table shows what fresh pages cost.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.registry import Options, Table, benchmark, seconds_of
from laconic.ops import dequantize_blockwise, kernels_in_use, native, quantize_blockwise
from laconic.ops.codebooks import BITS

_BLOCK_SIZE = 64
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4

Case = Callable[[], object]


def _keep_freed_memory() -> None:
    """Tell glibc's malloc to reuse freed memory of any size instead of giving it back to the system."""
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:  # not glibc: its own habits then count for every row
        return
    libc.mallopt(_M_MMAP_MAX, 0)
    libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def _peer_cases(x: Tensor) -> dict[str, dict[str, Case]]:
    """bitsandbytes' quantize and dequantize for the codes it has; empty where it is not installed."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return {}
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import bitsandbytes.functional as peer

    cases: dict[str, dict[str, Case]] = {}
    for code, kind in (("nf4", "nf4"), ("e2m1", "fp4")):
        codes, state = peer.quantize_4bit(x, blocksize=_BLOCK_SIZE, quant_type=kind)
        cases[code] = {
            "quantize": lambda kind=kind: peer.quantize_4bit(x, blocksize=_BLOCK_SIZE, quant_type=kind),
            "dequantize": lambda codes=codes, state=state: peer.dequantize_4bit(codes, state),
        }
    codes, state = peer.quantize_blockwise(x, blocksize=_BLOCK_SIZE)
    cases["int8"] = {
        "quantize": lambda: peer.quantize_blockwise(x, blocksize=_BLOCK_SIZE),
        "dequantize": lambda: peer.dequantize_blockwise(codes, state),
    }
    return cases


def _own_case(x: Tensor, code: str, verb: str, block_size: int = _BLOCK_SIZE, seed: int | None = None) -> Case:
    if verb == "quantize":
        return lambda: quantize_blockwise(x, code=code, block_size=block_size, seed=seed)
    codes, scales = quantize_blockwise(x, code=code, block_size=block_size)
    length = x.shape[-1]
    return lambda: dequantize_blockwise(codes, scales, length=length, code=code, block_size=block_size, dtype=x.dtype)


@benchmark("kernels")
def kernels(options: Options) -> list[Table]:
    """Speed of every code, against bitsandbytes and memcpy; instruction sets; block sizes; fresh pages."""
    x = torch.randn(options.elements, generator=torch.Generator().manual_seed(0)).bfloat16()
    x = x.view(-1, min(4096, options.elements))
    threads = f"{options.threads} thread{'s' * (options.threads > 1)}"
    what = f"{options.elements:,} bf16 elements, blocks of {_BLOCK_SIZE}, bf16 scales, {threads}"
    fresh = _page_speeds(x, options)
    _keep_freed_memory()
    return [
        _codes_table(x, options, what),
        _instruction_sets_table(x, options, threads),
        _block_sizes_table(x, options, threads),
        _pages_table(_page_speeds(x, options), fresh, threads),
    ]


def _speeds(x: Tensor, cases: dict[str, Case], options: Options) -> dict[str, float]:
    seconds = seconds_of(cases, options.rounds, warm_ups=1)
    return {name: x.nbytes / taken / 1e9 for name, taken in seconds.items()}


def _codes_table(x: Tensor, options: Options, what: str) -> Table:
    copy = torch.empty_like(x)
    peers = _peer_cases(x)
    cases: dict[str, Case] = {"memcpy": lambda: copy.copy_(x)}
    for code in BITS:
        for verb in ("quantize", "dequantize"):
            cases[f"{code} {verb}"] = _own_case(x, code, verb)
            if code in peers:
                cases[f"peer {code} {verb}"] = peers[code][verb]
        cases[f"{code} quantize, stochastic"] = _own_case(x, code, "quantize", seed=1)
    speed = _speeds(x, cases, options)
    rows = [["memcpy", f"{speed['memcpy']:.2f}", "", "", "1.00"]]
    for name in cases:
        if name == "memcpy" or name.startswith("peer "):
            continue
        peer = speed.get(f"peer {name}")
        beside = [f"{peer:.2f}", f"{speed[name] / peer:.1f}x"] if peer else ["", ""]
        rows.append([name, f"{speed[name]:.2f}", *beside, f"{speed[name] / speed['memcpy']:.2f}"])
    version = _peer_version()
    return Table(
        what,
        ["", "laconic GB/s", f"{version} GB/s", "ratio", "of memcpy"],
        rows,
        f"C++ kernels: {kernels_in_use()['cpu']['isa'] or 'none, plain torch'}. bitsandbytes' fp4 stands beside e2m1 "
        "(4-bit floats both), its 8-bit dynamic code beside int8; its scales are fp32.",
    )


def _instruction_sets_table(x: Tensor, options: Options, threads: str) -> Table:
    cases: dict[str, Case] = {}
    for isa in native.supported_isas():
        for code in ("nf4", "int8"):
            arguments = (code, _BLOCK_SIZE, torch.bfloat16)
            codes, scales = native.quantize_blockwise(x, *arguments, None)
            back = (codes, scales, code, _BLOCK_SIZE, x.shape[-1], x.dtype)
            cases[f"{isa} {code} quantize"] = lambda a=arguments, isa=isa: native.quantize_blockwise(
                x, *a, None, isa=isa
            )
            cases[f"{isa} {code} dequantize"] = lambda b=back, isa=isa: native.dequantize_blockwise(*b, isa=isa)
    speed = _speeds(x, cases, options)
    columns = [f"{code} {verb}" for code in ("nf4", "int8") for verb in ("quantize", "dequantize")]
    rows = [[isa, *(f"{speed[f'{isa} {c}']:.2f}" for c in columns)] for isa in native.supported_isas()]
    return Table(f"Instruction sets, GB/s, {threads}", ["", *columns], rows)


def _block_sizes_table(x: Tensor, options: Options, threads: str) -> Table:
    sizes = (16, 32, 64, 128, 256)
    columns = [f"{code} {verb}" for code in ("nf4", "int8") for verb in ("quantize", "dequantize")]
    cases = {f"{column} {size}": _own_case(x, *column.split(), block_size=size) for column in columns for size in sizes}
    speed = _speeds(x, cases, options)
    rows = [[str(size), *(f"{speed[f'{column} {size}']:.2f}" for column in columns)] for size in sizes]
    return Table(f"Block sizes, GB/s, {threads}", ["block", *columns], rows)


def _page_speeds(x: Tensor, options: Options) -> dict[str, float]:
    cases: dict[str, Case] = {
        "copy into a new tensor": lambda: x.clone(),
        "nf4 quantize": _own_case(x, "nf4", "quantize"),
        "nf4 dequantize": _own_case(x, "nf4", "dequantize"),
        "int8 dequantize": _own_case(x, "int8", "dequantize"),
    }
    return _speeds(x, cases, options)


def _pages_table(reused: dict[str, float], fresh: dict[str, float], threads: str) -> Table:
    rows = [[name, f"{reused[name]:.2f}", f"{fresh[name]:.2f}"] for name in reused]
    return Table(f"What fresh pages cost, GB/s, {threads}", ["", "reused memory", "fresh pages"], rows)


def _peer_version() -> str:
    if importlib.util.find_spec("bitsandbytes") is None:
        return "bitsandbytes (not installed)"
    from importlib.metadata import version

    return f"bitsandbytes {version('bitsandbytes')}"
