"""torchrun starts a loop of a user's own again: it goes on from its checkpoint and ends bit for bit alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.own_loop import STEPS
from tests.distributed.processes import environment, finish, start


def run(folder: Path, *killed_before: str) -> list[dict[str, torch.Tensor]]:
    """The weights of both ranks at the end."""
    folder.mkdir()
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    command += ["-m", "tests.distributed.own_loop", str(folder), *killed_before]
    ending = finish(start(command, environment(PYTHONWARNINGS="default")))
    assert ending.code == 0, ending.err
    return [torch.load(folder / f"end-{rank}.pt", weights_only=True) for rank in (0, 1)]


@pytest.mark.slow
def test_a_loop_of_ones_own_goes_on_after_a_kill_and_ends_bit_for_bit_alike(tmp_path: Path) -> None:
    undisturbed = run(tmp_path / "whole")
    restarted = run(tmp_path / "killed", "5")
    for rank in (0, 1):
        assert (tmp_path / "whole" / f"first-{rank}").read_text().split() == ["0"]
        assert (tmp_path / "killed" / f"first-{rank}").read_text().split() == ["0", "4"]
    assert STEPS > 5
    for weights in (undisturbed[1], *restarted):
        for name, expected in undisturbed[0].items():
            assert torch.equal(weights[name], expected), name
