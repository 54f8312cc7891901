"""Gradients in few bytes: stored in 8 or 12 bits, reduced over the network in 8 bits, or only every so many steps."""

from __future__ import annotations

from laconic.collectives.engine.layouts import TwoLevel
from laconic.collectives.runtime.background import Work
from laconic.gradients.ddp import ddp_q8_hook
from laconic.gradients.local_steps import LocalSteps
from laconic.gradients.reduce import NATIVE_BELOW_NBYTES, all_reduce_q8, all_reduce_quantized, reduce_scatter_q8
from laconic.gradients.store import CompressedGradients, compress_gradients
from laconic.gradients.wrappers import QuantizedReduction, quantize_reduction

__all__ = [
    "NATIVE_BELOW_NBYTES",
    "CompressedGradients",
    "LocalSteps",
    "QuantizedReduction",
    "TwoLevel",
    "Work",
    "all_reduce_q8",
    "all_reduce_quantized",
    "compress_gradients",
    "ddp_q8_hook",
    "quantize_reduction",
    "reduce_scatter_q8",
]
