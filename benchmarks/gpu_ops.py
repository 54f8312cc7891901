"""The gradient store, the optimizer, lossless messages and the head of a language model on a device.

Part of `benchmarks.gpu`. Each op has one function that makes its cases, so that the table of bits and the table of
speeds run the same calls; the device is an argument, so that the tests can run both on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.registry import Table, dtype_name
from laconic import BlockFormat, linear_cross_entropy, ops
from laconic.ops.dynamic_map import STATE_BLOCK_SIZE, zero_code
from laconic.ops.lossless import EXPONENT_DTYPES, Status

Timer = Callable[[Callable[[], object]], float]
"""Median seconds of one call."""

_NUM_SHARDS = 4
_ADAMW = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 1e-2, "step": 10}


@dataclass(frozen=True)
class _Case:
    """One op on tensors that it may write to: what to call, what it leaves, and bytes read and written."""

    name: str
    call: Callable[[], object]
    results: Callable[[], list[Tensor]]
    moved_nbytes: int


def _shard(x: Tensor, bits: int) -> tuple[Tensor, ...]:
    """codes, scales and, at 12 bits, those of what int8 lost of x [n]."""
    codes, scales = ops.quantize_blockwise(x, code="int8", block_size=128, scale_dtype=torch.float32)
    if bits == 8:
        return codes, scales
    back = ops.dequantize_blockwise(codes, scales, length=x.numel(), code="int8", block_size=128, dtype=torch.float32)
    return codes, scales, *ops.quantize_blockwise(x - back, code="int4", block_size=128, scale_dtype=torch.float32)


def _gradient_cases(x: Tensor, device: str) -> Iterator[_Case]:
    """Sums of shards and the gradient store, of x fp32 [n] on the CPU."""
    for bits in (8, 12):
        shard = _shard(x, bits)
        shards = [torch.stack([part.roll(17 * r) for r in range(_NUM_SHARDS)]).to(device) for part in shard]
        residual = dict(zip(("residual_codes", "residual_scales"), shards[2:], strict=False))
        read = sum(part.nbytes for part in shards)
        found: list[Tensor] = []

        def put(*values: Tensor | None, found: list[Tensor] = found) -> None:
            found[:] = [value for value in values if value is not None]

        yield _Case(
            f"sum_blockwise, {_NUM_SHARDS} shards in {bits} bits",
            lambda s=shards, r=residual, put=put: put(ops.sum_blockwise(s[0], s[1], factor=0.25, **r)),
            lambda found=found: found,
            read + x.nbytes,
        )
        yield _Case(
            f"sum_requantize_blockwise, {_NUM_SHARDS} shards in {bits} bits",
            lambda s=shards, r=residual, put=put: put(*ops.sum_requantize_blockwise(s[0], s[1], factor=0.25, **r)),
            lambda found=found: found,
            read + read // _NUM_SHARDS,
        )
        store = [part.to(device, copy=True) for part in shard]
        residual = dict(zip(("residual_codes", "residual_scales"), store[2:], strict=False))
        stored = sum(part.nbytes for part in store)
        gradient = x.bfloat16().to(device)
        yield _Case(
            f"accumulate_blockwise_, {bits} bits, bf16 gradient",
            lambda s=store, r=residual, g=gradient: ops.accumulate_blockwise_(s[0], s[1], g, alpha=0.5, **r),
            lambda s=store: s,
            2 * stored + gradient.nbytes,
        )
        yield _Case(
            f"square_sum_blockwise, {bits} bits",
            lambda s=store, r=residual, put=put: put(ops.square_sum_blockwise(s[0], s[1], **r)),
            lambda found=found: found,
            stored,
        )


def _optimizer_cases(x: Tensor, device: str) -> Iterator[_Case]:
    """adamw8bit_ on as many weights as x fp32 [n] has, in rows of one or more blocks."""
    n = x.numel() // STATE_BLOCK_SIZE * STATE_BLOCK_SIZE
    for name, dtype, bits in (("fp32", torch.float32, 32), ("bf16", torch.bfloat16, 32), ("fp32", torch.float32, 12)):
        state = [
            x[:n].view(-1, STATE_BLOCK_SIZE).to(device, dtype, copy=True),
            *(
                part
                for signed in (True, False)
                for part in (
                    torch.full((n // STATE_BLOCK_SIZE, STATE_BLOCK_SIZE), zero_code(signed), dtype=torch.uint8).to(
                        device
                    ),
                    torch.zeros(n // STATE_BLOCK_SIZE, 1, device=device),
                )
            ),
        ]
        gradient: list[Tensor] = [part.to(device) for part in _shard(x[:n] * 1e-3, bits)] if bits != 32 else []
        dense = (state[0] * 1e-3,) if bits == 32 else ()
        yield _Case(
            f"adamw8bit_, {name} weights, gradient in {f'{bits} bits' if dense == () else name}",
            lambda s=state, g=(*dense, *gradient): ops.adamw8bit_(*s, *g, **_ADAMW),
            lambda s=state: s,
            2 * sum(part.nbytes for part in state) + sum(part.nbytes for part in (*dense, *gradient)),
        )


def _cases(x: Tensor, device: str) -> Iterator[_Case]:
    yield from _gradient_cases(x, device)
    yield from _optimizer_cases(x, device)


def bits_table(device: str) -> Table:
    """Ops on the device beside the same ops on the CPU, whose bits the tests compare with the reference's."""
    x = torch.randn(256 * 50, generator=torch.Generator().manual_seed(0))
    rows = []
    for here, there in zip(_cases(x, "cpu"), _cases(x, device), strict=True):
        here.call()
        there.call()
        compared = 0
        for ours, truth in zip(there.results(), here.results(), strict=True):
            if not same_bits(ours, truth):
                raise SystemExit(f"the kernels on {device} and on the CPU differ: {here.name}")
            compared += truth.numel()
        rows.append([here.name, f"{compared:,}", "equal"])
    for dtype in EXPONENT_DTYPES:  # the others have no kernels on a device
        rows.append([f"lossless, {dtype_name(dtype)}", f"{_compare_messages(x, dtype, device):,}", "equal"])
    return Table(f"Bits on {device}, beside the CPU", ["op", "values compared", "bits"], rows)


