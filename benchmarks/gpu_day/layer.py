"""Part 3: device and host time of one layer of a Llama 8B, forward and backward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu_day.setting import Setting
from benchmarks.kit.models import DecoderLayers, decoder_layers
from benchmarks.registry import Table

_TOKENS = (4096, 2048, 8192, 512)
"""What was predicted comes first."""
_COMPILED_TOKENS = (2048, 8192, 512)
_BUDGET = 0.25
_MODEL = ("a Llama 8B", "a tiny Llama")
_HEADER = [
    "",
    "forward: device ms",
    "host ms",
    "backward: device ms",
    "host ms",
    "kept for backward MiB",
    "peak of a step MiB",
]


def run(setting: Setting) -> None:
    """A table for each number of tokens, eager; then compiled, which takes longest to begin."""
    most = _layers(setting, setting.sized(max(_TOKENS), 16))
    for tokens in setting.sized(_TOKENS, (16,)):
        layers = _first(most, tokens)
        cases: dict[str, Callable[[], nn.Module]] = {
            "unmodified": lambda layers=layers: layers.layers[0],
            "nf4": lambda layers=layers: layers.compressed(4),
            "int8": lambda layers=layers: layers.compressed(8),
            "nf4, attention exact": lambda layers=layers: layers.compressed(4, attention="exact"),
            "checkpointing": lambda layers=layers: _Checkpointed(layers.layers[0]),
        }
        _measure(setting, layers, cases, f"One layer of {_MODEL[setting.rehearses]}, {tokens} tokens, bf16")
    for tokens in setting.sized(_COMPILED_TOKENS, (16,)):
        layers = _first(most, tokens)
        compiled: dict[str, Callable[[], nn.Module]] = {
            "unmodified": lambda layers=layers: copy.deepcopy(layers.layers[0]),
            "nf4": lambda layers=layers: layers.compressed(4),
            f"unmodified, memory budget {_BUDGET}": lambda layers=layers: copy.deepcopy(layers.layers[0]),
        }
        _measure(setting, layers, compiled, f"The same under torch.compile, {tokens} tokens", is_compiled=True)


def _layers(setting: Setting, tokens: int) -> DecoderLayers:
    width, feed_forward, head_dim, kv_heads = setting.sized((4096, 14336, 128, 8), (64, 128, 16, 2))
    return decoder_layers(
        "llama",
        width,
        tokens,
        device=setting.device,
        head_dim=head_dim,
        intermediate_size=feed_forward,
        num_key_value_heads=kv_heads,
    )


def _first(layers: DecoderLayers, tokens: int) -> DecoderLayers:
    """The same layers with the first tokens."""
    cos, sin = (table[:, :tokens] for table in layers.positions)
    return replace(layers, x=layers.x[:, :tokens].contiguous(), positions=(cos, sin))


class _Checkpointed(nn.Module):
    """A layer under torch's activation checkpointing."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, **arguments: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=False, **arguments)


def _measure(
    setting: Setting,
    layers: DecoderLayers,
    cases: dict[str, Callable[[], nn.Module]],
    title: str,
    is_compiled: bool = False,
) -> None:
    rows: list[list[str]] = []
    is_predicted = not is_compiled and layers.x.shape[1] == 4096
    for name, make in cases.items():
        with setting.report.section(f"{title}: {name}"), _memory_budget("budget" in name):
            layer = make()
            if is_compiled:
                torch._dynamo.reset()
                # A rehearsal shows that the graph is made; a compiler for the CPU says nothing about a device.
                layer.compile(backend=setting.sized("inductor", "aot_eager"))
            figures, row = _times(setting, layers, layer)
            if is_predicted:
                for what, seconds in figures.items():
                    setting.report.figure(f"layer: {name}, {what}", seconds * 1e3, "ms")
            rows.append([name, *row])
            setting.table(Table(title, _HEADER, rows, "Host time: until all launches are issued."))
        setting.free()


@contextmanager
def _memory_budget(is_set: bool) -> Iterator[None]:
    config = torch._functorch.config
    before = config.activation_memory_budget
    config.activation_memory_budget = _BUDGET if is_set else before
    try:
        yield
    finally:
        config.activation_memory_budget = before


def _times(setting: Setting, layers: DecoderLayers, layer: nn.Module) -> tuple[dict[str, float], list[str]]:
    """Seconds by direction and clock, and the cells of a row."""
    gradient = torch.randn_like(layers.x)
    kept: list[Tensor] = []

    def forward() -> None:
        kept[:] = [layers.forward(layer, layers.source())]

    def backward() -> None:
        kept.pop().backward(gradient)
        layer.zero_grad(set_to_none=True)

    forward()
    backward()
    figures = {
        "forward": setting.device_seconds(forward),
        "forward, host": setting.host_seconds(forward),
        "backward": setting.device_seconds(backward, before=forward),
        "backward, host": setting.host_seconds(backward, before=forward),
    }
    kept.clear()
    before = 0 if setting.rehearses else torch.cuda.memory_allocated()
    forward()
    setting.wait()
    held = 0 if setting.rehearses else torch.cuda.memory_allocated() - before
    kept.clear()
    peak = setting.peak_nbytes(lambda: (forward(), backward())) - before
    mib = ["not measured"] * 2 if setting.rehearses else [f"{nbytes / 2**20:.0f}" for nbytes in (held, peak)]
    return figures, [*(f"{seconds * 1e3:.2f}" for seconds in figures.values()), *mib]
