"""The benchmarks over slow links run where network namespaces can be made."""

from __future__ import annotations

import pytest

from netlab import why_not
from tests.benchmark_runs import tables

ROWS = {
    "network": ["32 KB", "256 KB", "fp32", "bf16", "q8"],
    "collectives": [
        f"{case} | 64 KB"
        for case in (
            "all_gather, weights",
            "all_to_all, weights",
            "reduce_scatter, weights",
            "all_reduce, weights",
        )
    ],
    "choose": ["all_gather | 4 KB", "all_to_all | 256 KB"],
    "auto": ["all_gather | 4 B", "broadcast | 64 KB", "send and receive | 4 B", "reduce_scatter | 64 KB"],
    "process-group": ["all_reduce | 1 KB", "all_gather | 64 KB", "ring | 64 KB"],
    "moe-autotune": [
        "the whole model",
        "depth 1 | raw | 1",
        "depth 2 | raw | 1",
        "flat | raw | 1",
        "s2 | raw | 1",
        "sharded | raw | 1",
    ],
    "moe-dispatch": ["flat", "2 levels", "dedup, 1 level", "dedup, 2 levels, lossless", "dedup, 2 levels, int8"],
    "moe-training": [
        *("plain", "levels", "levels, swaps", "lossless rows", "2 chunks, windows", "4-bit activations"),
        *("all exact ones", "autotune", "autotune, 4-bit activations"),
    ],
    "moe-steps": [
        "joint",
        "levels, 2 chunks",
        "joint, 2 chunks, gradients in slots",
        "baseline",
        "sharded, 4 chunks",
    ],
    "moe-shared": ["after the routed experts, 1 of 128", "before the router, 1 of 128"],
    "infer-split": [
        f"qwen2_moe, M 64, 8 experts of 32, top 2, shared 32, 2 layers, prompts of 64 | 400 Mbit/s | {fit}"
        for fit in (1, 2, 8)
    ],
    "infer-split-run": ["naive", "PPPipe r1 = 2", "FinDEP r1 = 1, 2 slices of tokens", "1", "2"],
    "zip-training": ["gloo", "raw", "tiered", "auto"],
    "local-steps": ["DDP", "H = 10, 4 bits", "H = 10, 4 bits, 5 steps overlapped"],
}


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=f"{why_not()}")
@pytest.mark.parametrize("name", ROWS)
def test_a_benchmark_over_slow_links_writes_its_tables(name: str) -> None:
    found = tables(name, "--smoke")
    for row in ROWS[name]:
        assert f"\n| {row} | " in found
    if name == "moe-training":
        assert found.count("the same bits") >= 2  # plain's own, and lossless rows
    if name == "zip-training":
        assert found.count("the same bits in 2 steps") >= 4  # raw, tiered: whatever travels, a step is the same