def _compare_messages(x: Tensor, dtype: torch.dtype, device: str) -> int:
    """How many bytes and values were equal; ragged, with and without zeros, incompressible, and damaged."""
    compared = 0
    keep = torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) > 0.4
    noise = torch.randint(256, (9001 * dtype.itemsize,), generator=torch.Generator().manual_seed(2)).to(torch.uint8)
    for values in (_cast(x, dtype), _cast(x * keep, dtype)[:9001], _cast(x[:1], dtype), noise.view(dtype)):
        for code, capacity in (("tiered", None), ("window", None), ("raw", None), ("tiered", 9000)):
            truth, found = (
                ops.lossless_encode(v, code=code, capacity_nbytes=capacity) for v in (values, values.to(device))
            )
            size = int(truth[16:24].view(torch.int64)) if capacity is None else capacity
            truth, found = truth[:size], found[:size]
            out = torch.empty_like(values, device=device)
            status = ops.lossless_decode_(out, found)
            total, total_there = torch.ones(values.shape), torch.ones(values.shape, device=device)
            fits = ops.lossless_decode_add_(total, truth) == Status.SOUND
            damaged = truth.clone()
            damaged[-1] ^= 64
            is_equal = torch.equal(found.cpu(), truth)
            is_equal &= ops.lossless_decode_add_(total_there, found) == (Status.SOUND if fits else Status.TOO_LONG)
            is_equal &= status == (Status.SOUND if fits else Status.TOO_LONG)
            is_equal &= not fits or same_bits(out, values)
            is_equal &= not fits or torch.equal(total_there.cpu().nan_to_num(), total.nan_to_num())
            is_equal &= ops.lossless_decode_(out, damaged.to(device)).item() == ops.lossless_decode_(
                torch.empty_like(values), damaged
            )
            if not is_equal:
                raise SystemExit(
                    f"the kernels on {device} and on the CPU differ: lossless, {dtype}, {code}, {capacity}"
                )
            compared += truth.numel() + 2 * values.numel()
    return compared


