"""Compressed activations on a GPU, predicted: device time from a trace on the CPU, host time measured on this machine.

    python -m benchmarks.run gpu-step --out benchmarks/results/gpu_step_202611.md

Device: a layer of an eighth of the width of a Llama 8B runs forward and backward, plain and compressed, and every
operation of torch and of laconic is noted with the bytes of its tensors; a kernel that torch has on CUDA alone is one
operation here, too. Bytes of activations grow with tokens and with the width. Products are bounded by arithmetic, all
else by memory.

Host: a layer of the same operations, too small for its arithmetic to take time, is timed. No GPU measures anything.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.kit.data_sheets import BYTES_PER_SECOND, DENSE_BF16_FLOPS
from benchmarks.kit.fused_norms import fused_norms
from benchmarks.kit.host_time import TINY, TINY_HEAD, TINY_TOKENS, host_seconds
from benchmarks.kit.models import DecoderLayers, decoder_layers
from benchmarks.registry import Options, Table, benchmark, processor
from laconic.activations.keep.witnesses import ALWAYS

_LLAMA_8B = 4096
"""Its hidden size; gate and up are 3.5 times as wide, key and value a quarter, at each size here."""
_WIDE, _KEYS = 3.5, 0.25
_TRACED, _TRACED_HEAD = _LLAMA_8B // 8, 128
_TOKENS = 4096
_HIDDEN_SIZES = (1024, 2048, 4096, 8192)
_NUMBERS_OF_TOKENS = (512, 2048, 4096, 8192)
_MOST_TOKENS = 1 << 20
_VARIANTS = ("exact", "4 bits")
_DIRECTIONS = ("forward", "backward")
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
_PRODUCTS = {"mm", "addmm", "bmm", ATTENTION, f"{ATTENTION}_backward"}
_VIEWS = {"view", "_unsafe_view", "reshape", "t", "transpose", "unsqueeze", "squeeze", "slice", "expand", "detach"}
# What moves no bytes on a device; `equal` compares states of generators on the host.
_VIEWS |= {"set_", "equal"}
_VIEWS |= {"alias", "select", "permute", "as_strided", "split", "empty", "empty_like", "new_empty", "unbind"}
# A node of the graph that second derivatives need; it shares memory.
_VIEWS |= {"empty_strided", "unsafe_split_with_sizes"}


@dataclass(frozen=True)
class _Device:
    """Limits of NVIDIA's data sheets: dense bf16, memory."""

    name: str
    flops_per_second: float
    bytes_per_second: float


DEVICES = [_Device(name, flops, BYTES_PER_SECOND[name]) for name, flops in DENSE_BF16_FLOPS.items()]
_EFFICIENCY = 0.6
"""Share of the peak that products reach. An assumption, not measured."""


@dataclass
class Trace(TorchDispatchMode):
    """Operations and the bytes of their activations, by name."""

    parameters: set[int]
    calls: Counter[str] = field(default_factory=Counter)
    nbytes: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in _VIEWS:
            self.calls[name] += 1
            if name not in _PRODUCTS:
                listed = results if isinstance(results, (tuple, list)) else (results,)
                self.nbytes[name] += sum(
                    x.nbytes
                    for x in (*args, *listed)
                    if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in self.parameters
                )
        return results


@dataclass(frozen=True)
class Layer:
    """Forward and backward of one variant of a layer: what was traced, and seconds of the host."""

    traces: tuple[Trace, Trace]
    traced_hidden: int
    traced_tokens: int
    host: tuple[float, float]

    def bytes_of(self, direction: int, hidden: int, tokens: int) -> float:
        """Moved by all that is no product."""
        return self.traces[direction].nbytes.total() * hidden / self.traced_hidden * tokens / self.traced_tokens

    def flops_of(self, direction: int, hidden: int, tokens: int) -> float:
        """Of products: 2 per weight and token, causal attention over half of the tokens; twice as many backward.

        Attention that backward computes again, from what was kept, comes on top.
        """
        weights = hidden * hidden * (2 + 2 * _KEYS + 3 * _WIDE)
        attention = 4 * hidden * tokens / 2
        again = self.traces[1].calls[ATTENTION] * direction
        return tokens * ((1 + direction) * (2.0 * weights + attention) + again * attention)

    def seconds(self, device: _Device, direction: int, hidden: int, tokens: int) -> float:
        """Of the device, if the host is ahead."""
        products = self.flops_of(direction, hidden, tokens) / (_EFFICIENCY * device.flops_per_second)
        return products + self.bytes_of(direction, hidden, tokens) / device.bytes_per_second

    def bound_from(self, device: _Device, direction: int, hidden: int) -> int:
        """The fewest tokens that take the device as long as the host takes for any number."""
        return bisect_left(
            range(_MOST_TOKENS),
            self.host[direction],
            key=lambda tokens: self.seconds(device, direction, hidden, tokens),
        )


