"""What gates agree on over two processes: the global batch's balance loss and the bias."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from laconic.moe import SigmoidGate, SoftmaxGate
from laconic.moe.gates.losses import load_balance_loss
from tests.moe.worlds import run_world

SIZES = (5, 9)


def _tokens(rank: int) -> torch.Tensor:
    return torch.randn(SIZES[rank], 16, generator=torch.Generator().manual_seed(rank)) + rank


def global_balance_loss() -> None:
    gate = SoftmaxGate(8, 16, 2, balance_coef=1.0, balance_group=dist.group.WORLD)
    counts = sum(gate(_tokens(rank)).counts() for rank in range(2))
    # gate(...) above called the collective twice on each rank, with the same shapes.
    probabilities = gate.logits(_tokens(dist.get_rank())).softmax(-1)
    expected = load_balance_loss(probabilities, counts)
    loss = gate(_tokens(dist.get_rank())).losses["balance"]
    torch.testing.assert_close(loss, expected)
    assert not torch.equal(loss, load_balance_loss(probabilities, gate(_tokens(dist.get_rank())).counts()))
    (one,) = torch.autograd.grad(loss, gate.weight)
    (other,) = torch.autograd.grad(expected, gate.weight)
    torch.testing.assert_close(one, other)


def bias_of_the_summed_load() -> None:
    rank = dist.get_rank()
    gate = SigmoidGate(4, 16, 1, bias_rate=0.5)
    gate.load.copy_(torch.tensor([[9, 0, 1, 2], [0, 9, 3, 0]][rank]))
    gate.update_bias(dist.group.WORLD)
    assert gate.bias.tolist() == [-0.5, -0.5, 0.5, 0.5]
    assert gate.load.tolist() == [0, 0, 0, 0]


def test_gates_of_two_ranks_agree(tmp_path: Path) -> None:
    run_world([global_balance_loss, bias_of_the_summed_load], 2, tmp_path)
