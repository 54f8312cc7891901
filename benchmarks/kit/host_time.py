"""Host time of a layer: a tiny one, whose arithmetic takes no time, on one thread.

An estimate of what the host of a GPU takes to issue the layer: the CPU's own kernels for tiny tensors stand where that
host has launches, and that host is another machine.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from statistics import quantiles

import torch
from torch import nn

from benchmarks.kit.models import DecoderLayers
from benchmarks.kit.timing import in_rounds
from laconic.activations.keep.witnesses import ALWAYS

TINY, TINY_HEAD, TINY_TOKENS = 64, 16, 8
"""Hidden size, size of a head and tokens of the layer."""


def host_seconds(block: DecoderLayers, layers: Mapping[str, nn.Module], rounds: int) -> dict[str, tuple[float, float]]:
    """Time the variants `layers` of a layer of `block` by turns, after the steps that have witnesses.

    Returns:
        Seconds of this process in forward and in backward, by variant: the low decile of all rounds.
    """

    def step(layer: nn.Module) -> tuple[float, float]:
        source = block.source()
        started = time.process_time()
        out = block.forward(layer, source)
        forward = time.process_time() - started
        gradient = torch.ones_like(out)
        started = time.process_time()
        out.backward(gradient)
        backward = time.process_time() - started
        layer.zero_grad(set_to_none=True)
        return forward, backward

    steps = {name: partial(step, layer) for name, layer in layers.items()}
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        samples = in_rounds(steps, rounds, lambda case: case(), warm_up_rounds=ALWAYS)
    finally:
        torch.set_num_threads(before)
    return {
        name: (_low_decile([forward for forward, _ in times]), _low_decile([backward for _, backward in times]))
        for name, times in samples.items()
    }


def _low_decile(samples: list[float]) -> float:
    return quantiles(samples, n=10, method="inclusive")[0]