@benchmark("gpu-step")
def gpu_step(options: Options) -> list[Table]:
    """Predicted time of a layer, exact and compressed, who binds it, and which operations take what is added."""
    tokens = 64 if options.small else 512
    traces = traced(layers_of(_TRACED, _TRACED_HEAD, tokens))
    tiny = layers_of(TINY, TINY_HEAD, TINY_TOKENS)
    host = host_seconds(tiny, variants(tiny), 20 if options.small else 600)
    plain, packed = (Layer(traces[name], _TRACED, tokens, host[name]) for name in _VARIANTS)
    return [
        _overhead_table(plain, packed),
        _host_table(plain, packed),
        _crossing_table(plain, packed),
        *(_binding_table(device, plain, packed) for device in DEVICES),
        _operations_table(plain.traces, packed.traces, 1 / tokens * _LLAMA_8B / _TRACED),
        _fusion_table(),
    ]


def layers_of(width: int, head_dim: int, tokens: int) -> DecoderLayers:
    """Llama layers with the proportions of a Llama 8B: four heads, which share keys and values."""
    return decoder_layers(
        "llama",
        width,
        tokens,
        head_dim=head_dim,
        intermediate_size=int(_WIDE * width),
        num_key_value_heads=int(_KEYS * width) // head_dim,
    )


def traced(layers: DecoderLayers) -> dict[str, tuple[Trace, Trace]]:
    """Of each variant the operations of forward and backward, after steps that make what is made once."""
    found = {}
    for name, layer in variants(layers).items():
        known = {p.untyped_storage().data_ptr() for p in layer.parameters()}
        with fused_norms():
            # The first steps have witnesses, which one in fifty has later.
            for _ in range(ALWAYS):
                layers.forward(layer, layers.source()).sum().backward()
                layer.zero_grad(set_to_none=True)
            forward, backward = Trace(known), Trace(known)
            with forward:
                out = layers.forward(layer, source := layers.source())
            with backward:
                out.backward(torch.ones_like(out))
            del source
        layer.zero_grad(set_to_none=True)
        found[name] = forward, backward
    return found


def variants(layers: DecoderLayers) -> dict[str, nn.Module]:
    return dict(zip(_VARIANTS, (layers.layers[0], layers.compressed(4)), strict=True))


def _overhead_table(plain: Layer, packed: Layer) -> Table:
    rows = []
    for device in DEVICES:
        for number, (name, paper) in enumerate(zip(_DIRECTIONS, ("1.8 %", "2.7 %"), strict=True)):
            seconds = plain.seconds(device, number, _LLAMA_8B, _TOKENS)
            more = packed.seconds(device, number, _LLAMA_8B, _TOKENS) - seconds
            launches = packed.traces[number].calls.total() - plain.traces[number].calls.total()
            rows.append(
                [
                    device.name,
                    name,
                    f"{seconds * 1e3:.2f} ms",
                    f"{more * 1e6:+.0f} us",
                    f"{more / seconds:+.1%}",
                    f"{launches:+d}",
                    f"{packed.host[number] * 1e3:.2f} ms",
                    paper,
                ]
            )
    return Table(
        f"Prediction, not measured: one layer of a Llama 8B, {_TOKENS} tokens, bf16, kept in nf4",
        ["device", "", "unmodified", "added", "share", "launches added", "host time of all launches", "AGoQ reports"],
        rows,
        f"Products at {_EFFICIENCY:.0%} of the data sheet's bf16 rate (an assumption), all other bytes at the data"
        " sheet's bandwidth (a bound from below), eager torch. Backward computes attention again. The host time is that"
        " of the compressed layer, from the next table.",
    )


def _host_table(plain: Layer, packed: Layer) -> Table:
    return Table.of(
        f"Measured on this machine's CPU: host time of one layer, {_machine()}",
        [(name, layer, number) for name, layer in zip(_VARIANTS, (plain, packed), strict=True) for number in (0, 1)],
        [
            ("", lambda row: row[0]),
            ("", lambda row: _DIRECTIONS[row[2]]),
            ("host time", lambda row: f"{row[1].host[row[2]] * 1e3:.2f} ms"),
            ("operations on CUDA", lambda row: str(row[1].traces[row[2]].calls.total())),
        ],
        f"Hidden {TINY}, {TINY_TOKENS} tokens, one thread, time of the process, low decile of all rounds, without"
        " witnesses (steps that have them are a model's first ten, and then one of fifty). It is an estimate of what"
        " the host of a GPU takes to issue the layer: it has the CPU's own kernels for tiny tensors where that host has"
        " launches, and that host is another machine.",
    )


