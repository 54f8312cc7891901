"""The kernel benchmarks run; what they measure is not asserted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_ops, gpu_step
from benchmarks.kit.data_sheets import DENSE_BF16_FLOPS
from benchmarks.kit.host_time import host_seconds
from tests.benchmark_runs import run_command, tables


@pytest.mark.slow
def test_kernel_benchmark_writes_its_tables(tmp_path: Path) -> None:
    report = tmp_path / "kernels.md"
    result = run_command("kernels", "--smoke", "--threads", "1", "--out", str(report))
    assert result.returncode == 0, result.stderr
    text = report.read_text()
    assert result.stdout == text
    assert "`python -m benchmarks.run kernels --smoke --threads 1 --out" in text
    for row in ("memcpy", "nf4 quantize", "int8 dequantize", "e2m1 quantize, stochastic"):
        assert f"\n| {row} | " in text


ROWS = {
    "lossless": (1, ["memcpy", "window", "tiered", "portable, tiered decode_add", "8 KiB"]),
    "optim": (1, ["torch AdamW, fused", "AdamW8bit, gradient in 12 bits", "outliers | AdamW8bit"]),
    "loss": (2, ["plain", "chunked", "chunked, hidden states at int8"]),
    "model-step": (1, ["exact", "checkpointing", "laconic, 4 bits", "laconic, 4 bits, chunked loss"]),
    "planning": (
        1,
        [
            "fp32: 16 bits, attention exact, loss exact",
            "bf16: 8 bits, attention nf4, loss chunked",
            "Llama 8B, 32 ranks",
        ],
    ),
    "files": (1, ["weights, bf16", "checkpoint: weights, AdamW8bit", "fine-tuned, bfloat16"]),
}
"""By benchmark, how often the tables have rows, and which."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_a_benchmark_writes_its_tables(name: str) -> None:
    found, (times, rows) = tables(name, "--smoke"), ROWS[name]
    assert all(found.count(f"\n| {row} | ") >= times for row in rows)
    assert name != "files" or "other bytes" not in found


@pytest.mark.slow
def test_lossless_ratio_benchmark_compares_real_tensors_with_their_entropy() -> None:
    found = tables("lossless-ratio", "--smoke")
    rows = [line.strip("| ").split(" | ") for line in found.splitlines() if line.startswith("| ")]
    for name in ("tokens for experts, bf16", "weights, bf16", "Gaussian, fp32", "llama, weights in nf4, blocks of 64"):
        (bound, window, tiered), *_ = [map(float, row[3:6]) for row in rows if row[0] == name]
        # No code is shorter than the bound where there are no zeros to leave out.
        assert bound < tiered <= window


@pytest.mark.slow
def test_predicted_step_of_a_gpu_counts_what_compression_adds() -> None:
    found = tables("gpu-step", "--smoke")
    rows = [line.strip("| ").split(" | ") for line in found.splitlines() if line.startswith("| ")]
    changes = {(row[0], row[1]): float(row[3].split()[0]) for row in rows if len(row) == 5 and row[3].endswith(" U")}
    # Two norms (1 U each), gate (3.5), query (1), key and value (0.25) are read once; codes are 4.25 bits.
    assert changes["forward", "quantize_blockwise"] == pytest.approx(7 * (1 + 4.25 / 16), abs=0.75)
    # Up is read once for its codes and for the product that torch makes otherwise.
    assert changes["forward", "multiply_quantize_blockwise"] == pytest.approx(3.5 * (3 + 4.25 / 16), abs=0.01)
    assert changes["forward", "mul"] == pytest.approx(-3.5 * 3, abs=0.01)
    # Backward reads codes of gate and up twice: for their product, and with its gradient for their own.
    assert changes["backward", "dequantize_blockwise"] == pytest.approx(3.5 * (1 + 4.25 / 16), abs=0.5)
    assert changes["backward", "gated_product_blockwise"] == pytest.approx(3.5 * (1 + 2 * 4.25 / 16), abs=0.01)
    assert changes["backward", "gated_backward_blockwise"] == pytest.approx(3.5 * (3 + 2 * 4.25 / 16), abs=0.01)
    devices = len(DENSE_BF16_FLOPS)
    assert found.count("## Prediction") == 4 + devices
    # Hidden sizes, numbers of tokens, and the bound of each direction of either variant.
    bounds = [cell for row in rows for cell in row if cell.endswith((" ms, host", " ms, device"))]
    assert len(bounds) == devices * 4 * 4 * 4


