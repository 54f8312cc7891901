"""Compressed activations on a GPU, predicted: bytes and launches of a Llama 8B layer, traced on the CPU. Not measured.

    python -m benchmarks.run gpu-step --out benchmarks/results/gpu_step_202611.md

A layer of an eighth of the width runs forward and backward, plain and compressed, and every operation of torch and of
laconic is noted with the bytes of its tensors; a kernel that torch has on CUDA alone is one operation here, too. Bytes
of activations grow with tokens and with the width, so those of the 8B layer are eight times as many. Products are
bounded by arithmetic, all else by memory.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.kit.data_sheets import BYTES_PER_SECOND, DENSE_BF16_FLOPS
from benchmarks.kit.fused_norms import fused_norms
from benchmarks.kit.models import DecoderLayers, decoder_layers
from benchmarks.registry import Options, Table, benchmark

_SHRUNK = 8
_WIDTH, _FEED_FORWARD, _HEAD_DIM = 4096 // _SHRUNK, 14336 // _SHRUNK, 128
_TOKENS = 4096
_PRODUCTS = {"mm", "addmm", "bmm", "_scaled_dot_product_flash_attention_for_cpu"}
_PRODUCTS |= {"_scaled_dot_product_flash_attention_for_cpu_backward"}
_VIEWS = {"view", "_unsafe_view", "reshape", "t", "transpose", "unsqueeze", "squeeze", "slice", "expand", "detach"}
# What moves no bytes on a device; `equal` compares states of generators on the host.
_VIEWS |= {"set_", "equal"}
_VIEWS |= {"alias", "select", "permute", "as_strided", "split", "empty", "empty_like", "new_empty", "unbind"}
_VIEWS |= {"empty_strided"}


@dataclass(frozen=True)
class _Device:
    """Limits of NVIDIA's data sheets: dense bf16, memory."""

    name: str
    flops_per_second: float
    bytes_per_second: float


_DEVICES = [_Device(name, flops, BYTES_PER_SECOND[name]) for name, flops in DENSE_BF16_FLOPS.items()]
_EFFICIENCY = 0.6
"""Share of the peak that products reach. An assumption, not measured."""
_LAUNCH_SECONDS = 5e-6
"""Host time of one eager launch. An assumption; it shows only where the device waits for the host."""


@dataclass
class _Trace(TorchDispatchMode):
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


@benchmark("gpu-step")
def gpu_step(options: Options) -> list[Table]:
    """Predicted time that compression adds to a layer, and which of its operations take it."""
    tokens = 64 if options.small else 512
    layers = decoder_layers(
        "llama", _WIDTH, tokens, head_dim=_HEAD_DIM, intermediate_size=_FEED_FORWARD, num_key_value_heads=1
    )
    plain = _traced(layers, layers.layers[0])
    packed = _traced(layers, layers.compressed(4))
    per_token = _SHRUNK / tokens
    return [_overhead_table(plain, packed, per_token), _operations_table(plain, packed, per_token), _fusion_table()]


def _traced(layers: DecoderLayers, layer: nn.Module) -> tuple[_Trace, _Trace]:
    """Forward and backward of one step; an earlier one makes what is made once."""
    known = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    with fused_norms():
        for _ in range(2):
            forward, backward = _Trace(known), _Trace(known)
            with forward:
                out = layers.forward(layer, source := layers.source())
            with backward:
                out.backward(torch.ones_like(out))
            layer.zero_grad(set_to_none=True)
            del source
    return forward, backward


def _product_flops() -> float:
    """Of one token's forward: 2 per weight, and causal attention over half of the tokens on average."""
    width, kv = 4096, 1024
    weights = 2 * width * width + 2 * width * kv + 3 * width * 14336
    return 2.0 * weights + 4 * width * _TOKENS / 2


