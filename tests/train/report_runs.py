"""Run directories as training writes them, made without training, and the data of the page about them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from laconic.train.config.toml import load_config, save_config
from laconic.train.report.metrics import MetricsWriter

KINDS = {"norm": 100.0, "linear": 300.0, "mlp": 500.0, "attention": 100.0}


def make_run(
    folder: Path, name: str, *, bits: int = 16, loss: float = 1.0, speed: float = 1000.0, steps: int = 40
) -> Path:
    """A run directory as training writes it: loss falls to `loss`, and bits below 16 keep a fraction of the bytes."""
    run_dir = folder / name
    run_dir.mkdir(parents=True)
    save_config(load_config(None, {"activations.bits": bits, "run_dir": str(run_dir)}), run_dir / "config.toml")
    with MetricsWriter(run_dir) as writer:
        for step in range(1, steps + 1):
            writer.write(
                step,
                loss=loss + 3.0 * 0.5**step,
                tokens_per_second=1.0 if step == 1 else speed,
                peak_memory_nbytes=500_000_000 + step,
                wire_nbytes=2_000_000,
            )
            if step % 10 == 0:
                writer.write(step, validation_loss=loss + (0.2 if step == 20 else 0.1 + 1 / step))
    kept = {kind: nbytes * (bits / 16 if kind != "attention" else 1) for kind, nbytes in KINDS.items()}
    activations = {
        "reference_dtype": "bfloat16",
        "tokens": 64,
        "before_nbytes_per_token": sum(KINDS.values()),
        "after_nbytes_per_token": sum(kept.values()),
        "by_kind_before": KINDS,
        "by_kind_after": kept,
        "sites": [],
    }
    (run_dir / "activations.json").write_text(json.dumps(activations))
    (run_dir / "summary.json").write_text(json.dumps({"steps": steps, "loss": loss, "bf16_nbytes_per_token": 900.0}))
    return run_dir


def page_data(path: Path) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text("utf-8"), re.DOTALL)
    assert match
    data: dict[str, Any] = json.loads(match.group(1))
    return data
