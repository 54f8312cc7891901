"""Autotuning a Hugging Face model whose experts are spread."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from laconic.collectives.codec import Raw
from laconic.cost.comm.rates import Line
from laconic.cost.moe import MoERates
from laconic.moe import Grid, HierarchicalDispatcher, autotune, parallelize
from tests.activations.models import make_model
from tests.moe.worlds import run_world


def _every_block_is_tuned_and_the_model_says_the_same() -> None:
    model = make_model("qwen3_moe")
    ids = torch.randint(0, model.config.vocab_size, (2, 12), generator=torch.Generator().manual_seed(dist.get_rank()))
    expected = model(ids).logits
    made = parallelize(model, Grid(ep=2, device_type="cpu"), codec=Raw(), movable=True)
    lines = dict.fromkeys(("all_to_all", "send"), Line(0.0, 1e-3))
    rates = MoERates.of_lines({kind: lines for kind in ("all", "across", "node")}, Line(0.0, 0.0))
    said: list[str] = []
    tuned = autotune(made, example=ids, rates=rates, codecs=[Raw()], num_benchmarked=0, report=said.append)
    assert {*tuned.choices} == {*made.layers}
    for layer in made.layers.values():
        assert isinstance(layer.dispatcher, HierarchicalDispatcher)
    for choice in tuned.choices.values():
        assert choice.plan.path == "depth 1"
    assert all(p.grad is None for p in model.parameters())
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-5)
    if dist.get_rank() == 0:
        assert "choice: depth 1" in said[0]


def test_a_model_is_tuned_on_two_ranks(tmp_path: Path) -> None:
    run_world([_every_block_is_tuned_and_the_model_says_the_same], 2, tmp_path)