def speed_table(elements: int, device: str, seconds: Timer) -> Table:
    """GB/s of all bytes that an op has to read and write, beside a copy and torch's AdamW."""
    x = torch.randn(elements, generator=torch.Generator().manual_seed(0))
    source = x.to(device)
    target = torch.empty_like(source)
    copied = 2 * x.nbytes / seconds(lambda: target.copy_(source)) / 1e9
    rows = [["copy", "", f"{copied:.0f}", "1.00"]]

    def add(name: str, call: Callable[[], object], moved_nbytes: int) -> None:
        taken = seconds(call)
        speed = moved_nbytes / taken / 1e9
        rows.append([name, f"{taken * 1e6:.0f}", f"{speed:.0f}", f"{speed / copied:.2f}"])

    for case in _cases(x, device):
        add(case.name, case.call, case.moved_nbytes)
    weight = torch.nn.Parameter(source)
    weight.grad = source * 1e-3
    add("torch AdamW, fused, fp32", torch.optim.AdamW([weight], fused=True).step, 7 * x.nbytes)
    return Table(
        f"Gradients and optimizer on {device}: {elements:,} elements",
        ["", "us", "GB/s", "of copy bandwidth"],
        rows,
        "GB/s count all bytes that have to be read and written.",
    )


def lossless_table(elements: int, device: str, seconds: Timer) -> Table:
    """Ratio and GB/s of lossless messages; the limit is a copy of the tensor."""
    x = torch.randn(elements, generator=torch.Generator().manual_seed(0))
    rows = []
    for dtype in (torch.bfloat16, torch.float32, torch.float16, torch.float8_e4m3fn):
        values = _cast(x, dtype).to(device)
        for name, ratio, case in _lossless_cases(values):
            rows.append([f"{dtype_name(dtype)} {name}", ratio, f"{values.nbytes / seconds(case) / 1e9:.1f}"])
    return Table(
        f"Lossless messages on {device}: {elements:,} Gaussian values",
        ["", "ratio", "GB/s of the tensor"],
        rows,
    )


def _lossless_cases(values: Tensor) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """Name, ratio and call of a copy and of either code's ops."""
    out, total = torch.empty_like(values), torch.zeros(values.shape, device=values.device)
    yield "copy", "", lambda: out.copy_(values)
    for code in ("window", "tiered"):
        message = ops.lossless_encode(values, code=code)
        ratio = f"{values.nbytes / int(message[16:24].cpu().view(torch.int64)):.3f}"
        yield f"{code} encode", ratio, lambda code=code: ops.lossless_encode(values, code=code)
        yield f"{code} decode", ratio, lambda message=message: ops.lossless_decode_(out, message)
        yield f"{code} decode_add", ratio, lambda message=message: ops.lossless_decode_add_(total, message)


def head_table(tokens: int, hidden_size: int, vocabulary: int, device: str, seconds: Timer) -> Table:
    """Linear layer and cross entropy, forward and backward in bf16: plain, and in chunks."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, generator=generator).to(device, torch.bfloat16).requires_grad_()
    weight = torch.randn(vocabulary, hidden_size, generator=generator) / hidden_size**0.5
    weight = weight.to(device, torch.bfloat16).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,), generator=generator).to(device)
    cases: dict[str, Callable[[], Tensor]] = {
        "plain": lambda: F.cross_entropy(F.linear(hidden, weight).float(), labels),
        "chunked": lambda: linear_cross_entropy(hidden, weight, labels),
        "chunked, hidden states at int8": lambda: linear_cross_entropy(
            hidden, weight, labels, format=BlockFormat("int8")
        ),
    }
    is_cuda = torch.device(device).type == "cuda"

    def step(case: Callable[[], Tensor]) -> None:
        case().backward()
        hidden.grad = weight.grad = None

    rows = []
    for name, case in cases.items():
        taken = seconds(lambda case=case: step(case))
        peak = ""
        if is_cuda:
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            step(case)
            peak = f"{(torch.cuda.max_memory_allocated() - before) / 2**20:.0f} MiB"
        rows.append([name, f"{taken * 1e3:.2f} ms", peak])
    return Table(
        f"Head on {device}: {tokens} tokens, hidden {hidden_size}, vocabulary {vocabulary:,}, bf16",
        ["", "forward and backward", "peak above weights, gradients included"],
        rows,
    )


def same_bits(ours: Tensor, truth: Tensor) -> bool:
    """Whether two tensors are alike, bit for bit, wherever they are."""
    return ours.shape == truth.shape and ours.dtype == truth.dtype and torch.equal(_bits(ours), _bits(truth))


def _bits(x: Tensor) -> Tensor:
    return x.detach().cpu().contiguous().view(-1).view(torch.uint8)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point:
        return x.to(dtype)
    return (20 * x).clamp(-127, 127).to(torch.int8).view(dtype)
