"""Bytes kept, step time and host time of one decoder layer under torch.compile.

U is batch x sequence x hidden x 2 bytes, the unit of AGoQ's Table 1 (arXiv 2605.00539).
"""

from __future__ import annotations

import copy
import warnings

from torch import nn

from benchmarks.kit.host_time import TINY, TINY_HEAD, TINY_TOKENS, host_seconds
from benchmarks.kit.models import DecoderLayers, decoder_layers
from benchmarks.kit.timing import seconds_of
from benchmarks.registry import Options, Table, benchmark
from laconic.activations import SavedTensorTracker

_COMPILED = ", compiled"


@benchmark("compiled")
def compiled(options: Options) -> list[Table]:
    """One decoder layer in bf16, in eager mode and by inductor."""
    side = 128 if options.small else 1024
    return [_layer("llama", 4, side, options), _layer("mixtral", 2, side, options), _host_table(options)]


def _variants(block: DecoderLayers) -> dict[str, nn.Module]:
    layers = {
        "unmodified": block.layers[0],
        "laconic, nf4": block.compressed(attention="exact"),
        "laconic, nf4, attention int8": block.compressed(attention="int8"),
    }
    for name in tuple(layers):
        layers[name + _COMPILED] = copy.deepcopy(layers[name])
        layers[name + _COMPILED].compile()
    return layers


def _host_table(options: Options) -> Table:
    block = decoder_layers("llama", TINY, TINY_TOKENS, head_dim=TINY_HEAD, intermediate_size=4 * TINY)
    layers = _variants(block)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seconds = host_seconds(block, layers, 20 if options.small else 600)
    plain = seconds["unmodified"]
    return Table.of(
        f"Host time of one llama layer under torch.compile (inductor), bf16: hidden {TINY}, {TINY_TOKENS} tokens,"
        " 1 thread",
        layers,
        [
            ("", str),
            ("forward", lambda name: f"{seconds[name][0] * 1e3:.2f} ms"),
            ("backward", lambda name: f"{seconds[name][1] * 1e3:.2f} ms"),
            ("both, more than unmodified", lambda name: f"{(sum(seconds[name]) - sum(plain)) * 1e3:+.2f} ms"),
        ],
        "Time of the process, low decile of all rounds, without witnesses.",
    )


def _layer(family: str, wider: int, side: int, options: Options) -> Table:
    block = decoder_layers(family, side, side, intermediate_size=wider * side)
    layers = _variants(block)

    def step(name: str) -> None:
        block.forward(layers[name], block.source()).backward(block.x)
        layers[name].zero_grad(set_to_none=True)

    def kept_nbytes(name: str) -> int:
        with SavedTensorTracker(layers[name]) as tracker:
            block.forward(layers[name], block.source())
        return tracker.nbytes

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about what inductor imports
        for name in layers:
            step(name)
        kept = {name: kept_nbytes(name) for name in layers}
        seconds = seconds_of({name: lambda name=name: step(name) for name in layers}, options.rounds)
    first, first_compiled = "unmodified", "unmodified" + _COMPILED
    return Table.of(
        f"One {family} layer under torch.compile (inductor), bf16: hidden {side}, {side} tokens, {options.thread_text}",
        layers,
        [
            ("", str),
            ("kept for backward", lambda name: f"{kept[name] / block.x.nbytes:.2f} U"),
            ("of unmodified", lambda name: f"{kept[name] / kept[first]:.3f}"),
            ("step", lambda name: f"{seconds[name] * 1e3:.0f} ms"),
            ("of unmodified", lambda name: f"{seconds[name] / seconds[first]:.3f}"),
            ("of unmodified, compiled", lambda name: f"{seconds[name] / seconds[first_compiled]:.3f}"),
        ],
    )
