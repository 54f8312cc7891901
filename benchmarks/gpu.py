"""GPU: whether the Triton kernels return the reference's bits, how fast they are, and what a model gains.

    python -m benchmarks.run gpu --out benchmarks/results/gpu_NAME.md

Takes less than eight minutes on one CUDA device, most of them compiling kernels. Every part is a process of its own,
and its table is written when it ends: a part that fails leaves its reason, and the others their tables. Exits with code
1 if a part fails, as one does that finds a bit that differs.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator

import torch
from torch import nn

from benchmarks import gpu_ops
from benchmarks.kit import timing
from benchmarks.kit.isolated_parts import run_parts
from benchmarks.kit.models import decoder_layers
from benchmarks.kit.peers import bitsandbytes_cases, installed
from benchmarks.kit.timing import Case, Timing, seconds_of
from benchmarks.registry import Options, Table, Text, benchmark
from laconic.ops import BLOCK_SIZES, DTYPES, dequantize_blockwise, kernels_in_use, quantize_blockwise, reference
from laconic.ops.codebooks import BITS

_BLOCK_SIZE = 64


_PART_SECONDS = 200
_ALL_SECONDS = 460

Part = Callable[[Options, str], Table]
_PARTS: dict[str, Part] = {
    "bits of quantization": lambda options, device: _bits_table(device),
    "bits of the other ops": lambda options, device: gpu_ops.bits_table("cuda"),
    "speed of quantization": lambda options, device: _speed_table(options, device),
    "speed of the other ops": lambda options, device: gpu_ops.speed_table(2 * _elements(options), "cuda", _seconds),
    "lossless messages": lambda options, device: gpu_ops.lossless_table(4 * _elements(options), "cuda", _seconds),
    "one layer": lambda options, device: _block_table(options, device),
    "head": lambda options, device: gpu_ops.head_table(
        256 if options.small else 4096, 2048, 32000, "cuda", lambda case: _seconds(case, repeats=10)
    ),
}


@benchmark("gpu")
def gpu(options: Options) -> Iterator[Text]:
    """Bits and speed of every op, one Llama block, and the head of a language model, each as soon as it is there."""
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.gpu needs a CUDA device, and torch sees none on this machine")
    if (chosen := kernels_in_use()["cuda"])["implementation"] != "triton":
        raise SystemExit(f"benchmarks.gpu needs the Triton kernels, but the reference is in use: {chosen['reason']}")
    # A fault on a device ends all later calls of its process: a process for each part.
    start = [sys.executable, "-m", "benchmarks.gpu", str(options.threads), str(options.elements), str(options.rounds)]
    failed = []
    for part in run_parts({name: [*start, name] for name in _PARTS}, _PART_SECONDS, _ALL_SECONDS):
        yield Text(part.render())
        if part.failure:
            failed.append(part.name)
    if failed:
        raise SystemExit(f"benchmarks.gpu failed in {len(failed)} of {len(_PARTS)} parts: {', '.join(failed)}")


def _elements(options: Options) -> int:
    return max(options.elements, 1 << 20)


def _combinations(start: int) -> list[tuple[torch.dtype, int, torch.dtype, int | None]]:
    """Types, block sizes and rounding: each of their values, not all at once, for compiling takes most of the time."""
    # 13 has no factor in common with the numbers of values, so it passes through all of each.
    return list(itertools.product(DTYPES, BLOCK_SIZES, DTYPES, (None, 7)))[start::13]


def _bits_table(device: str) -> Table:
    """Compare with the reference on the CPU: all 16-bit patterns, ragged rows, magnitudes from 2**-140 to overflow."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(37, 1000, generator=generator)
    tensors = {
        "normal, ragged rows": normal,
        "wide range": normal * torch.exp2(50 * torch.randn(37, 1000, generator=generator)),
        "whole blocks": normal.view(-1)[: 64 * 512].view(64, 512),
    }
    rows = []
    for number, code in enumerate(BITS):
        compared = 0
        for dtype, block_size, scale_dtype, seed in _combinations(number):
            inputs = [x.to(dtype) for x in tensors.values()]
            if dtype != torch.float32:
                inputs.append(torch.arange(1 << 16).short().view(dtype).view(-1, 256))
            for x in inputs:
                expected = reference.quantize_blockwise(x, code, block_size, scale_dtype, seed)
                found = quantize_blockwise(
                    x.cuda(), code=code, block_size=block_size, scale_dtype=scale_dtype, seed=seed
                )
                back = reference.dequantize_blockwise(*expected, code, block_size, x.shape[-1], dtype)
                found_back = dequantize_blockwise(
                    *found, length=x.shape[-1], code=code, block_size=block_size, dtype=dtype
                )
                for ours, truth in zip((*found, found_back), (*expected, back), strict=True):
                    if not gpu_ops.same_bits(ours, truth):
                        where = f"{code}, {dtype}, block {block_size}, {scale_dtype}, seed {seed}, {tuple(x.shape)}"
                        raise SystemExit(f"the Triton kernels and the reference differ: {where}")
                    compared += truth.numel()
        rows.append([code, f"{compared:,}", "equal"])
    title = f"Bits on {device}, Triton beside the reference"
    return Table(title, ["code", "codes, scales and values compared", "bits"], rows)


