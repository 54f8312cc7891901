"""The comparison with peers: what it measures with is right, and a peer that is missing or fails is a row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.contenders import everything, text
from benchmarks.contenders.network import dequantized, quantized
from benchmarks.contenders.picture import _apart
from benchmarks.contenders.text import rate_at
from benchmarks.contenders.training import EXACT, Contender, Training, measured, tensor_nbytes
from tests.benchmark_runs import run
from tests.inductor import needs_inductor


class _Model(nn.Module):
    """Takes and returns what a language model of transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(512, 256)
        self.last = nn.Linear(256, 512)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> object:
        logits = self.last(self.first(input_ids).tanh())
        return type("Output", (), {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())})


def _fails(training: Training, ids: torch.Tensor) -> None:
    raise RuntimeError("no kernel for this processor")


@pytest.mark.ci
def test_a_contender_that_fails_or_is_missing_is_a_row_that_says_why() -> None:
    contenders = [
        Contender(EXACT),
        Contender("fails", [_fails]),
        Contender("for GPUs", [_fails], cannot="needs a GPU"),
        Contender("missing", package="no_such_package"),
        Contender("kept out", package="no_such_package", optional="its licence keeps it out"),
    ]
    rows = {row.name: row for row in measured(contenders, _Model(), torch.randint(16, (4, 8)), rounds=2)}
    assert rows[EXACT].failure == ""
    assert rows[EXACT].seconds is not None
    assert "no kernel for this processor" in rows["fails"].failure
    assert "no_such_package is not installed" in rows["missing"].failure
    assert {name for name, row in rows.items() if row.failure and not row.expected} >= {"fails", "missing"}
    assert rows["kept out"].expected
    assert rows["for GPUs"].expected
    assert rows["for GPUs"].failure.startswith("needs a GPU (")


@pytest.mark.ci
def test_memory_of_a_step_has_state_and_gradients() -> None:
    model = _Model()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    (row,) = measured([Contender(EXACT)], model, torch.randint(16, (32, 64)), rounds=1)
    assert 2 * weights < row.state_nbytes < 2 * weights + 1000  # two moments, and the number of the step
    assert row.gradient_nbytes == weights
    assert row.saved_nbytes >= 32 * 64 * 256 * 4  # what tanh saves
    assert row.held_nbytes >= row.saved_nbytes - 32 * 64 * 8  # labels were there before
    assert row.total_nbytes >= row.state_nbytes + row.gradient_nbytes


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_of_the_readme_is_what_is_measured(dtype: torch.dtype) -> None:
    readme = Path(__file__).parents[1].joinpath("README.md").read_text(encoding="utf-8")
    row = re.search(r"^\| \*\*laconic\*\* \| \*\*([0-9.]+)\*\*, .* \| \*\*([0-9.]+)\*\*, ", readme, re.MULTILINE)
    assert row is not None
    stated = float(row[1 if dtype == torch.float32 else 2])
    chosen = [one for one in everything.contenders() if one.name in (EXACT, "laconic, everything on")]
    model, ids = text.llama(512, 4, 32000), text.byte_pairs(4, 256, 32000)
    exact, ours = measured(chosen, model.to(dtype), ids, rounds=1)
    assert stated - 0.02 < ours.total_nbytes / exact.total_nbytes < stated + 0.01


def test_bytes_of_nested_state_count_each_storage_once() -> None:
    shared = torch.zeros(100)
    holder = type("Projector", (), {})()
    holder.matrix = torch.zeros(10, dtype=torch.bfloat16)
    state = {"weight": {"codes": shared, "again": shared[:10], "projector": holder, "step": 3}}
    assert tensor_nbytes(state) == 100 * 4 + 10 * 2


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("length", [1, 2047, 2048, 5000])
def test_messages_of_the_zeropp_scheme_come_back_within_half_a_code(bits: int, length: int) -> None:
    x = torch.randn(3, length, generator=torch.Generator().manual_seed(length))
    x[1] = 0
    message = quantized(x, bits)
    num_blocks = -(-length // 2048)
    assert message.shape == (3, num_blocks * (2048 * bits // 8 + 4))
    back = dequantized(message, length, bits)
    for block, found in zip(x.split(2048, 1), back.split(2048, 1), strict=True):
        step = block.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
        assert ((block - found).abs() <= 0.5001 * step).all()


def test_learning_rate_rises_falls_and_labels_stay_apart() -> None:
    rates = [rate_at(step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == 1
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0.1 <= rates[-1] < 0.11
    moved = _apart([0.5, 0.5, 0.1, 0.52], 0.05)
    assert moved[2] == pytest.approx(0.1)
    assert sorted(moved[:2]) + moved[3:] == pytest.approx([0.5067 - 0.05, 0.5067, 0.5567], abs=1e-4)


@pytest.mark.slow
@needs_inductor
def test_side_by_side_writes_its_tables() -> None:
    result = run("side-by-side", "--smoke", "--only", "loss", "files")
    for row in ("exact", "**laconic, chunked loss**", "torch, linear_cross_entropy, chunked"):
        assert re.search(rf"^\| {re.escape(row)} \| \d", result.stdout, re.MULTILINE), result.stderr
    assert result.stdout.count("\n| **laconic, encode** | ") == 3
    # Peers that are not installed are rows that say so, and the command ends with an error.
    tables = result.stdout[result.stdout.index("\n## ") :]
    assert "| failed" not in tables
    assert (result.returncode != 0) == ("not installed" in tables), result.stderr
