"""States and gradients that the implementations of adamw8bit_ are compared on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from laconic.ops import quantize_blockwise
from laconic.ops.dynamic_map import ZERO_CODE

OPTIONS: dict[str, Any] = {
    "lr": 1e-2,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "step": 1,
    "maximize": False,
}


@dataclass
class Case:
    """The tensor arguments of adamw8bit_, in order."""

    parameter: Tensor
    exp_avg_codes: Tensor
    exp_avg_scales: Tensor
    exp_avg_sq_codes: Tensor
    exp_avg_sq_scales: Tensor
    gradient: Tensor
    gradient_scales: Tensor | None = None
    residual_codes: Tensor | None = None
    residual_scales: Tensor | None = None
    gradient_factor: Tensor | None = None

    def arguments(self) -> list[Tensor | None]:
        return [getattr(self, field.name) for field in fields(self)]

    def to(self, device: str) -> Case:
        """A copy of everything, on a device."""
        copies = {
            f.name: value.to(device, copy=True) for f in fields(self) if (value := getattr(self, f.name)) is not None
        }
        return replace(self, **copies)

    def results(self) -> dict[str, Tensor]:
        """What the op writes."""
        return {field.name: getattr(self, field.name).cpu() for field in fields(self)[:5]}


def new_case(shape: tuple[int, int], dtype: torch.dtype, gradient: Tensor) -> Case:
    """A parameter with moments of zero and a dense gradient."""
    rows, length = shape
    blocks = -(-length // 256)
    return Case(
        torch.randn(shape).to(dtype),
        torch.full(shape, ZERO_CODE[True], dtype=torch.uint8),
        torch.zeros(rows, blocks),
        torch.full(shape, ZERO_CODE[False], dtype=torch.uint8),
        torch.zeros(rows, blocks),
        gradient,
    )


def quantized(case: Case, bits: int) -> Case:
    """The case with its gradient in 8 or 12 bits."""
    flat = case.gradient.flatten().float()
    codes, scales = quantize_blockwise(flat, code="int8", block_size=128, scale_dtype=torch.float32)
    if bits == 8:
        return replace(case, gradient=codes, gradient_scales=scales)
    residual_codes, residual_scales = quantize_blockwise(
        flat / 100, code="int4", block_size=128, scale_dtype=torch.float32
    )
    return replace(
        case, gradient=codes, gradient_scales=scales, residual_codes=residual_codes, residual_scales=residual_scales
    )


def awkward_gradients() -> Iterator[tuple[str, Tensor]]:
    """Named gradients [rows, length], fp32: sizes around blocks and vectors, magnitudes, special values."""
    yield "whole blocks", torch.randn(20, 512)
    yield "ragged", torch.randn(4, 300)
    yield "short odd rows", torch.randn(5, 37)
    yield "one element", torch.randn(1, 1)
    yield "no rows", torch.randn(0, 300)
    yield "no columns", torch.randn(3, 0)
    yield "wide", torch.randn(3, 280) * torch.exp2(30 * torch.randn(3, 280)).clamp(2.0**-70, 2.0**60)
    yield "tiny", torch.randn(2, 270) * 1e-21
    yield "zeros", torch.zeros(2, 300)
    some = torch.randn(2, 400)
    some[:, ::3] = 0
    some[:, 1] = -0.0
    yield "some zeros", some
    broken = torch.randn(4, 300)
    broken[0, 3], broken[1, 299], broken[2, 0], broken[3, 255] = float("nan"), float("inf"), -float("inf"), 1e30
    yield "broken", broken


def follow(op: Any, case: Case, num_steps: int, **options: Any) -> list[dict[str, Tensor]]:
    """What the op leaves after each of several steps with the same gradient, every other one with the opposite sign."""
    found = []
    for step in range(1, num_steps + 1):
        chosen = OPTIONS | {"step": step, "maximize": step % 2 == 0} | options
        op(*case.arguments(), *chosen.values())
        found.append({name: value.clone() for name, value in case.results().items()})
    return found
