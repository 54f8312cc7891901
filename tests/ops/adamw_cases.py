"""States and gradients that the implementations of adamw8bit_ are compared on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from laconic.ops import quantize_blockwise
from laconic.ops.dynamic_map import zero_code
from laconic.options import MOMENT_BLOCK_SIZES
from tests.ops.cases import same_bits

OPTIONS: dict[str, Any] = {
    "lr": 1e-2,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "step": 1,
    "maximize": False,
    "bits": 8,
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


def new_case(shape: tuple[int, int], dtype: torch.dtype, gradient: Tensor, bits: int = 8) -> Case:
    """A parameter with moments of zero in so many bits and a dense gradient."""
    rows, length = shape
    blocks, codes = -(-length // MOMENT_BLOCK_SIZES[bits]), (rows, -(-length * bits // 8))
    return Case(
        torch.randn(shape).to(dtype),
        torch.full(codes, zero_code(True, bits) * (17 if bits == 4 else 1), dtype=torch.uint8),
        torch.zeros(rows, blocks),
        torch.full(codes, zero_code(False, bits), dtype=torch.uint8),
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
    yield "all magnitudes", all_magnitudes(3, 600)


def all_magnitudes(rows: int, length: int) -> Tensor:
    """Finite gradients [rows, length], fp32, from 1e-45 to 3.4e38 in both signs; ordinary ones between huge ones."""
    x = torch.empty(rows, length).uniform_(-149, 127.99).exp2() * torch.randn(rows, length).sign()
    x[:, 1::7] = torch.randn(rows, length)[:, 1::7]
    x[0, 0], x[0, 3], x[-1, -1] = 2e19, torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max
    return x


def of_one(multi: Any) -> Any:
    """adamw8bit_ by an implementation of adamw8bit_multi_."""
    return lambda *a, **isa: multi(*([] if tensor is None else [tensor] for tensor in a[:9]), *a[9:], **isa)


def follow(op: Any, case: Case, num_steps: int, **options: Any) -> list[dict[str, Tensor]]:
    """What the op leaves after each of several steps with the same gradient, every other one with the opposite sign."""
    found = []
    for step in range(1, num_steps + 1):
        chosen = OPTIONS | {"step": step, "maximize": step % 2 == 0} | options
        op(*case.arguments(), *chosen.values())
        found.append({name: value.clone() for name, value in case.results().items()})
    return found


def batch(dtype: torch.dtype, gradient_dtype: torch.dtype, bits: int | None = None, moment_bits: int = 8) -> list[Case]:
    """A case for each of many sizes; gradients of a dtype, or in 8 or 12 bits."""
    cases = []
    for _, gradient in awkward_gradients():
        case = new_case((gradient.shape[0], gradient.shape[1]), dtype, gradient.to(gradient_dtype), moment_bits)
        cases.append(case if bits is None else quantized(case, bits))
    return cases


def as_lists(cases: list[Case]) -> list[Any]:
    """The tensor arguments of adamw8bit_multi_, in order."""
    *columns, factors = zip(*(case.arguments() for case in cases), strict=True)
    return [*([] if column[0] is None else list(column) for column in columns), factors[0]]


def follow_many(op: Any, cases: list[Case], num_steps: int, **options: Any) -> list[list[dict[str, Tensor]]]:
    """What adamw8bit_multi_ leaves of each case after each step, as `follow` does; each case's own list of steps."""
    lists = as_lists(cases)
    found: list[list[dict[str, Tensor]]] = [[] for _ in cases]
    for step in range(1, num_steps + 1):
        chosen = OPTIONS | {"step": step, "maximize": step % 2 == 0} | options
        op(*lists, *chosen.values())
        for case, steps in zip(cases, found, strict=True):
            steps.append({name: value.clone() for name, value in case.results().items()})
    return found


def assert_as_one_by_one(
    one: Any, many: Any, cases: list[Case], device: str = "cpu", num_steps: int = 3, **options: Any
) -> None:
    """Check that `many` on a device leaves the bits that `one` leaves of each case on the CPU."""
    expected = [follow(one, case.to("cpu"), num_steps, **options) for case in cases]
    found = follow_many(many, [case.to(device) for case in cases], num_steps, **options)
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for step, (left, right) in enumerate(zip(ours, theirs, strict=True), start=1):
            for name in right:
                assert same_bits(left[name], right[name]), (number, step, name)