def _events(case: Case) -> Callable[[], float]:
    """The device's own clock; nothing waits for it before all rounds are over."""
    started, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    started.record()
    case()
    ended.record()

    def read() -> float:
        ended.synchronize()
        return started.elapsed_time(ended) / 1e3

    return read


def _seconds(case: Case, repeats: int = 50) -> Timing:
    """Median seconds of one call on the device; the caches are flushed by the size of the tensors."""
    return seconds_of({"device": case}, repeats, warm_up_rounds=5, clock=_events)["device"]


def _speed_table(options: Options, device: str) -> Table:
    elements = _elements(options) * 8
    x = torch.randn(elements, device="cuda", dtype=torch.bfloat16).view(-1, 4096)
    target = torch.empty_like(x)
    copied = x.nbytes / _seconds(lambda: target.copy_(x)) / 1e9
    rows = [["copy", f"{copied:.0f}", "1.00", "", ""]]
    for code in BITS:
        codes, scales = quantize_blockwise(x, code=code, block_size=_BLOCK_SIZE)
        # Bytes that cross memory, as a share of the copy's, bound the speed that a perfect kernel could have.
        traffic = (x.nbytes + codes.nbytes + scales.nbytes) / (2 * x.nbytes)
        cases: dict[str, Case] = {
            "quantize": lambda code=code: quantize_blockwise(x, code=code, block_size=_BLOCK_SIZE),
            "quantize, stochastic": lambda code=code: quantize_blockwise(x, code=code, block_size=_BLOCK_SIZE, seed=1),
            "dequantize": lambda code=code, c=codes, s=scales: dequantize_blockwise(
                c, s, length=4096, code=code, block_size=_BLOCK_SIZE
            ),
        }
        peers: dict[str, Case] = {}
        if code in ("nf4", "int8") and installed("bitsandbytes"):
            peers = dict(zip(("quantize", "dequantize"), bitsandbytes_cases(x, code, _BLOCK_SIZE), strict=True))
        for verb, case in cases.items():
            speed = x.nbytes / _seconds(case) / 1e9
            beside = ["", ""]
            if verb in peers:
                peer_speed = x.nbytes / _seconds(peers[verb]) / 1e9
                beside = [f"{peer_speed:.0f}", f"{speed / peer_speed:.2f}x"]
            rows.append([f"{code} {verb}", f"{speed:.0f}", f"{speed * traffic / copied:.2f}", *beside])
    return Table(
        f"Speed on {device}: {elements:,} bf16 elements, blocks of {_BLOCK_SIZE}",
        ["", "GB/s of bf16", "of copy bandwidth", "bitsandbytes GB/s", "ratio"],
        rows,
        "The third column counts all bytes read and written, and compares them with those of the copy.",
    )


def _block_table(options: Options, device: str) -> Table:
    """One layer of the size of Llama 2 7B in bf16: step time and peak memory, plain and compressed."""
    length = 256 if options.small else 4096
    block = decoder_layers("llama", 4096, length, device="cuda", head_dim=128, intermediate_size=11008)

    def step(layer: nn.Module) -> None:
        block.forward(layer, block.x.detach().requires_grad_()).backward(block.x)
        layer.zero_grad(set_to_none=True)

    def kept_nbytes(layer: nn.Module) -> int:
        source = block.x.detach().requires_grad_()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        out = block.forward(layer, source)
        torch.cuda.synchronize()
        kept = torch.cuda.memory_allocated() - before
        del out
        return kept

    layers = {
        "unmodified": block.layers[0],
        "laconic nf4": block.compressed(4),
        "laconic int8": block.compressed(8),
    }
    rows = []
    for name, layer in layers.items():
        seconds = _seconds(lambda layer=layer: step(layer), repeats=20)
        kept = kept_nbytes(layer)
        torch.cuda.reset_peak_memory_stats()
        step(layer)
        peak = torch.cuda.max_memory_allocated()
        rows.append([name, f"{seconds * 1e3:.2f} ms", f"{kept / 2**20:.0f} MiB", f"{peak / 2**20:.0f} MiB"])
    return Table(
        f"One Llama layer on {device}: hidden 4096, {length} tokens, bf16",
        ["", "forward and backward", "allocated after forward", "peak of a step, weights included"],
        rows,
    )


def _main(threads: str, elements: str, rounds: str, name: str) -> None:
    torch.set_num_threads(int(threads))
    print(_PARTS[name](Options(int(threads), int(elements), int(rounds)), torch.cuda.get_device_name()).render())
    if taken := timing.summary():
        print(taken)


if __name__ == "__main__":
    _main(*sys.argv[1:])
