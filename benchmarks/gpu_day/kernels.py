"""Part 4: GB/s of every kernel as a share of a copy's, beside bitsandbytes where it is installed."""

from __future__ import annotations

import torch

from benchmarks.gpu_day.setting import Setting
from benchmarks.kit.kernel_cases import KernelCase, kernel_cases
from benchmarks.kit.peers import bitsandbytes_cases, installed
from benchmarks.registry import Table

ELEMENTS = 1 << 24
"""What `gpu-code` predicts for."""


def run(setting: Setting) -> None:
    """One row for each call of an op; the table grows as rows come. Lossless messages are in the part `exchange`."""
    elements = setting.sized(ELEMENTS, 1 << 13)
    target, source = (torch.zeros(2 * elements, dtype=torch.uint8, device=setting.device) for _ in range(2))
    copied = 4 * elements / setting.device_seconds(lambda: target.copy_(source))
    rows = [["copy", "", f"{copied / 1e9:.0f}", "1.00"]]
    with torch.device(setting.device):
        # Their messages are of zeros here: a decoder stops at the first bytes.
        for case in kernel_cases(elements):
            if case.op.startswith("lossless"):
                continue
            name = f"{case.op}, {case.variant}"
            with setting.report.section(name):
                rows.append(_row(setting, case, name, copied))
                setting.table(_table(rows, elements))
    with setting.report.section("bitsandbytes"):
        setting.table(_peer_table(setting, elements))


def _row(setting: Setting, case: KernelCase, name: str, copied: float) -> list[str]:
    taken = setting.device_seconds(case.call)
    setting.report.figure(f"kernel: {name}", taken * 1e6, "us")
    speed = case.moved_nbytes / taken
    return [name, f"{taken * 1e6:.1f}", f"{speed / 1e9:.0f}", f"{speed / copied:.2f}"]


def _table(rows: list[list[str]], elements: int) -> Table:
    return Table(
        f"Kernels on {elements:,} elements",
        ["", "us", "GB/s", "of copy bandwidth"],
        rows,
        "GB/s count all bytes that have to be read and written; caches are cold.",
    )


def _peer_table(setting: Setting, elements: int) -> Table:
    title, header = "Beside bitsandbytes", ["", "laconic us", "bitsandbytes us", "ratio"]
    if setting.rehearses or installed("bitsandbytes") is None:
        reason = "a rehearsal compares no speeds" if setting.rehearses else "bitsandbytes is not installed"
        return Table(title, header, [["not compared", "", "", ""]], f"Reason: {reason}.")
    from laconic.ops import dequantize_blockwise, quantize_blockwise

    x = torch.randn(elements, device=setting.device, dtype=torch.bfloat16).view(-1, 4096)
    rows = []
    for code in ("nf4", "int8"):
        codes, scales = quantize_blockwise(x, code=code, block_size=64)
        ours = (
            lambda code=code: quantize_blockwise(x, code=code, block_size=64),
            lambda code=code, codes=codes, scales=scales: dequantize_blockwise(
                codes, scales, length=4096, code=code, block_size=64
            ),
        )
        for verb, mine, theirs in zip(("quantize", "dequantize"), ours, bitsandbytes_cases(x, code, 64), strict=True):
            here, there = setting.device_seconds(mine), setting.device_seconds(theirs)
            rows.append([f"{code} {verb}", f"{here * 1e6:.1f}", f"{there * 1e6:.1f}", f"{there / here:.2f}x"])
    return Table(title, header, rows, f"{elements:,} bf16 elements, blocks of 64.")
