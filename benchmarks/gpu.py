"""GPU: whether the Triton kernels return the reference's bits, how fast they are, and what a model gains.

    python -m benchmarks.run gpu --out benchmarks/results/gpu_NAME.md

Takes less than eight minutes on one CUDA device, most of them compiling kernels. Exits with code 1 if any bit differs.
"""

from __future__ import annotations

import copy
import importlib.util
import itertools
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn

import laconic
from benchmarks import gpu_ops
from benchmarks.registry import Options, Table, benchmark
from laconic.ops import BLOCK_SIZES, dequantize_blockwise, kernels_in_use, quantize_blockwise, reference
from laconic.ops.codebooks import BITS
from laconic.ops.schemas import DTYPES

_BLOCK_SIZE = 64


@benchmark("gpu")
def gpu(options: Options) -> list[Table]:
    """Bits and speed of every op, one Llama block, and the head of a language model."""
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.gpu needs a CUDA device, and torch sees none on this machine")
    if (chosen := kernels_in_use()["cuda"])["implementation"] != "triton":
        raise SystemExit(f"benchmarks.gpu needs the Triton kernels, but the reference is in use: {chosen['reason']}")
    device = torch.cuda.get_device_name()
    elements = max(options.elements, 1 << 20)
    tokens = 256 if options.elements < 1 << 20 else 4096
    return [
        _bits_table(device),
        gpu_ops.bits_table("cuda"),
        _speed_table(options, device),
        gpu_ops.speed_table(2 * elements, "cuda", _seconds),
        gpu_ops.lossless_table(4 * elements, "cuda", _seconds),
        _block_table(options, device),
        gpu_ops.head_table(tokens, 2048, 32000, "cuda", lambda case: _seconds(case, repeats=10)),
    ]


def _same_bits(a: Tensor, b: Tensor) -> bool:
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(bits), b.view(bits))


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
    for code in BITS:
        compared = 0
        for dtype, block_size, scale_dtype, seed in itertools.product(DTYPES, BLOCK_SIZES, DTYPES, (None, 7)):
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
                    if not _same_bits(ours.cpu(), truth):
                        where = f"{code}, {dtype}, block {block_size}, {scale_dtype}, seed {seed}, {tuple(x.shape)}"
                        raise SystemExit(f"the Triton kernels and the reference differ: {where}")
                    compared += truth.numel()
        rows.append([code, f"{compared:,}", "equal"])
    title = f"Bits on {device}, Triton beside the reference"
    return Table(title, ["code", "codes, scales and values compared", "bits"], rows)


def _seconds(case: Callable[[], object], repeats: int = 50) -> float:
    """Median seconds of one call on the device; the caches are flushed by the size of the tensors."""
    for _ in range(5):
        case()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for started, ended in events:
        started.record()
        case()
        ended.record()
    torch.cuda.synchronize()
    return median(started.elapsed_time(ended) for started, ended in events) / 1e3


def _speed_table(options: Options, device: str) -> Table:
    elements = max(options.elements, 1 << 20) * 8
    x = torch.randn(elements, device="cuda", dtype=torch.bfloat16).view(-1, 4096)
    target = torch.empty_like(x)
    copied = x.nbytes / _seconds(lambda: target.copy_(x)) / 1e9
    rows = [["copy", f"{copied:.0f}", "1.00", "", ""]]
    peers = _peer_cases(x)
    for code in BITS:
        codes, scales = quantize_blockwise(x, code=code, block_size=_BLOCK_SIZE)
        # Bytes that cross memory, as a share of the copy's, bound the speed that a perfect kernel could have.
        traffic = (x.nbytes + codes.nbytes + scales.nbytes) / (2 * x.nbytes)
        cases: dict[str, Callable[[], object]] = {
            "quantize": lambda code=code: quantize_blockwise(x, code=code, block_size=_BLOCK_SIZE),
            "quantize, stochastic": lambda code=code: quantize_blockwise(x, code=code, block_size=_BLOCK_SIZE, seed=1),
            "dequantize": lambda code=code, c=codes, s=scales: dequantize_blockwise(
                c, s, length=4096, code=code, block_size=_BLOCK_SIZE
            ),
        }
        for verb, case in cases.items():
            speed = x.nbytes / _seconds(case) / 1e9
            peer = peers.get((code, verb))
            peer_speed = x.nbytes / _seconds(peer) / 1e9 if peer else None
            beside = [f"{peer_speed:.0f}", f"{speed / peer_speed:.2f}x"] if peer_speed else ["", ""]
            rows.append([f"{code} {verb}", f"{speed:.0f}", f"{speed * traffic / copied:.2f}", *beside])
    return Table(
        f"Speed on {device}: {elements:,} bf16 elements, blocks of {_BLOCK_SIZE}",
        ["", "GB/s of bf16", "of copy bandwidth", "bitsandbytes GB/s", "ratio"],
        rows,
        "The third column counts all bytes read and written, and compares them with those of the copy.",
    )


def _peer_cases(x: Tensor) -> dict[tuple[str, str], Callable[[], object]]:
    if importlib.util.find_spec("bitsandbytes") is None:
        return {}
    import bitsandbytes.functional as peer

    nf4, nf4_state = peer.quantize_4bit(x, blocksize=_BLOCK_SIZE, quant_type="nf4")
    int8, int8_state = peer.quantize_blockwise(x, blocksize=_BLOCK_SIZE)
    return {
        ("nf4", "quantize"): lambda: peer.quantize_4bit(x, blocksize=_BLOCK_SIZE, quant_type="nf4"),
        ("nf4", "dequantize"): lambda: peer.dequantize_4bit(nf4, nf4_state),
        ("int8", "quantize"): lambda: peer.quantize_blockwise(x, blocksize=_BLOCK_SIZE),
        ("int8", "dequantize"): lambda: peer.dequantize_blockwise(int8, int8_state),
    }


def _block_table(options: Options, device: str) -> Table:
    """One layer of the size of Llama 2 7B in bf16: step time and peak memory, plain and compressed."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    length = 256 if options.elements < 1 << 20 else 4096
    config = LlamaConfig(hidden_size=4096, intermediate_size=11008, num_attention_heads=32)
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    plain = LlamaDecoderLayer(config, 0).to("cuda", torch.bfloat16)
    x = torch.randn(1, length, 4096, device="cuda", dtype=torch.bfloat16)
    positions = LlamaRotaryEmbedding(config).cuda()(x, torch.arange(length, device="cuda")[None])
    inputs = {"hidden_states": x, "position_embeddings": positions}

    def step(layer: nn.Module) -> None:
        out = layer(x.detach().requires_grad_(), position_embeddings=positions)
        (out[0] if isinstance(out, tuple) else out).backward(x)
        layer.zero_grad(set_to_none=True)

    def kept_nbytes(layer: nn.Module) -> int:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        out = layer(x.detach().requires_grad_(), position_embeddings=positions)
        torch.cuda.synchronize()
        kept = torch.cuda.memory_allocated() - before
        del out
        return kept

    layers: dict[str, nn.Module] = {"unmodified": plain}
    for name, bits in (("laconic nf4", 4), ("laconic int8", 8)):
        layers[name] = copy.deepcopy(plain)
        laconic.compress_activations(layers[name], bits, example_inputs=inputs)
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