def _machine() -> str:
    bf16 = ", AVX-512 BF16" if torch.cpu._is_avx512_bf16_supported() else ""
    return f"{processor()}, {os.cpu_count()} cores{bf16}"


def _crossing_table(plain: Layer, packed: Layer) -> Table:
    cases = [(name, layer, n) for name, layer in zip(_VARIANTS, (plain, packed), strict=True) for n in (0, 1)]
    return Table(
        "Prediction: from how many tokens on the device is the bound, and not the host",
        ["device", "hidden", *(f"{name}, {_DIRECTIONS[number]}" for name, _, number in cases)],
        [
            [device.name, str(hidden), *(_rounded(layer.bound_from(device, n, hidden)) for _, layer, n in cases)]
            for device in DEVICES
            for hidden in _HIDDEN_SIZES
        ],
        "Of one sequence in one forward, for layers of a Llama 8B's proportions. With fewer tokens the host decides how"
        " long an eager layer takes; a compiled one takes it about half as long (benchmark `compiled`).",
    )


def _rounded(number: int) -> str:
    """To two digits."""
    return f"{float(f'{number:.2g}'):,.0f}"


def _binding_table(device: _Device, plain: Layer, packed: Layer) -> Table:
    rows = []
    for hidden in _HIDDEN_SIZES:
        for tokens in _NUMBERS_OF_TOKENS:
            cells, steps = [], []
            for layer in (plain, packed):
                bounds = []
                for number, host in enumerate(layer.host):
                    seconds = layer.seconds(device, number, hidden, tokens)
                    bounds.append(max(seconds, host))
                    cells.append(f"{bounds[-1] * 1e3:.2f} ms, {'device' if seconds >= host else 'host'}")
                steps.append(sum(bounds))
            rows.append([str(hidden), str(tokens), *cells, f"{steps[1] / steps[0]:.2f}"])
    return Table(
        f"Prediction for {device.name}: the larger of host and device time of one eager layer, and whose it is",
        ["hidden", "tokens", *(f"{name}, {way}" for name in _VARIANTS for way in _DIRECTIONS), "4 bits over exact"],
        rows,
        "Host time was measured on the CPU named above; device time is predicted as in the first table.",
    )


def _operations_table(plain: tuple[Trace, Trace], packed: tuple[Trace, Trace], per_token: float) -> Table:
    rows = []
    for number, direction in enumerate(_DIRECTIONS):
        names = sorted(set(plain[number].nbytes) | set(packed[number].nbytes))
        changes = [(packed[number].nbytes[name] - plain[number].nbytes[name], name) for name in names]
        for change, name in sorted(changes, key=lambda item: -abs(item[0])):
            if abs(change) * per_token >= 1024:
                calls = packed[number].calls[name] - plain[number].calls[name]
                units = change * per_token / (2 * _LLAMA_8B)
                micros = change * per_token * _TOKENS / DEVICES[0].bytes_per_second * 1e6
                rows.append([direction, name, f"{calls:+d}", f"{units:+.2f} U", f"{micros:+.0f}"])
    return Table(
        "Prediction: what compression changes, by operation; U is one bf16 tensor of the residual stream",
        ["", "operation", "calls", "bytes moved", "us on H200"],
        rows,
        "Bytes moved count each tensor that an operation reads or writes.",
    )


def _fusion_table() -> Table:
    """Tensors that need not be read or written again, in U: gate and up have 3.5 each."""
    fusions = [
        ("quantize gate where its activation reads it", "forward", _WIDE),
        ("quantize a norm's input where the norm reads it, two norms", "forward", 2.0),
        ("quantize query and key where rotary embedding writes them", "forward", 1.25),
        ("rebuild a norm's input in its backward: neither written nor read, two norms", "backward", 4.0),
    ]
    rows = []
    for what, direction, units in sorted(fusions, key=lambda fusion: -fusion[2]):
        nbytes = units * 2 * _LLAMA_8B * _TOKENS
        rows.append([what, direction, f"{units:.2f} U", *(f"{nbytes / d.bytes_per_second * 1e6:.0f}" for d in DEVICES)])
    return Table(
        "Prediction: what further fusing would remove, by arithmetic on shapes",
        ["fusion", "", "bytes", *(f"us on {device.name}" for device in DEVICES)],
        rows,
        "Fused already, not in this table: up is quantized where the product reads it (multiply_quantize_blockwise),"
        f" {_WIDE:.2f} U of forward; the backward of silu(gate) * up reads codes (gated_backward_blockwise). A product"
        " rounds once, so its bits are the host's on every device. What is left of forward would replace the host's own"
        " arithmetic.",
    )