@pytest.mark.slow
def test_the_layer_whose_host_time_is_measured_has_the_operations_of_the_traced_one() -> None:
    traced = gpu_step.traced(gpu_step.layers_of(128, 32, 64))
    layers = gpu_step.layers_of(64, 16, 8)
    tiny = gpu_step.traced(layers)
    for name, directions in traced.items():
        for number, trace in enumerate(directions):
            assert trace.calls == tiny[name][number].calls
    # Steps without witnesses, whose samples are taken; attention is computed again, from what was kept.
    assert not any(trace.calls["take"] for directions in traced.values() for trace in directions)
    attention = [traced[name][1].calls[gpu_step.ATTENTION] for name in ("exact", "4 bits")]
    assert attention == [0, 1]
    threads = torch.get_num_threads()
    host = host_seconds(layers, gpu_step.variants(layers), rounds=4)
    assert torch.get_num_threads() == threads
    assert set(host) == {"exact", "4 bits"}
    assert all(0 < seconds < 1 for directions in host.values() for seconds in directions)


def test_the_device_is_the_bound_from_where_it_takes_as_long_as_the_host() -> None:
    def layer(backward: dict[str, int]) -> gpu_step.Layer:
        traces = gpu_step.Trace(set(), Counter(mul=2), Counter(mul=3 << 20)), gpu_step.Trace(set(), Counter(backward))
        return gpu_step.Layer(traces, 64, 8, (2e-3, 1e-3))

    exact, packed = layer({}), layer({gpu_step.ATTENTION: 1})
    weights = 4096 * 4096 * 13
    assert exact.flops_of(0, 4096, 512) == 512 * (2 * weights + 2 * 4096 * 512)
    assert packed.flops_of(1, 4096, 512) - exact.flops_of(1, 4096, 512) == 512 * 2 * 4096 * 512
    assert packed.bytes_of(0, 128, 16) == 4 * (3 << 20)
    assert packed.bytes_of(1, 128, 16) == 0
    for device in gpu_step.DEVICES:
        for number, host in enumerate(packed.host):
            tokens = packed.bound_from(device, number, 4096)
            before, behind = (packed.seconds(device, number, 4096, n) for n in (tokens - 1, tokens))
            assert before < host <= behind


def test_tables_of_the_gpu_benchmark_hold_on_any_device() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def seconds(case: Callable[[], object]) -> float:
        started = time.perf_counter()
        case()
        return time.perf_counter() - started

    ops = [row[0] for row in gpu_ops.bits_table(device).rows]
    assert "lossless, float8_e5m2" in ops
    timed = gpu_ops.speed_table(1 << 14, device, seconds).rows
    assert set(ops) - {row[0] for row in timed} == {op for op in ops if op.startswith("lossless")}
    ratios = {row[0]: row[1] for row in gpu_ops.lossless_table(1 << 14, device, seconds).rows}
    assert 1.4 < float(ratios["bfloat16 window encode"]) < float(ratios["bfloat16 tiered decode_add"]) < 1.52
    assert len(gpu_ops.head_table(32, 64, 257, device, seconds).rows) == 3


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_gpu_benchmark_refuses_a_machine_without_a_gpu() -> None:
    result = run_command("gpu", "--smoke")
    assert result.returncode == 1
    assert "benchmarks.gpu needs a CUDA device, and torch sees none on this machine" in result.stderr


@pytest.mark.slow
def test_the_largest_model_of_each_way_to_train_is_found() -> None:
    found = tables("largest", "--smoke")
    rows = {line.split(" | ")[0]: line.split(" | ") for line in found.splitlines() if line.startswith("| ")}
    exact, ours = rows["| exact"], rows["| laconic, AdamW4bit"]
    assert 0 < int(exact[1].split()[0]) < int(ours[1].split()[0])
    assert 0 < float(exact[2]) < float(ours[2])
    assert all("allocate" in row[-1] for row in (exact, ours))  # what ended the next larger one
