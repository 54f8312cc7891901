"""What experts on two processes keep for backward."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

import laconic
from laconic.activations import SavedTensorTracker
from laconic.moe.dispatch.base import ExpertRows
from laconic.moe.hooks import Hook
from laconic.moe.huggingface import parallelize
from laconic.moe.layer import MoELayer
from laconic.moe.parallel.grid import Grid
from tests.activations.models import loss_of, make_ids, make_model
from tests.moe.worlds import run_world


class Arrived(Hook):
    """Counts rows that came to the experts of each layer."""

    def __init__(self) -> None:
        self.num_rows: list[int] = []

    def after_dispatch(self, layer: MoELayer, inputs: ExpertRows) -> None:
        self.num_rows.append(len(inputs.rows))


def experts_keep_codes_of_the_rows_that_came() -> None:
    arrived = Arrived()
    model = parallelize(make_model("mixtral"), Grid(ep=2), hooks=(arrived,)).model
    laconic.compress_activations(model, attention="exact")
    arrived.num_rows.clear()
    with SavedTensorTracker(model) as tracker:
        loss = loss_of(model, make_ids(seed=dist.get_rank()))
    assert len(arrived.num_rows) == 2
    for layer, num_rows in enumerate(arrived.num_rows):
        # 64 values a row: codes of 4 bits, a scale of 2 bytes; and the counts of two experts. No weights.
        kept = tracker.by_module[f"model.layers.{layer}.mlp.experts"]
        assert kept == num_rows * (64 // 2 + 2) + 2 * 8
    loss.backward()


def test_experts_keep_codes_of_the_rows_that_came(tmp_path: Path) -> None:
    run_world([experts_keep_codes_of_the_rows_that_came], 2, tmp_path)
