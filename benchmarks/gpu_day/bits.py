"""Part 1: `laconic doctor`, and whether each op's kernels give the reference's bits, for all dtypes and formats."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch

from benchmarks import gpu_ops
from benchmarks.gpu_day.record import reason_of
from benchmarks.gpu_day.setting import Setting, is_fatal, kernel_of
from benchmarks.registry import Table
from laconic.ops import BITS, BLOCK_SIZES, DTYPES, GATED_ACTIVATIONS
from laconic.ops.declarations import OPS
from laconic.ops.declarations.bits import MASK_DTYPES
from laconic.ops.lossless import EXPONENT_DTYPES
from laconic.ops.self_check import difference, examples

Kernels = Callable[[str], Callable[..., Any]]
Choices = tuple[Any, ...]

_WORKERS = 14
_AT_ONCE = 6
"""Combinations that a worker takes at a time."""


def run(setting: Setting) -> None:
    """Doctor, then every combination; on a device also ragged and damaged tensors against the CPU's kernels."""
    with setting.report.section("doctor"):
        setting.table(_doctor_table())
    with setting.report.section("bits of every op"):
        choices = {op: list(_choices(op, setting.rehearses)) for op in OPS}
        compare(setting, choices, workers=setting.sized(_WORKERS, 0))
    with setting.report.section("larger tensors"):
        setting.table(gpu_ops.bits_table(setting.device))


def _doctor_table() -> Table:
    done = subprocess.run(
        [sys.executable, "-m", "laconic", "doctor", "--json"], capture_output=True, text=True, check=False
    )
    if not done.stdout.startswith("{"):
        raise RuntimeError(f"laconic doctor printed no JSON: {done.stderr.strip()[-500:]}")
    found = json.loads(done.stdout)
    rows = [["version", name, version or "not installed"] for name, version in found["versions"].items()]
    rows += [
        ["kernels", device, f"{kernel.get('implementation', '')} {kernel.get('isa') or ''}".strip()]
        for device, kernel in found["kernels"].items()
    ]
    rows += [["device", device["name"], device["detail"]] for device in found["devices"]]
    rows += [["self test", name, result] for name, result in found["self_test"].items()]
    rows += [["problem", "", problem] for problem in found["problems"]]
    return Table("Doctor", ["", "what", "found"], rows)


def compare(
    setting: Setting, choices: Mapping[str, Sequence[Choices]], kernels: Kernels = kernel_of, workers: int = 0
) -> None:
    """Each op's kernels beside the reference, one row for each op; the table grows as rows come.

    Args:
        choices: of each op, as its `example` takes them.
        kernels: the implementation of an op.
        workers: processes that share the work, most of which is compiling; 0 works here.
    """
    where = "in Triton's interpreter" if setting.rehearses else f"on {torch.cuda.get_device_name()}"
    rows: list[list[str]] = []
    jobs = [
        (op, every[start : start + _AT_ONCE])
        for op, every in choices.items()
        for start in range(0, len(every), _AT_ONCE)
    ]
    check = partial(_differences, kernels=kernels, device=setting.device)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) if workers else nullcontext() as pool:
        found = zip(jobs, pool.map(check, jobs) if pool else map(check, jobs), strict=True)
        for op, answers in itertools.groupby(found, key=lambda answer: answer[0][0]):
            wrong = [line for _, lines in answers for line in lines]
            if wrong:
                setting.report.problem(f"bits of {op}", "\n".join(wrong[:20]))
            verdict = f"**{len(wrong)} differ**" if wrong else "equal"
            rows.append([op, str(len(choices[op])), verdict])
            setting.table(
                Table(
                    f"Bits of every op {where}, beside the plain-torch reference",
                    ["op", "combinations of dtypes, formats and options", "bits"],
                    rows,
                )
            )


def _differences(job: tuple[str, Sequence[Choices]], kernels: Kernels, device: str) -> list[str]:
    """What differs or fails, one line for each combination."""
    op, combinations = job
    lines = []
    for chosen in combinations:
        try:
            found = difference(op, kernels(op), OPS[op].example(*chosen), device)
        except Exception as error:
            if is_fatal(error):
                raise
            found = reason_of(error)
        if found:
            lines.append(f"({', '.join(map(str, chosen))}): {found}")
    return lines


def _choices(op: str, is_tiny: bool) -> Iterator[Choices]:
    """The examples of the self-check, and on a device every dtype with every format."""
    for chosen, _ in itertools.islice(examples(op), 3 if is_tiny else None):
        yield chosen
    if not is_tiny:
        yield from _grid(op)


def _grid(op: str) -> Iterator[Choices]:
    """Every dtype with every format; what is left passes through its values."""
    third = tuple(DTYPES)
    flags = list(itertools.product((False, True), repeat=2))
    curves = sorted(GATED_ACTIVATIONS)
    gated = [code for code, bits in BITS.items() if bits >= 4]
    match op:
        case "quantize_blockwise":
            for number, (code, dtype) in enumerate(itertools.product(BITS, third)):
                for block_size in BLOCK_SIZES[number % 2 :: 2]:
                    yield dtype, code, block_size, third[number % 3 - 1], number % 2 == 1, False
        case "multiply_quantize_blockwise":
            for number, (code, dtype) in enumerate(itertools.product(BITS, third)):
                for block_size in BLOCK_SIZES[number % 2 :: 2]:
                    yield dtype, code, block_size, third[number % 3 - 1]
        case "dequantize_blockwise":
            for number, (code, dtype) in enumerate(itertools.product(BITS, third)):
                for block_size in BLOCK_SIZES[number % 2 :: 2]:
                    yield third[number % 3 - 1], code, block_size, dtype, False
        case "gated_product_blockwise":
            for number, (code, activation) in enumerate(itertools.product(gated, curves)):
                yield third[number % 2], code, third[number % 3], activation
        case "gated_backward_blockwise":
            for number, (code, activation) in enumerate(itertools.product(gated, curves)):
                yield third[number % 3], third[number % 2], code, activation
        case "linear_blockwise":
            yield from itertools.product(third, third, gated)
        case "accumulate_blockwise_":
            yield from itertools.product((False, True), third)
        case "adamw8bit_multi_":
            for number, (dtype, (has_factor, maximizes)) in enumerate(itertools.product(third, flags)):
                for alone in (False, True):
                    yield dtype, dtype, False, False, has_factor, maximizes, alone
                    yield dtype, torch.uint8, True, number % 2 == 1, has_factor, maximizes, alone
        case "lossless_encode":
            yield from itertools.product(EXPONENT_DTYPES, ("tiered", "window", "raw"), (False, True))
        case "sum_rows":
            yield from itertools.product(third, (False, True))
        case "lossless_decode_":
            yield from ((dtype,) for dtype in EXPONENT_DTYPES)
        case "pack_bits" | "unpack_bits" | "select_bits":
            yield from ((dtype,) for dtype in MASK_DTYPES)
