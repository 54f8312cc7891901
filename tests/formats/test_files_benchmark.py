"""The benchmark of files runs; what it measures is not asserted."""

import pytest

from tests.benchmark_runs import run


@pytest.mark.slow
def test_files_benchmark_writes_its_tables() -> None:
    result = run("files", "--smoke")
    assert result.returncode == 0, result.stderr
    for row in ("weights, bf16", "checkpoint: weights, AdamW8bit", "fine-tuned, bfloat16"):
        assert f"\n| {row} | " in result.stdout
    assert "other bytes" not in result.stdout