def _overhead_table(plain: tuple[_Trace, _Trace], packed: tuple[_Trace, _Trace], per_token: float) -> Table:
    rows = []
    for device in _DEVICES:
        for number, (name, paper) in enumerate((("forward", "1.8 %"), ("backward", "2.7 %"))):
            flops = _product_flops() * (1, 2)[number] * _TOKENS
            before = plain[number].nbytes.total() * per_token * _TOKENS
            added = (packed[number].nbytes.total() - plain[number].nbytes.total()) * per_token * _TOKENS
            seconds = flops / (_EFFICIENCY * device.flops_per_second) + before / device.bytes_per_second
            more = added / device.bytes_per_second
            launches = packed[number].calls.total() - plain[number].calls.total()
            rows.append(
                [
                    device.name,
                    name,
                    f"{seconds * 1e3:.2f} ms",
                    f"{more * 1e6:+.0f} us",
                    f"{more / seconds:+.1%}",
                    f"{launches:+d}",
                    f"{packed[number].calls.total() * _LAUNCH_SECONDS * 1e3:.2f} ms",
                    paper,
                ]
            )
    return Table(
        f"Prediction, not measured: one layer of a Llama 8B, {_TOKENS} tokens, bf16, kept in nf4",
        ["device", "", "unmodified", "added", "share", "launches added", "host time of all launches", "AGoQ reports"],
        rows,
        f"Products at {_EFFICIENCY:.0%} of the data sheet's bf16 rate (an assumption), all other bytes at the data"
        f" sheet's bandwidth (a bound from below), eager torch, {_LAUNCH_SECONDS * 1e6:.0f} us of host time per launch"
        " (an assumption): where the host takes longer than the device, launches decide and not bytes.",
    )


def _operations_table(plain: tuple[_Trace, _Trace], packed: tuple[_Trace, _Trace], per_token: float) -> Table:
    rows = []
    for number, direction in enumerate(("forward", "backward")):
        names = sorted(set(plain[number].nbytes) | set(packed[number].nbytes))
        changes = [(packed[number].nbytes[name] - plain[number].nbytes[name], name) for name in names]
        for change, name in sorted(changes, key=lambda item: -abs(item[0])):
            if abs(change) * per_token >= 1024:
                calls = packed[number].calls[name] - plain[number].calls[name]
                units = change * per_token / (2 * 4096)
                micros = change * per_token * _TOKENS / _DEVICES[0].bytes_per_second * 1e6
                rows.append([direction, name, f"{calls:+d}", f"{units:+.2f} U", f"{micros:+.0f}"])
    return Table(
        "Prediction: what compression changes, by operation; U is one bf16 tensor of the residual stream",
        ["", "operation", "calls", "bytes moved", "us on H200"],
        rows,
        "Bytes moved count each tensor that an operation reads or writes.",
    )


def _fusion_table() -> Table:
    """Tensors that need not be read or written again, in U: gate and up have 3.5 each."""
    wide = 14336 / 4096
    fusions = [
        ("quantize gate and up where silu(gate) * up reads them", "forward", 2 * wide),
        ("quantize a norm's input where the norm reads it, two norms", "forward", 2.0),
        ("quantize query, key and value where rotary embedding writes them", "forward", 1.25),
        ("rebuild a norm's input in its backward: neither written nor read, two norms", "backward", 4.0),
    ]
    rows = []
    for what, direction, units in sorted(fusions, key=lambda fusion: -fusion[2]):
        nbytes = units * 2 * 4096 * _TOKENS
        rows.append(
            [what, direction, f"{units:.2f} U", *(f"{nbytes / d.bytes_per_second * 1e6:.0f}" for d in _DEVICES)]
        )
    return Table(
        "Prediction: what further fusing would remove, by arithmetic on shapes",
        ["fusion", "", "bytes", *(f"us on {device.name}" for device in _DEVICES)],
        rows,
        "The backward of silu(gate) * up is fused: gated_backward_blockwise reads codes of gate and up. Fusing what"
        " forward does replaces operations of the model's own code, whose bits it would have to give.",
    )
